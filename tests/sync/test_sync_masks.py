"""Masked statistics over ranks are those of all ranks' valid values, packed; what is no data adds nothing."""

import pytest
import torch
from ranks import ranks
from torch import nn as torch_nn

from leannorm import distributed, nn

F64 = torch.float64
SHAPES = [(3, 4, 5, 6), (2, 4, 3, 7), (4, 4, 2, 2), (1, 4, 6, 6)]


def batch(rank, seed, kind):
    """This rank's input, its incoming gradient and its mask."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    shape = SHAPES[rank]
    x, dy = (torch.randn(shape, dtype=F64, generator=generator) for _ in range(2))
    mask = torch.rand((shape[0], *shape[2:]), generator=generator) > 0.4
    if kind == "an empty rank" and rank == 1:
        mask[:] = False
    if kind == "a full rank" and rank == 1:
        mask[:] = True
    return x + rank, dy, mask


def randomized(layer):
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 2, 4)), layer.bias.copy_(torch.linspace(-1, 1, 4))
    return layer.double()


def trained(rank, kind, last):
    layer, seen = randomized(nn.SyncBatchNorm(4)), []
    for seed in range(2):
        x, dy, mask = batch(rank, seed, kind)
        wide = mask.unsqueeze(1)
        x, dy = (torch.where(wide, v, torch.full((), torch.nan, dtype=F64)) for v in (x, dy))
        if last:
            x = x.contiguous(memory_format=torch.channels_last)
        leaf = x.requires_grad_()
        layer.zero_grad()
        y = layer(leaf, mask=mask)
        y.backward(dy)
        assert (torch.where(wide, 0.0, y) == 0).all()
        assert (torch.where(wide, 0.0, leaf.grad) == 0).all()
        seen.append([y.detach(), leaf.grad, layer.weight.grad.clone(), layer.bias.grad.clone()])
    return seen, [b.clone() for b in layer.buffers()]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", ["random", "an empty rank", "a full rank"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_ranks_valid_values(world, kind, last):
    results = ranks(world, trained, kind, last)
    twin = randomized(torch_nn.BatchNorm1d(4))
    for seed in range(2):
        batches = [batch(rank, seed, kind) for rank in range(world)]
        packed = [v.movedim(1, -1)[mask] for v, _, mask in batches]
        leaf = torch.cat(packed).requires_grad_()
        twin.zero_grad()
        y = twin(leaf)
        y.backward(torch.cat([dy.movedim(1, -1)[mask] for _, dy, mask in batches]))
        sizes = [len(p) for p in packed]
        for i, whole in enumerate((y.detach(), leaf.grad)):
            for rank, part in enumerate(whole.split(sizes)):
                got = results[rank][0][seed][i].movedim(1, -1)[batches[rank][2]]
                torch.testing.assert_close(got, part)
        for i, of in ((2, twin.weight), (3, twin.bias)):
            torch.testing.assert_close(sum(r[0][seed][i] for r in results), of.grad)
    for _, buffers in results:
        for one, other in zip(buffers, twin.buffers(), strict=True):
            torch.testing.assert_close(one, other)


def second_order(rank):
    layer = randomized(nn.SyncBatchNorm(4))
    x, _, mask = batch(rank, 0, "random")
    leaf = x.requires_grad_()
    (first,) = torch.autograd.grad(layer(leaf, mask=mask).pow(3).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    return second


def test_second_order():
    results = ranks(2, second_order)
    twin = randomized(torch_nn.BatchNorm1d(4))
    batches = [batch(rank, 0, "random") for rank in range(2)]
    leaf = torch.cat([x.movedim(1, -1)[m] for x, _, m in batches]).requires_grad_()
    (first,) = torch.autograd.grad(twin(leaf).pow(3).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    got = torch.cat([r.movedim(1, -1)[m] for r, (_, _, m) in zip(results, batches, strict=True)])
    torch.testing.assert_close(got, second)


def repeated(rank, way):
    from torch.utils.checkpoint import checkpoint

    layer = randomized(nn.SyncBatchNorm(4))
    x, dy, mask = batch(rank, 0, "random")
    leaf = x.requires_grad_()
    if way == "checkpoint":
        y = checkpoint(lambda v: layer(v, mask=mask), leaf, use_reentrant=False)
    elif way == "compiled":
        y = torch.compile(layer, fullgraph=True, backend="aot_eager")(leaf, mask=mask)
    else:
        y = layer(leaf, mask=mask)
    y.backward(dy)
    return [y.detach(), leaf.grad, *(b.clone() for b in layer.buffers())]


@pytest.mark.parametrize("way", ["checkpoint", "compiled"])
def test_repeated_and_compiled(way):
    for got, want in zip(ranks(2, repeated, way), ranks(2, repeated, "plain"), strict=True):
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)


def unequal(rank):
    """Rank 1 has one batch less."""
    layer = randomized(nn.SyncBatchNorm(4))
    with distributed.join(layer):
        for seed in range(2 - rank):
            x, dy, mask = batch(rank, seed, "random")
            layer(x.requires_grad_(), mask=mask).backward(dy)
    return [b.clone() for b in layer.buffers()]


def test_ranks_run_out_of_batches():
    got = ranks(2, unequal)
    twin = randomized(torch_nn.BatchNorm1d(4))
    for seed in range(2):
        packed = [
            x.movedim(1, -1)[m] for x, _, m in (batch(rank, seed, "random") for rank in range(2 - seed))
        ]
        twin(torch.cat(packed))
    for buffers in got:
        for one, other in zip(buffers, twin.buffers(), strict=True):
            torch.testing.assert_close(one, other)


def of_jagged(rank, channels_first):
    """Samples of other lengths on each rank; on rank 1 one of them is empty."""
    x, dy = jagged_batch(rank, channels_first)
    layer = randomized(nn.SyncBatchNorm(4))
    y = layer(x.requires_grad_())
    assert y.is_nested
    y.backward(dy)
    found = y.detach().values(), x.grad.values(), layer.weight.grad, layer.bias.grad
    return [v.clone() for v in (*found, *layer.buffers())]


def jagged_batch(rank, channels_first):
    generator = torch.Generator().manual_seed(rank)
    lengths = [(3, 5), (7, 0, 2)][rank]
    values, dy = (torch.randn(sum(lengths), 4, dtype=F64, generator=generator) + rank for _ in range(2))
    if channels_first:
        values, dy = values.T.contiguous(), dy.T.contiguous()
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    x = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2 if channels_first else 1)
    return x, torch.nested.nested_tensor_from_jagged(dy, x.offsets(), jagged_dim=2 if channels_first else 1)


@pytest.mark.parametrize("channels_first", [False, True])
def test_jagged_tensors_of_all_ranks(channels_first):
    results = ranks(2, of_jagged, channels_first)
    twin = randomized(torch_nn.BatchNorm1d(4))
    batches = [jagged_batch(rank, channels_first) for rank in range(2)]
    given = [[v.values().T if channels_first else v.values() for v in batch] for batch in batches]
    leaf = torch.cat([x for x, _ in given]).detach().requires_grad_()
    y = twin(leaf)
    y.backward(torch.cat([dy for _, dy in given]))
    for i, whole in enumerate((y.detach(), leaf.grad)):
        got = torch.cat([r[i].T if channels_first else r[i] for r in results])
        torch.testing.assert_close(got, whole)
    for i, of in ((2, twin.weight), (3, twin.bias)):
        torch.testing.assert_close(sum(r[i] for r in results), of.grad)
    for *_, mean, var, _ in results:
        torch.testing.assert_close(mean, twin.running_mean)
        torch.testing.assert_close(var, twin.running_var)
