"""torch's own distributed tests of SyncBatchNorm (`test_DistributedDataParallel_SyncBatchNorm*`), written
again for gloo and our class: a local network and the same one in DDP agree, step by step."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch import nn as torch_nn
from torch.nn.parallel import DistributedDataParallel

from leannorm import nn
from leannorm.transforms import convert

WORLD = 2


def network(affine=True, spatial=True):
    torch.manual_seed(0)
    if spatial:
        layers = [torch_nn.Conv2d(3, 4, 2), torch_nn.BatchNorm2d(4, affine=affine), torch_nn.Conv2d(4, 4, 2)]
    else:
        layers = [torch_nn.Linear(3, 40), torch_nn.BatchNorm1d(40, affine=affine), torch_nn.Linear(40, 4)]
    return torch_nn.Sequential(*layers).double()


def agree(rank, options):
    """Two steps of a network on the whole batch, and of its converted copy on shares."""
    local = network(options.get("affine", True), options.get("spatial", True))
    shared = convert(copy.deepcopy(local), to="sync")
    memory_format = options.get("memory_format", torch.contiguous_format)
    if options.get("spatial", True):
        shared = shared.to(memory_format=memory_format)
    saved = io.BytesIO()
    torch.save(DistributedDataParallel(shared), saved)
    saved.seek(0)
    wrapped = torch.load(saved, weights_only=False)
    shared = wrapped.module
    sizes = options["sizes"]
    start = sum(sizes[:rank])
    for step in range(2):
        torch.manual_seed(100 + step)
        shape = (3, 5, 5) if options.get("spatial", True) else (3,)
        x = torch.randn(sum(sizes), *shape, dtype=torch.float64)
        for model, rows in ((local, x), (wrapped, x[start : start + sizes[rank]])):
            rows = rows.contiguous(memory_format=memory_format) if rows.dim() == 4 else rows
            model.zero_grad()
            # a sum over the shares, which DDP divides by the number of ranks
            (model(rows).square().sum() / (1 if model is wrapped else WORLD)).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 1e-3 * p.grad
    pairs = zip(local.state_dict().values(), shared.state_dict().values(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


OPTIONS = {
    "default": {"sizes": (4, 4)},
    "no affine": {"sizes": (4, 4), "affine": False},
    "2D input": {"sizes": (4, 4), "spatial": False},
    "channels last": {"sizes": (4, 4), "memory_format": torch.channels_last},
    "single input per process": {"sizes": (1, 1), "spatial": False},
    "different input sizes": {"sizes": (2, 6)},
    "single and many": {"sizes": (1, 7), "spatial": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_ddp_agrees_with_one_process(options):
    assert max(ranks(WORLD, agree, options)) <= 1e-12


def running_values(rank):
    """Ranks with inputs of different sizes: the running statistics are those of all values."""
    torch.manual_seed(0)
    model = DistributedDataParallel(convert(torch_nn.Sequential(torch_nn.BatchNorm2d(2)), to="sync"))
    values = [[torch.randn(1, 2, 4, 2 * (r + 1)) for r in range(WORLD)] for _ in range(10)]
    for inputs in values:
        model(inputs[rank]).sum().backward()
    oracle = torch_nn.BatchNorm1d(2)
    for inputs in values:
        oracle(torch.cat([v.flatten(2) for v in inputs], dim=2))
    for name, value in oracle.named_buffers():
        torch.testing.assert_close(model.module[0].get_buffer(name), value)
    return True


def test_running_values_of_different_input_sizes():
    assert all(ranks(WORLD, running_values))


def gradients_of_halves(rank):
    """float16 on a CPU: the gradient of the input is finite and of the input's dtype."""
    torch.manual_seed(rank)
    model = DistributedDataParallel(convert(torch_nn.Sequential(torch_nn.BatchNorm1d(3)), to="sync").half())
    x = torch.randn(5, 3, dtype=torch.half, requires_grad=True)
    model(x).sum().backward()
    return x.grad.dtype is torch.half and bool(x.grad.isfinite().all())


def test_halves():
    assert all(ranks(WORLD, gradients_of_halves))


def sums(layer, x):
    """How many sums over the ranks a forward and backward pass takes, and the output."""
    with torch.autograd.profiler.profile() as profile:
        y = layer(x.requires_grad_())
        y.sum().backward()
    sums_or_gathers = "c10d::allreduce_", "c10d::allgather_"
    return sum(event.name in sums_or_gathers for event in profile.function_events), y


def evaluation(rank, track):
    """One rank alone may evaluate, by its own batch's statistics where there are no running ones."""
    torch.manual_seed(0)
    layer = nn.SyncBatchNorm(2, momentum=0.99, track_running_stats=track)
    x = torch.randn(10, 2, 4, 4)
    assert sums(layer, x)[0] == 2
    alone = torch_nn.BatchNorm2d(2, momentum=0.99, track_running_stats=track)
    alone.load_state_dict(layer.state_dict())
    wrapped = DistributedDataParallel(layer, broadcast_buffers=False)
    if rank == 0:
        communications, y = sums(wrapped.module.eval(), x)
        assert communications == 0
        torch.testing.assert_close(y, alone.eval()(x))
        for _ in range(6):
            with torch.no_grad():
                torch.testing.assert_close(wrapped.eval()(x), y.detach())
    dist.barrier()
    return True


@pytest.mark.parametrize("track", [True, False])
def test_evaluation_needs_nobody(track):
    assert all(ranks(WORLD, evaluation, track))


def joined_strictly(rank):
    """DDP's own join, told to raise where a rank runs out: no rank waits in a layer."""
    model = DistributedDataParallel(convert(network(spatial=False), to="sync"))
    x = torch.randn(10, 3, dtype=torch.float64)
    why = "at least one rank that exhausted inputs" if rank == 0 else f"Rank {rank} exhausted all inputs"
    passes = []

    def train():
        with model.join(throw_on_early_termination=True):
            for step in range(5 if rank else 10):
                model(x).sum().backward()
                passes.append(step)

    with pytest.raises(RuntimeError, match=why):
        train()
    return len(passes)


def test_running_out_within_the_join_of_ddp():
    assert ranks(WORLD, joined_strictly) == [5, 5]


def groups_of_converted(rank):
    group = dist.new_group([0, 1])
    inner = torch_nn.Sequential(torch_nn.BatchNorm2d(3), torch_nn.Sequential(torch_nn.BatchNorm1d(3)))
    model = convert(torch_nn.Sequential(torch_nn.BatchNorm3d(3), inner), to="sync", process_group=group)
    layers = [layer for layer in model.modules() if isinstance(layer, torch_nn.modules.batchnorm._BatchNorm)]
    return len(layers) == 3 and all(layer.process_group is group for layer in layers)


def test_converted_layers_have_the_group():
    assert all(ranks(WORLD, groups_of_converted))
