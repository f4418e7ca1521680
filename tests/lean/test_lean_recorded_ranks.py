"""The log of operators (csrc/nodes/record/) on several ranks: the bits of plain PyTorch.

Rank 0 alone may rebuild: if a rebuild sent anything, the ranks would wait for ever.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lean_ranks import kept, local, mesh_of_all, no_pass_is_small, searching
from ranks import ranks
from torch import Tensor, nn

from leannorm.autograd.nodes import NODES
from leannorm.nn import SyncBatchNorm

pytestmark = pytest.mark.skipif(NODES is None or not dist.is_available(), reason="the log is C++")

SETTINGS: list[dict[str, Any]] = [
    {"recompute": "norm"},
    {"recompute": "conv"},
    {"recompute": "conv", "verify": True},
    {"recompute": "conv", "held": (Tensor.clone, Tensor.clone)},
]


def recording() -> None:
    no_pass_is_small()


# ------------------------------------------------ ways to share a model


def blocks(channels: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels), nn.SiLU(), nn.GroupNorm(4, channels)
        ),
        nn.Sequential(nn.Conv2d(channels, channels, 3), SyncBatchNorm(channels), nn.GELU()),
        nn.Sequential(nn.Flatten(2), nn.Linear(100, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 100)),
    )


def ddp(model: nn.Module, **settings: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, **settings)


def units(model: nn.Module, **settings: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for part in model:  # type: ignore[attr-defined]
        fully_shard(part, mesh=mesh_of_all(), **settings)
    return fully_shard(model, mesh=mesh_of_all(), **settings)


def units_along_columns(model: nn.Module) -> nn.Module:
    """Shards along another axis are copied by another operator when they are gathered."""
    from torch.distributed.tensor import Shard

    return units(model, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else Shard(0))


def flat(model: nn.Module, **settings: Any) -> nn.Module:
    """FSDP of the first kind: one flat weight a unit."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({nn.Sequential})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **settings)


WAYS: dict[str, Any] = {
    "ddp": ddp,
    "ddp, buckets are views": lambda model: ddp(model, gradient_as_bucket_view=True, bucket_cap_mb=1),
    "ddp, static": lambda model: ddp(model, static_graph=True),
    "units": units,
    "units that stay": lambda model: units(model, reshard_after_forward=False),
    "units that all go": lambda model: units(model, reshard_after_forward=True),
    "units along columns": units_along_columns,
    "flat": flat,
    "flat, own weights": lambda model: flat(model, use_orig_params=True),
}


def trained(way: str, setting: dict[str, Any] | None, twice: bool = False) -> tuple[list[Tensor], float]:
    model = WAYS[way](blocks())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found, share = list[Tensor](), 1.0
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn((4, 3, 14, 14), generator=generator)
        with nullcontext() if setting is None else searching(setting) as saved:
            y = model(x)
            loss = y.square().mean() + (model(x * 2).tanh().mean() if twice else 0.0)
        loss.backward()
        share = 1.0 if setting is None else kept(saved)
        found += [loss.detach(), *(local(p.grad).clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(local(t).detach().clone() for t in (*model.parameters(), *model.buffers()))], share


def trainings(rank: int, way: str, twice: bool) -> list[float]:
    recording()
    stock, _ = trained(way, None, twice)
    shares = []
    for setting in SETTINGS:
        ours, share = trained(way, setting, twice)
        assert len(ours) == len(stock)
        assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True)), (way, setting)
        shares.append(share)
    mine, _ = trained(way, SETTINGS[1] if rank == 0 else None, twice)
    assert all(torch.equal(a, b) for a, b in zip(mine, stock, strict=True)), way
    return shares


@pytest.mark.parametrize("way", WAYS)
def test_networks_train_to_the_bits_of_plain_torch(way: str) -> None:
    for shares in ranks(2, trainings, way, False, group_timeout=30.0):
        assert all(share < (0.8 if "flat" in way else 0.5) for share in shares), shares


@pytest.mark.parametrize("way", ["units", "units along columns", "flat"])
def test_a_model_that_runs_twice_in_a_pass(way: str) -> None:
    """Weights are gathered again where calls have read them before: what they held, they hold again."""
    ranks(2, trainings, way, True, group_timeout=30.0)
