// What a pass keeps: a saved value is dropped if it can be rebuilt by the calls that made it, from values that are kept.
#pragma once

#include "copies.h"
#include "encode_unseen.h"
#include "price.h"
#include "replay.h"
#include "trials.h"

#include <map>
#include <unordered_map>
#include <unordered_set>

namespace leannorm::recording {

// ---------------------------------------------------------------- the walk

constexpr int64_t kCopied = 1 << 14;  // bytes: tensors from before the pass up to this size are copied, as an optimizer may change them

// Whether all that a dropped value is rebuilt from is still there. Gathered weights may have been freed since it was dropped.
inline bool are_filled(const Log& log, int v) {
  if (!log.gathers) return true;
  std::unordered_set<int> looked;
  std::vector<int> left{v};
  bool all = true;
  while (!left.empty() && all) {
    const int one = left.back();
    left.pop_back();
    if (!looked.insert(one).second) continue;
    const Value& x = log.values[one];
    if (x.held.defined()) all = log.is_filled(x) && !is_idle(log, x, x.held);
    else if (x.state == Value::kDropped) for_inputs(log, log.calls[x.call], [&](int in) { left.push_back(in); });
  }
  return all;
}

// Whether this is a transposed convolution, in which a device may add in any order.
inline bool is_transposed(const Call& call) {
  constexpr size_t kTransposed = 6;
  return call.rule->formula == Formula::kConvolution && call.args.size() > kTransposed && call.args[kTransposed].isBool() && call.args[kTransposed].toBool();
}

class Walk {
 public:
  // `before`: values that were saved from this number on are not available.
  Walk(Log& log, int top, int64_t may_hold, int before = std::numeric_limits<int>::max()) : log_(log), top_(top), before_(before), may_hold_(may_hold), may_copy_(log.values[top].storage_bytes - may_hold) {
    ++log.stamp;
  }

  const std::vector<int>* takes = nullptr;  // as in `Value`
  std::vector<int> taken;  // values that no node has saved, to be kept instead of the dropped one
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> owned;  // keeps their memory, which another thread may free when a message ends
  Why why = Why::kNone;
  Cause cause;  // the first one found

  // Whether the value is kept or can be rebuilt. `depth` bounds the recursion; each value is visited once.
  bool is_available(int v, int depth = 64) {
    Value& x = log_.values[v];
    if (x.held.defined() && is_idle(log_, x, x.held)) return refuse(Why::kFreed, v);
    if (x.held.defined())
      return !x.lost && (x.copied || (log_.is_there(v) && !log_.memories[x.memory].sent)) && log_.is_filled(x) && (x.saves == 0 || x.number < before_);
    if (x.state == Value::kDropped) return are_filled(log_, v);
    if (x.seen == log_.stamp) return x.can;
    x.seen = log_.stamp, x.can = false;
    const bool can = (x.outlives && take(v)) || made_again(v, depth) || take(v);
    return log_.values[v].can = can;
  }

 private:
  Log& log_;
  const int top_, before_;
  int64_t may_hold_, may_copy_;  // bytes that `take` may still keep, and may copy of tensors from before the pass

  bool refuse(Why reason, int v) {  // notes the reason, and returns false
    if (const int call = log_.values[v].call; cause.why == Why::kNone && call >= 0) cause = {reason, v == top_ ? nullptr : &log_.calls[call].rule->name};
    const bool is_final = why == Why::kCollective || why == Why::kCheckpointed || why == Why::kFreed;
    if (why == Why::kNone || reason == Why::kCheckpointed || (v == top_ && !is_final)) why = reason;
    return false;
  }
  // Whether it can be kept although no node has saved it; then it is in `taken`. `planned`: a plan counts its bytes.
  bool take(int v, bool planned = false) {
    Value& x = log_.values[v];
    if (v == top_ || log_.memories[x.memory].sent) return false;
    const auto storage = log_.at_hand(v);
    if (!storage) return false;
    owned.push_back(storage);
    if (log_.gathers && is_idle(log_, x, over(c10::Storage(storage), x.made))) return refuse(Why::kFreed, v);
    x.runs = x.sums = x.products = 0, x.as = Value::kWhole, x.instead = top_;
    if (!x.takes_memory()) {
      if (x.storage_bytes <= kCopied && (may_copy_ -= x.storage_bytes) < 0) return false;  // more would be kept than dropped
      return taken.push_back(v), true;
    }
    const auto source = planned || x.storage_bytes > may_hold_ ? coding::source_of_cast(log_, x) : std::nullopt;
    const int64_t bytes = source ? x.made.numel() * static_cast<int64_t>(c10::elementSize(*source)) : x.storage_bytes;
    if (!planned && bytes > may_hold_) return false;
    may_hold_ -= planned ? 0 : bytes, x.as = source ? Value::kNarrow : Value::kWhole;
    return taken.push_back(v), true;
  }
  // Whether the plan keeps `in` instead of the value that is made of it.
  bool keeps(const Call& call, int v, int in) {
    Value& x = log_.values[in];
    if (x.held.defined() || x.state == Value::kDropped || x.seen == log_.stamp) return is_available(in);
    if (!take(in, true) && !copies(call, v, in, true)) return false;
    x.seen = log_.stamp;
    return x.can = true;
  }
  // Whether `in` is gone, but can be copied out of the concatenation `v`. Dense blocks read a part often, from one copy.
  bool copies(const Call& call, int v, int in, bool planned = false) {
    Value& x = log_.values[in];
    if (v != top_ || call.rule->name != "aten::cat" || x.held.defined() || x.state == Value::kDropped) return false;
    if (x.made.dtype != log_.values[v].made.dtype || x.made.offset != 0 || (!planned && x.storage_bytes > may_hold_) ||
        x.made.numel() * static_cast<int64_t>(c10::elementSize(x.made.dtype)) != x.storage_bytes || x.made.extent() != x.storage_bytes) return false;
    for (const Read& one : call.reads)
      if (log_.geometry_of(one).sizes.size() != log_.values[v].made.sizes.size() || (one.value == in && one.geometry >= 0)) return false;
    may_hold_ -= planned ? 0 : x.storage_bytes, x.can = true, x.runs = x.sums = x.products = 0, x.as = Value::kPart, x.instead = v;
    return taken.push_back(in), true;
  }
  // Whether the results are kept from which the call's first one is computed faster.
  bool by_result(const Call& call, int v) const {
    if (!call.rule->instead || log_.values[v].out != 0) return false;
    if (call.rule->by_statistics) {
      const auto& x = log_.values[v].made;  // a narrow result would hide other bits in most trials
      const bool trains = call.args[call.rule->gate].toBool(), wide = x.dtype == at::kFloat || x.dtype == at::kDouble;
      if (!trains || !wide || !x.device.is_cpu()) return false;
    }
    Call one = {};
    one.rule = call.rule, one.by_result = true;
    for (const int out : results_read(one)) {
      const int r = result_of(log_, call, out);
      if (r < 0 || !log_.values[r].held.defined() || log_.values[r].made.dtype != log_.values[result_of(log_, call, results_read(one)[0])].made.dtype) return false;
    }
    return true;
  }
  bool made_again(int v, int depth) {
    const Value& of = log_.values[v];
    if (of.call < 0) return refuse(Why::kUnknown, v);
    if (depth == 0) return refuse(Why::kTooDeep, v);
    Call& call = log_.calls[of.call];
    if (call.sends || call.rule->sends) return refuse(Why::kCollective, v);
    if (!call.usable) return refuse(call.of_mode ? Why::kMode : Why::kFlags, v);
    if (call.rule->kind == Kind::kOnce || call.rule->kind == Kind::kSkip || of.made.offset != 0) return refuse(Why::kNever, v);
    if (const int at = call.rule->dropout; at >= 0 && call.args[at].isDouble() && call.args[at].toDouble() != 0) return refuse(Why::kNever, v);
    if (is_on_device(of.made) && (call.rule->varies || is_transposed(call)) && !at::globalContext().deterministicAlgorithms()) return refuse(Why::kNever, v);
    if (is_on_device(of.made) && call.rule->formula == Formula::kConvolution && at::globalContext().benchmarkCuDNN()) return log_.meets(kTimedCalls), refuse(Why::kTimed, v);
    if (std::find(call.outs.begin(), call.outs.end(), v) == call.outs.end()) return refuse(Why::kUnknown, v);  // the call has not ended
    const Policy& policy = log_.policy;
    const bool product = call.rule->kind == Kind::kProduct, window = product && call.rule->formula == Formula::kNone;
    if (product && !policy.everything && (!policy.products || is_costly(log_, call))) return refuse(Why::kNotRepeated, v);
    bool needed = false;  // if so, it is decided already how the call is made again
    for (const int out : call.outs) needed |= log_.values[out].state == Value::kDropped;
    if (!needed) {
      call.by_result = by_result(call, v);
      call.by_result = call.by_result && !trust().is_refused(kind_of(log_, call));
    }
    if (!call.by_result && !call.rule->again) return refuse(Why::kNever, v);
    if (call.by_result && of.out != 0) return refuse(Why::kNotAtHand, v);
    if (trust().is_refused(kind_of(log_, call))) return refuse(Why::kOtherBits, v);
    int runs = 1, sums = 0, products = 0, position = 0;
    bool all = true;
    for_inputs(log_, call, [&](int in) {
      const bool planned = v == top_ && takes != nullptr && std::find(takes->begin(), takes->end(), position) != takes->end();
      ++position;
      if (!(all = all && ((planned && keeps(call, v, in)) || is_available(in, depth - 1) || copies(call, v, in)))) return;
      const Value& x = log_.values[in];
      if (x.held.defined()) return;
      runs = policy.by_plan ? std::max(runs, x.runs + 1) : runs + x.runs, sums = std::max(sums, x.sums), products = std::max(products, x.products);
    });
    if (!all) return refuse(log_.calls[of.call].in_checkpoint ? Why::kCheckpointed : Why::kNotAtHand, v);
    if (window && products > 0 && !policy.everything) return refuse(Why::kNotRepeated, v);  // it is small, and would need a larger product
    sums += log_.calls[of.call].rule->kind == Kind::kSum && adds_equals(log_.calls[of.call], v), products += product;
    if (runs > policy.runs) return refuse(Why::kTooDeep, v);
    if (sums > policy.sums || products > policy.row) return refuse(policy.everything ? Why::kTooDeep : Why::kNotRepeated, v);
    Value& x = log_.values[v];
    x.runs = runs, x.sums = sums, x.products = products;
    return true;
  }
  // Whether the call adds tensors of the result's size, as a residual connection does. A bias does not count.
  bool adds_equals(const Call& call, int v) const {
    const int64_t all = log_.values[v].made.numel();
    int large = 0;
    for (const Read& one : call.reads) large += log_.geometry_of(one).numel() == all;
    return large > 1;
  }
};

// ---------------------------------------------------------------- readers

// Encodes a kept value in fewer bytes, if possible.
inline bool encode(Log& log, int v) {
  Value& x = log.values[v];
  if (!may_be_coded(x, x.held)) return false;
  const Tensor made_as = as_made(x, x.held), whole = static_cast<int64_t>(x.held.nbytes()) == x.storage_bytes ? x.held : made_as;
  const Sample sample = Sample::of(made_as);
  if (!x.sample.matches(made_as)) return false;  // it was edited, which is an error when something is rebuilt from it
  const Below below(x.made.fake);
  std::optional<Coded> made;
  try {
    made = x.made.is_on_host() ? coded(whole) : coded_unseen(log, x);
  } catch (const std::exception&) {  // out of memory: the value is kept as it is
  }
  if (!made) return false;
  x.sample = sample, x.held = std::move(made->bytes), x.code = std::move(made->code), x.copied = true;
  return true;
}
// Queues a value that may be encoded once nothing else owns its memory.
inline void wait_for(Log& log, int v) {
  const Value& x = log.values[v];
  if (!x.held.defined() || x.copied || x.parameter || x.made.numel() < log.policy.smallest || !may_be_coded(x, x.held)) return;
  log.waiting.push({v, log.packs + 1, 1});
}

// A copy of a concatenation's argument, taken from its result.
inline Tensor part_of(const Log& log, const Value& whole, int part) {
  const Below below(whole.made.fake);
  const Call& call = log.calls[whole.call];
  const Geometry& made = log.values[part].made;
  const Tensor all = shown(whole.held, whole.made), copy = at::empty_strided(made.sizes, made.strides, all.options());
  const int64_t dim = at::maybe_wrap_dim(call.args[1].toInt(), all.dim());
  int64_t start = 0;
  for (const Read& one : call.reads) {
    const int64_t length = log.geometry_of(one).sizes[dim];
    if (one.value == part) return copy.copy_(all.narrow(dim, start, length));
    start += length;
  }
  TORCH_INTERNAL_ASSERT(false);
}

// Adds a reader to the value. If that drops the value, also adds one to each value from which it is rebuilt.
inline void add_reader(Log& log, int v, const std::vector<int>& taken) {
  c10::SmallVector<int, 16> left{v};
  while (!left.empty()) {
    const int one = left.pop_back_val();
    Value& x = log.values[one];
    ++x.refs, ++x.left;
    if (x.held.defined() && !x.sample.taken) x.sample = sample_of(x, x.held);
    if (x.held.defined() && x.is_outside() && !x.copied && !x.elsewhere && (log.gathers || !(x.parameter && x.weight)) && x.storage_bytes <= kCopied) {
      x.shown = x.held;
      copy_small(log, one);
    }
    if (x.held.defined() || x.state == Value::kDropped) continue;
    if (std::find(taken.begin(), taken.end(), one) != taken.end()) {
      if (x.as == Value::kPart) {
        x.held = part_of(log, log.values[x.instead], one), x.copied = true;
        x.sample = Sample::of(x.held), x.state = Value::kHeld;
        continue;
      }
      auto storage = log.memories[x.memory].storage.lock();
      TORCH_INTERNAL_ASSERT(storage);
      x.held = over(c10::Storage(std::move(storage)), x.made);
      if (x.is_outside() && x.storage_bytes <= kCopied) copy_small(log, one);
      x.sample = sample_of(x, x.held), x.state = Value::kHeld;
      if (x.is_outside()) continue;
      if (x.as == Value::kNarrow) encode(log, one);  // a copy, since other code may still have the cast
      if (!log.values[one].code) log.to_move.push_back(one);
      wait_for(log, one);
      continue;
    }
    x.state = Value::kDropped;
    for_inputs(log, log.calls[x.call], [&](int in) { left.push_back(in); });
  }
}

// Stops watching the value: no other code can write it, or nothing is rebuilt from it.
inline void hide(Log& log, Value& x) {
  if (std::exchange(x.exposed, false)) forget(*log.exposed, 1);
}

// Removes a reader, and frees what has none left.
inline void remove_reader(Log& log, int v) {
  c10::SmallVector<int, 16> left{v};
  while (!left.empty()) {
    const int one = left.pop_back_val();
    Value& x = log.values[one];
    --x.refs;
    if (x.refs <= x.saves) hide(log, x);
    if (x.refs > 0) {
      x.left = std::min(x.left, x.refs);  // the reader may have read it already
      continue;
    }
    const bool dropped = x.state == Value::kDropped;
    x.held.reset(), x.elsewhere.reset(), x.rebuilt.reset(), x.shown.reset(), x.state = Value::kFree, x.left = 0, x.copied = false, x.sample = {}, x.code = {};
    if (dropped) for_inputs(log, log.calls[x.call], [&](int in) { left.push_back(in); });
  }
}

// Keeps a dropped value from now on, since it is saved again and could not be rebuilt, or since a plan keeps it. Others are then
// rebuilt from it. The call that saves it may be about to write it.
inline void hold_again(Log& log, int v, Tensor held) {
  Value& x = log.values[v];
  x.held = std::move(held), x.state = Value::kHeld, x.why = Why::kFreed;
  x.sample = Sample::of(as_made(x, x.held));
  if (log.memories[x.memory].writer >= 0) copy_before_write(log, v);
  for_inputs(log, log.calls[x.call], [&](int in) { remove_reader(log, in); });
}

// Drops a saved value that is kept so far, if it can be rebuilt.
inline void decide(Log& log, int v) {
  Value& x = log.values[v];
  if (x.state == Value::kDropped || x.saves == 0 || x.copied || x.lost || x.elsewhere) return;
  x.state = Value::kHeld;
  const int64_t elements = x.made.numel();
  log.largest = std::max(log.largest, elements);
  if (x.is_outside()) return void(x.why = Why::kNone);
  if (elements < log.policy.smallest) return;
  if (!log.policy.everything && elements * log.policy.much_larger <= log.largest) return void(x.why = Why::kSmaller);
  const Tensor was = std::exchange(x.held, {});
  Walk walk(log, v, 0);
  walk.takes = x.takes;
  bool can = walk.is_available(v);
  const Why why = walk.why;
  const Cause cause = walk.cause;
  std::vector<int> taken = std::move(walk.taken);
  auto owned = std::move(walk.owned);
  if (!can) {  // try again with smaller values that no node has saved, such as the source of a cast
    Walk again(log, v, log.values[v].storage_bytes * 3 / 4);
    can = again.is_available(v), taken = std::move(again.taken), owned = std::move(again.owned);
  }
  log.values[v].held = was;
  if (!can) return void((log.values[v].why = log.calls[log.values[v].call].in_checkpoint ? Why::kCheckpointed : why, log.values[v].cause = cause));
  const Call& call = log.calls[log.values[v].call];
  for_inputs(log, call, [&](int in) { add_reader(log, in, taken); });
  if (const Why other = has_other_bits(log, v); other != Why::kNone) {
    for_inputs(log, call, [&](int in) { remove_reader(log, in); });
    return void(log.values[v].why = other);
  }
  Value& dropped = log.values[v];
  dropped.sample = Sample::of(shown(was, dropped.made));
  dropped.state = Value::kDropped, dropped.why = Why::kNone;
  dropped.held.reset();
}

}  // namespace leannorm::recording
