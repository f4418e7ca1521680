// A batch norm, a sum and an activation behind it are rebuilt by one call of leannorm's kernel, which reads and writes memory
// once. Nobody else may need what is between them. The first two times the calls are made one by one as well, to compare bits.
#pragma once

#include "trust.h"

namespace leannorm::recording {

struct Fused {
  int norm = -1, sum = -1;  // their results
  int other = -1;           // what the sum adds to the norm's result
  std::string act = "identity";
  uint64_t kind = 0;  // by which `Trust` counts it
};

// Where leannorm::channel_normalize has these arguments.
constexpr int kResidual = 5, kActivation = 6;

// Whether the value is a norm's result, which is rebuilt without a residual connection and an activation.
inline bool is_plain_norm(const Log& log, int v) {
  const Value& x = log.values[v];
  if (x.call < 0 || x.out != 0 || !log.calls[x.call].by_result) return false;
  const Call& call = log.calls[x.call];
  if (call.rule->by_statistics) return true;
  if (call.rule->instead->operator_name().name != "leannorm::channel_normalize") return false;
  const auto argument = [&](int at) -> const IValue& { return call.args[call.rule->sources[at].at]; };
  const bool adds = std::any_of(call.reads.begin(), call.reads.end(), [&](const Read& one) { return one.at == call.rule->sources[kResidual].at; });
  return !adds && argument(kActivation).isString() && argument(kActivation).toStringRef() == "identity";
}

// How the value is made by one call, if it is. `passes(u)`: whether the next of these calls, and nothing else, reads `u`.
template <class Passes> std::optional<Fused> fused_of(Log& log, int v, const Passes& passes) {
  const Value& top = log.values[v];
  if (top.call < 0 || top.out != 0 || (log.calls[top.call].rule->act.empty() && log.calls[top.call].rule->kind != Kind::kSum)) return {};
  const bool is_wide = top.made.dtype == at::kFloat || top.made.dtype == at::kDouble;  // others are rounded between the calls
  if (!is_wide || !top.made.is_on_host() || top.made.fake) return {};
  const uint8_t flags = log.calls[top.call].flags;
  const auto is_like_top = [&](const Read& read) {
    const Geometry& made = log.values[read.value].made;
    return read.geometry < 0 && made.dtype == top.made.dtype && made.sizes == top.made.sizes && made.strides == top.made.strides && made.offset == 0;
  };
  Fused found;
  int at = v;  // from the value back to the norm's result
  const auto go_back = [&](const Read& to) {
    found.kind = mixed(found.kind, kind_of(log, log.calls[log.values[at].call]));
    at = to.value;
    const int call = log.values[at].call;
    return call >= 0 && log.calls[call].flags == flags && log.calls[call].usable;
  };
  if (const Call& call = log.calls[top.call]; !call.rule->act.empty()) {
    if (call.reads.size() != 1 || !is_like_top(call.reads[0]) || !passes(call.reads[0].value) || !go_back(call.reads[0])) return {};
    found.act = call.rule->act;
  }
  const Call& sum = log.calls[log.values[at].call];
  const bool adds = sum.rule->name == "aten::add" || sum.rule->name == "aten::add_";
  if (adds && sum.reads.size() == 2 && is_like_top(sum.reads[0]) && is_like_top(sum.reads[1]) && sum.args[2].isInt() && sum.args[2].toInt() == 1) {
    for (const int side : {0, 1}) {
      const Read &one = sum.reads[side], &other = sum.reads[1 - side];
      if (one.value == other.value || !is_plain_norm(log, one.value) || !passes(one.value)) continue;
      found.sum = at, found.other = other.value;
      if (!go_back(one)) return {};
      break;
    }
  }
  if (at == v || !is_plain_norm(log, at)) return {};
  found.norm = at, found.kind = mixed(found.kind, kind_of(log, log.calls[log.values[at].call]));
  return found;
}

}  // namespace leannorm::recording
