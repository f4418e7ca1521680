"""Each activation of `ops/activation.py` in Triton, under its name, and its derivatives.

Written with functions that Triton both compiles and interprets (exp, erf, where), so without tanh and expm1.
Comparisons are written so that NaN stays NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leannorm.ops.activation import ACTIVATIONS

# their derivative is 0 or 1, so a product with it is not rounded
MASKS = ("identity", "relu", "relu6", "hardtanh")


def check_activation(act: str) -> None:
    if act not in ACTIVATIONS:
        raise RuntimeError(f"unknown activation {act}; the kernels have {', '.join(ACTIVATIONS)}")


@triton.jit
def _clamp(z, low: tl.constexpr, high: tl.constexpr):
    return tl.where(z < low, low, tl.where(z > high, high, z))


@triton.jit
def _between(z, low: tl.constexpr, high: tl.constexpr):
    return tl.where((z > low) & (z < high), 1.0, 0.0)


@triton.jit
def _exp_minus_one(z):
    """exp(z) - 1 for z <= 0; near 0, where the difference has no digits, the series."""
    if z.dtype == tl.float64:
        near = z > -0.0625  # 10 terms: to 1e-19
        s = 1 + z * (1 / 9 + z * (1 / 90))
        s = 1 + z / 6 * (1 + z / 7 * (1 + z / 8 * s))
        s = 1 + z / 2 * (1 + z / 3 * (1 + z / 4 * (1 + z / 5 * s)))
    else:
        near = z > -0.125  # 6 terms: to 1e-9
        s = 1 + z * (0.5 + z * (1 / 6 + z * (1 / 24 + z * (1 / 120 + z * (1 / 720)))))
    return tl.where(near, z * s, tl.exp(z) - 1)


@triton.jit
def _twice_gelu_tanh_argument(z):
    """2 u, for 0.5 (1 + tanh u) = 1 / (1 + exp(-2 u))."""
    return 1.5957691216057308 * (z + 0.044715 * z * z * z)


@triton.jit
def _tanh_of_softplus(e):
    """tanh(log(1 + e)), with no digit lost where e is small."""
    return e * (e + 2) / (e * (e + 2) + 2)


@triton.jit
def activate(z, ACT: tl.constexpr):
    """act(z), in z's dtype."""
    if ACT == "relu":
        z = tl.where(z <= 0, 0.0, z)
    elif ACT == "leaky_relu":
        z = tl.where(z > 0, z, 0.01 * z)
    elif ACT == "silu":
        z = z / (1 + tl.exp(-z))
    elif ACT == "gelu":
        z = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        z = z / (1 + tl.exp(-_twice_gelu_tanh_argument(z)))
    elif ACT == "hardswish":
        z = z * _clamp(z + 3, 0.0, 6.0) / 6
    elif ACT == "hardtanh":
        z = _clamp(z, -1.0, 1.0)
    elif ACT == "relu6":
        z = _clamp(z, 0.0, 6.0)
    elif ACT == "elu":
        z = tl.where(z > 0, z, _exp_minus_one(z))
    elif ACT == "mish":
        z = z * _tanh_of_softplus(tl.exp(tl.where(z > 20, 20.0, z)))
    return z


@triton.jit
def derivative(z, ACT: tl.constexpr):
    """act'(z), in z's dtype."""
    one = tl.full(z.shape, 1.0, z.dtype)
    if ACT == "relu":
        d = tl.where(z <= 0, 0.0, one)  # 1 at NaN, as in torch
    elif ACT == "leaky_relu":
        d = tl.where(z > 0, one, 0.01)
    elif ACT == "silu":
        s = 1 / (1 + tl.exp(-z))
        d = s * (1 + z * (1 - s))
    elif ACT == "gelu":
        cdf = 0.5 * (1 + tl.erf(z * 0.7071067811865476))
        d = cdf + z * tl.exp(-0.5 * z * z) * 0.3989422804014327
    elif ACT == "gelu_tanh":
        z = _clamp(z, -10.0, 10.0)  # beyond these it is 0 or 1, and z * z may be infinite
        u = _twice_gelu_tanh_argument(z)
        e = tl.exp(-tl.abs(u))
        inner = 1.5957691216057308 * (1 + 0.134145 * z * z)
        d = tl.where(u >= 0, 1.0, e) / (1 + e) + z * (e / ((1 + e) * (1 + e))) * inner
    elif ACT == "hardswish":
        d = tl.where(z <= -3, 0.0, tl.where(z >= 3, one, z / 3 + 0.5))
    elif ACT == "hardtanh":
        d = one * _between(z, -1.0, 1.0)
    elif ACT == "relu6":
        d = one * _between(z, 0.0, 6.0)
    elif ACT == "elu":
        d = tl.where(z > 0, one, tl.exp(z))
    elif ACT == "mish":
        e = tl.exp(tl.where(z > 20, 20.0, z))
        t = _tanh_of_softplus(e)
        d = t + z * (e / (1 + e)) * (1 - t * t)
    else:
        d = one
    return d


@triton.jit
def derivative_from_output(y, ACT: tl.constexpr):
    """act'(z) from y = act(z), for the activations whose output determines it."""
    if ACT == "elu":
        d = tl.where(y > 0, 1.0, y + 1)
    else:  # relu, leaky_relu, hardtanh, relu6: the same comparison as at the input
        d = derivative(y, ACT)
    return d
