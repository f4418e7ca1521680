// Which calls take much longer than reading what they make.
#pragma once

#include "log.h"

namespace leannorm::recording {

inline int64_t product_of(c10::IntArrayRef sizes) {
  int64_t n = 1;
  for (const int64_t v : sizes) n *= v;
  return n;
}

constexpr int64_t kConvolution = 768;  // operations for each value of the output, above which it is costly
constexpr int64_t kAttention = 1024;

inline bool is_costly(const Log& log, const Call& call) {
  if (call.outs.empty()) return true;
  const Geometry& out = log.values[call.outs[0]].made;
  const auto sizes = [&](int at) -> c10::IntArrayRef {
    for (const Read& one : call.reads)
      if (one.at == at) return log.geometry_of(one).sizes;
    return {};
  };
  switch (call.rule->formula) {
    case Formula::kConvolution: {
      const auto x = sizes(0), weight = sizes(1);
      if (weight.size() < 2) return true;
      int64_t each = 2 * product_of(weight.slice(1));
      if (call.args[6].isBool() && call.args[6].toBool()) each = each * product_of(x) / std::max<int64_t>(out.numel(), 1);
      return each > kConvolution;
    }
    case Formula::kMatrix: {  // with fewer outputs than inputs
      if (call.outer >= 0) {  // of all ranks
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

}  // namespace leannorm::recording
