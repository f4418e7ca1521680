"""The ways to run a training step that `profile` compares: plain PyTorch, lean, compiled, checkpointed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from leannorm._errors import InputError
from leannorm.compiled import compile_options
from leannorm.saving import lean
from leannorm.saving.small import NEVER_SMALL

LEAN = ("lean", "norm", "conv")
"""`lean()` as it is, and its sets by name."""
AGAINST = ("checkpoint", "compile")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Setting(NamedTuple):
    """`run(...)` is the model's forward pass; `around()` is a context for it and the loss. `eager`: whether
    autograd saves tensors layer by layer, so that they can be counted by layer."""

    name: str
    run: Callable[..., Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    eager: bool = True


def settings_for(
    model: nn.Module,
    recompute: Sequence[str],
    budgets: Sequence[float] = (),
    against: Sequence[str] = (),
    compiled: bool = False,
) -> list[Setting]:
    """Plain PyTorch first, then lean by kind and by budget, the same compiled, then the others. Raises
    InputError for unknown names."""
    made = [Setting("stock", model)]
    names = [*recompute, *(f"budget {budget:g}" for budget in budgets)]
    for name in names:
        leaner(name)  # raises if there is no such setting
        made.append(Setting(name, model, partial(_at_any_size, name)))
    if compiled:
        made.append(Setting("compiled", torch.compile(model), eager=False))
        for name in names:
            if name == "lean":  # whose goal the compiler does not have: its own default is "norm"
                continue
            run = torch.compile(model, options=compile_options(**_arguments(name)))
            made.append(Setting(f"compiled {name}", run, eager=False))
    check_methods(against)
    for other in against:
        if other == "checkpoint":
            made.append(Setting(other, model, _checkpointed(model), eager=False))
        else:
            from torch._functorch import config

            half = partial(config.patch, activation_memory_budget=0.5)
            made.append(Setting(other, torch.compile(model), half, eager=False))
    return made


def leaner(name: str, **more: Any) -> lean:
    """`lean()` from the name of a setting: "lean" itself, what to recompute, or an option and its number.

    >>> leaner("lean"), leaner("conv"), leaner("budget 0.5")
    (lean(no tensor saved), lean(no tensor saved), lean(no tensor saved))
    """
    return lean(**_arguments(name), **more)


def _arguments(name: str) -> dict[str, Any]:
    option, _, value = name.partition(" ")
    if not value:
        return {} if option == "lean" else {"recompute": option}
    try:
        return {option: float(value)}
    except ValueError:
        return {option: value}  # 8GiB


def code_of(name: str) -> str:
    """The call that `leaner` makes, as a user types it.

    >>> code_of("lean"), code_of("budget 0.5"), code_of("peak 8GiB")
    ('leannorm.lean()', 'leannorm.lean(budget=0.5)', 'leannorm.lean(peak="8GiB")')
    """
    option, _, value = name.partition(" ")
    quoted = value if value.replace(".", "", 1).isdigit() else f'"{value}"'
    argument = f"{option}={quoted}" if value else "" if name == "lean" else f'"{name}"'
    return f"leannorm.lean({argument})"


def check_methods(against: Sequence[str]) -> None:
    """Raises InputError for a method that lean() cannot be compared with."""
    for other in against:
        if other not in AGAINST:
            raise InputError(f"against is one of {', '.join(AGAINST)}; got {other!r}")


def _at_any_size(name: str) -> lean:
    """It also rebuilds in small passes, because a small model or batch usually represents a larger one."""
    context = leaner(name)
    context.place = NEVER_SMALL
    return context


def _checkpointed(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """`torch.utils.checkpoint` around every block of the model."""
    blocks = list(_blocks(model))
    if not blocks:
        raise InputError(
            f"checkpoint needs blocks (modules inside a Sequential or ModuleList), and "
            f"{type(model).__name__} has none: leave checkpoint out"
        )
    return partial(_wrapped, blocks)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that are in a container and have children, as a user would checkpoint a model."""
    for child in module.children():
        inside = isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS)
        if inside and any(True for _ in child.children()):
            yield child
        else:
            yield from _blocks(child)


@contextmanager
def _wrapped(blocks: Sequence[nn.Module]) -> Iterator[None]:
    from torch.utils.checkpoint import checkpoint

    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward  # back to the class's forward
