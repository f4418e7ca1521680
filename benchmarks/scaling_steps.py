"""A training step of each norm that `benchmarks.scaling` counts, and what it requests of torch.distributed.

Torch's own SyncBatchNorm has no kernels for CPUs. Here plain formulas replace its five kernels, so that its
exchange between ranks is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.scaling import CHANNELS, GROUP, GROUPS, OURS, PLAN, PLANS, TOKENS, TORCHS, Collective
from leannorm import lean, nn
from leannorm.saving.small import NEVER_SMALL

Step = Callable[[], object]
_NAMED = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "allgather_": "all_gather"}
_NAMED |= {"broadcast_": "broadcast", "all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather"}
_SILENT = {"wait_tensor", "_wrap_tensor_autograd"}


class Recorder(TorchDispatchMode):
    """Records every collective of torch.distributed and of DTensors that runs within it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its operations arrive again, on local tensors
        name = func._opname
        if func.namespace in ("c10d", "_c10d_functional") and name not in _SILENT:
            given = args[1] if name in ("allgather_", "_allgather_base_") else args[0]
            tensors = [given] if isinstance(given, Tensor) else given
            self.found.append(Collective(_NAMED[name], sum(t.nbytes for t in tensors)))
        return func(*args, **(kwargs or {}))


# ------------------------------------------------ a step of each norm


def torchs_kernels() -> torch.library.Library:
    """Formulas for the kernels of torch.nn.SyncBatchNorm that exist only on devices."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    over = (0, 2, 3)

    def of_channel(v: Tensor) -> Tensor:
        return v.view(1, -1, 1, 1)

    def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x.mean(over), (x.var(over, correction=0) + eps).rsqrt()

    def merge(
        x: Tensor, means: Tensor, rstds: Tensor, _m: Any, _v: Any, _f: Any, eps: float, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        of = counts[:, None] / counts.sum()
        center = (means * of).sum(0)
        var = ((rstds.pow(-2) - eps + (means - center).square()) * of).sum(0)
        return center, (var + eps).rsqrt()

    def normalize(x: Tensor, w: Tensor, b: Tensor, center: Tensor, rstd: Tensor, eps: float) -> Tensor:
        return (x - of_channel(center)) * of_channel(rstd * w) + of_channel(b)

    def reduce(dy: Tensor, x: Tensor, center: Tensor, rstd: Tensor, *_: Any) -> tuple[Tensor, ...]:
        with_x = (dy * (x - of_channel(center))).sum(over)
        return dy.sum(over), with_x, with_x * rstd, dy.sum(over)

    def gradient(
        dy: Tensor, x: Tensor, center: Tensor, rstd: Tensor, w: Tensor, s: Tensor, t: Tensor, n: Tensor
    ) -> Tensor:
        q = of_channel(t * rstd.square() / n.sum())
        return (dy - of_channel(s / n.sum()) - (x - of_channel(center)) * q) * of_channel(rstd * w)

    kernels = [stats, merge, normalize, reduce, gradient]
    names = ["stats", "gather_stats_with_counts", "elemt", "backward_reduce", "backward_elemt"]
    for name, kernel in zip(names, kernels, strict=True):
        library.impl(f"batch_norm_{name}", kernel)
    return library


def _torchs(weight: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor]:
    from torch.nn.modules._functions import SyncBatchNorm

    group = dist.distributed_c10d._get_default_group()
    return lambda x: SyncBatchNorm.apply(x, weight, bias, None, None, 1e-5, 0.1, group, dist.get_world_size())


def _plain(layer: Callable[[Tensor], Tensor], world: int) -> Step:
    """A step on images. Results are checked against one process with all ranks' images, or its own."""
    seed, mine = torch.Generator().manual_seed(0), slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    x, dy = (torch.randn(2 * world, CHANNELS, 4, 4, generator=seed) for _ in range(2))
    shares = type(layer) is not nn.BatchNorm2d
    whole = (x if shares else x[mine]).double().requires_grad_()
    exact = torch.nn.functional.batch_norm(whole, None, None, training=True)
    exact.backward((dy if shares else dy[mine]).double())
    leaf = x[mine].clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy[mine])
    for found, expected in ((y, exact), (leaf.grad, whole.grad)):
        assert found is not None
        assert expected is not None
        expected = expected[mine] if shares else expected
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    return lambda: layer(leaf).backward(dy[mine])


def _sharded(layer: torch.nn.Module, mesh: Any, local: Tensor, placement: Any, shape: Sequence[int]) -> Step:
    """A step on DTensors, with the sum of the weights' gradients."""
    from torch.distributed.tensor import DTensor, distribute_module

    distribute_module(layer, mesh)
    strides = torch.empty(shape, device="meta").stride()
    whole: dict[str, Any] = {"run_check": False, "shape": torch.Size(shape), "stride": strides}
    leaf = local.requires_grad_()

    def step() -> None:
        y = layer(DTensor.from_local(leaf, mesh, [placement], **whole))
        y.backward(torch.ones_like(y))
        for p in layer.parameters():
            p.grad.full_tensor()  # type: ignore[union-attr]
            p.grad = None

    return step


def row_norms(world: int) -> dict[str, Step]:
    """Steps of row norms on DTensors: what torch sends between and after them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh, (samples, positions) = init_device_mesh("cpu", (world,)), TOKENS
    tokens = torch.randn(samples, positions, CHANNELS)
    long, wide = (samples, positions * world, CHANNELS), (samples, positions, CHANNELS * world)

    def step(width: int, placement: Any, shape: Sequence[int]) -> Step:
        return _sharded(nn.LayerNorm(width), mesh, tokens.clone(), placement, shape)

    return {
        "layer norm, whole on each rank": step(CHANNELS, Replicate(), tokens.shape),
        "layer norm, positions cut": step(CHANNELS, Shard(1), long),
        "layer norm, rows cut": step(wide[2], Shard(2), wide),
    }


class _Network(torch.nn.Sequential):
    def __init__(self) -> None:
        blocks = [
            (torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.SyncBatchNorm(CHANNELS), torch.nn.SiLU())
            for _ in range(2)
        ]
        super().__init__(*(m for block in blocks for m in block))


def steps(world: int) -> dict[str, Step]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    weight, bias = torch.ones(CHANNELS, requires_grad=True), torch.zeros(CHANNELS, requires_grad=True)
    samples, groups = GROUPS
    slab = torch.randn(samples, CHANNELS, 2, 4)
    plan = torch.zeros(PLAN, dtype=torch.uint8)
    return {
        "batch norm": _plain(nn.BatchNorm2d(CHANNELS), world),
        OURS: _plain(nn.SyncBatchNorm(CHANNELS), world),
        **row_norms(world),
        TORCHS: _plain(_torchs(weight, bias), world),
        GROUP: _sharded(
            nn.GroupNorm(groups, CHANNELS),
            init_device_mesh("cpu", (world,)),
            slab,
            Shard(2),
            (samples, CHANNELS, 2 * world, 4),
        ),
        PLANS: lambda: dist.broadcast(plan, 0),
    }


def under_lean(world: int) -> tuple[list[Collective], list[Collective], bool]:
    """The collectives of a network without and with a plan, and whether all ranks have the same plan.

    The ranks have different numbers of samples.
    """
    model, found = _Network(), []
    for planned in (False, True):
        for _ in range(3):
            saved = lean(budget=0.5)
            saved.place = NEVER_SMALL
            x = torch.randn(2 + dist.get_rank() % 2, CHANNELS, 8, 8)
            with Recorder() as recorder:
                if planned:
                    with saved:
                        loss = model(x).square().mean()
                else:
                    loss = model(x).square().mean()
                loss.backward()
        found.append(recorder.found)
    mine = torch.tensor([r.rebuilt for r in saved.records], dtype=torch.uint8)
    every = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(every, mine)
    return found[0], found[1], all(torch.equal(e, mine) for e in every) and bool(mine.any())
