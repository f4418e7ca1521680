// The log of one forward pass: every operator call above autograd, and every version of every memory that the calls read
// or made. A value is one version of one memory, and a view is the same value with other sizes and strides. A write makes
// the next version, also if it goes through .data, runs under no_grad, or writes into a view.
#pragma once

#include "exposed.h"
#include "flags.h"
#include "rules.h"
#include "spent.h"
#include "values.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <mutex>
#include <queue>
#include <thread>
#include <vector>

namespace leannorm::recording {

using c10::IValue;

// What a pass gets from Python. `flags`: the global flags. `layer`: returns the layer that runs, if rebuilt tensors are
// compared. `hold`: calls the user's hook. `owns`: see `gathered`. (These three may be None.) `other`: returns the sizes,
// place and bytes of a tensor that the log cannot read. `met`: bits of `Met` that were seen while the pass was open.
struct Asked {
  py::object flags, layer, hold, owns, other;
  int met = 0;
};
// Compiled code, hooks of other code, memory that a limit does not count, convolutions that cuDNN chooses by timing them,
// an error of the log's own.
enum Met : int { kCompiled = 1, kOthersHooks = 2, kBeyondLimit = 4, kTimedCalls = 8, kFailed = 16 };

// A tensor in argument `at` of a call, which is item `place` if that is a list of optional tensors.
struct Read {
  int at, place, value;
  int geometry;  // its number in the log; -1: as the value was made
  bool saved = false;  // the call's own node has saved it
  bool wants = false;  // it requires a gradient
};

struct Call {
  Rule* rule = nullptr;
  std::vector<IValue> args;
  c10::SmallVector<Read, 4> reads;
  c10::SmallVector<int, 3> outs;      // values
  c10::SmallVector<int, 2> writing;   // memories
  c10::SmallVector<int, 1> waiting;   // values that were saved before the call ended
  int before = -1;                    // the value that its result overwrites
  bool sends = false;                 // it, or a call within it, sends to other ranks
  bool in_checkpoint = false;         // a checkpoint's hooks save what it reads and makes
  c10::SmallVector<int64_t, 3> whole; // the last size of each tensor that a matrix product reads
  int outer = -1;                     // the call on a tensor subclass that it is a part of
  bool of_subclass = false;           // it reads a tensor subclass, whose calls below autograd are logged
  bool of_mode = false;               // the program has set a dispatch mode, whose calls are logged
  uint64_t kind = 0;                  // by which `Trust` counts it; 0: not computed yet
  uint8_t flags = 0;                  // the flags under which it ran; 0: the log's, else a number in `others_flags`, from 1
  bool grad_mode = false, usable = true, by_result = false;  // by_result: rebuilt from its other results
};

struct Memory {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // while this exists, no other memory gets its address
  int current = -1;  // value
  int writer = -1;   // the open call that is going to write it
  bool sent = false;  // messages arrive here, such as flat weights. They move its counter, so nothing is rebuilt from it
  c10::VariableVersion counter;
  uint32_t version = 0;
  int died = -1;  // the first call that began after it was freed, or after only the log still had it
};

class Limit;

struct Policy {
  bool products = false, everything = false;
  int sums = 2, runs = 32, row = 2;  // at most: sums in a row; calls for one value; products in a row
  int64_t smallest = 1, much_larger = 32;  // elements; a smaller tensor is kept, and so is one that is so many times smaller than the largest
  bool by_plan = false;  // a plan decides, and `runs` only bounds the longest chain of calls
};

// A kept value that may be encoded in fewer bytes once nothing else owns its memory, which is checked now and then.
struct Waiting {
  int value;
  int64_t due, gap;  // counted in packed tensors
  bool operator>(const Waiting& other) const { return due > other.due; }
};

struct Follower;

// A tensor that a node has saved: in which pass and place, its value, and the node's call.
struct Save {
  const Follower* by;
  int place, value, call;
};

// Global flags that were set within a pass, and the Python object that sets them.
struct SetFlags {
  static constexpr size_t kMost = 255;
  uint64_t bits;
  std::shared_ptr<py::object> object;
};

struct Log {
  std::vector<Value> values;
  std::vector<Call> calls;
  std::vector<Memory> memories;
  std::vector<Geometry> geometries;
  std::vector<int> listed;  // values that nodes have saved, in order
  ska::flat_hash_map<c10::StorageImpl*, int> by_storage;
  ska::flat_hash_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> fresh;  // memory that was made below autograd
  std::vector<int> open;    // calls that have begun and not ended
  std::priority_queue<Waiting, std::vector<Waiting>, std::greater<>> waiting;
  std::unordered_map<int, std::vector<Tensor*>> leaves;  // by value: the tensors by which saved objects keep it
  int64_t packs = 0;  // tensors that were packed
  std::vector<std::weak_ptr<const Other>> others;
  Policy policy;
  std::shared_ptr<Asked> first;  // of the first pass, whose flags are the log's
  std::vector<std::shared_ptr<Asked>> asked;  // of each open pass, the innermost last
  std::vector<int> to_move;  // values for the user's hooks
  std::vector<int> to_copy;  // small values on a device that existed before the pass
  bool gathers = false;      // weights may be freed and gathered again
  bool subclasses = false;   // there may be tensor subclasses, such as DTensors
  uint64_t flags = flags_now(), stamp = 0;
  std::vector<SetFlags> others_flags;
  int64_t alive = 0;        // tensors that nodes have saved
  // By pass: its saved tensors, and how many of them existed when a backward pass last began before the pass closed.
  struct Alive {
    int64_t now = 0, then = 0;
    int backward_passes = 0;
  };
  std::vector<Alive> alive_of;
  int task = -1;            // the last of these backward passes, by the engine's number
  int64_t noted_packs = 0;  // `packs` when it began
  int64_t largest = 0;      // elements of the largest tensor that was saved
  std::shared_ptr<Limit> limit;  // of memory; nothing is dropped until it is near
  bool closed = false;
  bool failed = false;      // in the middle of a change: nothing else is dropped
  int passes = 0;           // open passes, which write into this log
  std::shared_ptr<Exposed> exposed;
  std::vector<Follower*> following;  // one for each open pass
  std::unordered_set<std::shared_ptr<const void>> plans;  // that they have followed, into which `Value::takes` points
  // If a plan may be made from an open pass, the log also notes gradients, what was saved, and when memories were freed.
  bool may_plan = false;
  std::vector<Save> saves;
  std::vector<int> living;           // memories that had not been freed when the last call began
  size_t known = 0;                  // how many memories `living` has had
  bool measures = false;             // whether an open pass has a goal, so that calls are timed
  std::shared_ptr<Spent> spent;      // then
  std::vector<float> seconds;        // then by call what it took, without the hooks and calls in it
  double in_hooks = 0;               // seconds of those so far
  at::CallbackHandle callback = 0;
  std::atomic<const void*> owner = nullptr;  // the thread that has the lock, by the address of one of its variables
  int depth = 0;

  // Two threads may use the log at once, as operators run without Python's lock, and hooks and destructors with it. One
  // thread may lock it twice, as freeing a tensor may free others that were saved.
  struct Lock {
    explicit Lock(Log& log) : log_(log) {
      const void* const me = &busy;
      const void* nobody = nullptr;
      const bool again = log_.owner.load(std::memory_order_relaxed) == me;
      if (!again && !log_.owner.compare_exchange_strong(nobody, me, std::memory_order_acquire)) wait(me);
      ++log_.depth;
    }
    Lock(const Lock&) = delete;
    ~Lock() {
      if (--log_.depth == 0) log_.owner.store(nullptr, std::memory_order_release);
    }
    Log& log_;

   private:
    void wait(const void* me) {
      PyThreadState* const state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
      for (const void* nobody = nullptr; !log_.owner.compare_exchange_weak(nobody, me, std::memory_order_acquire); nobody = nullptr)
        std::this_thread::yield();
      if (state != nullptr) PyEval_RestoreThread(state);
    }
  };

  Log() = default;
  ~Log() {
    if (exposed) forget(*exposed, exposed->left);
  }
  int new_value(int memory, const Tensor& t, int call) {
    Value& made = values.emplace_back();
    made.memory = memory, made.call = call, made.made = Geometry::of(t);
    made.storage_bytes = static_cast<int64_t>(t.storage().nbytes());
    made.counter = t.unsafeGetTensorImpl()->version_counter(), made.version = t._version();
    made.on = stream_of(made.made);
    const int before = memories[memory].current;
    made.outlives = before < 0 ? call < 0 && fresh.count(t.storage().unsafeGetStorageImpl()) == 0 : values[before].outlives;
    made.logged = before < 0 ? call >= 0 : values[before].logged, made.weight = before >= 0 && values[before].weight;
    return static_cast<int>(values.size()) - 1;
  }
  int new_memory(const Tensor& t, int call) {
    const int number = static_cast<int>(memories.size());
    memories.push_back({t.storage().getWeakStorageImpl()});
    by_storage.emplace(t.storage().unsafeGetStorageImpl(), number);
    return memories.back().current = new_value(number, t, call);
  }
  int memory_of(const Tensor& t) const {
    const auto known = by_storage.find(t.storage().unsafeGetStorageImpl());
    return known == by_storage.end() ? -1 : known->second;
  }
  // The value that the tensor shows now; -1: its memory is new.
  int value_of(const Tensor& t) {
    const int number = memory_of(t);
    if (number < 0) return -1;
    Memory& memory = memories[number];
    if (memory.writer >= 0 && memory.counter.current_version() != memory.version) written(number);
    Value& x = values[memory.current];
    const uint32_t now = x.counter.current_version();
    if (now == x.version || memory.writer >= 0) return memory.current;
    if (is_in_mode(number, x)) return x.version = now, memory.current;
    // The counter has moved, but no operator has written. An autograd function that declares a write (mark_dirty) moves
    // it once more after its own operators. Otherwise some code has written without the dispatcher.
    if (is_marked(x)) {
      x.marked = true, x.version = now;
      return memory.current;
    }
    x.lost = true;
    const int fresh = new_value(number, t, -1);
    return memories[number].current = fresh;
  }
  // Whether a mode's call has written the memory within an open call. Autograd counts the write when the mode returns.
  bool is_in_mode(int memory, const Value& x) const {
    if (x.call < 0 || x.counter.current_version() != x.version + 1) return false;
    return std::any_of(open.begin(), open.end(), [&](int one) {
      const Call& call = calls[one];
      return call.of_mode && one < x.call && std::find(call.writing.begin(), call.writing.end(), memory) != call.writing.end();
    });
  }
  bool is_marked(const Value& x) const {
    const bool in_function = x.call >= 0 && calls[x.call].before >= 0 && !calls[x.call].grad_mode;
    return in_function && !x.marked && x.counter.current_version() == x.version + 1;
  }
  bool is_unedited(const Value& x) const { return x.counter.current_version() == x.version || is_marked(x); }
  int value_or_new(const Tensor& t) {
    const int known = value_of(t);
    return known < 0 ? new_memory(t, -1) : known;
  }
  // The open call has written the memory: its next version is a new value.
  void written(int number) {
    Memory& memory = memories[number];
    const int writer = std::exchange(memory.writer, -1), before = memory.current;
    if (calls[writer].rule->reshapes) {  // the contents are the same
      if (values[before].version == memory.version) values[before].version = memory.counter.current_version();
      return;
    }
    const bool is_result = calls[writer].rule->edits;  // otherwise the call writes it in addition to its results
    Value& made = values.emplace_back();
    made.memory = number, made.call = is_result || calls[writer].rule->sends ? writer : -1, made.made = values[before].made;
    made.storage_bytes = values[before].storage_bytes, made.on = stream_of(made.made);
    made.outlives = values[before].outlives, made.logged = values[before].logged, made.weight = values[before].weight;
    made.counter = memory.counter, made.version = memory.counter.current_version();
    memory.current = static_cast<int>(values.size()) - 1;
    if (is_result) calls[writer].outs.push_back(memory.current), calls[writer].before = before;
    // If autograd has not seen the write, nodes that have saved the memory read its new contents.
    Value& old = values[before];
    if (old.saves == 0 || old.elsewhere || old.counter.current_version() != old.version) return;
    if (auto storage = memory.storage.lock(); storage && static_cast<int64_t>(storage->nbytes()) >= old.made.extent()) old.shown = over(c10::Storage(std::move(storage)), old.made);
  }
  uint64_t flags_of(const Call& call) const { return call.flags == 0 ? flags : others_flags[call.flags - 1].bits; }
  // The current flags as `Call::flags` has them; none if the pass has had too many.
  std::optional<uint8_t> number_of_flags() {
    const uint64_t now = flags_now();
    if (now == flags) return 0;
    const auto known = std::find_if(others_flags.begin(), others_flags.end(), [now](const SetFlags& one) { return one.bits == now; });
    if (known == others_flags.end() && others_flags.size() == SetFlags::kMost) return {};
    const auto number = static_cast<uint8_t>(known - others_flags.begin() + 1);
    if (known != others_flags.end()) return number;
    const py::gil_scoped_acquire gil;
    others_flags.push_back({now, of_python(py::object(first->flags.attr("now")()))});
    return number;
  }
  void meets(Met what) {
    for (const auto& one : asked) one->met |= what;
  }
  bool is_in_subclass() const { return !open.empty() && calls[open.back()].of_subclass; }
  bool is_in_call_of_calls() const { return !open.empty() && (calls[open.back()].of_subclass || calls[open.back()].of_mode); }
  bool is_there(int v) const {
    const Memory& memory = memories[values[v].memory];
    return memory.current == v && memory.writer < 0;
  }
  // The memory of a value that is still what the call made; null if it was freed or written.
  c10::intrusive_ptr<c10::StorageImpl> at_hand(int v) const {
    const Value& x = values[v];
    if (!is_there(v) || x.counter.current_version() != x.version) return {};
    auto storage = memories[x.memory].storage.lock();
    return storage && static_cast<int64_t>(storage->nbytes()) >= x.made.extent() ? storage : decltype(storage)();
  }
  // The same as a tensor; undefined if it was freed or written.
  Tensor tensor_at_hand(int v) const {
    auto storage = at_hand(v);
    return storage ? over(c10::Storage(std::move(storage)), values[v].made) : Tensor();
  }
  const Geometry& geometry_of(const Read& read) const { return read.geometry < 0 ? values[read.value].made : geometries[read.geometry]; }

  // Whether the kept memory is allocated. That of gathered weights is freed between uses.
  bool is_filled(const Value& x) const {
    return x.elsewhere || x.code || static_cast<int64_t>(x.held.storage().nbytes()) >= x.made.extent();
  }
  // Empties the log when no saved tensor is left, since a pass may last for a whole training run.
  void start_over() {
    values.clear(), calls.clear(), memories.clear(), geometries.clear(), listed.clear(), by_storage.clear(), fresh.clear(), to_move.clear(), to_copy.clear();
    saves.clear(), living.clear(), known = 0;
    waiting = {}, leaves.clear();
    std::erase_if(others, [](const auto& one) { return one.expired(); });
    largest = 0, seconds.clear(), failed = false;
  }
};

inline thread_local std::shared_ptr<Log> current;

// 1 for a weight of a module that runs now, which gathers it again before the backward pass comes here; 2 for a weight of a
// module that does not run now, and may have freed it by then; 0 for any other tensor.
inline int gathered(const Log& log, const Tensor& t) {
  const auto& first = log.first;
  if (!first || !first->owns || first->owns.is_none()) return 0;
  const py::gil_scoped_acquire gil;
  return py::cast<int>(first->owns(t));
}
inline bool is_idle(const Log& log, const Value& x, const Tensor& memory) {
  return log.gathers && x.call < 0 && !x.copied && gathered(log, memory) == 2;
}

}  // namespace leannorm::recording
