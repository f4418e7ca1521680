"""`profile`: memory and time of a model's training step in plain PyTorch, under lean(), and with other
methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from leannorm import _checks
from leannorm._batch import Arguments, inputs_of
from leannorm._errors import InputError
from leannorm._freed_memory import keep_freed_memory
from leannorm._untouched import Copies, untouched
from leannorm.report.layers import StockCount, by_layer, by_operation
from leannorm.report.loss import mean_square
from leannorm.report.memory import measure_step
from leannorm.report.memory_report import Measured, MemoryReport
from leannorm.report.numerics import largest_difference
from leannorm.report.settings import LEAN, Setting, settings_for
from leannorm.report.timing import time_step


def profile(  # noqa: PLR0913
    model: nn.Module,
    inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    *,
    recompute: Sequence[str] = LEAN,
    budgets: Sequence[float] = (),
    against: Sequence[str] = (),
    compiled: bool = False,
    loss: Callable[[Any], Tensor] = mean_square,
    steps: int = 5,
    progress: Callable[[str], None] = lambda doing: None,
) -> MemoryReport:
    """Run training steps of a model in plain PyTorch and under each lean setting, and report what they cost.

    `inputs` are a tensor, a tuple of all arguments, or a mapping of them by name. `recompute` and `budgets`
    are `lean`'s, and "lean" is `lean()` without arguments; `against` may name "checkpoint"
    (`torch.utils.checkpoint` around every block) and "compile" (`torch.compile` keeping half of the
    activations). `compiled`: also `torch.compile` alone, and with `compile_options` for each lean setting
    but "lean". `loss` computes a scalar from the output: by default its own `loss`, which models of
    transformers have if they get labels, otherwise the mean square of its tensors.
    The settings alternate for `steps` steps; seconds are medians, ratios medians of ratios. Freed memory is
    kept from then on (`keep_freed_memory`). Each pass starts from the same model, inputs and random numbers,
    and all of them are unchanged when it returns. `progress` is called with what is being done. Passes of
    which less than 4 MiB can be freed are measured with rebuilds, too, although `lean` leaves them as they
    are in training.

    Raises: `InputError` for unknown settings, and for a model without parameters that need gradients.

    >>> import torch, leannorm
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 4, 3))
    >>> report = leannorm.profile(model, torch.randn(2, 3, 20, 20), steps=1)
    >>> [setting.name for setting in report.settings]
    ['stock', 'lean', 'norm', 'conv']
    >>> report.settings[2].kept < report.settings[0].kept
    True
    """
    _checks.module(model, "profile")
    arguments = inputs_of(inputs).checked(model)
    settings = settings_for(model, recompute, budgets, against, compiled)
    learned = [p for p in model.parameters() if p.requires_grad]
    if not learned:
        raise InputError(
            "the model has no parameter that requires a gradient: there is no backward pass to measure"
        )
    device = learned[0].device
    freed_memory = keep_freed_memory()
    results = [Measured(setting.name) for setting in settings]
    stock: list[Tensor | None] = []
    for setting, measured in zip(settings, results, strict=True):
        progress(f"measuring {setting.name}")
        with _a_pass(model, arguments) as batch:
            # with a budget the first pass makes the plan, under torch.compile it compiles
            _on_others(setting, batch, loss).backward()
        with _a_pass(model, arguments) as batch:
            _forward(setting, batch, loss).backward()
            gradients = [p.grad for p in learned]
        stock = stock or gradients
        measured.gradient_difference = _difference(gradients, stock)
        with _a_pass(model, arguments) as batch:
            measured.kept, measured.peak, timeline, measured.forward_end = measure_step(
                partial(_forward, setting, batch, loss), device=device
            )
        measured.timeline = list(timeline)
        if setting.eager:
            with _a_pass(model, arguments) as batch:
                _count(model, setting, batch, loss, measured)
    seconds: list[list[float]] = [[] for _ in settings]
    for turn in range(steps):
        progress(f"timing, turn {turn + 1} of {steps}")
        for setting, taken in zip(settings, seconds, strict=True):
            with _a_pass(model, arguments) as batch:
                taken.append(time_step(partial(_step, setting, batch, loss), device))
    for measured, taken in zip(results, seconds, strict=True):
        measured.seconds = median(taken)
        measured.time_ratio = median(a / b for a, b in zip(taken, seconds[0], strict=True))
    return MemoryReport(
        type(model).__name__,
        arguments.described(),
        str(device),
        torch.get_num_threads(),
        torch.__version__,
        str(freed_memory),
        sum(p.nbytes for p in model.parameters()),
        results,
        str(learned[0].dtype).removeprefix("torch."),
    )


def _forward(setting: Setting, arguments: Arguments, loss: Callable[[Any], Tensor]) -> Tensor:
    torch.manual_seed(0)  # the same dropout for every setting
    with setting.around():
        return loss(arguments.call(setting.run))


def _step(setting: Setting, arguments: Arguments, loss: Callable[[Any], Tensor]) -> None:
    _forward(setting, arguments, loss).backward()


def _on_others(setting: Setting, arguments: Arguments, loss: Callable[[Any], Tensor]) -> Tensor:
    """On tensors of other values, as in training: a rebuild is on trial until it has seen two."""
    try:
        return _forward(setting, arguments.reversed(), loss)
    except Exception:  # samples that must come in a fixed order, such as by length
        return _forward(setting, arguments, loss)


@contextmanager
def _a_pass(model: nn.Module, arguments: Arguments) -> Iterator[Arguments]:
    """A pass from the model's state, without gradients; yields a copy of the inputs, and leaves nothing
    behind.

    It uses the model's own parameters, because compiled code and a plan of `lean()` recognize it by them.
    """
    with untouched(model, Copies(parameters=False)):
        for parameter in model.parameters():
            parameter.grad = None
        yield arguments.copied()


def _difference(ours: Sequence[Tensor | None], stock: Sequence[Tensor | None]) -> float:
    pairs = [(a, b) for a, b in zip(ours, stock, strict=True) if a is not None and b is not None]
    return largest_difference(*zip(*pairs, strict=True))[1] if pairs else 0.0


def _count(
    model: nn.Module,
    setting: Setting,
    arguments: Arguments,
    loss: Callable[[Any], Tensor],
    measured: Measured,
) -> None:
    torch.manual_seed(0)
    around = StockCount() if setting.name == "stock" else setting.around()
    with around as saved, by_layer(model, lambda: _counts(around if saved is None else saved)) as layers:
        result = loss(arguments.call(setting.run))  # keeps the saved tensors alive
    del result
    measured.layers = layers
    measured.rebuilt = by_operation(getattr(saved, "records", ()))
    measured.reasons = list(getattr(saved, "reasons", ()))


def _counts(saved: Any) -> tuple[int, int]:
    return saved.kept_bytes, saved.rebuilt_bytes
