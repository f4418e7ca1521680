"""Train the digit network in several ways with the same initial weights, batches and dropout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from leannorm._errors import InputError
from leannorm._freed_memory import keep_freed_memory
from leannorm.demo.digits import Digits, load
from leannorm.demo.network import DigitNetwork, Pair, lean_pair, loss_of, stock_pair
from leannorm.report.memory import check_device, measure_step
from leannorm.report.numerics import largest_difference
from leannorm.report.timing import time_step
from leannorm.saving import lean

# Relative, in float64: rounding through this network stays under 1e-12, a missing term shows at 1e-3.
SAME = 1e-9


@dataclass(frozen=True)
class Settings:
    """What to train on and how."""

    data: str = "digits"
    root: str | None = None
    epochs: int = 6
    batch_size: int = 256
    device: str = "cpu"
    seed: int = 0

    def check(self) -> None:
        """Raises InputError for numbers out of range and for a device that torch cannot use."""
        for name, least in (("epochs", 1), ("batch_size", 2)):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise InputError(f"--{flag} must be at least {least}; got {getattr(self, name)}")
        if not 0 <= self.seed < 1 << 63:
            raise InputError(f"--seed must be at least 0 and below 2**63; got {self.seed}")
        check_device(self.device)


@dataclass
class Side:
    """The measurements of one way to train; bytes and seconds are those of one training step.

    `time_ratio`: the median over the steps of its time divided by stock's time on the same batch.
    `gradient_difference`: the largest difference from stock's gradients on the first batch;
    `relative_difference`: divided by the largest gradient of the same parameter; `double_difference`: the
    relative difference with both networks in float64.
    """

    name: str
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    held: int = 0
    peak: int = 0
    step_seconds: float = 0.0
    time_ratio: float = 1.0
    gradient_difference: float = 0.0
    relative_difference: float = 0.0
    double_difference: float = 0.0

    @property
    def same_gradients(self) -> bool:
        return self.double_difference <= SAME


@dataclass
class Comparison:
    """All sides, stock first, and the settings of the run."""

    settings: Settings
    data_name: str
    images: int
    test_images: int
    threads: int
    freed_memory: str
    sides: list[Side]

    @property
    def passed(self) -> bool:
        """Do the gradients of every side equal stock's, except for rounding?"""
        return all(side.same_gradients for side in self.sides)

    @property
    def verdict(self) -> str:
        stock, *others = self.sides
        lines = [
            f"{side.name} holds {side.held / stock.held:.2f} of stock's bytes after the forward pass, "
            f"peaks at {side.peak / stock.peak:.2f} and takes {side.time_ratio:.2f} of the time; "
            + ("same gradients." if side.same_gradients else "its gradients differ by more than rounding.")
            for side in others
        ]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed, "verdict": self.verdict}


class Way(NamedTuple):
    """How one side trains: the layers of its pairs, and a context around its forward pass."""

    pair: Pair
    around: Callable[[], AbstractContextManager[object]] = nullcontext


WAYS = {"stock": Way(stock_pair), "ConvBatchNorm2d": Way(lean_pair), "lean()": Way(stock_pair, lean)}


class Progress(Protocol):
    """Called after every step and after every epoch."""

    def step(self, done: int, of: int) -> None: ...

    def epoch(self, epoch: int, sides: list[Side]) -> None: ...


def prepared(settings: Settings) -> Digits:
    """The images on their device.

    Raises InputError for invalid settings, MissingDependencyError if the library that has the data is not
    installed.
    """
    settings.check()
    digits = Digits(*(_to(part, settings.device) for part in load(settings.data, settings.root)))
    if settings.batch_size > len(digits.labels):
        raise InputError(
            f"--batch-size must be at most {len(digits.labels)}, the number of training images; "
            f"got {settings.batch_size}"
        )
    return digits


def compare(
    settings: Settings, digits: Digits, progress: Progress, ways: Mapping[str, Way] = WAYS
) -> Comparison:
    """Train all ways on each batch in turn and report what each costs; freed memory is kept for all."""
    freed_memory = keep_freed_memory()
    networks = _equal_networks(ways, settings)
    sides = [Side(name) for name in ways]
    result = Comparison(
        settings,
        digits.name,
        len(digits.labels),
        len(digits.test_labels),
        torch.get_num_threads(),
        str(freed_memory),
        sides,
    )
    _first_batch(result, networks, list(ways.values()), digits)
    _train(result, networks, list(ways.values()), digits, progress)
    return result


def _to(part: str | Tensor, device: str) -> Any:
    return part.to(device) if isinstance(part, Tensor) else part


def _equal_networks(ways: Mapping[str, Way], settings: Settings) -> list[nn.Module]:
    torch.manual_seed(settings.seed)
    networks: list[nn.Module] = [DigitNetwork(way.pair).to(settings.device) for way in ways.values()]
    for network in networks[1:]:
        network.load_state_dict(networks[0].state_dict())
    return networks


def _batches(digits: Digits, settings: Settings, epoch: int) -> list[Tensor]:
    """Indices of an epoch's batches, full ones only, in an order that depends on the seed alone."""
    order = torch.randperm(len(digits.labels), generator=torch.Generator().manual_seed(settings.seed + epoch))
    return [batch for batch in order.split(settings.batch_size) if len(batch) == settings.batch_size]


def _loss(network: nn.Module, way: Way, images: Tensor, labels: Tensor, seed: int) -> Tensor:
    with way.around():
        return loss_of(network, images, labels, seed)


def _first_batch(result: Comparison, networks: list[nn.Module], ways: list[Way], digits: Digits) -> None:
    """Measure memory and gradients of one step, on copies of the networks.

    The verdict is taken in float64. In float32 a rounding error may change the sign before a ReLU or the
    position of a maximum, so two correct networks may have different gradients.
    """
    settings = result.settings
    batch = _batches(digits, settings, 0)[0]
    images, labels = digits.images[batch], digits.labels[batch]
    single, double = [], []
    for side, network, way in zip(result.sides, networks, ways, strict=True):
        trial, exact = copy.deepcopy(network), copy.deepcopy(network).double()
        forward = partial(_loss, trial, way, images, labels, settings.seed)
        forward()  # the first pass also does what is done once, such as trying a rebuild
        side.held, side.peak, *_ = measure_step(forward, device=settings.device)
        _loss(exact, way, images.double(), labels, settings.seed).backward()
        single.append(_gradients(trial))
        double.append(_gradients(exact))
    for side, ours, ours_double in zip(result.sides, single, double, strict=True):
        side.gradient_difference, side.relative_difference = largest_difference(ours, single[0])
        _, side.double_difference = largest_difference(ours_double, double[0])


def _gradients(network: nn.Module) -> list[Tensor]:
    return [p.grad for p in network.parameters() if p.grad is not None]


def _train(
    result: Comparison, networks: list[nn.Module], ways: list[Way], digits: Digits, progress: Progress
) -> None:
    settings = result.settings
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9) for network in networks]
    seconds: list[list[float]] = [[] for _ in networks]
    of, done = settings.epochs * len(_batches(digits, settings, 0)), 0
    for epoch in range(settings.epochs):
        losses: list[list[float]] = [[] for _ in networks]
        for batch in _batches(digits, settings, epoch):
            images, labels = digits.images[batch], digits.labels[batch]
            for i, (network, way, optimizer) in enumerate(zip(networks, ways, optimizers, strict=True)):
                optimizer.zero_grad()
                step = partial(_step, network, way, images, labels, settings.seed + done, losses[i])
                seconds[i].append(time_step(step, settings.device))
                optimizer.step()
            done += 1
            progress.step(done, of)
        for side, network, seen, taken_by in zip(result.sides, networks, losses, seconds, strict=True):
            side.loss.append(sum(seen) / len(seen))
            side.accuracy.append(_accuracy(network, digits))
            side.step_seconds = median(taken_by)
            side.time_ratio = median(a / b for a, b in zip(taken_by, seconds[0], strict=True))
        progress.epoch(epoch + 1, result.sides)


def _step(
    network: nn.Module, way: Way, images: Tensor, labels: Tensor, seed: int, losses: list[float]
) -> None:
    loss = _loss(network, way, images, labels, seed)
    loss.backward()
    losses.append(float(loss.detach()))


@torch.no_grad()
def _accuracy(network: nn.Module, digits: Digits) -> float:
    network.eval()
    right = sum(
        int((network(images).argmax(1) == labels).sum())
        for images, labels in zip(digits.test_images.split(500), digits.test_labels.split(500), strict=True)
    )
    network.train()
    return right / len(digits.test_labels)


if __name__ == "__main__":
    from leannorm.demo.ranks import main

    raise SystemExit(main())
