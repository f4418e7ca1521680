"""`lean()` on several ranks where one fails in a rebuild, has another plan, or has little of a tensor."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lean_ranks import local, mesh_of_all, no_pass_is_small, searching
from ranks import Outcome, outcomes, ranks
from torch import Tensor
from torch import nn as torch_nn

from leannorm import nn
from leannorm.saving import make_lean
from leannorm.saving.models import last_pass

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

TIMEOUT = 6.0
WAYS = ["shared", "ddp", "units", "columns"]


def network(way: str, width: int = 32) -> torch_nn.Module:
    """Shared statistics, DDP, FSDP2 of blocks or of single layers, or cut by columns and rows, with norms of
    DTensors along the batch."""
    torch.manual_seed(0)
    norm = nn.SyncBatchNorm if way == "shared" else torch_nn.LayerNorm
    blocks = [
        torch_nn.Sequential(norm(width), torch_nn.Linear(width, 3 * width), torch_nn.SiLU(),
                            torch_nn.Linear(3 * width, width))
        for _ in range(3)
    ]  # fmt: skip
    model: torch_nn.Module = torch_nn.Sequential(*blocks)
    if way == "ddp":
        return torch_nn.parallel.DistributedDataParallel(model)
    if way in ("units", "layers"):
        from torch.distributed.fsdp import fully_shard

        layers = [m for block in blocks for m in block if next(m.parameters(), None) is not None]
        for unit in blocks if way == "units" else layers:
            fully_shard(unit, mesh=mesh_of_all())
        return fully_shard(model, mesh=mesh_of_all())
    if way == "columns":
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        back = RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
        plan = {"*.0": SequenceParallel(sequence_dim=0), "*.1": ColwiseParallel(input_layouts=Shard(0))}
        return parallelize_module(model, mesh_of_all(), {**plan, "*.3": back})
    return model


def batch(way: str, width: int = 32, samples: int = 16) -> Tensor:
    """The same on every rank where ranks hold parts of the weights' products."""
    seed = 0 if way == "columns" else dist.get_rank()
    return torch.randn(samples, width, generator=torch.Generator().manual_seed(seed))


def loss_of(model: torch_nn.Module, way: str, width: int, samples: int) -> Tensor:
    y = model(batch(way, width, samples))
    y = y.full_tensor() if way == "columns" else y
    loss: Tensor = y.square().mean()
    return loss


# ------------------------------------------------ a rank that fails in a rebuild


class Dies:
    """Saved-tensor hooks of what `lean()` holds: a rebuild on rank 1 reads it, and does not come back."""

    def __init__(self, how: str) -> None:
        self.how, self.armed = how, False

    def pack(self, tensor: Tensor) -> Tensor:
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        if self.armed and dist.get_rank() == 1:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the disk with the held tensors is gone")
        return tensor


FAILURES = [  # each way once in the usual tests
    pytest.param(way, how, marks=[pytest.mark.conformance] * ((i + j) % 2))
    for i, way in enumerate([*WAYS, "layers", "pipeline"])
    for j, how in enumerate(["killed", "raises"])
]


def fails_in_a_pipeline(rank: int, how: str) -> None:
    """On three ranks: the one in the middle fails, with passes under way on all."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    no_pass_is_small()
    stage, hooks = network("stage", 96), Dies(how)
    make_lean(stage, "conv", held=(hooks.pack, hooks.unpack))
    of_rank = PipelineStage(stage, rank, 3, torch.device("cpu"))
    schedule = Schedule1F1B(of_rank, 4, loss_fn=lambda y, t: (y - t).square().mean())
    for step in range(3):
        hooks.armed = step == 2
        x = torch.ones(64, 96)
        schedule.step(*(() if rank else (x,)), **({"target": x} if rank == 2 else {}))
        saved = last_pass(stage)
        assert saved is not None
        assert saved.rebuilt_bytes > 0, (saved, saved.reasons)


def fails_in_a_rebuild(rank: int, way: str, how: str) -> None:
    if way == "pipeline":
        return fails_in_a_pipeline(rank, how)
    model, hooks = network(way, 96), Dies(how)
    for step in range(3):
        with searching({"recompute": "conv", "held": (hooks.pack, hooks.unpack)}) as saved:
            loss = loss_of(model, way, 96, 256)
        assert saved.rebuilt_bytes > 0, (saved, saved.reasons, len(saved.records))
        hooks.armed = step == 2
        loss.backward()


@pytest.mark.parametrize(("way", "how"), FAILURES)
def test_where_a_rank_fails_in_a_rebuild_the_others_raise_within_the_time_out(way: str, how: str) -> None:
    results: list[Outcome] = outcomes(
        3, fails_in_a_rebuild, way, how, group_timeout=TIMEOUT, deadline=6 * TIMEOUT
    )
    failed = results.pop(1)
    if how == "killed":
        assert failed.exitcode == -signal.SIGKILL
    else:
        assert failed.error is not None
        assert "the disk with the held tensors is gone" in failed.error
    for other in results:
        assert other.error is not None
        assert other.seconds < 3 * TIMEOUT
        if way == "shared":
            assert "SyncError" in other.error
            assert "rank 1 did not come" in other.error
        else:  # torch's own, as without lean()
            assert "RuntimeError" in other.error or "DistBackendError" in other.error, other.error


# ------------------------------------------------ ranks with other plans


def trained(way: str, setting: dict[str, Any] | None, width: int = 32, samples: int = 16) -> list[Tensor]:
    model = network(way, width)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        with nullcontext() if setting is None else searching(setting) as saved:
            loss = loss_of(model, way, width, samples)
        if setting == {"recompute": "conv"} and samples and width > 2:
            assert saved.rebuilt_bytes > saved.kept_bytes / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [*model.parameters(), *model.buffers(), loss]
    return [local(v).detach().clone() for v in found]


PLANS: list[dict[str, Any] | None] = [{"budget": 0.3}, {"overhead": 0.02}, {"recompute": "conv"}, None, {}]


def other_plans(rank: int) -> None:
    for way in WAYS:
        stock = trained(way, None)
        for turn in range(2):
            ours = trained(way, PLANS[(rank + 2 * turn) % len(PLANS)])
            assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True)), (way, turn)


def test_ranks_with_other_plans_train_to_the_bits_of_stock() -> None:
    ranks(3, other_plans, group_timeout=30.0)


# ------------------------------------------------ uneven and empty parts


def little(rank: int) -> None:
    """Weights of 10, 2 and 1 numbers over 3 ranks, and a rank without samples."""
    for way in ("units", "columns"):
        for width in (10, 2, 1):
            stock = trained(way, None, width, 512)
            for setting in ({}, {"recompute": "conv"}, {"budget": 0.3}):
                ours = trained(way, setting, width, 512)
                assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True)), (way, width)
    samples = 0 if rank == 1 else 50 + rank
    stock = trained("shared", None, samples=samples)
    for setting in ({}, {"recompute": "conv"}, {"budget": 0.3}):
        ours = trained("shared", setting, samples=samples)
        equal = [torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(ours, stock, strict=True)]
        assert all(equal), setting


def test_uneven_and_empty_parts_train_to_the_bits_of_stock() -> None:
    ranks(3, little, group_timeout=30.0)
