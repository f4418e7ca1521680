"""The per-channel kernels of every backend: the reference's numbers in every layout, dtype, size, activation.

Triton's are interpreted where there is no GPU, and tried by one launch and by several.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from cases import EMPTY, ChannelCase
from kernel_cases import (
    BF16,
    CHANNEL,
    EVERY,
    F16,
    F32,
    F64,
    SEVERAL,
    alike,
    assert_close_to_reference,
    call_on,
    on_every,
    results,
    tried,
)

from leannorm._types import Channels, ChannelTensors, KeptByChannelNorm
from leannorm.ops.backends import REFERENCE


@pytest.mark.sampled(of=4)
@tried("given", CHANNEL)
def test_the_verbs_are_the_references(kernels, given):
    assert_close_to_reference(call_on(*given), kernels)


@tried("shape", alike(EVERY[:2], [*EMPTY, (3, 0, 4), (3, 0)]))
def test_nothing_in_it(kernels, shape):
    x = torch.empty(shape)
    for groups in (0, 1) if shape[1] else (0,):
        norm = Channels(groups, 1e-5, "relu")
        y, mean, m2, rstd, _ = kernels.channel_forward(ChannelTensors(x), norm)
        assert y.shape == shape
        assert mean.eq(0).all()
        assert m2.eq(0).all()
        torch.testing.assert_close(rstd, torch.full_like(rstd, 1e-5).rsqrt())
        kept = KeptByChannelNorm(x, mean, rstd, norm=norm)
        dx, dweight, dbias, dz = kernels.channel_backward(x, kept, True)
        assert dx.shape == dz.shape == shape
        assert dweight.eq(0).all()
        assert dbias.eq(0).all()
        assert kernels.channel_moments(x, groups).mean.eq(0).all()
        assert kernels.channel_grad_sums(x, kept)[0].eq(0).all()
        assert kernels.channel_input_grad(x, kept)[0].shape == shape


@tried("shape", alike(EVERY[:2], [(3, 0, 4), (0, 4, 5), (2, 4, 0)]))
def test_groups_of_nothing(kernels, shape):
    x = torch.empty(shape)
    norm = Channels(2, 1e-5)
    y, mean, _, rstd, _ = kernels.channel_forward(ChannelTensors(x), norm)
    assert (y.shape, mean.shape) == (shape, (shape[0], 2))
    assert mean.eq(0).all()
    dx, dweight, dbias, _ = kernels.channel_backward(x, KeptByChannelNorm(x, mean, rstd, norm=norm))
    assert (dx.shape, dweight.shape, dbias.shape) == (shape, shape[1:2], shape[1:2])


FAR = [
    (1e4, 1.0, "contiguous"),
    (1e4, 1.0, "channels_last"),
    (1.0, 0.0, "contiguous"),
    (0.0, 1e-6, "contiguous"),
]


@pytest.mark.sampled(of=3)
@on_every("mean, std, layout", *FAR)
def test_a_mean_far_from_zero(kernels, mean, std, layout):
    call = call_on(ChannelCase((4, 4, 3, 7), layout), F32, groups=0 if std else 2)
    assert_close_to_reference(call._replace(x=(call.x - 0.5) / 2 * std + mean), kernels)


@pytest.mark.sampled(of=3)
@on_every("layout", "contiguous", "channels_last")
def test_the_first_values_may_lie_far_from_the_mean(kernels, layout):
    call = call_on(ChannelCase((4, 6, 5, 7), layout), F32)
    call.x[0, :, 0] = 0
    call.x[:, :, 1:] += 1e4
    assert_close_to_reference(call, kernels)


@pytest.mark.sampled(of=3)
@on_every(
    "dtype, layout, groups",
    *((d, *w) for d in (F32, BF16) for w in (("contiguous", 0), ("channels_last", 2))),
)
def test_squares_past_float32(kernels, dtype, layout, groups):
    """Of one sample or channel; the others beside it in a tile keep their digits."""
    call = call_on(ChannelCase((3, 4, 3, 5), layout), dtype, "identity", groups)
    (call.x[1] if groups else call.x[:, 1]).mul_(1e30)
    assert_close_to_reference(call, kernels)


@on_every("layout", "contiguous", "channels_last")
def test_what_is_not_a_number_stays_so(kernels, layout):
    call = call_on(ChannelCase((4, 6, 5, 7), layout), F32)
    call.x[1, 2, 3, 4] = float("nan")
    call.x[1, 3, 3, 4] = float("inf")
    y, mean, m2, *_ = kernels.channel_forward(ChannelTensors(call.x), Channels(0, 1e-5, "relu"))
    wrong = torch.tensor([False, False, True, True, False, False])
    assert torch.equal(m2.isfinite(), ~wrong)
    assert torch.equal(mean.isfinite(), ~wrong)
    assert torch.equal(y.isfinite().flatten(2).all(2).all(0), ~wrong)


@pytest.mark.sampled(of=3)
@on_every("layout, groups", ("contiguous", 3), ("channels_last", 0))
def test_a_second_run_is_the_same_to_the_bit(kernels, layout, groups):
    call = call_on(ChannelCase((2, 6, 7, 7), layout), BF16, "gelu", groups, residual=True)
    first, second = results(kernels, call), results(kernels, call)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


LAYOUTS = ("contiguous", "channels_last")
REBUILT = {
    "cpu": [
        (shape, groups, dtype, act, layout)
        for shape, groups in (((4, 64, 15, 15), 0), ((2, 6, 33, 17), 3))
        for dtype in (F32, F64, BF16, F16)
        for act in ("identity", "relu", "gelu")
        for layout in LAYOUTS
    ],
    **alike(
        ("triton", SEVERAL),
        [
            ((2, 6, 5, 7), groups, dtype, act, layout)
            for dtype, groups in ((F32, 0), (BF16, 3))
            for act, layout in (("relu", "contiguous"), ("gelu", "channels_last"))
        ],
    ),
}


@tried("shape, groups, dtype, act, layout", REBUILT)
@pytest.mark.sampled(of=3)
def test_a_rebuilt_output_is_the_same_bits(kernels, shape, groups, dtype, act, layout):
    call = call_on(ChannelCase(shape, layout), dtype, act, groups)
    y, mean, _, rstd, _ = kernels.channel_forward(call.tensors, call.norm)
    assert torch.equal(y, kernels.channel_normalize(call.kept(mean, rstd)))
    assert y.stride() == call.x.stride()
    # and so are the gradients, whether the derivative is read from the output or rebuilt
    kept, rebuilt = (kernels.channel_backward(call.dy, call.kept(mean, rstd, of)) for of in (y, None))
    for a, b in zip(kept[:3], rebuilt[:3], strict=True):
        assert torch.equal(a, b)


IN_PLACE = {
    "cpu": [((4, 20, 9, 9), layout) for layout in LAYOUTS],
    **alike(("triton", SEVERAL), [((2, 5, 5, 7), layout) for layout in LAYOUTS]),
}


@tried("shape, layout", IN_PLACE)
def test_the_gradient_in_the_inputs_place_is_the_same(kernels, shape, layout):
    call = call_on(ChannelCase(shape, layout), F32, "silu")
    _, mean, _, rstd, _ = kernels.channel_forward(call.tensors, call.norm)
    kept = call.kept(mean, rstd)
    dx, dweight, dbias, _ = kernels.channel_backward(call.dy, kept)
    place = call.x.clone()
    same, *more, _ = kernels.channel_backward(call.dy, kept._replace(x=place), into=place)
    assert same is place
    assert torch.equal(place, dx)
    assert torch.equal(more[0], dweight)
    assert torch.equal(more[1], dbias)


CONSTANT = {
    "cpu": [
        (shape, groups, dtype, act, layout)
        for shape, groups in (((4, 20, 9, 9), 0), ((40, 16, 4, 4), 0), ((4, 6, 5, 7), 3), ((4, 6, 5, 7), -2))
        for dtype in (F32, F64, BF16, F16)
        for act in ("identity", "relu", "silu")
        for layout in LAYOUTS
    ],
    **alike(
        ("triton", SEVERAL),
        [
            ((4, 6, 5, 7), 0, F32, "silu", "contiguous"),
            ((4, 6, 5, 7), 3, BF16, "relu", "channels_last"),
            ((4, 6, 5, 7), -2, F32, "identity", "contiguous"),
        ],
    ),
}


@pytest.mark.sampled(of=3)
@tried("shape, groups, dtype, act, layout", CONSTANT)
def test_constant_statistics_give_the_bits_of_the_single_verbs(kernels, shape, groups, dtype, act, layout):
    call = call_on(ChannelCase(shape, layout), dtype, act, groups, residual=True)
    y, mean, _, rstd, _ = kernels.channel_forward(call.tensors, call.norm)
    for out in (None, y) if act == "relu" else (None,):
        kept = call.kept(mean, rstd, out, norm=call.norm._replace(by_batch=False))
        dx, dweight, dbias, dz = kernels.channel_backward(call.dy, kept, True)
        dbias_alone, dweight_alone = kernels.channel_grad_sums(call.dy, kept)
        for a, b in zip((dx, dz), kernels.channel_input_grad(call.dy, kept, None, True), strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
        for a, b in ((dweight, dweight_alone), (dbias, dbias_alone)):
            assert a.dtype == F32
            if groups:  # the samples' sums are added up in another order
                torch.testing.assert_close(a, b.sum(0).float())
            else:
                assert torch.equal(a, b.float())


@pytest.mark.parametrize("kernels", EVERY, indirect=True)
def test_a_parameter_of_any_dtype(kernels):
    x = torch.randn(4, 6, 5).bfloat16()
    weight, bias = torch.rand(6).double(), torch.randn(6).half()
    y, *_ = kernels.channel_forward(ChannelTensors(x, weight, bias), Channels(0, 1e-5))
    want, *_ = REFERENCE.channel_forward(ChannelTensors(x.double(), weight, bias.double()), Channels(0, 1e-5))
    assert (y.double() - want).abs().max() <= torch.finfo(torch.bfloat16).eps * want.abs().max()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"groups": 3}, "cannot be divided into 3 groups"),
        ({"act": "softplus"}, "unknown activation softplus"),
        ({"weight": (3,)}, "weight must have one value a channel"),
        ({"residual": (2, 4, 3, 2)}, "must have the dtype, shape and layout"),
        ({"x": (2, 4, 3, 6)}, "contiguous or channels_last"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_kernel_refuses_what_it_cannot_read(operators, changed, words):
    given = {
        "x": (2, 4, 3, 3),
        "weight": (4,),
        "residual": (2, 4, 3, 3),
        "act": "relu",
        "groups": 0,
    } | changed
    x, weight, residual = (torch.ones(given[name]) for name in ("x", "weight", "residual"))
    x = x[..., ::2] if x.shape[-1] == 6 else x
    with pytest.raises(RuntimeError, match=words):
        operators.channel_forward(x, weight, None, residual, 1e-5, given["act"], given["groups"])


CHECKED = {
    "cpu": [(*case, masked) for case in product(LAYOUTS, (0, 2)) for masked in (False, True)],
    "triton": [("contiguous", 2, False), ("channels_last", 0, False), ("contiguous", 2, True)],
}


@pytest.mark.sampled(of=4)
@tried("layout, groups, masked", CHECKED)
def test_the_dispatcher_finds_nothing_wrong(kernels, operators, layout, groups, masked):
    call = call_on(ChannelCase((2, 4, 3, 3), layout), F32, residual=True)
    x, dy, weight, bias, residual, act, _, _ = call
    mask = (torch.rand(2, 9) < 0.6,) if masked else ()
    _, mean, m2, rstd, count = operators.channel_forward(x, weight, bias, residual, 1e-5, act, groups, *mask)
    assert (count is None) == (not masked)
    saved = (dy, x, mean, rstd, weight, bias, residual, None)
    buffers = torch.zeros(4), torch.ones(4), torch.tensor(0)
    for name, *arguments in (
        ("channel_moments", x, groups, *mask),
        ("channel_normalize", x, mean, rstd, weight, bias, residual, act, *mask),
        ("channel_grad_sums", *saved, act, *mask),
        ("channel_input_grad", *saved, mean, m2, act, True, *mask),
        ("channel_forward", x, weight, bias, residual, 1e-5, act, groups, *mask),
        ("channel_forward_tracked_", x, weight, bias, residual, 1e-5, act, *buffers, 0.1),
        ("channel_backward", *saved, act, groups, True, False, *mask, *(count,) * masked),
        ("channel_backward", *saved, act, groups, True, True, *mask),
        ("channel_backward_", dy, x.clone(), *saved[2:], act, groups, False),
    ):
        torch.library.opcheck(getattr(operators, name).default, tuple(arguments))


def test_the_dispatcher_finds_nothing_wrong_with_statistics(operators):
    mean, m2, var = (torch.rand(3).double() for _ in range(3))
    total, batches = torch.rand(13).double(), torch.tensor(1)
    count = total[0].clone()
    for name, *arguments in (
        ("move_running_", mean.clone(), var.float(), batches, 0.1, mean, m2, 5, None),
        ("move_running_", mean.clone(), var, None, None, mean, m2, 0, count),
        ("constants_of", mean.float(), var, 1e-5),
        ("sums_of", mean, m2, 5),
        ("moments_of", total, 1e-5),
        ("means_of", total[:7].clone(), var, count),
    ):
        torch.library.opcheck(getattr(operators, name).default, tuple(arguments))
