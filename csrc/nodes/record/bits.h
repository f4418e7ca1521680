// Compares the bits of a tensor that was made again with those of the first one.
#pragma once

#include "below.h"

namespace leannorm::recording {

// On a device all values are compared and the host waits for the result, so only trials call this.
inline bool has_several_values(const Tensor& t) {
  if (!t.defined() || t.numel() == 0 || is_on_host(t)) return t.defined() && Sample::of(t).has_several;
  const Below below;
  const Tensor row = t.reshape({-1});
  return row.ne(row.narrow(0, 0, 1)).any().item<bool>();
}

enum class Bits : uint8_t { kSame, kOther, kNotKnown };  // kNotKnown: with NaNs, whose payloads may differ
inline Bits compared(const Tensor& again, const Tensor& before) {
  const Below below;
  const auto bits = [](const Tensor& t) { return t.is_contiguous() && t.dim() > 0 ? t.view(at::kByte) : t.reshape({-1}).contiguous().view(at::kByte); };
  if (again.numel() == 0 || at::equal(bits(again), bits(before))) return Bits::kSame;
  return before.is_floating_point() && before.isnan().any().item<bool>() ? Bits::kNotKnown : Bits::kOther;
}

}  // namespace leannorm::recording
