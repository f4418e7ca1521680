// Encodes tensors without reading their values: on a device the host would wait for them, and fake tensors have none. What a
// tensor contains is inferred from the call that made it.
#pragma once

#include "encode.h"

#include <ATen/ops/constant_pad_nd.h>

namespace leannorm::recording {

namespace coding {

inline const Call* maker_of(const Log& log, const Value& x, const char* name) {
  if (x.call < 0 || log.calls[x.call].rule == nullptr || log.calls[x.call].rule->name != name) return nullptr;
  return &log.calls[x.call];
}

// Whether the value is dropout's mask, which a CPU makes as zeros and ones divided by a number.
inline bool is_dropped(const Log& log, const Value& x) {
  if (maker_of(log, x, "aten::div_") == nullptr) return false;
  for (int call = x.call - 1; call >= std::max(x.call - 4, 0); --call) {
    const Call& before = log.calls[call];
    if (before.rule != nullptr && before.rule->name == "aten::bernoulli_") return std::find(before.writing.begin(), before.writing.end(), x.memory) != before.writing.end();
  }
  return false;
}

// The dtype of a floating-point cast's source; none if the value is not such a cast.
inline std::optional<at::ScalarType> source_of_cast(const Log& log, const Value& x) {
  const Call* const cast = maker_of(log, x, "aten::_to_copy");
  if (cast == nullptr || cast->reads.size() != 1) return {};
  const at::ScalarType from = log.geometry_of(cast->reads[0]).dtype;
  return at::isFloatingType(from) && at::isFloatingType(x.made.dtype) ? std::optional(from) : std::nullopt;
}

// The same, if it takes at most half of the bytes.
inline std::optional<at::ScalarType> narrow_source(const Log& log, const Value& x) {
  const auto from = source_of_cast(log, x);
  return from && 2 * c10::elementSize(*from) <= c10::elementSize(x.made.dtype) ? from : std::nullopt;
}

// The largest position that max pooling can return for an image or a volume; none if the value is not its positions.
inline std::optional<int64_t> largest_position(const Log& log, const Value& x) {
  if (x.out != 1 || x.made.dtype != at::kLong) return {};
  for (const auto& [name, axes] : {std::pair("aten::max_pool2d_with_indices", size_t{2}), {"aten::max_pool3d_with_indices", size_t{3}}}) {
    const Call* const pool = maker_of(log, x, name);
    if (pool == nullptr || pool->reads.empty()) continue;
    const auto& sizes = log.geometry_of(pool->reads[0]).sizes;
    int64_t all = 1;
    for (size_t i = sizes.size() - std::min(axes, sizes.size()); i < sizes.size(); ++i) all *= sizes[i];
    return all - 1;
  }
  return {};
}

inline Tensor bits_on_device(const Tensor& flags) {  // eight per byte, the first one in the lowest bit
  const int64_t n = flags.numel();
  Tensor bytes = flags.view(at::kByte);
  if (n % 8 != 0) bytes = at::constant_pad_nd(bytes, {0, 8 - n % 8});
  if (bytes.storage_offset() % 8 != 0) bytes = bytes.clone();
  // Eight flags are one word. The product moves flag i from bit 8 i to bit 56 + i, so its last byte has all of them.
  constexpr int64_t kGathers = 0x0102040810204080;
  return (bytes.view(at::kLong) * kGathers).view(at::kByte).view({-1, 8}).select(1, 7).contiguous();
}
}  // namespace coding

inline std::optional<Coded> coded_unseen(const Log& log, const Value& x) {
  using namespace coding;
  if (x.made.dtype == at::kBool && x.call >= 0)
    return Coded{bits_on_device(flat(x.held)), std::make_shared<Code>(Code{Code::kBits, 0, 1})};
  if (x.made.fake && is_dropped(log, x))
    return Coded{at::empty({(x.made.numel() + 7) / 8}, x.held.options().dtype(at::kByte)), std::make_shared<Code>(Code{Code::kBits, 0, 1})};
  if (const auto most = largest_position(log, x)) {
    const at::ScalarType narrow = *most <= 0xFF ? at::kByte : *most <= 0x7FFF ? at::kShort : at::kInt;
    if (*most <= 0x7FFFFFFF) return Coded{flat(x.held).to(narrow), std::make_shared<Code>(Code{Code::kIntegers, 0, static_cast<uint64_t>(*most), narrow})};
  }
  if (const auto from = narrow_source(log, x))
    return Coded{flat(x.held).to(*from), std::make_shared<Code>(Code{Code::kCast, 0, 0, *from})};
  return {};
}

}  // namespace leannorm::recording
