"""`lean()` in pipelines: passes of several micro-batches are under way at once, each with what it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lean_ranks import kept, no_pass_is_small
from ranks import ranks
from test_lean_units import SETTINGS, Block
from torch import Tensor, nn

from leannorm.saving import make_lean
from leannorm.saving.models import last_pass

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

BATCHES = 4
MOST = (0.58, 0.22, 0.31)  # of its bytes, what a pass holds with each of the settings
# stages of a rank, and how many passes are under way on rank 0 at the most
SCHEDULES = {
    "1F1B": (1, 2),
    "GPipe": (1, 4),
    "Interleaved1F1B": (2, 4),
    "LoopedBFS": (2, 8),
    "InterleavedZeroBubble": (2, 4),
}


class Passes:
    """What each pass of a model holds, and how many were under way at once."""

    def __init__(self) -> None:
        self.held: list[float] = []
        self.under_way = self.most = 0

    def begun(self, model: nn.Module, inputs: Any, y: Tensor) -> None:
        self.held.append(kept(last_pass(model)))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        y.register_hook(self.ended)

    def ended(self, gradient: Tensor) -> None:
        self.under_way -= 1


def trained(rank: int, name: str, setting: dict[str, Any] | None) -> tuple[list[Tensor], Passes]:
    """On one of two ranks, which have a stage each or two."""
    from torch.distributed import pipelining

    torch.manual_seed(rank)
    of_rank, passes = SCHEDULES[name][0], Passes()
    parts = [nn.Sequential(Block(64), Block(64), Block(64)) for _ in range(of_rank)]
    for part in parts if setting is not None else ():
        make_lean(part, **setting)
    device = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(part, rank + 2 * i, 2 * of_rank, device) for i, part in enumerate(parts)
    ]
    schedule = getattr(pipelining, f"Schedule{name}")(
        stages if of_rank > 1 else stages[0], BATCHES, loss_fn=lambda y, t: (y - t).square().mean()
    )
    parameters = [p for part in parts for p in part.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        # in step 0 the schedule learns shapes by a pass of its own
        for part in parts if setting is not None and step == 1 else ():
            part.register_forward_hook(passes.begun)
        x, target = (torch.randn(32, 16, 64, generator=generator) for _ in range(2))
        schedule.step(*(() if rank else (x,)), **({"target": target} if rank else {}))
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in parameters], passes


def pipeline(rank: int, name: str) -> None:
    no_pass_is_small()
    stock, _ = trained(rank, name, None)
    of_rank, at_once = SCHEDULES[name]
    for setting, most in zip(SETTINGS, MOST, strict=True):
        ours, passes = trained(rank, name, setting)
        assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True)), setting
        assert len(passes.held) == 2 * BATCHES * of_rank
        assert max(passes.held) <= most, (setting, passes.held)
        assert passes.under_way == 0
        assert rank or passes.most >= at_once, (setting, passes.most)


@pytest.mark.parametrize(
    "name", [s if s == "1F1B" else pytest.param(s, marks=pytest.mark.conformance) for s in SCHEDULES]
)
def test_each_pass_of_a_pipeline_rebuilds_and_it_trains_to_the_bits_of_stock(name: str) -> None:
    ranks(2, pipeline, name, group_timeout=30.0)
