"""DTensors: converted layers under tensor and sequence parallelism, over two ranks."""

import copy
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from ranks import ranks
from torch import nn as torch_nn

from leannorm import convert, functional, lean, nn
from leannorm._torch import RELEASE
from leannorm.saving import reasons


def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2,))


@contextmanager
def lacking_in_torch():
    """Releases before 2.13 cannot compute a batch norm in shards: then neither can stock layers."""
    try:
        yield
    except NotImplementedError as error:
        if RELEASE >= (2, 13) or "Operator aten." not in str(error):
            raise


class Block(torch_nn.Module):
    """A pre-norm block, as torch's guide to tensor parallelism shards it."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.up, self.down = norm, torch_nn.Linear(16, 32), torch_nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch_nn.functional.gelu(self.up(self.norm(x))))


def sequence_parallel(rank, norm, order, compiling):
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    own = Block(norm(16))
    with torch.no_grad():
        for p in own.norm.parameters():
            p.uniform_(0.5, 1.5)
    model = copy.deepcopy(own)
    if order == "before":
        convert(model)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=True),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    model = parallelize_module(model, mesh(), plan)
    model = parallelize_module(
        model, mesh(), PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
    )
    model = parallelize_module(
        model, mesh(), PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    )
    if order == "after":
        convert(model)
    assert type(model.norm).__module__.startswith("leannorm")
    x = torch.randn(2, 6, 16)
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    own(leaf).square().sum().backward()
    run = torch.compile(model, backend="aot_eager") if compiling else model
    run(other).square().sum().backward()
    torch.testing.assert_close(other.grad, leaf.grad)
    for ours, theirs in zip(model.parameters(), own.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("norm", [torch_nn.LayerNorm, torch_nn.RMSNorm])
def test_sequence_parallel(norm, order):
    ranks(2, sequence_parallel, norm, order, False)


def test_sequence_parallel_compiled():
    ranks(2, sequence_parallel, torch_nn.RMSNorm, "before", True)


def every_function(rank):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    there = mesh()
    x, r, g = (torch.randn(4, 6, 16) for _ in range(3))
    w, b = torch.rand(16) + 0.5, torch.randn(16)
    images, c, d = torch.randn(4, 8, 3, 3), torch.rand(8) + 0.5, torch.randn(8)
    mean, var = torch.randn(8), torch.rand(8) + 0.5
    calls = [
        (functional.layer_norm, (x, (16,), w, b), {}),
        (functional.rms_norm, (x, (16,), w), {"weight_offset": 1.0, "cast": "before"}),
        (functional.add_layer_norm, (x, r, (16,), w, b), {}),
        (functional.add_rms_norm, (x, r, (16,), w), {}),
        (functional.gated_rms_norm, (x, g, (16,), w), {}),
        (functional.ada_layer_norm, (x, (16,), torch.rand(4, 1, 16), torch.rand(4, 1, 16)), {}),
        (functional.group_norm, (images, 4, c, d), {}),
        (functional.group_norm_act, (images, 4, c, d), {"act": "silu"}),
        (functional.instance_norm, (images, None, None, c, d), {}),
        (functional.batch_norm, (images, None, None, c, d, True), {}),
        (functional.batch_norm, (images, mean, var, c, d), {}),
        (functional.batch_norm_act, (images, mean, var, c, d), {"act": "relu"}),
    ]

    def spread(value, placement):
        return distribute_tensor(value, there, [placement]) if isinstance(value, torch.Tensor) else value

    for function, (input, *rest), named in calls:
        whole = function(input, *rest, **named)
        for placement in (Shard(0), Replicate()):
            parts = None
            given = [
                spread(v, placement if getattr(v, "shape", ()) == input.shape else Replicate()) for v in rest
            ]
            with lacking_in_torch():
                parts = function(spread(input, placement), *given, **named)
            if parts is None:
                continue
            for y, z in zip(*(v if isinstance(v, tuple) else (v,) for v in (parts, whole)), strict=True):
                torch.testing.assert_close(y.full_tensor(), z, msg=f"{function.__name__} {placement}")


def test_every_function():
    ranks(2, every_function)


def statistics_of_all(rank, layer):
    """Running statistics are those of the whole batch; `convert(to="torch")` goes back."""
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    x, layer = torch.randn(4, 8, 3, 3), copy.deepcopy(layer)  # what is passed to ranks shares its memory
    whole = copy.deepcopy(layer)
    whole(x)
    model = distribute_module(layer, mesh())
    cut = distribute_tensor(x, mesh(), [Shard(0)])
    model(cut)
    for ours, theirs in zip(model.buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    torch.testing.assert_close(model.eval()(cut).full_tensor(), whole.eval()(x))
    with lacking_in_torch():
        stock = convert(torch_nn.Sequential(model), to="torch").train()
        assert stock(cut).shape == x.shape


def test_statistics_that_move():
    for layer in (nn.BatchNorm2d(8, momentum=None), nn.InstanceNorm2d(8, track_running_stats=True)):
        ranks(2, statistics_of_all, layer)


def under_lean(rank):
    """A converted layer's output is rebuilt from DTensors; gradients are stock's to the bit."""
    from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

    model = torch_nn.Sequential(torch_nn.Linear(64, 64), torch_nn.GELU(), torch_nn.LayerNorm(64))
    model = convert(distribute_module(model, mesh()))
    found = []
    for context in (nullcontext(), lean("norm"), lean(budget=0.5)):
        x = distribute_tensor(torch.ones(64, 64), mesh(), [Replicate()]).requires_grad_()
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with context as saved:
                loss = model(x).square().sum()
        loss.backward()
        found.append([x.grad.to_local(), *(p.grad.to_local().clone() for p in model.parameters())])
        if saved is not None:
            assert reasons.SUBCLASSES not in saved.reasons
            # by autograd's node, or by the operator of our norm, where operators are recorded
            names = [r.node for r in saved.records if r.rebuilt]
            assert any("_FromTorchTensor" in name or name == "leannorm::row_forward" for name in names), names
            assert all(torch.equal(a, b) for a, b in zip(found[0], found[-1], strict=True))


def test_under_lean():
    ranks(2, under_lean)
