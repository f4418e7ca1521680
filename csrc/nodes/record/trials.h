// Calls of kinds that are not trusted are made again while the forward pass goes on, and the bits are compared.
#pragma once

#include "replay.h"

#include <map>

namespace leannorm::recording {

// Whether some of its numbers are normal, by a sample. From zeros and denormal numbers nearly all kernels compute the same.
inline bool has_normal_numbers(const Tensor& t) {
  const auto dtype = t.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble && dtype != at::kHalf && dtype != at::kBFloat16) return true;
  const double least = dtype == at::kDouble ? 0x1p-1022 : dtype == at::kHalf ? 0x1p-14 : 0x1p-126;
  constexpr int64_t kSome = 4096;
  const Below below;
  const Tensor flat = t.is_non_overlapping_and_dense() ? t.as_strided({t.numel()}, {1}) : t.reshape({-1});
  return flat.slice(0, 0, flat.numel(), std::max<int64_t>(flat.numel() / kSome, 1)).abs().ge(least).any().item<bool>();
}
// Whether the call's large arguments have several values. A norm of zeros is its bias, whichever kernel computes it.
inline bool has_varied_inputs(const Log& log, const Call& call, const std::map<int, Tensor>& scratch) {
  int64_t most = 0;
  for_inputs(log, call, [&](int in) { most = std::max(most, log.values[in].made.numel()); });
  bool several = most == 0;
  for_inputs(log, call, [&](int in) {
    const Value& x = log.values[in];
    if (several || 2 * x.made.numel() < most) return;
    const auto made = scratch.find(in);
    const Tensor t = x.held.defined() ? x.held : made != scratch.end() ? made->second : log.tensor_at_hand(in);
    several = has_several_values(t) && has_normal_numbers(t);
  });
  return several;
}

// Whether other bits of what is read may give the same result: a narrower dtype, a mask, or a few numbers of many.
inline bool hides_bits(const Geometry& from, const Geometry& to) {
  const auto is_real = [](const Geometry& g) { return at::isFloatingType(g.dtype) || at::isComplexType(g.dtype); };
  const bool narrows = is_real(from) && (!is_real(to) || c10::elementSize(to.dtype) < c10::elementSize(from.dtype));
  return narrows || 2 * to.numel() < from.numel();
}
// A value that is still there, and the calls of kinds that are not trusted yet from which its trial makes it. `is_hidden`:
// whether other bits of this call's result may give the same bits of the value.
struct Untried {
  struct One {
    int call;
    bool is_hidden;
  };
  int by;
  std::vector<One> calls;
};
// Whether a second call is likely to have other bits: a faster formula, or an operator of the program. These are trusted only if
// their own results were compared.
inline bool may_differ(const Call& call) { return call.by_result || !is_of_torch_or_ours(call); }
// Whether calls of kinds that are not trusted yet make the value. Each save of a dropped value asks this; soon the answer is no.
inline bool is_untried(Log& log, int v) {
  c10::SmallVector<int, 16> left{v};
  ++log.stamp;
  while (!left.empty()) {
    const int one = left.pop_back_val();
    Value& x = log.values[one];
    if (std::exchange(x.seen, log.stamp) == log.stamp || (one != v && x.held.defined())) continue;
    Call& call = log.calls[x.call];
    if (!call.rule->moves && !trust().is_enough(kind_of(log, call))) return true;
    for_inputs(log, call, [&](int in) { left.push_back(in); });
  }
  return false;
}
// The values that a trial compares: this value, and those that it is made of, if they are still there.
inline std::vector<Untried> untried_of(Log& log, int v) {
  std::vector<Untried> made;
  c10::SmallVector<int, 16> there{v};
  c10::SmallVector<std::pair<int, bool>, 16> left;
  ++log.stamp;
  for (size_t i = 0; i < there.size(); ++i) {
    Untried part{there[i], {}};
    for (left.push_back({part.by, false}); !left.empty();) {
      const auto [one, is_hidden] = left.pop_back_val();
      Value& x = log.values[one];
      if (std::exchange(x.seen, log.stamp) == log.stamp || (one != v && x.held.defined())) continue;
      Call& call = log.calls[x.call];
      if (!call.rule->moves && !trust().is_enough(kind_of(log, call))) part.calls.push_back({x.call, is_hidden});
      for_inputs(log, call, [&](int in) {
        if (log.at_hand(in)) there.push_back(in);
        else left.push_back({in, is_hidden || hides_bits(log.values[in].made, x.made)});
      });
    }
    if (!part.calls.empty()) made.push_back(std::move(part));
  }
  return made;
}

// A trial gave other bits for a value: refuses the call that made it if that is untried, otherwise all untried calls, since any
// of them may be wrong.
inline void refuse(Log& log, int last, const Untried& part) {
  const bool is_last = std::any_of(part.calls.begin(), part.calls.end(), [last](const auto& one) { return one.call == last; });
  for (const auto& one : part.calls)
    if (one.call == last || !is_last) trust().refuse(kind_of(log, log.calls[one.call]));
}

// Makes calls of kinds that are not trusted once more right away, and compares the bits. On a device the host waits for that,
// so it is not done while a graph is captured, and rarely after some trials whose values showed nothing.
inline Why has_other_bits(Log& log, int v) {
  if (log.values[v].made.fake || !is_untried(log, v)) return Why::kNone;  // fake tensors stand for real ones that pass their trials
  const std::vector<Untried> parts = untried_of(log, v);
  const bool on_device = is_on_device(log.values[v].made);
  if (on_device) {
    if (is_captured(log.values[v].held)) return Why::kUntried;
    for (const Untried& part : parts)
      for (const auto& one : part.calls)
        if (trust().is_vain(kind_of(log, log.calls[one.call]))) return Why::kUntried;
  }
  Why why = Why::kNone;
  for (const Untried& part : parts) {
    const Tensor before = part.by == v ? shown(log.values[v].held, log.values[v].made) : log.tensor_at_hand(part.by);
    Bits found = Bits::kOther;
    std::map<int, Tensor> scratch;
    try {
      found = compared(Replay(log, &scratch).again(part.by), before);
    } catch (const std::exception&) {  // the operator raised an error when it was called again: its result is kept
    }
    for (const auto& one : part.calls)
      if (on_device) trust().looked(kind_of(log, log.calls[one.call]));
    if (found == Bits::kOther) refuse(log, log.values[part.by].call, part);
    if (found != Bits::kSame) why = Why::kOtherBits;
    if (found != Bits::kSame || !has_several_values(before)) continue;
    for (const auto& [number, is_hidden] : part.calls) {
      Call& call = log.calls[number];
      if ((!is_hidden || !may_differ(call)) && has_varied_inputs(log, call, scratch)) trust().confirm(kind_of(log, call));
    }
  }
  return why;
}

}  // namespace leannorm::recording
