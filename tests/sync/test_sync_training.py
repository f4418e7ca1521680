"""SyncBatchNorm inside what people train with: DDP, FSDP2, accumulation, checkpointing, copies, groups."""

import copy
import inspect
import pickle
import socket
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from sync_cases import messages_sent
from torch import nn as torch_nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from leannorm import distributed, nn
from leannorm._errors import InputError
from leannorm.saving import lean

EXACT = 1e-14  # float64, values of order one
STEPS = 3


def network(norm):
    torch.manual_seed(0)
    layers = [torch_nn.Conv2d(3, 6, 3), norm(6), torch_nn.ReLU(), torch_nn.Flatten(), torch_nn.Linear(96, 4)]
    return torch_nn.Sequential(*layers).double()


def batches():
    torch.manual_seed(1)
    return [
        (torch.randn(8, 3, 6, 6, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64))
        for _ in range(STEPS)
    ]


def train(model, rows, wrapped=None, micro=1):
    """Losses are means over equal shares, so that averaged gradients are the whole batch's."""
    wrapped = model if wrapped is None else wrapped
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9)
    losses = []
    for x, t in batches():
        optimizer.zero_grad()
        for a, b in zip(x[rows].chunk(micro), t[rows].chunk(micro), strict=True):
            loss = (wrapped(a) - b).square().mean() / micro
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def differs(model, other):
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return max(
        (a - (b.full_tensor() if hasattr(b, "full_tensor") else b)).abs().max().item() for a, b in pairs
    )


def share(rank):
    return slice(4 * rank, 4 * rank + 4)


# whether rank 0's buffers are sent to all, by the name that this torch has for it
SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


def in_ddp(rank, sync_buffers):
    one, model = network(torch_nn.BatchNorm2d), network(nn.SyncBatchNorm)
    train(one, slice(None))
    train(model, share(rank), DistributedDataParallel(model, **{SYNC_BUFFERS: sync_buffers}))
    return differs(one, model)


@pytest.mark.parametrize("sync_buffers", [True, False])
def test_in_distributed_data_parallel(sync_buffers):
    assert max(ranks(2, in_ddp, sync_buffers)) <= EXACT


def in_fsdp(rank):
    one, model = network(torch_nn.BatchNorm2d), network(nn.SyncBatchNorm)
    train(one, slice(None))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    train(model, share(rank))
    return differs(one, model)


def test_in_fsdp2():
    assert max(ranks(2, in_fsdp)) <= EXACT


def interleaved(rank):
    """Two micro-batches a step: micro-batch k of both ranks together is the k-th of one process."""
    one, model = network(torch_nn.BatchNorm2d), network(nn.SyncBatchNorm)
    order = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])
    train(one, order, micro=2)
    train(model, share(rank), DistributedDataParallel(model), micro=2)
    return differs(one, model)


def test_with_gradient_accumulation():
    assert max(ranks(2, interleaved)) <= EXACT


def checkpointed(rank, reentrant):
    """The same gradients and statistics to the bit; as many collectives; two passes may be in flight."""
    calls = messages_sent()
    model, again = network(nn.SyncBatchNorm)[:3], network(nn.SyncBatchNorm)[:3]
    xs = [x[share(rank)] for x, _ in batches()]
    found = []
    for net, run in (
        (model, lambda net, x: net(x)),
        (again, lambda net, x: checkpoint(net, x, use_reentrant=reentrant)),
    ):
        calls.clear()
        inputs = [x.clone().requires_grad_() for x in xs]
        ys = [run(net, x) for x in inputs[:2]]
        for y in reversed(ys):
            y.square().sum().backward()
        run(net, inputs[2]).square().sum().backward()
        found.append((len(calls), [x.grad for x in inputs], net[1].state_dict(), net[0].weight.grad))
    (calls, dx, state, dw), (calls_again, dx_again, state_again, dw_again) = found
    assert calls == calls_again == 2 * len(xs)
    assert all(torch.equal(a, b) for a, b in zip(dx, dx_again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(state.values(), state_again.values(), strict=True))
    return torch.equal(dw, dw_again)


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_checkpointing(reentrant):
    assert all(ranks(2, checkpointed, reentrant))


def checkpointed_with_nan(rank, reentrant):
    """The gradients of one rank's bad batch, without checkpointing and with it."""
    found = []
    for again in (False, True):
        net = network(nn.SyncBatchNorm)[:3]
        x = batches()[0][0][share(rank)].clone()
        if rank == 0:
            x[0, 0, 0, 0] = torch.nan
        x.requires_grad_()
        y = checkpoint(net, x, use_reentrant=reentrant) if again else net(x)
        y.square().sum().backward()
        found.append([x.grad, *(p.grad for p in net.parameters())])
    for plain, repeated in zip(*found, strict=True):
        torch.testing.assert_close(repeated, plain, rtol=0, atol=0, equal_nan=True)
    return bool(found[1][0].isnan().any())


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_nan_on_one_rank_passes_through_checkpointing(reentrant):
    assert ranks(2, checkpointed_with_nan, reentrant, group_timeout=20.0) == [True, True]


def equal_on_one_rank(rank, reentrant):
    """Several passes in flight; rank 1's batches are all the same, as dummy batches are."""
    xs = [x[share(rank)] + step for step, (x, _) in enumerate(batches())]
    if rank == 1:
        xs = xs[:1] * len(xs)
    found = []
    for again in (False, True):
        net = network(nn.SyncBatchNorm)[:3]
        inputs = [x.clone().requires_grad_() for x in xs]
        ys = [checkpoint(net, x, use_reentrant=reentrant) if again else net(x) for x in inputs]
        sum(step * y.square().sum() for step, y in enumerate(ys, 1)).backward()
        found.append([*(x.grad for x in inputs), *(p.grad for p in net.parameters())])
    return all(torch.equal(plain, repeated) for plain, repeated in zip(*found, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_repeated_pass_has_its_own_statistics_where_a_ranks_batches_are_equal(reentrant):
    assert ranks(2, equal_on_one_rank, reentrant, group_timeout=20.0) == [True, True]


def lean_pass(rank):
    """Under `lean()` kernels rebuild outputs: no collective more, the same gradients to the bit."""
    calls = messages_sent()
    torch.manual_seed(rank)
    x, found = torch.randn(4, 3, 34, 34), []
    for context in (nullcontext(), lean("norm")):
        calls.clear()
        torch.manual_seed(0)
        layers = [torch_nn.Conv2d(3, 16, 3), nn.SyncBatchNorm(16), torch_nn.ReLU()]
        model = torch_nn.Sequential(*layers, torch_nn.Conv2d(16, 4, 3))
        with context as saved:
            loss = model(x).square().sum()
        loss.backward()
        found.append((len(calls), [p.grad for p in model.parameters()], list(model.buffers())))
    (plain, grads, buffers), (again, grads_again, buffers_again) = found
    assert plain == again == 2
    assert saved.rebuilt_bytes > 0
    assert all(torch.equal(a, b) for a, b in zip(buffers, buffers_again, strict=True))
    return all(torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True))


def test_under_lean():
    assert all(ranks(2, lean_pass))


def on_nodes(rank):
    """Two ranks a host: the mean of a rank's input is shared with its neighbour only."""
    socket.gethostname = lambda: f"host{rank // 2}"
    layer = nn.SyncBatchNorm(3, process_group="node", momentum=1.0)
    layer(torch.full((2, 3), float(rank)))
    dist.barrier()  # rank 0 serves the store that the others still make their group with
    return layer.running_mean[0].item()


def test_groups_of_a_node():
    assert ranks(4, on_nodes) == [0.5, 0.5, 2.5, 2.5]


def in_groups(rank):
    groups = dist.new_group([0, 2]), dist.new_group([1, 3])
    layer = nn.SyncBatchNorm(3, process_group=groups[rank % 2], momentum=1.0)
    twin = copy.deepcopy(layer)
    assert twin.process_group is layer.process_group
    for one in (layer, twin):
        one(torch.full((2, 3), float(rank)))
    with pytest.raises(InputError, match="contain this rank"):
        nn.SyncBatchNorm(3, process_group=groups[1 - rank % 2])(torch.ones(2, 3))
    dist.barrier()
    return layer.running_mean[0].item(), twin.running_mean[0].item()


def test_a_process_group_of_some_ranks():
    assert ranks(4, in_groups) == [(1.0, 1.0), (2.0, 2.0), (1.0, 1.0), (2.0, 2.0)]


def without_sync(rank):
    layer, local = nn.SyncBatchNorm(3), nn.BatchNorm1d(3)
    x = torch.randn(4, 3) + rank
    with distributed.no_sync():
        y = layer(x)
    return torch.equal(y, local(x)) and torch.equal(layer.running_var, local.running_var)


def test_no_sync():
    assert all(ranks(2, without_sync))


def joined(rank):
    """4 and 2 steps; the weights afterwards are those of one process, and the same on both ranks."""
    model = network(nn.SyncBatchNorm)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.001)
    x = batches()[0][0]
    with distributed.join(wrapped):
        for step in range(4 - 2 * rank):
            optimizer.zero_grad()
            wrapped(x[share(rank)] + step).square().sum().backward()
            optimizer.step()
    one = network(torch_nn.BatchNorm2d)
    optimizer = torch.optim.SGD(one.parameters(), 0.001)
    for step in range(4):
        optimizer.zero_grad()
        # DDP goes on dividing by the number of ranks that there were
        (one((x if step < 2 else x[share(0)]) + step).square().sum() / 2).backward()
        optimizer.step()
    return differs(one, model), {k: v.clone() for k, v in model.state_dict().items()}


def test_join_with_distributed_data_parallel():
    (error, state), (other_error, other) = ranks(2, joined)
    assert max(error, other_error) <= 1e-12  # a sum's gradients: values of order 100
    assert all(torch.equal(a, b) for a, b in zip(state.values(), other.values(), strict=True))


def autocast(rank):
    layer = nn.SyncBatchNorm(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch_nn.functional.conv2d(torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)))
    return y.dtype, layer.running_mean.dtype, layer.bfloat16()(torch.randn(2, 4).bfloat16()).dtype


def test_autocast_and_low_precision():
    assert ranks(2, autocast) == [(torch.bfloat16, torch.float32, torch.bfloat16)] * 2


def test_state_dict_repr_copies_and_pickles_are_those_of_torch():
    ours, theirs = nn.SyncBatchNorm(4, momentum=None), torch_nn.SyncBatchNorm(4, momentum=None)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert repr(ours) == f"leannorm.{theirs!r}"
    assert isinstance(ours, torch_nn.modules.batchnorm._BatchNorm)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(twin.running_var, ours.running_var)
        assert twin(torch.randn(3, 4)).shape == (3, 4)


BAD_ARGUMENTS = [
    ({"timeout": 0}, "timeout must be positive"),
    ({"timeout": -1.0}, "timeout must be positive"),
    ({"process_group": "host"}, "'node' or None"),
]


@pytest.mark.parametrize(("options", "text"), BAD_ARGUMENTS)
def test_bad_arguments(options, text):
    with pytest.raises(InputError, match=text):
        nn.SyncBatchNorm(3, **options)(torch.randn(2, 3))


def destroyed(rank):
    group = dist.new_group([0, 1])
    layer = nn.SyncBatchNorm(3, process_group=group)
    before = copy.deepcopy(layer.state_dict())
    layer(torch.randn(2, 3))
    dist.barrier()
    dist.destroy_process_group()
    state = copy.deepcopy(layer.state_dict())
    with pytest.raises(InputError, match="not initialized"):
        layer(torch.randn(2, 3))
    assert all(torch.equal(a, b) for a, b in zip(state.values(), layer.state_dict().values(), strict=True))
    assert list(before) == list(state)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return True


def test_a_group_that_is_gone():
    assert all(ranks(2, destroyed))


def without_collectives(rank):
    """gloo knows nothing of this device: said before the ranks connect a group for statistics."""
    layer = nn.SyncBatchNorm(3, device="meta")
    with pytest.raises(InputError, match="collectives for the input's device meta"):
        layer(torch.randn(2, 3, device="meta"))
    return len(dist.distributed_c10d._world.pg_map) == 1


def test_a_backend_without_the_devices_collectives():
    assert all(ranks(2, without_collectives))
