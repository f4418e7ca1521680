// How tensors show their memory, and samples of a few bytes of it.
#pragma once

#include "fakes.h"

#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace leannorm::recording {

// Sizes, strides, offset, dtype and device: how a tensor shows its memory.
struct Geometry {
  c10::SmallVector<int64_t, 5> sizes, strides;
  int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;
  c10::Device device = at::kCPU;
  std::shared_ptr<py::object> fake;  // the mode of a fake tensor

  static Geometry of(const Tensor& t) {
    Geometry made;
    made.sizes.assign(t.sizes().begin(), t.sizes().end());
    made.strides.assign(t.strides().begin(), t.strides().end());
    made.offset = t.storage_offset(), made.dtype = t.scalar_type(), made.device = t.device();
    if (is_fake(t)) made.fake = mode_of_fake(t);
    return made;
  }
  bool is_on_host() const { return device.is_cpu() && !fake; }
  bool is_of(const Tensor& t) const {
    return t.storage_offset() == offset && t.scalar_type() == dtype && t.sizes() == c10::IntArrayRef(sizes) &&
           t.strides() == c10::IntArrayRef(strides);
  }
  int64_t numel() const {
    int64_t n = 1;
    for (const int64_t size : sizes) n *= size;
    return n;
  }
  // Whether the elements are exactly the memory's `bytes`. If so hooks get the tensor as it is, otherwise the memory as one row.
  bool fills(int64_t bytes) const {
    if (offset != 0 || numel() * static_cast<int64_t>(c10::elementSize(dtype)) != bytes || extent() != bytes) return false;
    return std::find(strides.begin(), strides.end(), 0) == strides.end();
  }
  // Bytes from the start of the memory to the end of the last element.
  int64_t extent() const {
    int64_t last = offset;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] == 0) return 0;
      last += (sizes[i] - 1) * strides[i];
    }
    return (last + 1) * static_cast<int64_t>(c10::elementSize(dtype));
  }
};

// Whether the log can read and make such a tensor. Subclasses and the tensors of transforms show other memory than they
// compute with. `in_any_bits`: also allows conjugate and negative views, which a call may write through.
inline bool plain(const Tensor& t, bool in_any_bits = false) {
  constexpr c10::DispatchKeySet bits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  constexpr c10::DispatchKeySet wrapped({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
                                         c10::DispatchKey::Functionalize, c10::DispatchKey::ZeroTensor});
  if (t.defined() && t.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})) && !is_fake(t)) return false;
  return t.defined() && t.layout() == at::kStrided && t.has_storage() && !t.key_set().has_any(wrapped) &&
         (in_any_bits || !t.key_set().has_any(bits)) && !t.is_inference() && !t.is_nested() &&
         !t.is_quantized() && !t.is_meta() && !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         t.storage().sym_nbytes().maybe_as_int().has_value();
}

inline Tensor base_of(const Tensor& t) {
  if (t.is_view()) return Tensor(t._base());
  return t;
}

inline thread_local bool busy = false;  // this thread runs calls of the library itself, which are not logged
struct Busy {
  const bool before = std::exchange(busy, true);
  Busy() = default;
  Busy(const Busy&) = delete;
  ~Busy() { busy = before; }
};

// Makes the same tensor as the dispatcher would, in a tenth of the time.
inline Tensor over_bare(c10::Storage storage, const Geometry& geometry, c10::DispatchKey key) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(geometry.dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(geometry.sizes, geometry.strides, geometry.offset);
  return made;
}
inline Tensor over(c10::Storage storage, const Geometry& geometry) {
  if (geometry.fake) return fake_of(*geometry.fake, over_bare(std::move(storage), geometry, c10::DispatchKey::Meta), geometry.device);
  if (geometry.device.is_cpu()) return over_bare(std::move(storage), geometry, c10::DispatchKey::CPU);
  if (geometry.device.is_cuda()) return over_bare(std::move(storage), geometry, c10::DispatchKey::CUDA);
  const Busy unseen;
  const at::AutoDispatchBelowADInplaceOrView below;
  const PastModes real;
  Tensor made = at::empty({0}, at::TensorOptions().dtype(geometry.dtype).device(geometry.device));
  return made.set_(std::move(storage), geometry.offset, geometry.sizes, geometry.strides);
}

// The same memory and version counter without the graph, which could lead back to the node that saves it. Modes do not see it.
inline Tensor alias_of(const Tensor& t) {
  auto* const impl = t.unsafeGetTensorImpl();
  if (is_fake(t)) {
    Tensor made = over(t.storage(), Geometry::of(t));
    made.unsafeGetTensorImpl()->set_version_counter(impl->version_counter());
    return made;
  }
  const PastModes real;
  return Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

// Replaces every NaN in a word with the same one. Which NaN a kernel makes of two is not specified, and may depend on the
// alignment of the memory.
struct OneNaN {
  int bits = 0;  // of a number; 0: nothing is replaced
  uint64_t infinite = 0;

  explicit OneNaN(at::ScalarType dtype) {
    switch (c10::toRealValueType(dtype)) {
      case at::kDouble: bits = 64, infinite = 0x7FF0000000000000ull; break;
      case at::kFloat: bits = 32, infinite = 0x7F800000ull; break;
      case at::kHalf: bits = 16, infinite = 0x7C00ull; break;
      case at::kBFloat16: bits = 16, infinite = 0x7F80ull; break;
      default: break;
    }
  }
  uint64_t operator()(uint64_t word) const {
    if (bits == 0) return word;
    const uint64_t one = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
    for (int at = 0; at < 64; at += bits)
      if ((word >> at & one >> 1) > infinite) word |= one << at;
    return word;
  }
};

// A hash of some bytes of a tensor on a CPU, which shows most edits that the dispatcher has not seen.
struct Sample {
  static constexpr int kFew = 12, kMany = 48;  // words; many of a weight, which an optimizer may change in few places
  uint64_t bits = 0;
  int words = kFew;
  bool taken = false, has_several = false;  // values that differ

  static Sample of(const Tensor& t, int words = kFew) {
    Sample made;
    made.words = words;
    if (!is_on_host(t) || t.numel() == 0 || !t.is_non_overlapping_and_dense()) return made;
    const auto* const data = static_cast<const unsigned char*>(t.const_data_ptr());
    if (data == nullptr) return made;
    const int64_t n = static_cast<int64_t>(t.nbytes()), width = std::min<int64_t>(n, 8), item = std::min(static_cast<int64_t>(t.itemsize()), width);
    const int64_t last = (n - width) / item * item, step = (last << 8) / (words - 1);
    const OneNaN with_one_nan(t.scalar_type());
    made.taken = true;
    uint64_t first = 0;
    for (int64_t i = 0; i < words; ++i) {
      const int64_t at = i == words - 1 ? last : (i * step >> 8) & -item;  // the size of an element is a power of two
      uint64_t word = 0;
      if (width == 8) std::memcpy(&word, data + at, 8);
      else std::memcpy(&word, data + at, width);
      word = with_one_nan(word);
      if (i == 0) first = word;
      made.has_several |= word != first;
      made.bits = (made.bits ^ word) * 0x9E3779B97F4A7C15ull + (made.bits >> 29);
    }
    return made;
  }
  bool matches(const Tensor& t) const {
    if (!taken) return true;
    const Sample now = of(t, words);
    return !now.taken || bits == now.bits;
  }
};

}  // namespace leannorm::recording
