"""Compiled graphs, second derivatives, and the number and size of the collectives."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from sync_cases import messages_sent
from torch import nn as torch_nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from leannorm import nn
from leannorm.distributed import checkpoint_contexts, no_sync

EXACT = 1e-13  # float64, values of order one


class Split(torch.autograd.Function):
    """This rank's rows of what all ranks have; its gradient has every rank's rows, put together by a sum."""

    @staticmethod
    def forward(ctx, x, start, stop):
        ctx.span = (start, stop, x.shape)
        return x[start:stop].clone()

    @staticmethod
    def backward(ctx, dy):
        return Join.apply(dy, *ctx.span), None, None


class Join(torch.autograd.Function):
    """All ranks' rows, put together by a sum; the inverse of `Split`, and its gradient."""

    @staticmethod
    def forward(ctx, part, start, stop, shape):
        ctx.span = (start, stop)
        whole = part.new_zeros(shape)
        whole[start:stop] = part
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, dwhole):
        return Split.apply(dwhole, *ctx.span), None, None, None


def derivatives_of_a_function_of_all_ranks(rank):
    """Both ranks change the same input by the same amounts, so both check the same function."""
    layer = nn.SyncBatchNorm(2, dtype=torch.float64)
    start, stop = ((0, 1), (1, 3))[rank]

    def function(x, weight, bias):
        y = torch.func.functional_call(layer, {"weight": weight, "bias": bias}, Split.apply(x, start, stop))
        return Join.apply(y.tanh(), start, stop, x.shape)

    torch.manual_seed(0)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None

    def of_x(x):  # the weight's and bias's gradients are one rank's share, as DDP expects
        return function(x, weight.detach(), bias.detach())

    return gradcheck(of_x, (x,)) and gradgradcheck(of_x, (x,))


def test_gradgradcheck_on_two_ranks():
    assert ranks(2, derivatives_of_a_function_of_all_ranks) == [True, True]


def penalty(layer, x):
    """The gradient penalty of Wasserstein GANs: the norm of each sample's input gradient."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).tanh().square().sum(), x, create_graph=True)
    loss = (gradient.square().sum((1, 2)) + 1e-3).sqrt().sub(1).square().sum()
    loss.backward()
    return loss.detach(), x.grad, layer.weight.grad


def penalty_of_shares(rank, share, x, weight):
    layer = nn.SyncBatchNorm(len(weight), dtype=torch.float64)
    layer.weight.data.copy_(weight)
    loss, dx, dweight = penalty(layer, x[share[rank] : share[rank + 1]])
    dist.all_reduce(loss)
    dist.all_reduce(dweight)
    return loss, dx, dweight


@pytest.mark.parametrize("share", [(0, 2, 6), (0, 6, 6), (0, 1, 2, 6)])
def test_gradient_penalty_equals_one_process(share):
    x, weight = torch.randn(6, 3, 4, dtype=torch.float64), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    layer = torch_nn.BatchNorm1d(3, dtype=torch.float64)
    layer.weight.data.copy_(weight)
    loss, dx, dweight = penalty(layer, x)
    found = ranks(len(share) - 1, penalty_of_shares, share, x, weight)
    assert (torch.cat([f[1] for f in found]) - dx).abs().max() <= EXACT
    for got in found:
        assert (got[0] - loss).abs() <= EXACT * loss
        assert (got[2] - dweight).abs().max() <= EXACT * dweight.abs().max()


def network():
    return torch_nn.Sequential(torch_nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4, momentum=None), torch_nn.ReLU())


def compiled(rank, backend):
    """Compiled and not, on batches of other sizes on each rank, one of them empty."""
    model = network()
    twin = copy.deepcopy(model)
    fast = torch.compile(twin, fullgraph=True, backend=backend, dynamic=False)
    for size in (2 + rank, 2 * rank):
        x = torch.randn(size, 3, 5, 5)
        a, b = (x.clone().requires_grad_() for _ in range(2))
        y, z = model(a), fast(b)
        y.square().sum().backward()
        z.square().sum().backward()
        for one, other in ((y, z), (a.grad, b.grad), (model[0].weight.grad, twin[0].weight.grad)):
            assert one.numel() == 0 or (one - other).abs().max() <= 1e-4 * max(1, one.abs().max()), size
    assert twin[1].num_batches_tracked == 2
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert (one - other).abs().max() <= 1e-6
    return True


def two_layers_compiled(rank):
    """Two layers with nothing between them that an empty batch would keep in order, by inductor."""
    model = torch_nn.Sequential(nn.SyncBatchNorm(4), torch_nn.ReLU(), nn.SyncBatchNorm(4))
    fast = torch.compile(copy.deepcopy(model), fullgraph=True, dynamic=False)
    x = torch.randn(2 * rank, 4, 5)
    a, b = (x.clone().requires_grad_() for _ in range(2))
    model(a).square().sum().backward()
    fast(b).square().sum().backward()
    return torch.allclose(a.grad, b.grad, atol=1e-5)


@pytest.mark.conformance
def test_inductor_keeps_the_order_of_the_sums():
    assert ranks(2, two_layers_compiled) == [True, True]


def test_compiles_to_one_graph():
    assert ranks(2, compiled, "aot_eager") == [True, True]


def compiled_and_checkpointed(rank, backend):
    """What the backward pass repeats has one sum a layer and pass, and the same gradients; eagerly too."""
    calls = messages_sent()
    model = torch_nn.Sequential(network(), torch_nn.Conv2d(4, 4, 3), nn.SyncBatchNorm(4))
    twin = copy.deepcopy(model)

    def run(x):
        return checkpoint(twin, x, use_reentrant=False, context_fn=checkpoint_contexts)

    fast = torch.compile(run, fullgraph=True, backend=backend) if backend else run
    x, found = torch.randn(2 + rank, 3, 7, 7), []
    for function, owner in ((model, model), (fast, twin)):
        function(x)  # messages grow to their size, the compiler runs
        calls.clear()
        a = x.clone().requires_grad_()
        y = function(a)
        forward = len(calls)
        y.square().sum().backward()
        found.append((y, a.grad, owner[0][0].weight.grad, *owner.buffers(), forward, len(calls)))
    assert found[0][-2:] == found[1][-2:] == (2, 4)
    return max((a - b).abs().max().item() for a, b in zip(found[0][:-2], found[1][:-2], strict=True))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.sampled(of=2)
def test_compiled_under_checkpointing(backend):
    assert max(ranks(2, compiled_and_checkpointed, backend)) <= (1e-5 if backend else 0)


def counted(rank, channels):
    """Collectives and their bytes, of one forward and backward of each layer, after the first step."""
    sizes = messages_sent()
    found = []
    layers = [nn.SyncBatchNorm(c) for c in channels]
    for step in range(2):
        sizes.clear()
        for layer in layers:
            layer(torch.randn(4, layer.num_features, requires_grad=True)).square().sum().backward()
        found.append((step, [8 * size for size in sizes]))
    for layer in layers:
        sizes.clear()
        layer.eval()(torch.randn(4, layer.num_features, requires_grad=True)).sum().backward()
        with no_sync():
            layer.train()(torch.randn(4, layer.num_features, requires_grad=True)).sum().backward()
        assert not sizes
    return found


SIZES = [((3, 126), 4096), ((3, 127), 8192), ((64, 512), 20480), ((2048,), 69632)]


@pytest.mark.parametrize(("channels", "size"), SIZES)
def test_one_collective_each_way_of_one_size(channels, size):
    """4 C + 7 values of 8 bytes, rounded up to a multiple of 4 KiB; on any number of ranks."""
    for world in (2, 3):
        for found in ranks(world, counted, channels):
            step, sizes = found[-1]
            assert step == 1
            assert sizes == [size] * 2 * len(channels)


def test_the_function_transform_of_one_rank():
    x = torch.randn(4, 3)
    layer = nn.SyncBatchNorm(3, track_running_stats=False)
    gradient = torch.func.grad(lambda v: layer(v).pow(3).sum())(x)
    x.requires_grad_()
    layer(x).pow(3).sum().backward()
    assert (gradient - x.grad).abs().max() <= 1e-5
