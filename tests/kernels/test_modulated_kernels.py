"""The kernels with a scale and a shift, a gated residual or a gate: the reference's numbers."""

import pytest
import torch
from cases import DTYPES
from kernel_cases import needs_kernels

from leannorm import functional
from leannorm._types import KeptByGatedNorm, KeptByRowNorm, Rows
from leannorm.autograd.rows import with_scale
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends import CPU, REFERENCE
from leannorm.ops.schema import OPS

pytestmark = needs_kernels
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
# rows in a group, and groups: a piece and many, one group and many, a line of each row
SHAPES = [(1, 1, 5), (3, 40, 64), (2, 700, 33), (700, 1, 48), (1, 900, 16), (5, 3, 4096), (2, 33, 2055)]
RMS = pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])


def close(got, want, dtype, roundings=1):
    """Both round the same number, in another order of addition."""
    assert (got is None) == (want is None)
    if got is None or not got.numel():
        return
    assert got.shape == want.shape
    assert got.dtype in (want.dtype, dtype)  # the sum of one row may have the rows' dtype
    arithmetic = torch.finfo(torch.promote_types(dtype, F32)).eps
    rounding = (roundings * torch.finfo(got.dtype).eps if got.dtype == dtype else 0) + 32 * arithmetic
    assert (got.double() - want.double()).abs().max() <= rounding * max(want.abs().max().item(), 1.0)


def ada(backend, shape, dtype, rms, summed, affine, places=(1, 1)):
    """Both verbs; a place is the number of leading axes that scale or gate has.

    What the gate makes of dx, which has been rounded, is compared at once, on the same dx.
    """
    torch.manual_seed(0)
    x, branch, dy, dtotal = (torch.randn(shape).to(dtype) for _ in range(4))
    scale, shift = (torch.randn(*shape[: places[0]], shape[-1]).to(dtype) for _ in range(2))
    gate = torch.randn(*shape[: places[1]], shape[-1]).to(dtype)
    weight, bias = (torch.randn(shape[-1]) if affine else None for _ in range(2))
    bias = None if rms else bias
    of_sum, rows = (branch, gate) if summed else (None, None), Rows(2, 3, 1e-5, rms, float(not affine))
    lines = with_scale(scale, shift, weight, bias, torch.promote_types(dtype, F32))
    y, total, mean, rstd = backend.row_forward((x, *of_sum, None, None, *lines), rows)
    kept = KeptByRowNorm(total, mean, rstd, lines[0], None, of_sum[1], of_sum[0])
    grads = backend.row_backward(dy, dtotal if summed else None, kept, rows, True, True)
    assert len(grads) == (5 if summed else 3)
    for got, want in zip(grads[3:], REFERENCE.gate_backward(grads[0], kept, rows), strict=False):
        close(got, want, dtype)
    return y, total, mean, rstd, *grads[:3]


@RMS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scale_and_a_shift(shape, dtype, rms):
    for places in ((1, 2), (2, 1), (0, 0)):
        for summed, affine in ((False, False), (True, True)):
            results = [ada(b, shape, dtype, rms, summed, affine, places) for b in (CPU, REFERENCE)]
            for got, want in zip(*results, strict=True):
                close(got, want, dtype)


ACTS = ["silu", "gelu", "mish", "identity"]


def gated(backend, shape, dtype, act, before, cast):
    torch.manual_seed(0)
    x, gate, dy = (torch.randn(shape).to(dtype) for _ in range(3))
    weight = torch.randn(shape[-1]).to(dtype)
    gating = Rows(2, 3, 1e-5, True, 0.0, cast, act, before)
    y, rstd = backend.row_gated_forward(x, gate, weight, gating)
    return y, rstd, *backend.row_gated_backward(dy, KeptByGatedNorm(x, gate, rstd, weight), gating)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gate(shape, dtype, before):
    for act in ACTS:
        for cast in (False, True):
            results = [gated(b, shape, dtype, act, before, cast) for b in (CPU, REFERENCE)]
            for i, (got, want) in enumerate(zip(*results, strict=True)):
                # where the normalized value falls between two, it is rounded either way
                close(got, want, dtype, 2 if cast and not i else 1)


def test_the_number_of_threads_changes_nothing():
    before, results = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(
            [
                *ada(CPU, (3, 900, 64), F32, False, True, False),
                *ada(CPU, (3, 900, 64), BF16, False, True, False, (2, 2)),
                *gated(CPU, (2, 999, 65), BF16, "silu", True, True),
            ]
        )
    torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_the_gradient_of_a_token_s_shift_is_dy():
    """The kernel neither writes nor returns it; where it needs another shape, it is no view of dy."""
    x, dy, scale, line = (torch.randn(6, 8) for _ in range(4))
    mean, rstd = torch.randn(6), torch.rand(6)
    for groups in (6, 2):
        given = dy, None, x, mean, rstd, line[:groups], 1, 2, False, True, True, 1.0
        lengths = [len(v) for v in OPS.row_backward(*given) if v is not None]
        assert lengths == [6, groups, 0 if groups == 6 else groups]
        torch.library.opcheck(OPS.row_backward, given)
    for sizes in ((2, 3, 8), (6, 1, 8)):
        statistics = x.view(sizes), mean.view(*sizes[:2], 1), rstd.view(*sizes[:2], 1)
        kept, rows = KeptByRowNorm(*statistics, scale.view(sizes)), Rows(2, 3, 1e-5, False, 1.0)
        alike = CPU.row_backward(dy.view(sizes), None, kept, rows)
        assert torch.equal(alike[2], dy.view(sizes))
    other = CPU.row_backward(dy.view(sizes), None, kept._replace(weight=scale), rows)
    assert torch.equal(other[2], dy)
    assert other[2].data_ptr() != dy.data_ptr()


@pytest.mark.parametrize("sizes", [(2, 5, 8), (10, 1, 8)])
def test_gradients_that_are_added_up_leave_dy_alone(sizes):
    x, dy = torch.randn(sizes), torch.randn(sizes)
    scale, shift = (torch.zeros(10, 8).view(sizes).squeeze(1).requires_grad_() for _ in range(2))
    before = dy.clone()
    for times in (1, 2):
        functional.ada_layer_norm(x, (8,), scale, shift).backward(dy)
        torch.testing.assert_close(shift.grad, times * before.view_as(shift))
        assert torch.equal(dy, before)


EDGES = [0.0, 1e-40, 1e-8, 0.3, 5.0, 87.0, 88.8, 95.0, 103.0, 104.0, 127.0, 200.0, 1e30, float("inf")]


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_at_the_edges(act):
    """At zeros, infinities, NaN, and where e^x leaves float32, as the formula in float64."""
    gate = torch.tensor([[*EDGES, *(-e for e in EDGES), float("nan"), float("nan"), 1.0, -1.0]])
    ones = torch.ones_like(gate)
    gating = Rows(1, 2, 0.0, True, act=act)
    got, _ = CPU.row_gated_forward(ones, gate, None, gating)
    want = ACTIVATIONS[act].forward(gate.double())
    torch.testing.assert_close(got.double(), want, rtol=4e-7, atol=1e-6, equal_nan=True)
    _, dgate, _ = CPU.row_gated_backward(ones, KeptByGatedNorm(ones, gate, ones[:, 0]), gating, False)
    kept = KeptByGatedNorm(*(t.double() for t in (ones, gate, ones[:, :1])))
    _, slope, _ = REFERENCE.row_gated_backward(ones.double(), kept, gating, False)
    there = ~(gate.abs() >= 1e30)  # where some derivatives are inf * 0
    torch.testing.assert_close(dgate[there].double(), slope[there], rtol=1e-6, atol=1e-6, equal_nan=True)


@RMS
@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_values_whose_squares_are_no_float32(size, rms):
    x, zero = torch.randn(4, 100) * size, torch.zeros(1, 100)
    rows = Rows(1, 2, 0.0, rms, 1.0)
    for line in (zero, zero.expand(4, 100)):
        y, *_ = CPU.row_forward((x, None, None, None, None, line, line), rows)
        wide, *_ = REFERENCE.row_forward((x.double(), None, None, None, None, line, line), rows)
        torch.testing.assert_close(y.double(), wide, rtol=1e-5, atol=1e-5)
    gate = torch.ones(4, 100)
    for before in (True, False):
        gating = Rows(1, 2, 0.0, True, act="identity", norm_before_gate=before)
        y, _ = CPU.row_gated_forward(x, gate, None, gating)
        want, _ = REFERENCE.row_gated_forward(x.double(), gate.double(), None, gating)
        torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)


def test_large_tensors_are_written_past_the_caches(monkeypatch):
    """To the same bits as a part of them, which is not."""
    x, dy, gate = (torch.randn(60000, 64) for _ in range(3))
    scale = torch.randn(60000, 64)
    rows, gating = Rows(1, 2, 1e-5, False, 1.0), Rows(1, 2, 1e-5, True, act="silu")
    whole = CPU.row_forward((x, None, None, None, None, scale, scale), rows)
    part = CPU.row_forward((x[:99], None, None, None, None, scale[:99], scale[:99]), rows)
    for a, b in zip(whole, part, strict=True):
        assert torch.equal(a[:99], b)
    back = CPU.row_backward(dy, None, KeptByRowNorm(x, *whole[2:], scale), rows)
    some = CPU.row_backward(dy[:99], None, KeptByRowNorm(x[:99], *part[2:], scale[:99]), rows)
    for a, b in zip(back, some, strict=True):
        assert torch.equal(a[:99], b)
    y, rstd = CPU.row_gated_forward(x, gate, None, gating)
    assert torch.equal(y[:99], CPU.row_gated_forward(x[:99], gate[:99], None, gating)[0])
    dx, dgate, _ = CPU.row_gated_backward(dy, KeptByGatedNorm(x, gate, rstd), gating)
    dx_, dgate_, _ = CPU.row_gated_backward(dy[:99], KeptByGatedNorm(x[:99], gate[:99], rstd[:99]), gating)
    assert torch.equal(dx[:99], dx_)
    assert torch.equal(dgate[:99], dgate_)


def test_slices_of_a_projection_are_not_copied():
    x, gate = torch.randn(2, 30, 100)[..., :64], torch.randn(2, 30, 200)[..., 64:128]
    gating = Rows(2, 3, 1e-5, True, act="silu")
    with torch.profiler.profile() as profile:
        y, rstd = CPU.row_gated_forward(x, gate, None, gating)
        found = CPU.row_gated_backward(x, KeptByGatedNorm(x, gate, rstd), gating)
    assert not {"aten::copy_", "aten::clone"} & {event.key for event in profile.key_averages()}
    dense, opened = x.contiguous(), gate.contiguous()
    want = CPU.row_gated_backward(dense, KeptByGatedNorm(dense, opened, rstd), gating)
    assert torch.equal(y, CPU.row_gated_forward(dense, opened, None, gating)[0])
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("with_sum", [False, True])
def test_the_dispatcher_finds_nothing_wrong(with_sum):
    x, other, line = torch.randn(6, 8), torch.randn(6, 8), torch.randn(2, 8)
    mean, rstd, weight = torch.randn(6), torch.rand(6), torch.randn(8)
    branch, gate = (other, line) if with_sum else (None, None)
    check = torch.library.opcheck
    for lines in (line, torch.randn(6, 8), torch.randn(8)):
        check(OPS.row_forward, (x, branch, lines, lines, 1, 2, 1e-5, False, 1.0, False, None, gate))
        given = x, branch, other, mean, rstd, lines, 1, 2
        for want_bias in (False, with_sum):
            check(OPS.row_backward, (*given, True, True, want_bias, 1.0, None, gate, branch))
    check(OPS.row_backward, (*given, True, False, False, 1.0, None, line, None))
    check(OPS.row_gated_forward, (x, other, weight, 1e-5, "silu", with_sum, False))
    check(OPS.row_gated_backward, (x, x, other, rstd, weight, "gelu", with_sum, with_sum))
