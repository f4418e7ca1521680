"""A batch without a value moves neither running statistics nor counter: averages go on as without it."""

import copy

import pytest
import torch
from ranks import ranks

import leannorm
from leannorm import nn, program
from leannorm.ops.select import use_backend

LAYERS = {
    "BatchNorm2d": lambda m: nn.BatchNorm2d(3, momentum=m),
    "groups of samples": lambda m: nn.BatchNorm2d(3, momentum=m, group_size=2),
    "BatchNormAct2d": lambda m: nn.BatchNormAct2d(3, act="silu", momentum=m),
    "SyncBatchNorm": lambda m: nn.SyncBatchNorm(3, momentum=m),
    "SyncBatchNorm, groups of samples": lambda m: nn.SyncBatchNorm(3, momentum=m, group_size=2),
    "ConvBatchNorm2d": lambda m: nn.ConvBatchNorm2d(3, 4, 1, momentum=m),
}


def batches(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 3, 2, 5, generator=generator) * 3 + 5 for _ in range(2)]


def train(layer, xs, call=None):
    for x in xs:
        (layer if call is None else call)(x.clone().requires_grad_()).sum().backward()
    return [b.clone() for b in layer.buffers()]


def assert_empty_ones_move_nothing(layer, call_of=lambda layer: None):
    twin, (first, second) = copy.deepcopy(layer), batches()
    mixed = [first[:0], first[:, :, :, :0], first, first[:0], second]
    if isinstance(layer, nn.ConvBatchNorm2d):
        del mixed[1]  # a convolution refuses images without a pixel
    got, want = train(layer, mixed, call_of(layer)), train(twin, (first, second))
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
    counted = next(b for name, b in layer.named_buffers() if name.endswith(("tracked", "batch_id")))
    assert counted == 2


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
@pytest.mark.parametrize("name", LAYERS)
def test_eager(name, backend, momentum):
    with use_backend(backend):
        assert_empty_ones_move_nothing(LAYERS[name](momentum))


@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_a_counter_of_another_dtype(backend):
    layer = nn.BatchNorm2d(3, momentum=None)
    layer.num_batches_tracked = torch.tensor(0.0)
    with use_backend(backend):
        assert_empty_ones_move_nothing(layer)


@pytest.mark.parametrize("use_global_est", [False, True])
def test_the_operator_layer_takes_the_first_batch_that_has_values_as_the_first(use_global_est):
    assert_empty_ones_move_nothing(nn.BatchNormOp(3, use_global_est=use_global_est))


@pytest.mark.parametrize("name", LAYERS)
def test_compiled(name):
    def compiled(layer):
        return torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)

    assert_empty_ones_move_nothing(LAYERS[name](None), compiled)


def nothing_valid(layer):
    """Compiled code, where the host does not know how many positions are valid."""
    call = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    first, second = batches()
    mask = torch.ones(4, 2, 5, dtype=torch.bool)
    for x, valid in ((first, ~mask), (first, mask), (second, ~mask), (second, mask)):
        call(x, mask=valid)
    return [b.clone() for b in layer.buffers()]


@pytest.mark.parametrize("name", ["BatchNorm2d", "SyncBatchNorm"])
def test_a_mask_without_a_valid_position(name):
    twin = LAYERS[name](None)
    for one, other in zip(nothing_valid(LAYERS[name](None)), train(twin, batches()), strict=True):
        torch.testing.assert_close(one, other)


def test_accumulated_and_recalibrated():
    first, second = batches()
    for momentum in (0.1, None):
        layer, twin = LAYERS["BatchNorm2d"](momentum), LAYERS["BatchNorm2d"](momentum)
        with leannorm.accumulate_stats(layer):
            layer(first[:0])
        assert layer.num_batches_tracked == 0
        for one, xs in ((layer, (first[:0], first, second)), (twin, (first, second))):
            with leannorm.accumulate_stats(one):
                train(one, xs)
        for got, want in zip(layer.buffers(), twin.buffers(), strict=True):
            assert torch.equal(got, want)

    def part(model, sizes):
        model(torch.cat((first, second))[: sizes[0]])

    report = leannorm.recalibrate(layer, [[4], [0], [8]], forward=part)
    assert [(one.batches, one.values) for one in report.layers] == [(2, 120)]
    assert layer.num_batches_tracked == 2
    with pytest.raises(leannorm.InputError, match="recalibrate needs a batch"):
        leannorm.recalibrate(layer, [[0]], forward=part)


def test_the_training_branch_of_a_program():
    layer, twin = (nn.BatchNorm2d(3, momentum=None) for _ in range(2))
    first, second = batches()
    empty = program.fork(layer, (first[:0],))
    empty.train(first[:0])
    assert layer.num_batches_tracked == 0
    train(layer, (first, second)), train(twin, (first, second))
    for one, other in zip(layer.buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, other)


def on_ranks(rank, group_size):
    """Rank 1 has no value of one batch, no rank one of another; with masks, too."""
    first, second = (x.chunk(2)[rank] for x in batches())
    none = torch.zeros(2, 2, 5, dtype=torch.bool)
    for backend in ("auto", "reference"):
        with use_backend(backend):
            layer, twin = (nn.SyncBatchNorm(3, momentum=None, group_size=group_size) for _ in range(2))
            some = first if rank == 0 else first[:0]
            for x in (first[:0], some, first[:, :, :0], second):
                layer(x.clone().requires_grad_()).sum().backward()
            if group_size is None:
                layer(first, mask=none)
            for x in (some, second):
                twin(x)
            for one, other in zip(layer.buffers(), twin.buffers(), strict=True):
                assert torch.equal(one, other)
            assert layer.num_batches_tracked == 2
    return [b.tolist() for b in layer.buffers()]


@pytest.mark.parametrize("group_size", [None, 2])
def test_ranks(group_size):
    one, other = ranks(2, on_ranks, group_size)
    assert one == other
