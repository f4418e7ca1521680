"""What `lean()` saves on common networks: bytes, time, and the batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from leannorm._report import Table
from leannorm.report.demo.networks import VisionTransformer, resnet50
from leannorm.report.fit import FitReport, fit
from leannorm.report.memory_report import Measured, MemoryReport, setting_table
from leannorm.report.profile import profile

MEMORY = "16 GB"  # the memory for which the largest batch is searched, with images of 224×224


class Network(NamedTuple):
    """A network, the images that it is measured on, and one image of the size for the largest batch."""

    name: str
    make: Callable[[], nn.Module]
    images: tuple[int, int, int, int]
    sample: tuple[int, int, int] = (3, 224, 224)


NETWORKS = (
    Network("ResNet-50", resnet50, (4, 3, 128, 128)),
    Network("vision transformer", VisionTransformer, (2, 3, 224, 224)),
)


class Saved(NamedTuple):
    """One network's step, in plain PyTorch and under each setting of `lean()`, and the largest batches in a
    memory."""

    network: str
    steps: MemoryReport
    batches: FitReport

    @property
    def leanest(self) -> Measured:
        """The setting that keeps least."""
        return min(self.steps.settings, key=lambda setting: setting.kept)

    @property
    def larger_batch(self) -> float:
        """The largest batch under the leanest setting, relative to plain PyTorch."""
        sizes = {one.name: one.batch for one in self.batches.fits}
        return sizes[self.leanest.name] / sizes["stock"]

    def table(self) -> Table:
        """The settings: bytes, time, gradients, and the largest batch."""
        table = setting_table(self.steps)
        batches = {fit.name: str(fit.batch) for fit in self.batches.fits}
        rows = [[*row, batches.get(row[0], "–")] for row in table.rows]
        return Table([*table.columns, f"batch in {self.batches.available}"], rows, table.title)


def measured(
    device: str,
    networks: Sequence[Network] = NETWORKS,
    memory: str = MEMORY,
    progress: Callable[[str], None] = lambda doing: None,
) -> Iterator[Saved]:
    """Run a few steps of each network on random images, then find the largest batches on fake tensors.

    >>> layers = lambda: torch.nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    >>> small = Network("small", layers, (2, 3, 9, 9), (3, 9, 9))
    >>> next(measured("cpu", [small], "1MB")).network
    'small'
    """
    for name, make, images, sample in networks:
        torch.manual_seed(0)
        progress(f"{name}: plain PyTorch and under lean()")
        say = partial(_of_network, name, progress)
        report = profile(make().to(device), torch.randn(images, device=device), steps=3, progress=say)
        report.model = name
        progress(f"{name}: the largest batch in {memory}")
        yield Saved(name, report, fit(make, sample, memory, progress=say))


def _of_network(name: str, progress: Callable[[str], None], doing: str) -> None:
    progress(f"{name}: {doing}")
