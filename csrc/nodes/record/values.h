// Values of the log: what is known of each, and whether it was edited.
#pragma once

#include "device.h"
#include "shown.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <memory>
#include <string>

namespace leannorm::recording {

struct Code;  // encode.h
struct Other;  // others.h

// Why a value is kept. saving/reasons.py has a sentence for each reason.
enum class Why : uint8_t { kNone, kNever, kNotRepeated, kNotAtHand, kTooDeep, kOtherBits, kSmaller, kUnknown, kFlags, kPlanned, kCollective, kFreed, kCheckpointed, kAlone, kMode, kUntried, kTimed };
// Why a value is kept, and the operator that this is about, if it is not the value's own.
struct Cause {
  Why why = Why::kNone;
  const std::string* of = nullptr;
};

struct Elsewhere {
  py::object bring;  // bring() returns the tensor that the user's hooks keep
  c10::weak_intrusive_ptr<c10::StorageImpl> memory;  // of the tensor that the hooks were given
  bool is_other = true;  // the hooks return a tensor with other memory

  // The memory is about to be written, and a copy that is under way must not see that.
  void settle() const {
    const py::gil_scoped_acquire gil;
    if (py::hasattr(bring, "settle")) bring.attr("settle")();
  }
};
struct Value {
  enum State : uint8_t { kFree, kHeld, kDropped };  // not needed; kept; rebuilt when it is read
  int memory = -1;
  int call = -1, out = 0;  // the call that made it, as which result; -1: it existed before the pass, or no call was seen
  bool outlives = false;   // its memory existed before the pass, and stays when the value is dropped
  bool logged = false;     // a logged call made its memory
  Geometry made;           // as its call made it, or as it was first read
  int64_t storage_bytes = 0;
  c10::VariableVersion counter;
  uint32_t version = 0;
  Tensor held;     // an alias or a copy of the memory; empty if the value is `elsewhere`
  std::shared_ptr<const Code> code;  // how `held` is decoded, if it has fewer bytes
  std::shared_ptr<Elsewhere> elsewhere;
  Tensor shown;    // the memory itself, which nodes read if `held` is a copy, or if autograd did not see an edit
  Tensor rebuilt;
  std::optional<c10::Stream> on, rebuilt_on;  // the streams on which it was made and rebuilt
  Sample sample;
  State state = kFree;
  Why why = Why::kNone;
  Cause cause;
  bool copied = false;   // `held` is a copy
  bool marked = false;   // mark_dirty has raised its counter once more after the call that wrote it
  bool lost = false;     // it was overwritten without the dispatcher
  bool listed = false;   // a pass lists it as saved, at `number`
  int number = 0;
  const std::vector<int>* takes = nullptr;  // of what it is made of, by position: what its plan keeps instead of it
  bool in_rows = false;    // its gradient can read it some rows at a time
  bool waits = false;      // if it is dropped, nodes may get a stand-in for it
  bool pinned = false;     // a node has saved it as a leaf, so that an edit is an error in plain PyTorch too
  bool parameter = false;  // memory of a parameter, which exists without autograd too
  bool weight = false;     // memory of a leaf that requires a gradient
  bool exposed = false;    // other code can write the kept memory after the pass
  // Of a value that no node has saved, and that is kept to rebuild a dropped one:
  enum As : uint8_t { kWhole, kNarrow, kPart } as = kWhole;  // as it is, as its cast's source, or as a part of a concatenation
  int instead = -1;        // the dropped one
  int saves = 0, refs = 0, left = 0;  // nodes that saved it; these and dropped values made of it; how many have yet to read it
  int runs = 0, sums = 0, products = 0;  // of a rebuild: calls, and the most sums and products in a row
  int64_t above = 0;     // under a limit: bytes of the longest chain of dropped values that is rebuilt from it
  uint64_t seen = 0;     // the number of the last walk that came here, and what it found
  bool can = false;
  uint8_t gradient = 0;  // bits of `Gradient`

  bool is_outside() const { return outlives || call < 0; }
  // Whether only the log has the memory, and `objects` that nodes have saved. A fake tensor and its storage always have a
  // Python object.
  bool is_owned_by_log(size_t objects = 0) const {
    const size_t owners = made.fake ? 2 : 1;
    return held.use_count() <= owners && held.storage().use_count() <= owners + objects;
  }
  // Gathered weights, which no logged call made, do not: their memory is freed and filled again.
  bool takes_memory() const { return !outlives && (call >= 0 || logged); }
};

// Nodes may get a stand-in for a tensor of this many bytes that they do not read at once; on a device, of eight times as many. A
// stand-in takes the host 35 us. The first in a process takes 0.5 s and 40 MB, as torch then loads its distributed tensors. Tests
// set fewer bytes.
inline std::atomic<int64_t> waits_from = 1 << 23;

enum Gradient : uint8_t { kWants = 1, kHasGradient = 2 };  // a value gets a gradient, which is added to an existing one

// A node may have saved a part of the memory, and a copy is as the value was made. Samples are of that, too.
inline Tensor as_made(const Value& x, const Tensor& t) {
  const bool is_there = x.made.is_on_host() && x.made.extent() <= static_cast<int64_t>(t.storage().nbytes());
  return is_there && !x.made.is_of(t) ? over(t.storage(), x.made) : t;
}
inline Sample sample_of(const Value& x, const Tensor& t) { return Sample::of(as_made(x, t), x.is_outside() && !x.copied ? Sample::kMany : Sample::kFew); }
inline bool is_as_sampled(const Value& x, const Tensor& t) { return x.sample.matches(as_made(x, t)); }

}  // namespace leannorm::recording
