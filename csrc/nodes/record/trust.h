// Which kinds of calls gave the same bits when they were called again.
#pragma once

#include "log.h"

#include <unordered_map>

namespace leannorm::recording {

// Counts, by kind, the trials in which a second call gave the same bits as the first. Two trials on tensors of several
// values are enough to trust a kind. A kind that once gave other bits is refused.
class Trust {
 public:
  bool is_enough(uint64_t kind) { return count(kind) >= kEnough; }
  // Whether to skip a trial, since several showed nothing because of their values: from then on only one in `kAgain` is made.
  bool is_vain(uint64_t kind) {
    const std::lock_guard lock(mutex_);
    const auto known = looks_.find(kind);
    return known != looks_.end() && known->second >= kLooks && ++known->second % kAgain != 0;
  }
  void looked(uint64_t kind) {
    const std::lock_guard lock(mutex_);
    if (looks_.size() > kMostKinds) looks_.clear();
    ++looks_[kind];
  }
  bool is_refused(uint64_t kind) { return count(kind) < 0; }
  void confirm(uint64_t kind) { change(kind, 1); }
  void refuse(uint64_t kind) { change(kind, -kMany); }
  void forget() {
    const std::lock_guard lock(mutex_);
    counts_.clear(), looks_.clear();
  }

 private:
  static constexpr int kEnough = 2, kMany = 1 << 20, kLooks = 4, kAgain = 256;
  static constexpr size_t kMostKinds = 1 << 16;
  std::mutex mutex_;  // because operators run in several threads at once
  std::unordered_map<uint64_t, int> counts_, looks_;  // looks_: trials for which the host waited for a device

  int count(uint64_t kind) {
    const std::lock_guard lock(mutex_);
    const auto known = counts_.find(kind);
    return known == counts_.end() ? 0 : known->second;
  }
  void change(uint64_t kind, int by) {
    const std::lock_guard lock(mutex_);
    if (counts_.size() > kMostKinds) counts_.clear();
    counts_[kind] += by;
  }
};
inline Trust& trust() {
  static auto* const known = new Trust();
  return *known;
}

inline uint64_t mixed(uint64_t h, uint64_t v) {
  h = (h ^ v) * 0x9E3779B97F4A7C15ull;
  return h ^ h >> 29;
}

inline uint64_t hash_of(const Log& log, const Call& call) {
  uint64_t h = call.rule->id;
  const auto mix = [&h](uint64_t v) { h = mixed(h, v); };
  const auto mix_double = [&](double d) { uint64_t bits; std::memcpy(&bits, &d, sizeof bits), mix(bits); };
  mix(call.grad_mode), mix(log.flags_of(call));
  for (const IValue& v : call.args) {
    if (v.isInt()) mix(v.toInt());
    else if (v.isBool()) mix(v.toBool() + 2);
    else if (v.isDouble()) mix_double(v.toDouble());
    else if (v.isComplexDouble()) mix_double(v.toComplexDouble().real()), mix_double(v.toComplexDouble().imag());
    else if (v.isIntList()) { for (const int64_t i : v.toIntVector()) mix(i + 7); }
    else if (v.isDoubleList()) { for (const double d : v.toDoubleVector()) mix_double(d); }
    else if (v.isString()) mix(std::hash<std::string>()(v.toStringRef()));
    else if (v.isTensor() && v.toTensor().defined()) mix(static_cast<uint64_t>(v.toTensor().scalar_type()) + 13);  // a Python number
    else mix(v.isNone());
  }
  for (const Read& one : call.reads) {
    const Geometry& g = log.geometry_of(one);
    mix(static_cast<uint64_t>(g.dtype) * 64 + static_cast<uint64_t>(g.device.type())), mix(one.at), mix(one.geometry < 0);
    for (size_t i = 0; i < g.sizes.size(); ++i) mix(g.strides[i] == 1 ? i + 11 : g.strides[i] == 0);
  }
  return h;
}
inline uint64_t kind_of(const Log& log, Call& call) {
  if (call.kind == 0) call.kind = hash_of(log, call) & ~uint64_t{1};
  return call.kind + call.by_result;
}

}  // namespace leannorm::recording
