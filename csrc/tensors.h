// What the kernels need of a tensor: its element type, its dense layout, small vectors read from it.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <vector>

namespace leannorm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

// The element types of the kernels, in the order of every table.
enum ElementType { kFloat, kDouble, kBFloat16, kHalf, kElementTypes };

inline ElementType element_type(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return kFloat;
    case ScalarType::Double: return kDouble;
    case ScalarType::BFloat16: return kBFloat16;
    case ScalarType::Half: return kHalf;
    default: STD_TORCH_CHECK(false, "leannorm: the kernels take float32, float64, bfloat16 and float16");
  }
}

inline ScalarType compute_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Whether results are filled with NaN before a kernel writes them. Tests do so, which shows elements that are not
// written.
inline bool poisons() {
  static const bool asked = std::getenv("LEANNORM_POISON") != nullptr;
  return asked;
}

// On the CPU, by the call of torch's shim that does not go through a dispatcher: a good part of a small call's time.
inline Tensor new_tensor(const int64_t* sizes, int64_t dims, ScalarType type) {
  int64_t strides[64], step = 1;  // torch's tensors have at most 64 axes
  for (int64_t d = dims; d-- > 0; step *= std::max<int64_t>(sizes[d], 1)) strides[d] = step;
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dims, sizes, strides, code, aoti_torch_device_type_cpu(), 0, &handle));
  const Tensor made(handle);
  if (poisons()) std::memset(made.mutable_data_ptr(), 0xff, made.numel() * made.element_size());
  return made;
}
inline Tensor new_tensor(const Tensor&, const int64_t* sizes, int64_t dims, ScalarType type) {
  return new_tensor(sizes, dims, type);
}
inline Tensor new_tensor(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType type) {
  return new_tensor(like, sizes.data(), sizes.size(), type);
}
// As x, in its layout if that is dense.
inline Tensor new_like(const Tensor& x) {
  const auto sizes = x.sizes(), strides = x.strides();
  int64_t expected = 1;
  for (int64_t d = sizes.size(); d-- > 0; expected *= std::max<int64_t>(sizes[d], 1))
    if (strides[d] != expected) return torch::stable::empty_like(x);
  return new_tensor(x, sizes.data(), sizes.size(), x.scalar_type());
}
inline Tensor no_tensor(const Tensor& like) { return new_tensor(like, {0}, like.scalar_type()); }

inline const char* data(const Tensor& x) { return static_cast<const char*>(x.const_data_ptr()); }
inline const char* data(const Optional& x) { return x.has_value() ? data(*x) : nullptr; }
inline char* mutable_data(const Tensor& x) { return static_cast<char*>(x.mutable_data_ptr()); }

inline double value_at(ElementType type, const void* p, int64_t i) {
  switch (type) {
    case kFloat: return static_cast<const float*>(p)[i];
    case kDouble: return static_cast<const double*>(p)[i];
    case kBFloat16: return static_cast<const c10::BFloat16*>(p)[i];
    default: return static_cast<const c10::Half*>(p)[i];
  }
}
inline int64_t element_size(ElementType type) { return type == kDouble ? 8 : type == kFloat ? 4 : 2; }

// A small contiguous tensor of any floating type, read as float64 in place: a copy that one thread makes for all
// would have to travel from its cache to theirs.
struct Values {
  ElementType type = kDouble;
  const void* p = nullptr;
  int64_t n = 0;

  Values() = default;
  Values(const Tensor& v) : type(element_type(v)), p(v.const_data_ptr()), n(v.numel()) {
    STD_TORCH_CHECK(v.is_contiguous(), "leannorm: per-channel values must be contiguous");
  }
  explicit Values(const std::vector<double>& v) : p(v.data()), n(v.size()) {}
  Values(const Optional& v) {
    if (v.has_value()) *this = Values(*v);
  }
  double operator[](int64_t i) const { return value_at(type, p, i); }
  // This many of them from `first` on, in place or in `to`; `missing` if there are none.
  const double* read(int64_t first, int64_t count, double* to, double missing) const {
    switch (given() ? type : kElementTypes) {
      case kDouble: return static_cast<const double*>(p) + first;
      case kFloat: std::copy_n(static_cast<const float*>(p) + first, count, to); break;
      case kElementTypes: std::fill_n(to, count, missing); break;
      default: for (int64_t i = 0; i < count; ++i) to[i] = value_at(type, p, first + i);
    }
    return to;
  }
  bool given() const { return p != nullptr; }
};

}  // namespace leannorm
