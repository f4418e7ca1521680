"""Random splits of a batch over ranks, as data: what each rank gets, and what the layer is made of.

Also a count of what ranks send.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from leannorm.distributed import group

# beside float32, float64, bfloat16 and float16
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
SPATIAL = ((), (7,), (5, 6), (2, 3, 4))


@dataclass(frozen=True)
class Case:
    """`shapes` are the ranks' inputs; image sizes may differ, and a batch may be empty."""

    seed: int
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    offset: float
    channels_last: bool
    affine: bool
    track_running_stats: bool
    momentum: float | None
    training: bool

    def inputs(self) -> list[Tensor]:
        """Every rank's input, the same on every rank that asks."""
        generator = torch.Generator().manual_seed(self.seed)
        xs = [(torch.randn(s, generator=generator) + self.offset).to(self.dtype) for s in self.shapes]
        if self.channels_last and len(self.shapes[0]) == 4:
            xs = [x.contiguous(memory_format=torch.channels_last) for x in xs]
        return xs

    def gradients(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return [torch.randn(s, generator=generator).to(self.dtype) for s in self.shapes]

    def flat(self, tensors: list[Tensor]) -> Tensor:
        """All ranks' values as one batch (1, C, L), which is what batch norm sees of them."""
        return torch.cat([t.movedim(1, 0).flatten(1) for t in tensors], dim=1)[None]


def random_cases(world: int, number: int) -> list[Case]:
    draw = random.Random(world)
    cases = []
    while len(cases) < number:
        channels, spatial = draw.choice((1, 3, 8)), draw.choice(SPATIAL)
        shapes = []
        for _ in range(world):
            size = [max(1, s + draw.choice((-1, 0, 0, 1))) for s in spatial]
            shapes.append((draw.choice((0, 1, 1, 2, 3, 5)), channels, *size))
        track = draw.random() < 0.8
        case = Case(
            seed=draw.randrange(10**6),
            dtype=draw.choice(DTYPES),
            shapes=tuple(shapes),
            offset=draw.choice((0.0, 0.0, 3.0, 100.0)),
            channels_last=draw.random() < 0.3,
            affine=draw.random() < 0.8,
            track_running_stats=track,
            momentum=draw.choice((0.1, 0.5, None)),
            training=not track or draw.random() < 0.9,  # else a rank is on its own
        )
        if sum(t.numel() for t in case.inputs()) // channels > 1:  # else there is no variance to speak of
            cases.append(case)
    return cases


def messages_sent() -> list[int]:
    """In this process, from now on: the size of every sum over the ranks, in values, as a list that grows."""
    sizes, all_reduce, gathered = [], dist.all_reduce, group.Gathered

    def noted(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    def noted_gather(total, *args):
        sizes.append(total.numel())
        return gathered(total, *args)

    dist.all_reduce, group.Gathered = noted, noted_gather
    return sizes
