"""The per-channel kernels with a mask, of every backend: the reference's numbers, padding is never read."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import ChannelCase
from kernel_cases import BF16, EVERY, F16, F32, F64, Call, alike, call_on, on_every, tried

from leannorm import nn, use_backend
from leannorm._types import Channels, ChannelTensors, KeptByChannelNorm
from leannorm.ops.backends import REFERENCE

NAN = float("nan")


def mask_of(shape: tuple[int, ...], kind: str) -> torch.Tensor:
    """Of (samples, positions): random, of lengths, of lengths behind a long beginning of padding."""
    samples, positions = shape[0], torch.Size(shape[2:]).numel()
    place = torch.arange(positions)
    if kind == "random" or positions == 1:
        mask = torch.rand(samples, positions) < 0.6
    else:
        lengths = torch.randint(1, positions + 1, (samples, 1))
        mask = place >= positions - lengths if kind == "late" else place < lengths
    mask[0 if samples > 1 else 1 :: 3] = False  # samples without a valid position
    mask[-1, -1] = True
    return mask


def with_nan(call: Call, mask: torch.Tensor) -> Call:
    """NaN wherever there is no data."""
    at = (~mask).view(mask.shape[0], 1, *call.x.shape[2:])

    def filled(t: torch.Tensor) -> torch.Tensor:
        return t.masked_fill(at, NAN)

    residual = None if call.residual is None else filled(call.residual)
    return call._replace(x=filled(call.x), dy=filled(call.dy), residual=residual)


def results(backend, call, mask, statistics=None):  # type: ignore[no-untyped-def]
    """All that the verbs return, by name; backward by the `statistics` and the output given."""
    x, dy, groups = call.x, call.dy, call.groups
    found = backend.channel_forward(call.tensors._replace(mask=mask), call.norm)
    named = dict(zip(("y", "mean", "m2", "rstd", "count"), found, strict=True))
    mean, rstd, size, out = statistics or (named["mean"], named["rstd"], named["count"], named["y"])
    kept = call.kept(mean, rstd, out.to(x.dtype) if call.out_given else None, mask=mask, size=size)
    named |= dict(zip(("sum_dz", "sum_dz_xhat"), backend.channel_grad_sums(dy, kept), strict=True))
    grads = backend.channel_backward(dy, kept, True)
    named |= dict(zip(("dx", "dweight", "dbias", "dz"), grads, strict=True))
    named["again"] = backend.channel_normalize(kept)
    named["dx_fixed"], _ = backend.channel_input_grad(dy, kept)
    moments = backend.channel_moments(x, groups, mask)
    return named | {"alone.mean": moments.mean, "alone.m2": moments.m2, "alone.count": moments.count}


def assert_close_to_reference(kernels, call, mask):  # type: ignore[no-untyped-def]
    ours = results(kernels, call, mask)
    statistics = tuple(ours[name] for name in ("mean", "rstd", "count", "y"))
    want = results(REFERENCE, call, mask, statistics)
    exact = results(REFERENCE, call.double(), mask, statistics)
    values = max(int(mask.sum()), 1)
    rounding = torch.finfo(F32 if call.x.dtype != F64 else F64).eps
    largest = torch.where(mask.view(-1, 1, *call.x.shape[2:]), call.x.double(), 0.0).abs().max().item()
    for name, one in ours.items():
        other = exact[name]
        assert (one.shape, one.dtype) == (want[name].shape, want[name].dtype), name
        allowed = 8 * rounding * max(other.abs().max().item(), 1.0)
        if name.startswith(("sum", "dw", "db")):
            allowed *= values**0.5
        if name.endswith("mean"):
            allowed = rounding * largest
        allowed += torch.finfo(one.dtype).eps * other.abs().max().item()
        if one.shape == call.x.shape:
            assert one.stride() == call.x.stride(), name
            assert not one.movedim(1, -1)[~mask.view(one.shape[0], *one.shape[2:])].any(), name
            allowed *= max(1.0, ours["rstd"].max().item())
        assert (one.double() - other.double()).abs().max().item() <= allowed, name


# several samples in one tile, pieces of a plane, odd and even extents, columns of one row and of many
SHAPES = [
    (ChannelCase((3, 4, 17)), 2),
    (ChannelCase((4, 6, 4, 8)), 3),
    (ChannelCase((4, 6, 4, 5), "channels_last"), 3),
    (ChannelCase((2, 3, 300)), 0),
    (ChannelCase((20, 5)), 0),
]
GIVEN = [
    (case, dtype, kind, groups, act, residual, out)
    for case, of in SHAPES
    for dtype, kind, groups, act, residual, out in (
        (F32, "random", 0, "silu", True, False),
        (BF16, "lengths", of, "relu", True, True),
        (F64, "late", case.shape[1] if of else 0, "identity", False, False),
    )
]


@pytest.mark.sampled(of=4)
@tried("case, dtype, kind, groups, act, residual, out", alike(EVERY, GIVEN))
def test_the_verbs_are_the_references(kernels, case, dtype, kind, groups, act, residual, out):
    torch.manual_seed(0)
    mask = mask_of(case.shape, kind)
    call = with_nan(call_on(case, dtype, act, groups, residual, out), mask)
    assert_close_to_reference(kernels, call, mask)


PLANES, COLUMNS = ChannelCase((4, 6, 4, 8)), ChannelCase((4, 6, 4, 5), "channels_last")
WHOLE = [
    (PLANES, F32, 0),
    (COLUMNS, BF16, 0),
    (ChannelCase((2, 3, 300)), F64, 0),
    (ChannelCase((20, 5)), F16, 0),
]
GROUPED = [(PLANES, BF16, 3), (PLANES, F32, 6), (COLUMNS, F32, 3), (COLUMNS, F16, 6)]


# for C++ kernels functions leave a mask out in which all is valid, as the host can see (test_masks.py)
@pytest.mark.sampled(of=4)
@tried("case, dtype, groups", alike(EVERY[1:3], WHOLE + GROUPED))
def test_all_valid_is_no_mask_bit_for_bit(kernels, case, dtype, groups):
    torch.manual_seed(1)
    call = call_on(case, dtype, "silu", groups, residual=True)
    x, dy = call.x, call.dy
    mask = torch.ones(mask_of(case.shape, "random").shape, dtype=torch.bool)
    *plain, _ = kernels.channel_forward(call.tensors, call.norm)
    *masked, count = kernels.channel_forward(call.tensors._replace(mask=mask), call.norm)
    kept = call.kept(masked[1], masked[3])
    plain += kernels.channel_backward(dy, kept, True)
    masked += kernels.channel_backward(dy, kept._replace(mask=mask, size=count), True)
    assert count.eq(x.numel() / x.shape[1] if not groups else x[0].numel() / groups).all()
    for one, other in zip(plain, masked, strict=True):
        assert torch.equal(one, other)


@pytest.mark.sampled(of=3)
@on_every("last, dtype", (False, F32), (True, F32), (False, F64))
def test_a_mean_far_from_zero_behind_padding(kernels, last, dtype):
    """The first tiles of a part, and the first parts, have no data: sums are of deviations all the same."""
    torch.manual_seed(2)
    x = (torch.randn(12, 3, 6, 70, dtype=F64) + 1e4).to(dtype)
    mask = torch.zeros(12, 6, 70, dtype=torch.bool)
    mask[5, 3:], mask[9:, 4], mask[11, 5, ::3] = True, True, True
    x = torch.where(mask[:, None], x, NAN)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    found = kernels.channel_moments(x, mask=mask.flatten(1))
    values = x.movedim(1, -1)[mask].double()
    rounding = 1e-7 if dtype == F32 else 1e-14
    assert (found.mean - values.mean(0)).abs().max() <= rounding + 1e-15 * 1e4
    m2 = (values - values.mean(0)).square().sum(0)
    torch.testing.assert_close(found.m2, m2, rtol=10 * rounding, atol=0)
    *_, by_one_call, _, _ = kernels.channel_forward(
        ChannelTensors(x, mask=mask.flatten(1)), Channels(0, 1e-5)
    )
    torch.testing.assert_close(by_one_call, m2, rtol=10 * rounding, atol=0)


@on_every("last", False, True)
def test_squares_past_float32(kernels, last):
    torch.manual_seed(3)
    x, mask = torch.randn(4, 3, 5, 7) * 1e25, mask_of((4, 3, 5, 7), "random")
    x = torch.where(mask.view(4, 1, 5, 7), x, NAN)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    got, want = kernels.channel_moments(x, 0, mask), REFERENCE.channel_moments(x.double(), 0, mask)
    torch.testing.assert_close(got.m2, want.m2, rtol=1e-6, atol=0)


@on_every("groups", 0, 2, 4)
def test_no_position_is_valid(kernels, groups):
    x, mask = torch.full((3, 4, 5), NAN), torch.zeros(3, 5, dtype=torch.bool)
    norm = Channels(groups, 1e-5, "relu")
    y, mean, m2, rstd, count = kernels.channel_forward(ChannelTensors(x, residual=x, mask=mask), norm)
    for zero in (y, mean, m2, count):
        assert not zero.any()
    torch.testing.assert_close(rstd, torch.full_like(rstd, 1e-5).rsqrt())
    kept = KeptByChannelNorm(x, mean, rstd, None, None, x, None, mask, count, norm)
    for zero in kernels.channel_backward(x, kept, True):
        assert not zero.any()


@on_every("shape", (0, 4, 5), (3, 4, 0))
def test_nothing_in_it(kernels, shape):
    x, mask = torch.empty(shape), torch.empty(shape[0], shape[2], dtype=torch.bool)
    for groups in (0, 2):
        norm = Channels(groups, 1e-5, "relu")
        y, mean, m2, rstd, count = kernels.channel_forward(ChannelTensors(x, mask=mask), norm)
        assert y.shape == shape
        for zero in (mean, m2, count):
            assert not zero.any()
        torch.testing.assert_close(rstd, torch.full_like(rstd, 1e-5).rsqrt())
        kept = KeptByChannelNorm(x, mean, rstd, mask=mask, size=count, norm=norm)
        dx, dweight, dbias, dz = kernels.channel_backward(x, kept, True)
        assert dx.shape == dz.shape == shape
        assert not dweight.any()
        assert not dbias.any()


@pytest.mark.sampled(of=3)
@on_every("last", False, True)
def test_a_repeated_call_reads_the_mask_anew(kernels, last):
    case = ChannelCase((4, 6, 4, 5), "channels_last" if last else "contiguous")
    for kind in ("random", "late", "lengths"):
        mask = mask_of(case.shape, kind)
        assert_close_to_reference(kernels, with_nan(call_on(case, F32), mask), mask)


@tried("fill", {"triton": ["zero", "normalize"]})
def test_layers_by_lengths(kernels, fill):
    torch.manual_seed(4)
    layer = nn.BatchNormAct1d(6, act="silu")
    x, dy, residual, lengths = (
        torch.randn(4, 6, 11) + 3,
        torch.randn(4, 6, 11),
        torch.randn(4, 6, 11),
        [11, 4, 0, 1],
    )
    found = []
    for backend in (kernels.name, "reference"):
        one = copy.deepcopy(layer)
        leaves = [t.detach().requires_grad_() for t in (x, residual)]
        with use_backend(backend):
            y = one(*leaves, lengths=lengths, fill=fill)
            grads = torch.autograd.grad(y, [*leaves, *one.parameters()], dy)
            evaluated = one.eval()(x, lengths=lengths, fill=fill)
        found.append([y, *grads, *one.buffers(), evaluated])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "groups", "words"),
    [
        (torch.ones(2, 8, dtype=torch.bool), 0, "mask must be"),
        (torch.ones(2, 9), 0, "mask must be"),
        (torch.ones(2, 9, dtype=torch.bool), -1, "groups of samples"),
    ],
)
def test_a_kernel_refuses_what_it_cannot_read(operators, mask, groups, words):
    with pytest.raises(RuntimeError, match=words):
        operators.channel_moments(torch.ones(2, 4, 3, 3), groups, mask)
