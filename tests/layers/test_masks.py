"""Masked norms are the norms of the packed valid values; padding is never read and gets 0."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn as torch_nn

import leannorm
from leannorm import functional, nn
from leannorm.ops.activation import ACTIVATIONS

F64 = torch.float64
JUNK = (0.0, 1e30, torch.nan, torch.inf, -torch.inf)
BACKENDS = ["auto", "reference"]
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
# short and long planes, several pieces of one plane, narrow and wide columns, rows of one position
SHAPES = [
    (5, 3, 17), (4, 6, 5, 7), (3, 5, 2, 3, 4), (9, 4), (160, 70), (2, 3, 20000), (2, 2, 150, 130), (40, 3, 9),
    (70, 64, 11), (3, 80, 6, 5), (1, 4, 30), (300, 2, 4, 4),
]  # fmt: skip


def mask_of(shape, kind):
    """Of (N, *): random, of random lengths, or with samples that have no data."""
    positions = (shape[0], *shape[2:])
    if kind == "random" or len(positions) == 1:
        mask = torch.rand(positions) > 0.4
    else:
        lengths = torch.randint(1, positions[-1] + 1, (shape[0], *(1,) * (len(positions) - 1)))
        mask = (torch.arange(positions[-1]) < lengths).expand(positions).clone()
    if kind == "empty samples":
        mask[0 if shape[0] > 1 else 1 :: 3] = False
    mask.view(-1)[:: max(mask.numel() // 5, 1)] = True
    return mask


def with_junk(v, mask, junk):
    return torch.where(mask.unsqueeze(1), v, torch.full((), junk, dtype=v.dtype))


def packed(v, mask):
    """(valid positions, C)."""
    return v.movedim(1, -1)[mask]


def laid_out(v, last):
    return v.contiguous(memory_format=LAYOUTS[v.dim()]) if last and v.dim() in LAYOUTS else v


def randomized(layer):
    with torch.no_grad():
        layer.weight.uniform_(0.5, 2), layer.bias.normal_()
    return layer


def layer_of(shape, act="identity", dtype=F64, **of):
    return randomized(getattr(nn, f"BatchNormAct{max(len(shape) - 2, 1)}d")(shape[1], act=act, **of)).to(
        dtype
    )


def twin_of(layer):
    """A batch norm over packed values, with the same parameters."""
    twin = torch_nn.BatchNorm1d(layer.num_features, layer.eps, layer.momentum).to(layer.weight.dtype)
    twin.load_state_dict(layer.state_dict())
    return twin


def results(layer, x, dy, residual=None, **masking):
    leaves = [x.detach().requires_grad_()]
    leaves += [] if residual is None else [residual.detach().requires_grad_()]
    y = layer(*leaves, **masking)
    grads = torch.autograd.grad(y, [*leaves, layer.weight, layer.bias], dy)
    return [y.detach(), *grads, *(b.clone() for b in layer.buffers())]


def assert_padding_is_zero(tensors, mask):
    for one in tensors:
        assert torch.equal(packed(one, ~mask), torch.zeros_like(packed(one, ~mask)))


def assert_as_packed(layer, x, dy, mask, residual=None, junk=torch.nan, **tolerance):
    """A step of the layer with a mask is that of torch's batch norm on the packed values."""
    twin, act = twin_of(layer), ACTIVATIONS[layer.activation].forward

    def on_packed(v, *r):
        return act(twin(v) if not r else twin(v) + r[0])

    on_packed.weight, on_packed.bias, on_packed.buffers = twin.weight, twin.bias, twin.buffers
    r = None if residual is None else packed(residual, mask)
    want = results(on_packed, packed(x, mask), packed(dy, mask), r)
    bad = [None if v is None else with_junk(v, mask, junk) for v in (x, dy, residual)]
    bad = [laid_out(v, not x.is_contiguous()) if v is not None else None for v in bad]
    got = results(layer, *bad, mask=mask)
    spatial = 2 if residual is None else 3
    assert_padding_is_zero(got[:spatial], mask)
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        one = packed(one, mask) if i < spatial else one
        torch.testing.assert_close(one, other, **tolerance)
    for one in got[:spatial]:
        assert one.stride() == bad[0].stride()


@pytest.mark.parametrize("kind", ["random", "lengths", "empty samples"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_packed_norm(shape, backend, last, kind):
    torch.manual_seed(len(shape))
    mask, junk = mask_of(shape, kind), random.Random(f"{shape} {kind}").choice(JUNK)
    x = laid_out(
        torch.randn(shape, dtype=F64) * 3
        + torch.arange(shape[1], dtype=F64).view(-1, *(1,) * (len(shape) - 2)),
        last,
    )
    with leannorm.use_backend(backend):
        assert_as_packed(layer_of(shape), x, torch.randn(shape, dtype=F64), mask, junk=junk)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_and_residual(act, backend, last, residual):
    torch.manual_seed(1)
    shape = (6, 5, 7, 9)
    x, dy, r = (torch.randn(shape, dtype=F64) for _ in range(3))
    with leannorm.use_backend(backend):
        for kind in ("random", "lengths"):
            layer = layer_of(shape, act)
            assert_as_packed(layer, laid_out(x, last), dy, mask_of(shape, kind), r if residual else None)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype, backend, last):
    """Against the same values in float64: one rounding of the result, and of what is added up."""
    torch.manual_seed(2)
    shape, tolerance = (6, 37, 8, 23), {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    x, dy, r = (torch.randn(shape).to(dtype) for _ in range(3))
    for kind in ("random", "lengths"):
        mask, layer = mask_of(shape, kind), layer_of(shape, "silu", torch.float32)
        wide = copy.deepcopy(layer).double()
        with leannorm.use_backend("reference"):
            want = results(wide, x.double(), dy.double(), r.double(), mask=mask)
        with leannorm.use_backend(backend):
            bad = [laid_out(with_junk(v, mask, torch.nan), last) for v in (x, dy, r)]
            got = results(layer, *bad, mask=mask)
        assert_padding_is_zero(got[:3], mask)
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            assert one.dtype == (dtype if i < 3 else torch.int64 if i == 7 else torch.float32)
            largest = max(other.abs().max().item(), 1)
            allowed = tolerance if i < 3 else 2e-6 * mask.sum().item() ** 0.5
            assert (one.double() - other).abs().max().item() <= allowed * largest, i


@pytest.mark.parametrize("mean", [0.0, 1e4, 1e20])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_statistics_are_exact(dtype, last, mean):
    torch.manual_seed(3)
    shape = (7, 20, 30, 31)
    mask = mask_of(shape, "random")
    x = (torch.randn(shape, dtype=F64) * max(mean / 1e4, 1) + mean).to(dtype)
    layer = layer_of(shape, dtype=torch.float32, momentum=1.0, stats_dtype=F64)
    layer(laid_out(with_junk(x, mask, torch.nan), last), mask=mask)
    values = packed(x, mask).double()
    rounding = 1e-7 if dtype == torch.float32 else 1e-14
    rounding_of_mean = rounding * values.std(0) + 1e-15 * mean
    assert ((layer.running_mean - values.mean(0)).abs() <= rounding_of_mean).all()
    var = torch.tensor(values.numpy().astype(np.longdouble).var(0, ddof=1).astype(np.float64))
    torch.testing.assert_close(layer.running_var, var, rtol=10 * rounding, atol=0)


@pytest.mark.parametrize(
    "lengths", [[3, 9, 1, 0], torch.tensor([3, 9, 1, 0]), torch.tensor([3, 9, 1, 0], dtype=torch.uint8)]
)
def test_lengths_are_masks(lengths):
    x, dy = (torch.randn(4, 3, 9) for _ in range(2))
    mask = torch.arange(9) < torch.tensor([[3], [9], [1], [0]])
    layer = layer_of(x.shape, dtype=torch.float32)
    twin = copy.deepcopy(layer)
    for one, other in zip(
        results(layer, x, dy, lengths=lengths), results(twin, x, dy, mask=mask), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_all_valid_is_no_mask_bit_for_bit(dtype, last):
    x, dy = (laid_out(torch.randn(4, 30, 9, 11).to(dtype), last) for _ in range(2))
    for masking in ({"mask": torch.ones(4, 9, 11, dtype=torch.bool)}, {"lengths": [11] * 4}):
        layer = layer_of(x.shape, "relu", torch.float32)
        twin = copy.deepcopy(layer)
        for one, other in zip(results(layer, x, dy, **masking), results(twin, x, dy), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", ["random", "lengths"])
@pytest.mark.parametrize("shape", [(7, 33, 12, 13), (3, 5, 30000), (80, 70, 31)], ids=str)
def test_threads_change_no_bit(shape, kind, last):
    torch.manual_seed(4)
    x, dy, mask = torch.randn(shape), torch.randn(shape), mask_of(shape, kind)
    before, seen = torch.get_num_threads(), []
    layer = layer_of(shape, "silu", torch.float32)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.append(results(copy.deepcopy(layer), laid_out(x, last), laid_out(dy, last), mask=mask))
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        for one, two in zip(seen[0], other, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("act", ["identity", "silu", "relu"])
@pytest.mark.parametrize("fill", ["zero", "normalize"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.sampled(of=3)
def test_gradients_of_any_order(training, fill, act):
    torch.manual_seed(5)
    mask = mask_of((3, 2, 5), "random")
    statistics = torch.randn(2, dtype=F64), torch.rand(2, dtype=F64) + 0.5

    def call(x, weight, bias, residual):
        return functional.batch_norm_act(
            x, *statistics, weight, bias, training, 0.0, mask=mask, fill=fill, act=act, residual=residual
        )

    inputs = [torch.randn(s, dtype=F64, requires_grad=True) for s in ((3, 2, 5), (2,), (2,), (3, 2, 5))]
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("training", [True, False])
def test_fill_normalize(training, backend):
    """Statistics over the valid, every position normalized: as written in plain torch."""
    torch.manual_seed(6)
    x, dy = (torch.randn(4, 3, 5, 6, dtype=F64) for _ in range(2))
    mask = mask_of(x.shape, "random")
    layer = layer_of(x.shape, "silu")
    want_layer = copy.deepcopy(layer).train(training)
    values = packed(x.requires_grad_(), mask)
    mean, var = (
        (values.mean(0), values.var(0, correction=0)) if training else (layer.running_mean, layer.running_var)
    )

    def spread(v):
        return v.view(-1, 1, 1)

    z = (x - spread(mean)) / (spread(var) + layer.eps).sqrt() * spread(want_layer.weight) + spread(
        want_layer.bias
    )
    y = torch.nn.functional.silu(z)
    want = torch.autograd.grad(y, [x, want_layer.weight, want_layer.bias], dy)
    with leannorm.use_backend(backend):
        got = results(layer.train(training), x, dy, mask=mask, fill="normalize")
    for one, other in zip(got, [y, *want], strict=False):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "make", [lambda: nn.BatchNorm2d(3), lambda: nn.GroupNorm(3, 3), lambda: nn.InstanceNorm2d(3, affine=True)]
)
def test_fill_normalize_without_padding_is_the_plain_norm(make, backend):
    torch.manual_seed(6)
    x, dy = torch.randn(4, 3, 5, 6), torch.randn(4, 3, 5, 6)
    whole = torch.ones(4, 5, 6, dtype=torch.bool)
    with leannorm.use_backend(backend):
        layer = randomized(make())
        want = results(copy.deepcopy(layer), x, dy)
        got = results(layer, x, dy, mask=whole, fill="normalize")
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("last", [False, True])
def test_evaluation(last, backend):
    torch.manual_seed(7)
    shape = (4, 3, 5, 6)
    x, dy, mask = (
        laid_out(torch.randn(shape, dtype=F64), last),
        torch.randn(shape, dtype=F64),
        mask_of(shape, "random"),
    )
    layer = layer_of(shape, "relu")
    layer(x)
    with leannorm.use_backend(backend):
        assert_as_packed_in_evaluation(layer.eval(), x, dy, mask)
        with torch.no_grad():
            y = layer(laid_out(with_junk(x, mask, torch.nan), last), mask=mask)
    assert_padding_is_zero([y], mask)
    torch.testing.assert_close(packed(y, mask), packed(layer(x), mask))


def assert_as_packed_in_evaluation(layer, x, dy, mask):
    want = results(layer, x, with_junk(dy, mask, 0.0))
    got = results(layer, with_junk(x, mask, torch.nan), with_junk(dy, mask, torch.nan), mask=mask)
    assert_padding_is_zero(got[:2], mask)
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(
            packed(one, mask) if i < 2 else one, packed(other, mask) if i < 2 else other
        )


def test_frozen_parameters_and_inputs_in_evaluation():
    """Each set of wanted gradients is served; what is not kept is not read."""
    x, mask = torch.randn(4, 3, 6), mask_of((4, 3, 6), "random")
    for need in itertools.product([False, True], repeat=3):
        layer = layer_of(x.shape, "relu", torch.float32).eval()
        layer.weight.requires_grad_(need[0]), layer.bias.requires_grad_(need[1])
        leaf = with_junk(x, mask, torch.nan).requires_grad_(need[2])
        y = layer(leaf, mask=mask)
        assert y.requires_grad == any(need)
        if any(need):
            y.sum().backward()
        for one, wanted in zip((layer.weight, layer.bias, leaf), need, strict=True):
            assert (one.grad is not None) == wanted
            assert not wanted or one.grad.isfinite().all()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_over_several_batches(momentum):
    layer = layer_of((4, 3, 9), momentum=momentum)
    twin = twin_of(layer)
    for _ in range(3):
        x, mask = torch.randn(4, 3, 9, dtype=F64), mask_of((4, 3, 9), "random")
        layer(x, mask=mask), twin(packed(x, mask))
    for one, other in zip(layer.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)
