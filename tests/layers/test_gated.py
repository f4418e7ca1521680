"""RMS norm with a gate of the input's shape: as transformers writes it, and against float64."""

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES

from leannorm import functional
from leannorm.ops.activation import ACTIVATIONS

N, L, C = 3, 5, 24
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def qwen3_next(x, gate, weight, eps):
    """transformers' Qwen3NextRMSNormGated."""
    dtype = x.dtype
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    y = weight * y.to(dtype)
    return (y * F.silu(gate.to(torch.float32))).to(dtype)


def mamba2(x, gate, weight, eps):
    """transformers' MambaRMSNormGated."""
    dtype = x.dtype
    y = x.to(torch.float32) * F.silu(gate.to(torch.float32))
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(dtype)


GATES = pytest.mark.parametrize(("formula", "before"), [(qwen3_next, True), (mamba2, False)])


@GATES
@DTYPE
@pytest.mark.parametrize("w_dtype", [None, torch.float32], ids=["one dtype", "float32 weight"])
def test_the_published_formulas(formula, before, dtype, w_dtype):
    if dtype == torch.float64:
        return  # they compute in float32
    x, gate = ((torch.randn(64, 333) * 2).to(dtype) for _ in range(2))
    weight = torch.randn(333).to(w_dtype or dtype)
    got = functional.gated_rms_norm(x, gate, (333,), weight, 1e-6, "silu", before, cast="before")
    want = formula(x, gate, weight, 1e-6)
    assert got.dtype == want.dtype
    roundings = 2 if dtype != torch.float32 else 8  # its root and its SiLU are off by more
    assert ((got - want).abs() <= roundings * torch.finfo(dtype).eps * want.abs() + 1e-30).all()
    if dtype != torch.float32:
        assert (got == want).float().mean() > 0.99


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "relu", "mish", "identity"])
@DTYPE
def test_values_and_gradients_with_a_gate(before, act, dtype):
    leaves = [(torch.randn(s) * 2).to(dtype).requires_grad_() for s in ((N, L, 40), (N, L, 40), (40,))]

    def call(x, gate, weight):
        return functional.gated_rms_norm(x, gate, (40,), weight, 1e-5, act, before)

    wide = [t.detach().double().requires_grad_() for t in leaves]
    opened = ACTIVATIONS[act].forward(wide[1])
    value = wide[0] if before else wide[0] * opened
    want = F.rms_norm(value, (40,), wide[2], 1e-5) * (opened if before else 1)
    got = call(*leaves)
    dy = torch.randn(got.shape).to(dtype)
    found = [got, *torch.autograd.grad(got, leaves, dy)]
    for g, w in zip(found, [want, *torch.autograd.grad(want, wide, dy.double())], strict=True):
        assert g.dtype == dtype
        unit = 2 * torch.finfo(dtype).eps + 16 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        assert (g.double() - w).abs().max() <= unit * max(w.abs().max().item(), 1.0)


def test_kept_are_input_gate_and_one_statistic_a_row():
    kept = []
    x, gate, weight = (torch.randn(s, requires_grad=True) for s in ((N, C), (N, C), (C,)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        functional.gated_rms_norm(x, gate, (C,), weight)
    assert sorted(t.numel() for t in kept) == [N, C, N * C, N * C]


@pytest.mark.parametrize("affine", [False, True])
def test_the_output_may_be_edited(affine):
    """As that of torch's operators: a function's output that is a view may not."""
    x, gate = (torch.randn(N, L, C, requires_grad=True) for _ in range(2))
    weight = torch.ones(C) if affine else None
    plain = torch.autograd.grad(functional.gated_rms_norm(x, gate, (C,), weight).sum() * 2, (x, gate))
    y = functional.gated_rms_norm(x, gate, (C,), weight)
    edited = torch.autograd.grad(y.mul_(2).sum(), (x, gate))
    for a, b in zip(edited, plain, strict=True):
        torch.testing.assert_close(a, b)
