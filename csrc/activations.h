// Every activation on vectors: forward, derivative from its input, derivative from its output. The same
// conventions at the kinks as ops/activation.py.
#pragma once

#include <type_traits>

#include "activation.h"
#include "elementary.h"

namespace leannorm::LEANNORM_ISA {

template <class V> LEANNORM_INLINE V clamp(V z, double low, double high) {
  z = z < splat<V>(low) ? splat<V>(low) : z;  // written so that NaN stays NaN
  return z > splat<V>(high) ? splat<V>(high) : z;
}
template <class V> LEANNORM_INLINE V sigmoid(V z) { return 1 / (1 + exp(-z)); }

template <class V> struct Tanh { V value, rest; };  // tanh(u) and 1 - tanh(u)^2
template <class V> LEANNORM_INLINE Tanh<V> tanh_of(V u) {
  const V e = exp(2 * clamp(u, -44, 44)), one_minus = 2 / (e + 1);  // e stays finite in float32
  return {1 - one_minus, one_minus * one_minus * e};
}

constexpr double kSqrtHalf = 0.70710678118654752440, kSqrtTwoOverPi = 0.79788456080286535588;
template <class V> LEANNORM_INLINE V gelu_inner(V z) {
  using S = typename Scalar<V>::type;
  return S(kSqrtTwoOverPi) * (z + S(0.044715) * z * z * z);
}

// tanh(softplus(z)) = n / (n + 2) with n = e^z (e^z + 2); past 20 it is 1 in float32, past 40 in float64.
template <class V> LEANNORM_INLINE Tanh<V> tanh_softplus(V z) {
  const V limit = splat<V>(40), e = exp(z > limit ? limit : z), n = e * (e + 2), one_minus = 2 / (n + 2);
  return {n / (n + 2), one_minus * (2 - one_minus)};
}

template <class V> LEANNORM_INLINE V activate(V z, int act) {
  using S = typename Scalar<V>::type;
  const V zero{};
  switch (act) {
    case kRelu: return z < zero ? zero : z;
    case kLeakyRelu: return z > zero ? z : z * S(0.01);
    case kSilu: return z / (1 + exp(-z));
    case kGelu: return S(0.5) * z * (1 + erf(z * S(kSqrtHalf)));
    case kGeluTanh: return S(0.5) * z * (1 + tanh_of(gelu_inner(z)).value);
    case kHardswish: return z * clamp(z + 3, 0, 6) / 6;
    case kHardtanh: return clamp(z, -1, 1);
    case kRelu6: return clamp(z, 0, 6);
    case kElu: return z > zero ? z : expm1(z);
    case kMish: return z * tanh_softplus(z).value;
    default: return z;
  }
}

template <class V> LEANNORM_INLINE V between(V z, double low, double high) {
  const V one = splat<V>(1), zero{};
  const V above = z > splat<V>(low) ? one : zero;
  return z < splat<V>(high) ? above : zero;
}

template <class V> LEANNORM_INLINE V slope_from_input(V z, int act) {
  using S = typename Scalar<V>::type;
  const V zero{}, one = splat<V>(1);
  switch (act) {
    case kRelu: return z <= zero ? zero : one;  // 1 at NaN, as in torch
    case kLeakyRelu: return z > zero ? one : splat<V>(0.01);
    case kSilu: {
      const V s = sigmoid(z);
      return s * (1 + z * (1 - s));
    }
    case kGelu: {
      const V density = exp(S(-0.5) * z * z) * S(0.5 * kSqrtTwoOverPi);
      return S(0.5) * (1 + erf(z * S(kSqrtHalf))) + z * density;
    }
    case kGeluTanh: {
      const V near = clamp(z, -10, 10);  // beyond these the slope is 0 or 1, and z * z may be infinite
      const Tanh<V> t = tanh_of(gelu_inner(near));
      const V inner = S(kSqrtTwoOverPi) * (1 + S(3 * 0.044715) * near * near);
      return S(0.5) * (1 + t.value) + S(0.5) * near * t.rest * inner;
    }
    case kHardswish: {
      const V inside = z >= splat<V>(3) ? one : z / 3 + S(0.5);  // NaN stays NaN
      return z <= splat<V>(-3) ? zero : inside;
    }
    case kHardtanh: return between(z, -1, 1);
    case kRelu6: return between(z, 0, 6);
    case kElu: return z > zero ? one : exp(z);
    case kMish: {
      const Tanh<V> t = tanh_softplus(z);
      const V near = z > splat<V>(40) ? splat<V>(40) : z;  // beyond it the rest is small, but not 0
      return t.value + near * sigmoid(z) * t.rest;
    }
    default: return one;
  }
}

// Both from the input, sharing what is expensive.
template <class V> struct WithSlope { V value, slope; };
template <class V> LEANNORM_INLINE WithSlope<V> activate_with_slope(V z, int act) {
  using S = typename Scalar<V>::type;
  switch (act) {
    case kSilu: {
      const V s = sigmoid(z), value = z * s;
      return {value, fma(value, 1 - s, s)};
    }
    case kGelu: {
      const V half = S(0.5) * (1 + erf(z * S(kSqrtHalf))), density = exp(S(-0.5) * z * z) * S(0.5 * kSqrtTwoOverPi);
      return {z * half, fma(z, density, half)};
    }
    default: return {activate(z, act), slope_from_input(z, act)};
  }
}

template <class V> LEANNORM_INLINE V slope_from_output(V y, int act) {
  const V zero{}, one = splat<V>(1);
  switch (act) {
    case kRelu: return y <= zero ? zero : one;
    case kLeakyRelu: return y > zero ? one : splat<V>(0.01);
    case kHardtanh: return between(y, -1, 1);
    case kRelu6: return between(y, 0, 6);
    case kElu: return y > zero ? one : y + 1;
    default: return one;
  }
}

// body(act) with an act that the compiler knows, around a loop, so that it is decided once.
template <int kFirst = 0, class Body> LEANNORM_INLINE void with_known(int act, const Body& body) {
  if (act == kFirst) body(std::integral_constant<int, kFirst>());
  else if constexpr (kFirst + 1 < kActivations) with_known<kFirst + 1>(act, body);
}

// As a call, so that they are compiled once for many kernels.
template <class V> LEANNORM_ONCE V activate_by_call(V z, int act) { return activate(z, act); }
template <class V> LEANNORM_ONCE V slope_from_input_by_call(V z, int act) { return slope_from_input(z, act); }
template <class V> LEANNORM_ONCE V slope_from_output_by_call(V y, int act) { return slope_from_output(y, act); }

}  // namespace leannorm::LEANNORM_ISA
