// Encodes kept tensors in fewer bytes: two values as bits, integers in the width of their range, floats in a narrower dtype.
// All of the values are read to choose the code, and decoding returns the same bits, even of a NaN's payload, of -0.0 and of
// denormals.
#pragma once

#include "log.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/arange.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <limits>

namespace leannorm::recording {

struct Code {
  enum Kind : uint8_t { kBits, kIntegers, kUpperHalves, kCast } kind;
  uint64_t low = 0, high = 0;  // the two values; of integers: the least one, and the largest minus the least
  at::ScalarType narrow = at::kByte;

  const char* name() const { return kind == kBits ? "bits of a mask" : kind == kIntegers ? "integers in a narrower dtype" : "source of a cast"; }
};
struct Coded {
  Tensor bytes;
  std::shared_ptr<const Code> code;
};

namespace coding {

constexpr int64_t kGrain = 1 << 15, kFirst = 64, kChunk = 1 << 16;  // elements per thread, read first, cast at once

template <class Run> void for_unsigned(int64_t width, const Run& run) {
  switch (width) {
    case 1: return run(uint8_t());
    case 2: return run(uint16_t());
    case 4: return run(uint32_t());
    case 8: return run(uint64_t());
    default: return;
  }
}
template <class U> U* data(const Tensor& t) { return static_cast<U*>(t.mutable_data_ptr()); }
template <class U> const U* elements(const Tensor& t) { return static_cast<const U*>(t.const_data_ptr()); }

// The elements in the order of their memory.
inline Tensor flat(const Tensor& t) { return t.as_strided({t.numel()}, {1}, t.storage_offset()); }

// The nodes are compiled without vectorization, which these two loops need.
#if defined(__GNUC__) && !defined(__clang__)
#define LEANNORM_VECTORS __attribute__((optimize("O3")))
#else
#define LEANNORM_VECTORS
#endif
// Sets a flag where the element is `high`. False if an element is neither `low` nor `high`.
template <class U> LEANNORM_VECTORS bool flags_of(const U* from, int64_t n, U low, U high, uint8_t* flags) {
  U others = 0;
  for (int64_t i = 0; i < n; ++i) {
    const U is = from[i] == high;
    flags[i] = static_cast<uint8_t>(is);
    others |= static_cast<U>((is ^ 1) & static_cast<U>(from[i] != low));
  }
  return others == 0;
}
template <class U> LEANNORM_VECTORS void from_flags(const uint8_t* flags, int64_t n, U low, U high, U* to) {
  const U both = low ^ high;
  for (int64_t i = 0; i < n; ++i) to[i] = low ^ static_cast<U>(both & static_cast<U>(-static_cast<U>(flags[i])));
}
#undef LEANNORM_VECTORS

constexpr int64_t kBlock = 4096;  // flags, in the cache
constexpr uint64_t kOnes = 0x0101010101010101, kDiagonal = 0x8040201008040201, kGather = 0x0102040810204080;

template <class U> std::optional<Coded> bits_of(const Tensor& t) {
  const int64_t n = t.numel();
  const U* const p = elements<U>(t);
  const U low = p[0];
  const U* const other = std::find_if(p, p + n, [low](U x) { return x != low; });
  const U high = other == p + n ? low : *other;
  for (const U* x = other; x < std::min(other + kFirst, p + n); ++x)
    if (*x != low && *x != high) return {};
  const Tensor made = at::empty({(n + 7) / 8}, at::kByte);
  uint8_t* const to = data<uint8_t>(made);
  std::atomic<bool> fits = true;
  at::parallel_for(0, (n + kBlock - 1) / kBlock, kGrain / kBlock, [&](int64_t begin, int64_t end) {
    uint8_t flags[kBlock];
    for (int64_t block = begin; block < end && fits; ++block) {
      const int64_t at = block * kBlock, count = std::min(kBlock, n - at);
      std::memset(flags + count, 0, -count & 7);
      if (!flags_of(p + at, count, low, high, flags)) fits = false;
      for (int64_t i = 0; i < count; i += 8) {
        uint64_t eight;
        std::memcpy(&eight, flags + i, 8);
        to[(at + i) / 8] = static_cast<uint8_t>(eight * kGather >> 56);
      }
    }
  });
  if (!fits) return {};
  return Coded{made, std::make_shared<Code>(Code{Code::kBits, low, high})};
}
template <class U> void from_bits(const Code& code, const Tensor& bytes, const Tensor& to) {
  const uint8_t* const from = elements<uint8_t>(bytes);
  U* const p = data<U>(to);
  const int64_t n = to.numel();
  at::parallel_for(0, (n + kBlock - 1) / kBlock, kGrain / kBlock, [&](int64_t begin, int64_t end) {
    uint8_t flags[kBlock];
    for (int64_t at = begin * kBlock; at < std::min(end * kBlock, n); at += kBlock) {
      const int64_t count = std::min(kBlock, n - at);
      for (int64_t i = 0; i < count; i += 8) {
        const uint64_t eight = ((from[(at + i) / 8] * kOnes & kDiagonal) + 0x7F * kOnes) >> 7 & kOnes;
        std::memcpy(flags + i, &eight, 8);
      }
      from_flags(flags, count, static_cast<U>(code.low), static_cast<U>(code.high), p + at);
    }
  });
}

// Integers as their differences from the least one.
template <class U> std::optional<Coded> integers_of(const Tensor& t) {
  const auto [least, most] = at::aminmax(t);
  const U low = *elements<U>(least);
  const U span = static_cast<U>(*elements<U>(most) - low);
  const at::ScalarType narrow = span <= 0xFF ? at::kByte : span <= 0xFFFF ? at::kUInt16 : span <= 0xFFFFFFFF ? at::kUInt32 : at::kUInt64;
  if (2 * c10::elementSize(narrow) > sizeof(U)) return {};
  const int64_t n = t.numel();
  const Tensor made = at::empty({n}, narrow);
  const U* const p = elements<U>(t);
  for_unsigned(made.element_size(), [&]<class N>(N) {
    N* const to = data<N>(made);
    at::parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = static_cast<N>(p[i] - low);
    });
  });
  return Coded{made, std::make_shared<Code>(Code{Code::kIntegers, low, span})};
}
template <class U> void from_integers(const Code& code, const Tensor& bytes, const Tensor& to) {
  const int64_t n = to.numel();
  const U low = static_cast<U>(code.low);
  U* const p = data<U>(to);
  for_unsigned(bytes.element_size(), [&]<class N>(N) {
    const N* const from = elements<N>(bytes);
    at::parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) p[i] = static_cast<U>(from[i] + low);
    });
  });
}

// Whether some elements end in so many zero bits: a float fits in a narrower one only if the digits that this lacks are 0. The
// first ones do not tell: those of a causal softmax are a 1 and zeros.
template <class U> bool some_end_in_zeros(const Tensor& t, int zeros) {
  const U* const p = elements<U>(t);
  const int64_t n = t.numel(), count = std::min(n, kFirst);
  const U lost = (U{1} << zeros) - 1;
  for (int64_t i = 0; i < count; ++i)
    if (((p[i] | p[i * (n / count)] | p[n - 1 - i]) & lost) != 0) return false;
  return true;
}

// Takes the upper half of each float32's bits, which is a bfloat16. A cast could change a NaN's bits, or flush a denormal.
inline std::optional<Coded> upper_halves_of(const Tensor& t) {
  const int64_t n = t.numel();
  const uint32_t* const p = elements<uint32_t>(t);
  if (!some_end_in_zeros<uint32_t>(t, 16)) return {};
  const Tensor made = at::empty({n}, at::kBFloat16);
  uint16_t* const to = data<uint16_t>(made);
  std::atomic<bool> fits = true;
  at::parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end && fits; at += kBlock) {
      uint32_t lost = 0;
      for (int64_t i = at; i < std::min(at + kBlock, end); ++i) lost |= p[i], to[i] = static_cast<uint16_t>(p[i] >> 16);
      if (lost & 0xFFFF) fits = false;
    }
  });
  if (!fits) return {};
  return Coded{made, std::make_shared<Code>(Code{Code::kUpperHalves, 0, 0, at::kBFloat16})};
}
inline void from_upper_halves(const Tensor& halves, const Tensor& to) {
  const uint16_t* const from = elements<uint16_t>(halves);
  uint32_t* const p = data<uint32_t>(to);
  at::parallel_for(0, to.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) p[i] = static_cast<uint32_t>(from[i]) << 16;
  });
}

// Whether some values are denormal as float32, which some threads flush to zero.
inline bool has_denormals(const Tensor& doubles) {
  const double* const p = elements<double>(doubles);
  return std::any_of(p, p + doubles.numel(), [](double x) { return x != 0 && std::abs(x) < std::numeric_limits<float>::min(); });
}

inline std::optional<Coded> cast_of(const Tensor& t, at::ScalarType narrow) {
  const Tensor wide = flat(t);
  const int64_t n = wide.numel();
  const int zeros = narrow == at::kFloat ? 0 : narrow == at::kHalf ? 13 : 16;
  if (wide.scalar_type() == at::kDouble ? !some_end_in_zeros<uint64_t>(t, 29 + zeros) : !some_end_in_zeros<uint32_t>(t, zeros)) return {};
  const Tensor made = at::empty({n}, wide.options().dtype(narrow));
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const Tensor part = wide.narrow(0, begin, std::min(kChunk, n - begin)), there = part.to(narrow), back = there.to(wide.scalar_type());
    if (std::memcmp(part.const_data_ptr(), back.const_data_ptr(), part.nbytes()) != 0) return {};
    if (part.scalar_type() == at::kDouble && has_denormals(part)) return {};
    made.narrow(0, begin, part.numel()).copy_(there);
  }
  return Coded{made, std::make_shared<Code>(Code{Code::kCast, 0, 0, narrow})};
}

}  // namespace coding

// A widening cast in its source's dtype; none if casting back would give other bits.
inline std::optional<Coded> in_source(const Tensor& t, at::ScalarType narrow) {
  if (t.scalar_type() == at::kFloat && narrow == at::kBFloat16) return coding::upper_halves_of(t);
  return coding::cast_of(t, narrow);
}

// The tensor in at most half of its bytes, if that is possible. It must be dense and fill its memory.
inline std::optional<Coded> coded(const Tensor& t) {
  std::optional<Coded> made;
  coding::for_unsigned(t.element_size(), [&]<class U>(U) { made = coding::bits_of<U>(t); });
  if (made) return made;
  switch (t.scalar_type()) {
    case at::kLong: return coding::integers_of<uint64_t>(t);
    case at::kInt: return coding::integers_of<uint32_t>(t);
    case at::kShort: return coding::integers_of<uint16_t>(t);
    case at::kFloat:
      made = in_source(t, at::kBFloat16);
      return made ? made : in_source(t, at::kHalf);
    case at::kDouble:
      for (const auto narrow : {at::kBFloat16, at::kHalf, at::kFloat})
        if ((made = in_source(t, narrow))) return made;
      return {};
    default: return {};
  }
}

namespace coding {

inline Tensor flags_on_device(const Tensor& bytes, int64_t n) {
  const Tensor places = at::arange(8, bytes.options());
  return bytes.unsqueeze(1).bitwise_right_shift(places).bitwise_and_(1).view({-1}).narrow(0, 0, n);
}

}  // namespace coding

// Decodes a tensor on a device, or a fake one.
inline Tensor decoded_unseen(const Code& code, const Tensor& bytes, const Geometry& made) {
  if (code.kind == Code::kBits) {
    Tensor flags = coding::flags_on_device(bytes, made.numel());
    if (made.dtype != at::kBool) flags = flags.to(made.dtype);  // a fake tensor
    return over(flags.storage(), made);
  }
  return over(bytes.to(made.dtype).storage(), made);
}

// Decodes the tensor into new memory, in its original layout.
inline Tensor decoded(const Code& code, const Tensor& bytes, const Geometry& made, int64_t storage_bytes) {
  if (!made.is_on_host()) return decoded_unseen(code, bytes, made);
  const Tensor t = over(at::empty({storage_bytes}, at::TensorOptions().dtype(at::kByte).device(made.device)).storage(), made);
  const auto each = [&](const auto& run) { coding::for_unsigned(t.element_size(), run); };
  switch (code.kind) {
    case Code::kBits: each([&]<class U>(U) { coding::from_bits<U>(code, bytes, t); }); break;
    case Code::kIntegers: each([&]<class U>(U) { coding::from_integers<U>(code, bytes, t); }); break;
    case Code::kUpperHalves: coding::from_upper_halves(bytes, t); break;
    case Code::kCast: coding::flat(t).copy_(bytes); break;
  }
  return t;
}

// Whether torch's allocator of the device made memory with this deleter, or the one that it had before a limit (arena.h).
inline bool is_of_torch(c10::DeleterFnPtr deleter, const c10::Device& device) {
  return deleter == c10::GetAllocator(device.type())->raw_deleter() || (device.is_cpu() && deleter == c10::GetDefaultCPUAllocator()->raw_deleter());
}

// Whether the tensor fills its memory, and torch allocated that. Other code that allocates memory (for an array, a file or
// another process) may read and write it unseen.
inline bool may_be_coded(const Value& x, const Tensor& t) {
  const Geometry& g = x.made;
  return g.offset == 0 && x.storage_bytes > 0 && g.numel() * static_cast<int64_t>(c10::elementSize(g.dtype)) == x.storage_bytes &&
         t.is_non_overlapping_and_dense() && t.storage().resizable() &&
         static_cast<int64_t>(t.storage().nbytes()) == x.storage_bytes &&
         (g.fake || is_of_torch(t.storage().data_ptr().get_deleter(), g.device));
}

}  // namespace leannorm::recording
