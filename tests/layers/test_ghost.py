"""Ghost batch norm, `group_size=`: statistics of every so many samples, as a loop over the batch has them."""

import copy
from math import prod

import pytest
import torch
from ranks import ranks
from torch import nn as stock

import leannorm
from leannorm import nn

F64 = torch.float64
SHAPES = {
    "BatchNorm1d": [(8, 3), (7, 3), (64, 70), (8, 3, 5), (160, 4, 9)],
    "BatchNorm2d": [(8, 3, 6, 5), (7, 3, 1, 1), (6, 4, 130, 130), (160, 8, 7, 7)],
    "BatchNorm3d": [(8, 3, 2, 4, 3)],
    "SyncBatchNorm": [(8, 3, 6, 5)],
}
CASES = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def looped(layer, x, size, residual=None, act=lambda v: v):
    """torch's own batch norm, group after group."""
    dims = (0, *range(2, x.dim()))
    rows = []
    for i, part in enumerate(x.split(size)):
        y = torch.nn.functional.batch_norm(part, None, None, layer.weight, layer.bias, True, 0.0, layer.eps)
        rows.append(act(y if residual is None else y + residual.split(size)[i]))
    return torch.cat(rows), x.mean(dims), x.var(dims)


def gradients(y, leaves):
    torch.manual_seed(1)
    return torch.autograd.grad(y, leaves, torch.randn(y.shape, dtype=y.dtype))


def made(name, channels, size, **of):
    layer = getattr(nn, name)(channels, group_size=size, momentum=1.0, **of)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 2), layer.bias.normal_()
    return layer


@pytest.mark.parametrize("size", [2, 3, 4, 100])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
@pytest.mark.sampled(of=3)
def test_it_is_the_loop(name, shape, size, backend, last):
    while prod(shape[2:]) == 1 and shape[0] % size == 1:
        size += 1  # a last group of one value is refused
    first = torch.arange(shape[0], dtype=F64).view(-1, *(1,) * (len(shape) - 1))
    x = torch.randn(shape, dtype=F64) * 3 + first
    if last and len(shape) in LAYOUTS:
        x = x.contiguous(memory_format=LAYOUTS[len(shape)])
    layer = made(name, shape[1], size, dtype=F64)
    leaves = [x.requires_grad_(), layer.weight, layer.bias]
    want, mean, var = looped(layer, x, size)
    with leannorm.use_backend(backend):
        y = layer(x)
        got = gradients(y, leaves)
    torch.testing.assert_close(y, want)
    for one, other in zip(got, gradients(want, leaves), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(layer.running_mean, mean)
    torch.testing.assert_close(layer.running_var, var)
    assert layer.num_batches_tracked == 1
    assert y.stride() == x.stride()
    with leannorm.use_backend(backend), torch.no_grad():
        torch.testing.assert_close(layer(x), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("last", [False, True])
def test_other_dtypes(dtype, last):
    x = torch.randn(8, 6, 5, 5)
    x = (x.contiguous(memory_format=torch.channels_last) if last else x).to(dtype)
    layer = made("BatchNorm2d", 6, 4)
    with torch.no_grad():
        want = looped(copy.deepcopy(layer).double(), x.double(), 4)[0]
    torch.testing.assert_close(layer(x).double(), want, rtol=0, atol=8 * torch.finfo(dtype).eps * 4)


def test_interpreted_triton():
    for shape in ((8, 3, 5, 5), (7, 3, 4)):
        x = torch.randn(shape, requires_grad=True)
        layer = made("BatchNorm2d" if len(shape) == 4 else "BatchNorm1d", 3, 4)
        want = looped(layer, x, 4)[0]
        with leannorm.use_backend("triton"):
            y = layer(x)
            got = gradients(y, [x, layer.weight])
        torch.testing.assert_close(y, want)
        for one, other in zip(got, gradients(want, [x, layer.weight]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("act", ["relu", "silu"])
def test_with_a_residual_and_an_activation(act):
    x, r = (torch.randn(7, 3, 4, 4, dtype=F64, requires_grad=True) for _ in range(2))
    layer = made("BatchNormAct2d", 3, 2, dtype=F64, act=act)
    want = looped(layer, x, 2, r, getattr(torch.nn.functional, act))[0]
    y = layer(x, r)
    torch.testing.assert_close(y, want)
    for one, other in zip(gradients(y, [x, r, layer.bias]), gradients(want, [x, r, layer.bias]), strict=True):
        torch.testing.assert_close(one, other)


def test_derivatives_of_all_kinds():
    x = torch.randn(6, 2, 3, dtype=F64, requires_grad=True)
    layer = made("BatchNorm1d", 2, 2, dtype=F64)
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x)
    want = torch.func.jacrev(lambda x: looped(layer, x, 2)[0])(x)
    torch.testing.assert_close(torch.func.jacrev(layer)(x), want)
    torch.testing.assert_close(torch.func.jacfwd(layer)(x), want)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("n", [8, 7])
@pytest.mark.sampled(of=4)
def test_compiled_checkpointed_and_lean(n, backend):
    with leannorm.use_backend(backend):
        assert_composes(n)


def assert_composes(n):
    torch._dynamo.reset()
    layer = stock.Sequential(made("BatchNorm2d", 3, 4, dtype=F64), stock.ReLU())
    x = torch.randn(n, 3, 5, 5, dtype=F64, requires_grad=True)
    y = copy.deepcopy(layer)(x)
    (want,) = gradients(y, [x])

    def lean(x):
        with leannorm.lean("norm"):
            return layer(x)

    calls = (
        torch.compile(layer, fullgraph=True, backend="aot_eager"),
        lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False),
        lean,
    )
    for i, call in enumerate(calls):
        found = call(x)
        torch.testing.assert_close(found, y)
        torch.testing.assert_close(gradients(found, [x])[0], want)
        assert layer[0].num_batches_tracked == i + 1


def test_what_it_keeps_in_a_state_dict_a_copy_and_evaluation():
    layer, plain = made("BatchNorm2d", 3, 2), nn.BatchNorm2d(3)
    layer(torch.randn(8, 3, 4, 4))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(4, 3, 4, 4)
    assert torch.equal(layer.eval()(x), plain.eval()(x))
    other = copy.deepcopy(layer).train()
    assert torch.equal(other(x), layer.train()(x))
    assert "group_size=2" in repr(layer)
    with leannorm.no_stats_update():
        assert torch.equal(other(x), layer(x))
    with pytest.warns(UserWarning, match="torch has no such layer"):
        assert leannorm.convert(stock.Sequential(layer), to="torch")[0] is layer
    assert layer.group_size == 2
    assert type(layer) is nn.BatchNorm2d


def test_a_bad_group_moves_nothing_and_shows_in_its_group_alone():
    layer, x = made("BatchNorm2d", 3, 2), torch.randn(6, 3, 4, 4)
    x[2, 1, 0, 0] = torch.nan
    y = layer(x)
    assert layer.num_batches_tracked == 0
    assert y.isnan().flatten(1).any(1).tolist() == [False, False, True, True, False, False]


def test_pooled_over_micro_batches():
    layer, twin = made("BatchNorm2d", 3, 2, dtype=F64), nn.BatchNorm2d(3, momentum=1.0, dtype=F64)
    x = torch.randn(12, 3, 4, 4, dtype=F64)
    with leannorm.accumulate_stats(layer):
        for part in x.split(5):
            layer(part)
    twin(x)
    torch.testing.assert_close(layer.running_var, twin.running_var, rtol=1e-13, atol=0)
    leannorm.recalibrate(layer, list(x.split(7)))
    torch.testing.assert_close(layer.running_var, twin.running_var, rtol=1e-13, atol=0)


def test_what_it_refuses():
    for size in (0, -1, 2.0, True):
        with pytest.raises(leannorm.InputError, match="group_size must be a positive number"):
            nn.BatchNorm2d(3, group_size=size)
    layer = nn.BatchNorm1d(3, group_size=2)
    with pytest.raises(leannorm.InputError, match="got a group of 1 in"):
        layer(torch.randn(5, 3))
    assert layer.num_batches_tracked == 0
    assert layer(torch.randn(0, 3)).shape == (0, 3)
    with pytest.raises(leannorm.InputError, match="group_size=2 cannot be exported or traced"):
        leannorm.program.fork(nn.BatchNorm2d(3, group_size=2), (torch.randn(4, 3, 2, 2),))
    norm = nn.BatchNorm2d(4, group_size=2)
    with pytest.raises(leannorm.InputError, match="of the whole batch"):
        nn.ConvBatchNorm2d.from_pair(stock.Conv2d(3, 4, 1), norm)
    torch.export.export(norm.eval(), (torch.randn(4, 4, 2, 2),))


def on_ranks(rank, world):
    """Groups are each rank's own; the running statistics are those of all ranks' batches."""
    torch.manual_seed(0)
    whole = torch.randn(5 * world, 3, 4, 4, dtype=F64)
    mine = whole.split(5)[rank].clone().requires_grad_()
    layer = made("SyncBatchNorm", 3, 2, dtype=F64)
    want = looped(layer, mine, 2)[0]
    y = torch.utils.checkpoint.checkpoint(layer, mine, use_reentrant=False)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(gradients(y, [mine]), gradients(want, [mine]))
    torch.testing.assert_close(layer.running_mean, whole.mean((0, 2, 3)))
    torch.testing.assert_close(layer.running_var, whole.var((0, 2, 3)))
    return layer.running_var.tolist()


def test_ranks():
    first, second = ranks(2, on_ranks, 2)
    assert first == second
