// One forward pass as a log: every operator call above autograd, and every version of every memory that they read and
// made. A value is one version of one memory; a view of it is the same value, seen by other sizes and strides. A write,
// also one through .data, under no_grad or into a view, is a call that makes the next version.
#pragma once

#include "device.h"
#include "exposed.h"
#include "rules.h"
#include "shown.h"

#include <ATen/Context.h>
#include <torch/headeronly/version.h>
#include <ATen/Parallel.h>
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

struct Code;  // encode.h
struct Other;  // others.h

// Why a value is held; saving/recorded.py has a sentence for each.
enum class Why : uint8_t { kNone, kNever, kNotRepeated, kNotAtHand, kTooDeep, kOtherBits, kEdited, kSmaller, kUnknown, kFlags, kPlanned, kCollective, kFreed, kCheckpointed, kAlone, kMode, kUntried, kTimed };
// Where it is not at hand: why that is so, and the operator to which that applies.
struct Cause {
  Why why = Why::kNone;
  const std::string* of = nullptr;
};

struct Elsewhere {
  py::object bring;  // bring() returns what the user's hooks have held
  c10::weak_intrusive_ptr<c10::StorageImpl> memory;  // of what they got
  bool is_other = true;  // is what they return other memory?
};
// What a pass asks of Python: its flags; `layer`, the one that runs, where what is rebuilt is compared; `hold`, hooks for
// what is held; `owns`, is a tensor a weight that is freed and gathered again, as `gathered` says (each may be None); `other`,
// the sizes, place and bytes of a tensor that the log cannot read. `met`, while it is open: what `Met` lists.
struct Asked {
  py::object flags, layer, hold, owns, other;
  int met = 0;
};
enum Met : int { kCompiled = 1, kOthersHooks = 2, kBeyondLimit = 4, kTimedCalls = 8 };  // compiled code, hooks of others, memory
// that a limit does not count, convolutions that cuDNN times

struct Value {
  enum State : uint8_t { kFree, kHeld, kDropped };  // nobody needs it, or: it is held; it is made again
  int memory = -1;
  int call = -1, out = 0;  // that made it; -1: it was there before the pass, or nobody saw who made it
  Geometry made;           // by its call, or as it was first read
  int64_t storage_bytes = 0;
  c10::VariableVersion counter;
  uint32_t version = 0;
  Tensor held;     // an alias of the memory, or a copy of it; without memory, where it is `elsewhere`
  std::shared_ptr<const Code> code;  // by which `held` is read, where it is a copy in fewer bytes
  std::shared_ptr<Elsewhere> elsewhere;
  Tensor shown;    // the memory itself, where it was edited unseen by autograd after it was saved
  Tensor rebuilt;
  std::optional<c10::Stream> on, rebuilt_on;  // the streams on which it was made, and made again
  Sample sample;
  State state = kFree;
  Why why = Why::kNone;
  Cause cause;
  bool copied = false;   // is `held` a copy?
  bool marked = false;   // its counter moved once more behind the call that wrote it
  bool lost = false;     // it was overwritten past the dispatcher
  bool listed = false;   // among what the pass has saved, as its
  int number = 0;
  bool narrow = false;     // a plan keeps it: what it is made of may take its place, in a narrower dtype
  bool in_rows = false;    // may its gradient read it some rows at a time?
  bool pinned = false;     // a node has saved it, as a parameter, so that an edit of it is an error in plain PyTorch, too
  bool parameter = false;  // memory of a parameter, which is there without autograd, too
  bool weight = false;     // of a leaf that wants a gradient
  bool exposed = false;    // can others write what is held, behind the pass?
  // Of a value that nobody has saved, and that is held to make one that is dropped:
  enum As : uint8_t { kWhole, kNarrow, kPart } as = kWhole;  // also: a cast in the dtype before it; a copied part of a concatenation
  int instead = -1;        // that one
  int saves = 0, refs = 0, left = 0;  // nodes that saved it; these and values made of it; those to come in this backward pass
  int runs = 0, sums = 0, products = 0;  // of a dropped value: calls, and the most sums and products in a row
  int64_t above = 0;     // under a limit: bytes of the values, made again, that are made of it one after another
  uint64_t seen = 0;     // the last walk that came here, and what it found
  bool can = false;
};

// A tensor among a call's arguments. `place`: in a list of optional tensors.
struct Read {
  int at, place, value;
  int geometry;  // of the log; -1: as the value was made
  bool saved = false;  // by the call's node
};

struct Call {
  Rule* rule = nullptr;
  std::vector<IValue> args;
  c10::SmallVector<Read, 4> reads;
  c10::SmallVector<int, 3> outs;      // values
  c10::SmallVector<int, 2> writing;   // memories
  c10::SmallVector<int, 1> waiting;   // values that were saved before it had ended
  int before = -1;                    // the version that its result is written over
  bool sends = false;                 // to other ranks, within
  bool in_checkpoint = false;         // do a checkpoint's hooks save what it reads and makes?
  c10::SmallVector<int64_t, 3> whole; // the last sizes of what it reads, where that is a subclass
  int outer = -1;                     // the call on a subclass that it is a part of
  bool of_subclass = false;           // it reads a subclass of tensors, whose calls below autograd are calls of the log
  bool of_mode = false;               // or a mode of the program's is on, whose calls are
  uint64_t kind = 0;                  // of its trials, once it was asked for
  uint8_t flags = 0;                  // under which it ran: those of the log, or which of its `others_flags`
  bool grad_mode = false, usable = true, by_result = false;  // made again by `Rule::instead`
};

struct Memory {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // as long as this is there, its address does not come again
  int current = -1;  // value
  int writer = -1;   // the open call that writes it, until it has
  bool sent = false;  // do messages come here, such as flat weights? Its counter moves as they come: nothing is made of it again
  c10::VariableVersion counter;
  uint32_t version = 0;
};

// The global flags that bits of kernels depend on, in one number (saving/flags.py has and sets them).
inline uint64_t flags_now() {
  const auto& context = at::globalContext();
  uint64_t bits = at::get_num_threads();
  for (const bool flag : {context.deterministicAlgorithms(), context.deterministicAlgorithmsWarnOnly(), context.userEnabledMkldnn(),
                          context.deterministicMkldnn(), context.userEnabledNNPACK(), context.benchmarkCuDNN(), context.allowFP16ReductionCPU()})
    bits = bits * 2 + flag;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  for (const auto op : {at::Float32Op::MATMUL, at::Float32Op::CONV})
    bits = bits * 16 + static_cast<uint64_t>(at::globalContext().float32Precision(at::Float32Backend::MKLDNN, op));
#endif
  for (const bool flag : {context.userEnabledCuDNN(), context.deterministicCuDNN()}) bits = bits * 2 + flag;
  if (context.hasCUDA()) {
    bits = bits * 16 + static_cast<uint64_t>(context.allowFP16ReductionCuBLAS()) * 4 + static_cast<uint64_t>(context.allowBF16ReductionCuBLAS());
    bits = bits * 2 + context.allowFP16AccumulationCuBLAS();
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
    for (const auto op : {at::Float32Op::MATMUL, at::Float32Op::CONV})
      bits = bits * 16 + static_cast<uint64_t>(context.float32Precision(at::Float32Backend::CUDA, op));
#else
    bits = bits * 4 + context.allowTF32CuBLAS() * 2 + context.allowTF32CuDNN();
#endif
  }
  volatile double tiny = 4.9406564584124654e-324;  // 0 where this thread flushes denormal numbers
  return bits * 2 + (tiny == 0.0);
}

class Limit;

struct Policy {
  bool products = false, everything = false;
  int sums = 2, runs = 32, row = 2;  // in a row: sums; calls behind one value; products
  int64_t smallest = 1, much_larger = 32;  // elements; a smaller tensor is held
  bool by_plan = false;  // what is in a row was planned: `runs` bounds the longest chain of calls alone
};

// A value that is held and might be in fewer bytes, once nobody else has its memory: it is looked at now and then.
struct Waiting {
  int value;
  int64_t due, gap;  // in tensors that are packed
  bool operator>(const Waiting& other) const { return due > other.due; }
};

struct Follower;
struct Times;

// Global flags that were set within a pass, and Python's object that sets them.
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
  std::vector<int> open;    // calls that have begun and not ended
  std::priority_queue<Waiting, std::vector<Waiting>, std::greater<>> waiting;
  std::unordered_map<int, std::vector<Tensor*>> leaves;  // of a value: what saved objects hold of it
  int64_t packs = 0;  // tensors that were packed
  std::vector<std::weak_ptr<const Other>> others;
  Policy policy;
  std::shared_ptr<Asked> first;  // pass, whose flags are the log's
  std::vector<std::shared_ptr<Asked>> asked;  // by each pass that is open, the innermost last
  std::vector<int> to_move;  // values that may be held elsewhere
  std::vector<int> to_copy;  // of a device, small, and there before the pass
  bool gathers = false;      // do weights come and go?
  bool subclasses = false;   // may there be any, such as DTensors?
  uint64_t flags = flags_now(), stamp = 0;
  std::vector<SetFlags> others_flags;
  int64_t alive = 0;        // saved tensors
  // By pass: its saved tensors; of them those that were there when a backward pass last began before it had closed.
  struct Alive {
    int64_t now = 0, then = 0;
    int backward_passes = 0;
  };
  std::vector<Alive> alive_of;
  int task = -1;            // the last of these backward passes, by the engine's number
  int64_t noted_packs = 0;  // all that was saved before it
  int64_t largest = 0;      // of what was saved
  std::shared_ptr<Limit> limit;  // of memory, under which nothing is dropped before it is near
  bool closed = false;
  int passes = 0;           // that are open and write into it
  std::shared_ptr<Exposed> exposed;
  std::vector<Follower*> following;  // one for each pass that is open
  std::shared_ptr<Times> times;      // if a plan is to be made of the pass
  at::CallbackHandle callback = 0;
  std::atomic<const void*> owner = nullptr;  // the thread that reads or writes it, by an address of its own
  int depth = 0;

  // Two threads may come here: operators run without Python's lock, hooks and destructors with it. One thread may come
  // twice: what is freed in here may free what was saved.
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
    Value made;
    made.memory = memory, made.call = call, made.made = Geometry::of(t);
    made.storage_bytes = static_cast<int64_t>(t.storage().nbytes());
    made.counter = t.unsafeGetTensorImpl()->version_counter(), made.version = t._version();
    made.on = stream_of(made.made);
    values.push_back(std::move(made));
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
    // The counter has moved, and no operator has written. A function that says that it worked in place (mark_dirty)
    // moves it once more behind its own operators; else somebody has written past the dispatcher.
    if (is_marked(x)) {
      x.marked = true, x.version = now;
      return memory.current;
    }
    x.lost = true;
    const int fresh = new_value(number, t, -1);
    return memories[number].current = fresh;
  }
  // Has a mode's call written it within one that is open? Autograd counts the write when the mode has returned.
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
  // The open call has written the memory.
  void written(int number) {
    Memory& memory = memories[number];
    const int writer = std::exchange(memory.writer, -1), before = memory.current;
    if (calls[writer].rule->reshapes) {  // the contents are as they were
      if (values[before].version == memory.version) values[before].version = memory.counter.current_version();
      return;
    }
    const bool is_result = calls[writer].rule->edits;  // else it is written beside the result
    Value made;
    made.memory = number, made.call = is_result || calls[writer].rule->sends ? writer : -1, made.made = values[before].made;
    made.storage_bytes = values[before].storage_bytes, made.on = stream_of(made.made);
    made.counter = memory.counter, made.version = memory.counter.current_version();
    values.push_back(std::move(made));
    memory.current = static_cast<int>(values.size()) - 1;
    if (is_result) calls[writer].outs.push_back(memory.current), calls[writer].before = before;
    // Where autograd has not seen it, whoever has saved the memory reads what is there now.
    Value& old = values[before];
    if (old.saves == 0 || old.elsewhere || old.counter.current_version() != old.version) return;
    if (auto storage = memory.storage.lock(); storage && static_cast<int64_t>(storage->nbytes()) >= old.made.extent()) old.shown = over(c10::Storage(std::move(storage)), old.made);
  }
  uint64_t flags_of(const Call& call) const { return call.flags == 0 ? flags : others_flags[call.flags - 1].bits; }
  // The flags now, as a call has them; none if there are too many.
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
  const Geometry& geometry_of(const Read& read) const { return read.geometry < 0 ? values[read.value].made : geometries[read.geometry]; }

  // Is what is held there? Weights that are gathered come and go.
  bool is_filled(const Value& x) const {
    return x.elsewhere || x.code || static_cast<int64_t>(x.held.storage().nbytes()) >= x.made.extent();
  }
  // A pass in which all that was saved is gone, such as one around a whole training, begins anew.
  void begin_anew() {
    values.clear(), calls.clear(), memories.clear(), geometries.clear(), listed.clear(), by_storage.clear(), to_move.clear(), to_copy.clear();
    waiting = {}, leaves.clear();
    std::erase_if(others, [](const auto& one) { return one.expired(); });
    largest = 0;
  }
};

inline thread_local std::shared_ptr<Log> current;

// Whose weight is it: nobody's (0), one that is gathered and gets what it held before (1), of a module that does not run
// now (2), which may have freed it when the backward pass comes.
inline int gathered(const Log& log, const Tensor& t) {
  const auto& first = log.first;
  if (!first || !first->owns) return 0;
  const py::gil_scoped_acquire gil;
  return first->owns.is_none() ? 0 : py::cast<int>(first->owns(t));
}
inline bool is_idle(const Log& log, const Value& x, const Tensor& memory) {
  return log.gathers && x.call < 0 && !x.copied && gathered(log, memory) == 2;
}

}  // namespace leannorm::recording
