"""The Triton per-channel kernels: the reference's numbers in every layout, dtype, size and activation.

Interpreted where there is no GPU, compiled where there is one; each test by one launch and by several.
"""

from __future__ import annotations

import pytest
import torch
from cases import ACTS, CASES, EMPTY, ChannelCase
from kernel_cases import assert_close_to_reference, call_on, results

from leannorm.ops import schema
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends import REFERENCE, TRITON, triton

REASONS = [] if torch.cuda.is_available() else TRITON.why_not(torch.empty(1), named=True)
pytestmark = pytest.mark.skipif(bool(REASONS), reason=" ".join(REASONS))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (1, 7, 16, 17)
LARGE = 9  # samples of the table's cases that an interpreter takes minutes for


def on(case, dtype, *arguments, **settings):
    call = call_on(case, dtype, *arguments, **settings)
    tensors = {k: v.to(DEVICE) for k, v in call._asdict().items() if isinstance(v, torch.Tensor)}
    return call._replace(**tensors)


@pytest.fixture(params=["one launch", "several"])
def launches(request, monkeypatch):
    """Small inputs take one launch; without that, and in small tiles, they take what large ones do."""
    from leannorm.ops.backends.triton import tiling

    tiling.planned.cache_clear()
    if request.param == "several":
        monkeypatch.setattr(tiling, "one_launch", lambda *_: False)
        monkeypatch.setattr(tiling, "_IN_FLIGHT", 16)
        monkeypatch.setattr(tiling, "_WARPS", 1)
    yield request.param
    tiling.planned.cache_clear()


@pytest.mark.parametrize("case", [c for c in CASES if c.shape[0] < LARGE], ids=str)
def test_the_verbs_are_the_references(case):
    for dtype, groups in ((torch.float32, 0), (torch.bfloat16, 1), (torch.float32, case.shape[1])):
        if groups == 0 or torch.Size(case.shape[2:]).numel() * case.shape[1] // groups > 1:
            assert_close_to_reference(on(case, dtype, groups=groups), TRITON)


@pytest.mark.parametrize(
    ("layout", "dtype"), [("contiguous", torch.float32), ("channels_last", torch.float16)], ids=str
)
def test_many_values_a_channel(layout, dtype):
    """Several tiles for a program, and several programs for a channel, as they are without being forced."""
    assert_close_to_reference(on(ChannelCase((9, 3, 24, 24), layout), dtype), TRITON)


@pytest.mark.parametrize("act", ACTS)
def test_every_activation(act, launches):
    dtype, layout, residual = (
        (torch.float32, "contiguous", False)
        if launches == "one launch"
        else (torch.float64, "channels_last", True)
    )
    assert_close_to_reference(on(ChannelCase((2, 3, 3, 4), layout), dtype, act, residual=residual), TRITON)


@pytest.mark.parametrize("act", [a for a in ACTS if ACTIVATIONS[a].from_output is not None])
@pytest.mark.parametrize("launches", ["several"], indirect=True)
def test_a_derivative_read_from_the_output(act, launches):
    case = ChannelCase((2, 3, 4, 5), "channels_last")
    assert_close_to_reference(on(case, torch.bfloat16, act, residual=True, out_given=True), TRITON)


@pytest.mark.parametrize("size", SIZES)
def test_every_size_in_every_place(size, launches):
    for shape in ((size, 2), (2, size, 3), (2, 3, size)):
        assert_close_to_reference(on(ChannelCase(shape), torch.float32), TRITON)


@pytest.mark.parametrize(
    ("groups", "layout"), [(1, "contiguous"), (3, "contiguous"), (3, "channels_last"), (6, "channels_last")]
)
def test_groups(groups, layout, launches):
    case = ChannelCase((2, 6, 3, 7), layout)
    assert_close_to_reference(on(case, torch.float16, "silu", groups, residual=True), TRITON)


@pytest.mark.parametrize(
    ("mean", "std", "layout"),
    [
        (1e4, 1.0, "contiguous"),
        (1e4, 1.0, "channels_last"),
        (1.0, 0.0, "contiguous"),
        (0.0, 1e-6, "contiguous"),
    ],
)
def test_a_mean_far_from_zero(mean, std, layout, launches):
    call = on(ChannelCase((4, 4, 3, 7), layout), torch.float32, groups=0 if std else 2)
    call = call._replace(x=(call.x - 0.5) / 2 * std + mean)
    assert_close_to_reference(call, TRITON)


def test_the_first_values_may_lie_far_from_the_mean(launches):
    call = on(ChannelCase((4, 6, 5, 7), "channels_last"), torch.float32)
    call.x[0, :, 0] = 0
    call.x[:, :, 1:] += 1e4
    assert_close_to_reference(call, TRITON)


@pytest.mark.parametrize(("layout", "groups"), [("contiguous", 0), ("channels_last", 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_squares_past_float32(dtype, layout, groups, launches):
    """Of one sample or channel; the others beside it in a tile keep their digits."""
    call = on(ChannelCase((3, 4, 3, 5), layout), dtype, "identity", groups)
    (call.x[1] if groups else call.x[:, 1]).mul_(1e30)
    assert_close_to_reference(call, TRITON)


def test_what_is_not_a_number_stays_so(launches):
    call = on(ChannelCase((4, 6, 5, 7)), torch.float32)
    call.x[1, 2, 3, 4] = float("nan")
    call.x[1, 3, 3, 4] = float("inf")
    y, mean, m2, _ = TRITON.channel_forward(call.x, None, None, None, 1e-5, "relu")
    wrong = torch.tensor([False, False, True, True, False, False], device=DEVICE)
    assert torch.equal(m2.isfinite(), ~wrong)
    assert torch.equal(mean.isfinite(), ~wrong)
    assert torch.equal(y.isfinite().flatten(2).all(2).all(0), ~wrong)


@pytest.mark.parametrize("shape", [*EMPTY, (3, 0, 4), (3, 0)], ids=str)
def test_nothing_in_it(shape):
    x = torch.empty(shape, device=DEVICE)
    for groups in (0, 1) if shape[1] else (0,):
        y, mean, m2, rstd = TRITON.channel_forward(x, None, None, None, 1e-5, "relu", groups)
        assert y.shape == shape
        assert mean.eq(0).all()
        assert m2.eq(0).all()
        torch.testing.assert_close(rstd, torch.full_like(rstd, 1e-5).rsqrt())
        saved = (x, x, mean, rstd, None, None, None, None, "relu")
        dx, dweight, dbias, dz = TRITON.channel_backward(*saved, groups, True)
        assert dx.shape == dz.shape == shape
        assert dweight.eq(0).all()
        assert dbias.eq(0).all()
        assert TRITON.channel_moments(x, groups).mean.eq(0).all()
        assert TRITON.channel_grad_sums(*saved)[0].eq(0).all()
        assert TRITON.channel_input_grad(*saved[:-1], act="relu")[0].shape == shape


@pytest.mark.parametrize(("layout", "groups"), [("contiguous", 3), ("channels_last", 0)])
def test_a_second_run_is_the_same_to_the_bit(layout, groups, launches):
    call = on(ChannelCase((2, 6, 7, 7), layout), torch.bfloat16, "gelu", groups, residual=True)
    first, second = results(TRITON, call), results(TRITON, call)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize(("act", "layout"), [("relu", "contiguous"), ("gelu", "channels_last")])
def test_a_rebuilt_output_is_the_same_bits(act, layout, launches):
    for dtype, groups in ((torch.float32, 0), (torch.bfloat16, 3)):
        call = on(ChannelCase((2, 6, 5, 7), layout), dtype, act, groups)
        y, mean, _, rstd = TRITON.channel_forward(call.x, call.weight, call.bias, None, 1e-5, act, groups)
        assert torch.equal(y, TRITON.channel_normalize(call.x, mean, rstd, call.weight, call.bias, None, act))
        assert y.stride() == call.x.stride()
        saved = (call.dy, call.x, mean, rstd, call.weight, call.bias, None)
        kept = TRITON.channel_backward(*saved, y, act, groups)
        rebuilt = TRITON.channel_backward(*saved, None, act, groups)
        for a, b in zip(kept[:3], rebuilt[:3], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_gradient_in_the_inputs_place_is_the_same(layout, launches):
    call = on(ChannelCase((2, 5, 5, 7), layout), torch.float32, "silu")
    _, mean, _, rstd = TRITON.channel_forward(call.x, call.weight, call.bias, None, 1e-5, "silu")
    arguments = (mean, rstd, call.weight, call.bias, None, None, "silu", 0, False)
    dx, dweight, dbias, _ = TRITON.channel_backward(call.dy, call.x, *arguments)
    place = call.x.clone()
    same, *more, _ = TRITON.channel_backward(call.dy, place, *arguments, into=place)
    assert same is place
    assert torch.equal(place, dx)
    assert torch.equal(more[0], dweight)
    assert torch.equal(more[1], dbias)


def test_a_parameter_of_any_dtype(launches):
    x = torch.randn(4, 6, 5, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.rand(6, dtype=torch.float64, device=DEVICE)
    bias = torch.randn(6, dtype=torch.float16, device=DEVICE)
    y, *_ = TRITON.channel_forward(x, weight, bias, None, 1e-5)
    want, *_ = REFERENCE.channel_forward(x.double(), weight, bias.double(), None, 1e-5)
    assert (y.double() - want).abs().max() <= torch.finfo(torch.bfloat16).eps * want.abs().max()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"act": "softplus"}, "unknown activation softplus"),
        ({"weight": torch.ones(3)}, "weight must have one value a channel"),
        ({"residual": torch.ones(2, 4, 3, 2)}, "must have the dtype, shape and layout"),
        ({"x": torch.ones(2, 4, 3, 6)[..., ::2]}, "contiguous or channels_last"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_kernel_refuses_what_it_cannot_read(changed, words):
    from leannorm.ops.backends.triton import channel

    good = {"x": torch.ones(2, 4, 3, 3), "weight": None, "residual": None, "act": "relu"} | changed
    good = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in good.items()}
    with pytest.raises(RuntimeError, match=words):
        channel.channel_forward(good["x"], good["weight"], None, good["residual"], 1e-5, good["act"], 0)


@pytest.fixture(scope="module")
def interpreted_ops():
    """The operators once more, in a namespace where tensors of the CPU reach the interpreted kernels."""
    library = torch.library.Library("leannorm_interpreted", "DEF")
    for definition in (*schema._SCHEMAS, *schema._BETWEEN):
        name = library.define(definition)
        library.impl(name, getattr(triton._kernels, name), "CPU")
        fake = torch._library.simple_registry.singleton.find(f"leannorm::{name}").fake_impl.kernel.func
        torch.library.register_fake(f"leannorm_interpreted::{name}", fake, lib=library)
    yield torch.ops.leannorm_interpreted
    library._destroy()


@pytest.mark.parametrize(("layout", "groups"), [("contiguous", 2), ("channels_last", 0)])
def test_the_dispatcher_finds_nothing_wrong(layout, groups, request):
    ops = torch.ops.leannorm if DEVICE == "cuda" else request.getfixturevalue("interpreted_ops")
    call = on(ChannelCase((2, 4, 3, 3), layout), torch.float32, residual=True)
    x, dy, weight, bias, residual, act, _, _ = call
    _, mean, m2, rstd = ops.channel_forward(x, weight, bias, residual, 1e-5, act, groups)
    saved = (dy, x, mean, rstd, weight, bias, residual, None)
    buffers = (torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE), torch.tensor(0, device=DEVICE))
    for op, arguments in (
        (ops.channel_moments, (x, groups)),
        (ops.channel_normalize, (x, mean, rstd, weight, bias, residual, act)),
        (ops.channel_grad_sums, (*saved, act)),
        (ops.channel_input_grad, (*saved, mean, m2, act, True)),
        (ops.channel_forward, (x, weight, bias, residual, 1e-5, act, groups)),
        (ops.channel_forward_tracked_, (x, weight, bias, residual, 1e-5, act, *buffers, 0.1)),
        (ops.channel_backward, (*saved, act, groups, True)),
        (ops.channel_backward_, (dy, x.clone(), *saved[2:], act, groups, False)),
    ):
        torch.library.opcheck(op.default, arguments)


def test_the_dispatcher_finds_nothing_wrong_between_kernels_and_in_rows(request):
    ops = torch.ops.leannorm if DEVICE == "cuda" else request.getfixturevalue("interpreted_ops")
    mean, m2, var = (torch.rand(3, dtype=torch.float64, device=DEVICE) for _ in range(3))
    total = torch.rand(13, dtype=torch.float64, device=DEVICE)
    count, batches = total[0].clone(), torch.tensor(1, device=DEVICE)
    x, dy, weight = (torch.randn(4, 3, device=DEVICE) for _ in range(3))
    rows = torch.ones(4, 1, device=DEVICE)
    for op, arguments in (
        (ops.move_running_, (mean.clone(), var.float(), batches, 0.1, mean, m2, 5, None)),
        (ops.move_running_, (mean.clone(), var, None, None, mean, m2, 0, count)),
        (ops.constants_of, (mean.float(), var, 1e-5)),
        (ops.sums_of, (mean, m2, 5)),
        (ops.moments_of, (total, 1e-5)),
        (ops.means_of, (total[:7].clone(), var, count)),
        (ops.row_forward, (x, dy, weight[0].clone(), None, 1, 2, 1e-5, False)),
        (ops.row_backward, (dy, x, x, rows, rows, weight[0].clone(), 1, 2, False, True)),
    ):
        torch.library.opcheck(op.default, arguments)
