"""What a check examines, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from leannorm._catalog import Norm
from leannorm.report.doctor.observe import Seen

if TYPE_CHECKING:
    from leannorm.report.doctor.gradients import Gradients
    from leannorm.report.doctor.ranks import Rank


class Call(NamedTuple):
    """A module that another calls, the one whose output only it reads, and whether its running statistics are
    updated."""

    module: Module
    source: Module | None
    moves: bool


SEVERITIES = ("error", "warning", "note")


class Found(NamedTuple):
    """A layer in which a check found its fault; what all findings of the check have in common is in `Check`.

    `size` ranks it among the others of its check; by default it is the value. `severity` is by default that
    of its check.
    """

    layer: str
    value: float | str
    consequence: str
    remedy: str
    size: float | None = None
    severity: str | None = None


@dataclass
class Subject:
    """A model, its norms, its optimizers by the expression that names each, what batches showed about a norm.

    `passed` has the arguments of `doctor` that `recalibrate` needs, too. `averaged` is a model that follows
    it. `ranks`, `gradients` and `shown` have what each rank reported: about itself, the gradients of gamma
    and beta, and the statistics of its synchronized norms' inputs.
    """

    model: Module
    norms: list[Norm]
    optimizers: Mapping[str, torch.optim.Optimizer] = field(default_factory=dict)
    seen: dict[str, Seen] = field(default_factory=dict)
    difference: float | None = None
    batches: int = 0
    averaged: Module | None = None
    passed: str = ""
    ranks: Sequence[Rank] = ()
    gradients: Sequence[Gradients] = ()
    shown: Sequence[dict[str, list[float]]] = ()
    traces: dict[Module, list[Call] | None] = field(default_factory=dict)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode. In evaluation mode the modes of its training are not
        known."""
        return self.model.training

    def moves(self, norm: Norm) -> bool:
        """Whether the running statistics of a norm are updated in training."""
        return norm.tracks and self.reached(norm) and (norm.module.training or not self.training)

    def by_batch(self, norm: Norm) -> bool:
        """Whether a norm normalizes by the statistics of its input, in the mode of the training."""
        trains = norm.module.training or not self.training or not norm.tracks
        return norm.kind != "frozen" and trains and self.reached(norm)

    def reached(self, norm: Norm) -> bool:
        """Whether training reaches it, as far as batches show. Some models keep layers that nobody calls."""
        return not self.seen or norm.name in self.seen

    def observed(self) -> Iterator[tuple[Norm, Seen]]:
        """The norms that batches have reached, with what these showed."""
        return ((norm, self.seen[norm.name]) for norm in self.norms if norm.name in self.seen)

    @cached_property
    def untouched(self) -> frozenset[str]:
        """The norms whose running statistics are as initialized."""
        return frozenset(norm.name for norm in self.norms if norm.tracks and initial(norm))

    @cached_property
    def learned(self) -> frozenset[str]:
        """The norms whose parameters have been trained."""
        return frozenset(norm.name for norm in self.norms if learned(norm))

    @cached_property
    def fresh(self) -> bool:
        """Whether the model is as initialized: no running statistic updated, no gamma or beta trained."""
        return not self.learned and all(n.name in self.untouched for n in self.norms if n.tracks)

    @cached_property
    def decayed(self) -> dict[int, float]:
        """The weight decay of every parameter in an optimizer, by its id."""
        return {
            id(parameter): float(group.get("weight_decay", 0.0) or 0.0)
            for optimizer in self.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }


class Check(NamedTuple):
    """A check by its name, which does not change; `title` heads its findings, `unit` says what their value
    is.

    `of_data`: it judges the values of the batches, which means nothing if these are made up. `of_ranks`: it
    judges what ranks reported.
    """

    name: str
    severity: str
    title: str
    unit: str
    find: Callable[[Subject], Iterator[Found]]
    of_data: bool = False
    of_ranks: bool = False


def check(
    severity: str, title: str, unit: str = "", *, of_data: bool = False, of_ranks: bool = False
) -> Callable[[Callable[[Subject], Iterator[Found]]], Check]:
    """Make a function that finds a fault a check with this name."""
    return lambda find: Check(find.__name__, severity, title, unit, find, of_data, of_ranks)


def layer(name: str) -> str:
    """A layer as an expression in a line of code."""
    return "model" if name in ("", "(model)") else f'model.get_submodule("{name}")'


def values_of(tensor: Tensor | None) -> Tensor | None:
    """A tensor's values on this rank, detached; None if there are none to read (meta, fake, lazy)."""
    if tensor is None or is_lazy(tensor):
        return None
    local = tensor.detach()
    if hasattr(local, "to_local"):
        local = local.to_local()
    if local.is_meta or isinstance(local, torch._subclasses.FakeTensor) or local.numel() == 0:
        return None
    return local


def running_of(norm: Norm) -> tuple[Tensor, Tensor] | None:
    """A norm's running mean and variance on this rank, float64 on the CPU; None if there are none to read."""
    mean, var = values_of(norm.mean), values_of(norm.var)
    return None if mean is None or var is None else (mean.cpu().double(), var.cpu().double())


def initial(norm: Norm) -> bool:
    """Whether its running statistics are as initialized: mean 0, variance 1, no batch counted."""
    running, batches = running_of(norm), values_of(norm.batches)
    if running is None or (batches is not None and bool(batches != 0)):
        return False
    return bool((running[0] == 0).all()) and bool((running[1] == 1).all())


def learned(norm: Norm) -> bool:
    """Whether it has been trained: whether its beta, or gamma if there is none, has two different values.

    Gamma does not count if there is a beta: some models start with random gamma.
    """
    values = values_of(norm.weight if norm.bias is None else norm.bias)
    return values is not None and bool((values != values.flatten()[0]).any())
