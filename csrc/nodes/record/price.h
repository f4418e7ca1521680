// The cost of calls: which of them take much longer than reading their results would, and how many operations they need.
#pragma once

#include "log.h"

namespace leannorm::recording {

inline int64_t product_of(c10::IntArrayRef sizes) {
  int64_t n = 1;
  for (const int64_t v : sizes) n *= v;
  return n;
}

// The sizes of the tensor that is this argument; empty if it is not a tensor.
inline c10::IntArrayRef sizes_read(const Log& log, const Call& call, int at) {
  for (const Read& one : call.reads)
    if (one.at == at) return log.geometry_of(one).sizes;
  return {};
}

constexpr int64_t kConvolution = 768;  // operations per value of the output, above which a call is costly
constexpr int64_t kAttention = 1024;

inline bool is_costly(const Log& log, const Call& call) {
  if (call.outs.empty()) return true;
  const Geometry& out = log.values[call.outs[0]].made;
  const auto sizes = [&](int at) { return sizes_read(log, call, at); };
  switch (call.rule->formula) {
    case Formula::kConvolution: {
      const auto x = sizes(0), weight = sizes(1);
      if (weight.size() < 2) return true;
      int64_t each = 2 * product_of(weight.slice(1));
      if (call.args[6].isBool() && call.args[6].toBool()) each = each * product_of(x) / std::max<int64_t>(out.numel(), 1);
      return each > kConvolution;
    }
    case Formula::kMatrix: {  // costly with fewer outputs than inputs
      if (call.outer >= 0) {  // the sizes of all ranks together
        const auto& whole = log.calls[call.outer].whole;
        if (const size_t n = whole.size(); n > 1) return whole[n - 2] > whole[n - 1];
      }
      const auto a = sizes(call.args.size() > 3 ? 1 : 0);
      return a.empty() || out.sizes.empty() || a.back() > out.sizes.back();
    }
    case Formula::kAttention: {
      const auto q = sizes(0), k = sizes(1);
      if (q.empty() || k.size() < 2 || (call.args[3].isDouble() && call.args[3].toDouble() != 0.0)) return true;
      return 4 * product_of(q) * k[k.size() - 2] > kAttention * std::max<int64_t>(out.numel(), 1);
    }
    default: return false;
  }
}

// The number of operations of one call.
inline int64_t operations(const Log& log, const Call& call) {
  if (call.outs.empty() || call.by_result) return 0;
  const int64_t out = log.values[call.outs[0]].made.numel();
  const auto sizes = [&](int at) { return sizes_read(log, call, at); };
  switch (call.rule->formula) {
    case Formula::kConvolution: {
      const auto weight = sizes(1);
      const bool transposed = call.args.size() > 6 && call.args[6].isBool() && call.args[6].toBool();
      return weight.size() < 2 ? 0 : 2 * product_of(weight.slice(1)) * (transposed ? product_of(sizes(0)) : out);
    }
    case Formula::kMatrix: {
      const auto a = sizes(call.args.size() > 3 ? 1 : 0);
      return a.empty() ? 0 : 2 * out * a.back();
    }
    case Formula::kAttention: {
      const auto q = sizes(0), k = sizes(1);
      return k.size() < 2 ? 0 : 4 * product_of(q) * k[k.size() - 2];
    }
    default: return 0;
  }
}
inline int64_t groups_of(const Call& call) {
  if (call.rule->formula != Formula::kConvolution) return 0;
  return call.args.size() > 8 && call.args[8].isInt() ? call.args[8].toInt() : 1;
}

}  // namespace leannorm::recording
