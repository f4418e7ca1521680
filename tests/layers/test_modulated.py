"""Norms with a scale and a shift from the network, with a gated residual, with a gate."""

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, lay_out

from leannorm import functional

N, L, H, C = 3, 5, 2, 24
# the input's shape, the modulation's, and that with which torch broadcasts it
PLACES = [
    ((N, L, C), (N, C), (N, 1, C)),
    ((N, L, C), (N, 1, C), (N, 1, C)),
    ((N, L, C), (N, L, C), (N, L, C)),
    ((N, L, C), (1, L, C), (1, L, C)),
    ((N, L, C), (C,), (1, 1, C)),
    ((N, N, C), (N, C), (N, 1, C)),
    ((N, L, H, C), (N, L, C), (N, L, 1, C)),
    ((N, L, H, C), (N, 1, H, C), (N, 1, H, C)),
    ((N, C), (N, C), (N, C)),
    ((0, L, C), (0, C), (0, 1, C)),
    ((N, 0, C), (N, C), (N, 1, C)),
]
PLACE = pytest.mark.parametrize(("shape", "given", "wide"), PLACES, ids=str)
RMS = pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def plain(leaves, rms, wide=None):
    """The formula, as models write it."""
    x, branch, gate, scale, shift, weight, bias = leaves
    shape = x.shape[-1:]
    total = x if branch is None else x + (branch if gate is None else gate.reshape(wide) * branch)
    y = F.rms_norm(total, shape, weight, 1e-5) if rms else F.layer_norm(total, shape, weight, bias, 1e-5)
    y = y * (1 + scale.reshape(wide))
    return (y if shift is None else y + shift.reshape(wide)), total


def ours(leaves, rms, wide=None):
    x, branch, gate, scale, shift, weight, bias = leaves
    shape = x.shape[-1:]
    if branch is None and rms:
        return functional.ada_rms_norm(x, shape, scale, 1e-5, weight, shift), x
    if branch is None:
        return functional.ada_layer_norm(x, shape, scale, shift, 1e-5, weight, bias), x
    if rms:
        return functional.add_ada_rms_norm(x, branch, gate, shape, scale, 1e-5, weight, shift)
    return functional.add_ada_layer_norm(x, branch, gate, shape, scale, shift, 1e-5, weight, bias)


def tensors(shape, given, rms, dtype=torch.float32, summed=True, affine=True):
    """x, branch, gate, scale, shift, weight, bias: leaves."""
    sizes = [shape, shape, given, given, given, shape[-1:], shape[-1:]]
    made = [(torch.randn(s) * 2 + 0.5).to(dtype).requires_grad_() for s in sizes]
    if not summed:
        made[1] = made[2] = None
    if not affine:
        made[5] = made[6] = None
    if rms:
        made[6] = None
    return made


def results(function, leaves, *how):
    y, total = function(leaves, *how)
    dy, dtotal = (torch.linspace(-1, 2, y.numel()).reshape(y.shape).sin().to(y.dtype) for _ in range(2))
    wanted = [t for t in leaves if t is not None]
    both = (y,) if total is leaves[0] else (y, total)
    return [y.detach(), total.detach(), *torch.autograd.grad(both, wanted, (dy, dtotal)[: len(both)])]


def doubles(leaves):
    return [None if t is None else t.detach().double().requires_grad_() for t in leaves]


@RMS
@DTYPE
@PLACE
@pytest.mark.parametrize("summed", [False, True], ids=["", "sum"])
def test_values_and_every_gradient(shape, given, wide, summed, dtype, rms):
    """Against float64; two roundings of the result's dtype, a few of the arithmetic for what is summed."""
    for affine in (False, True):
        leaves = tensors(shape, given, rms, dtype, summed, affine)
        got = results(ours, leaves, rms)
        want = results(plain, doubles(leaves), rms, wide)
        kinds = [leaves[0], leaves[0], *(t for t in leaves if t is not None)]
        for g, w, like in zip(got, want, kinds, strict=True):
            assert (g.dtype, g.shape) == (like.dtype, like.shape)
            if g.numel():
                unit = (
                    2 * torch.finfo(dtype).eps
                    + 16 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
                )
                assert (g.double() - w).abs().max() <= unit * max(w.abs().max().item(), 1.0)


@RMS
def test_the_branch_without_a_gate_is_added_as_it_is(rms):
    leaves = tensors((N, L, C), (N, C), rms)
    leaves[2] = None
    for g, w in zip(results(ours, leaves, rms), results(plain, doubles(leaves), rms, (N, 1, C)), strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-5)


@RMS
def test_only_the_sum_was_used(rms):
    leaves = tensors((N, L, C), (N, C), rms)
    grads = []
    for function, given in ((ours, leaves), (plain, doubles(leaves))):
        _, total = function(given, rms, (N, 1, C))
        wanted = [t for t in given if t is not None]
        grads.append(torch.autograd.grad(total.pow(2).sum(), wanted, allow_unused=True))
    for g, w in zip(*grads, strict=True):
        assert (g is None) == (w is None)
        if g is not None:
            torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-4)


@RMS
@pytest.mark.parametrize("layout", ["sliced", "transposed", "offset", "expanded"])
def test_any_layout_of_anything(layout, rms):
    """A chunk of the projection that makes all six of a DiT block, among others."""
    made = tensors((N, L, C), (N, C), rms)
    laid = [t if t is None or t.dim() < 2 else lay_out(t.detach(), layout).requires_grad_() for t in made]
    if layout == "sliced":
        laid[3:5] = torch.randn(N, 6 * C).chunk(6, dim=-1)[2:4]
        laid[3].requires_grad_(), laid[4].requires_grad_()
    dense = [None if t is None else t.detach().contiguous().requires_grad_() for t in laid]
    for g, w in zip(results(ours, laid, rms), results(ours, dense, rms), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


@RMS
@pytest.mark.parametrize("other", [torch.float32, torch.float64], ids=str)
def test_any_mix_of_dtypes(other, rms):
    leaves = tensors((N, L, C), (N, C), rms, torch.bfloat16)
    leaves[2:] = [None if t is None else t.detach().to(other).requires_grad_() for t in leaves[2:]]
    got, want = results(ours, leaves, rms), results(plain, doubles(leaves), rms, (N, 1, C))
    kinds = [leaves[0], leaves[0], *(t for t in leaves if t is not None)]
    for g, w, like in zip(got, want, kinds, strict=True):
        assert g.dtype == like.dtype
        assert (g.double() - w).abs().max() <= 2**-7 * max(w.abs().max().item(), 1.0)


@RMS
@pytest.mark.parametrize(("given", "wide"), [((2, 6), (2, 1, 6)), ((2, 3, 6), (2, 3, 6))])
def test_first_and_second_derivatives(given, wide, rms):
    leaves = doubles(tensors((2, 3, 6), given, rms))

    def function(*some):
        given = iter(some)
        return ours([None if t is None else next(given) for t in leaves], rms)

    some = [t for t in leaves if t is not None]
    assert torch.autograd.gradcheck(function, some, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, some, fast_mode=True)


def test_an_rms_norm_keeps_one_statistic_a_row():
    x, branch, _, scale, shift, *_ = tensors((N, L, C), (N, C), False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        functional.add_ada_rms_norm(x, branch, None, (C,), scale, shift=shift)
    assert sorted(t.numel() for t in kept) == [N * L, N * C, N * L * C]


def test_kept_are_the_sum_and_two_statistics_a_row():
    x, branch, gate, scale, shift, *_ = tensors((N, L, C), (N, C), False)

    def kept_by(gate):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            out = functional.add_ada_layer_norm(x, branch, gate, (C,), scale, shift)
        return kept, out

    kept, (_, total) = kept_by(gate.detach())
    assert sorted(t.numel() for t in kept) == [N * L, N * L, N * C, N * C, N * L * C]
    assert total.data_ptr() in {t.data_ptr() for t in kept}
    kept, _ = kept_by(gate)  # its gradient needs the branch
    assert sorted(t.numel() for t in kept)[-2:] == [N * L * C] * 2
    assert branch.data_ptr() in {t.data_ptr() for t in kept}


def test_a_weight_and_bias_that_are_views():
    x, scale = torch.randn(3, 4, 6), torch.randn(3, 4, 6)
    weight, bias = torch.randn(6, 4).t(), torch.randn(4, 12)[:, ::2]
    found = functional.ada_layer_norm(x, (4, 6), scale, None, 1e-5, weight, bias)
    copies = weight.contiguous(), bias.contiguous()
    want = functional.ada_layer_norm(x, (4, 6), scale, None, 1e-5, *copies)
    assert torch.equal(found, want)
