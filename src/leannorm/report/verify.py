"""Does a model train under lean() bit for bit as in plain PyTorch? Compares rebuilt tensors and gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from leannorm._batch import Arguments, inputs_of
from leannorm._untouched import random_state, untouched
from leannorm.report.loss import mean_square
from leannorm.report.numerics import Check
from leannorm.report.settings import leaner
from leannorm.saving.evidence import RebuildError

SETTINGS = ("lean", "norm", "conv", "budget 0.5")


def verify_model(model: nn.Module, inputs: Any, steps: int = 3) -> Iterator[Check]:
    """Train the model in plain PyTorch and under each setting, and compare gradients and buffers; the model
    is unchanged.

    `inputs` are a tensor, a tuple of all arguments, or a mapping. One check per setting and step. Its error
    is the number of tensors that differ in any bit; it must be 0 if two runs in plain PyTorch give equal
    bits. A rebuilt tensor that differs gives the error infinity.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    >>> all(check.passed for check in verify_model(model, torch.randn(4, 8)))
    True
    """
    arguments = inputs_of(inputs).checked(model)
    expected, again = (_steps(model, arguments, steps, nullcontext)[0] for _ in range(2))
    apart = list(map(_different, expected, again))
    for i, tensors in enumerate(apart):
        yield Check(f"stock, step {i + 1}", float(tensors), math.inf, "stock again")
    for name in SETTINGS:
        seen, error = _steps(model, arguments, steps, partial(leaner, name, verify=True))
        for i, (ours, stock) in enumerate(zip(seen, expected, strict=False)):
            allowed = math.inf if any(apart[: i + 1]) else 0.0
            yield Check(f"{_words(name)}, step {i + 1}", float(_different(ours, stock)), allowed, "stock")
        if error is not None:
            step = f"{_words(name)}, step {len(seen) + 1}"
            yield Check(step, math.inf, 0.0, "the forward pass", str(error))


def _words(name: str) -> str:
    return name if name == "lean" else f"lean, {name}"


def _steps(
    model: nn.Module, arguments: Arguments, steps: int, context: Callable[[], AbstractContextManager[object]]
) -> tuple[list[dict[str, Tensor]], RebuildError | None]:
    """Gradients and buffers after each step of gradient descent, and the error that ended them early."""
    seen: list[dict[str, Tensor]] = []
    with untouched(model):
        for i in range(steps):
            model.zero_grad()
            try:
                _step(model, arguments, i, context)
            except RebuildError as error:
                return seen, error
            seen.append(
                {
                    **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
                    **{name: buffer.clone() for name, buffer in model.named_buffers()},
                }
            )
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=1e-3)
    return seen, None


def _step(
    model: nn.Module, arguments: Arguments, seed: int, context: Callable[[], AbstractContextManager[object]]
) -> None:
    with random_state(model):
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            # a budget that is out of reach is verified, too
            warnings.filterwarnings("ignore", "leannorm: budget=")
            with context():
                loss = mean_square(arguments.copied().call(model))
        loss.backward()


def _different(ours: dict[str, Tensor], stock: dict[str, Tensor]) -> int:
    names = ours.keys() ^ stock.keys()
    same = (
        torch.equal(ours[name].nan_to_num(), stock[name].nan_to_num()) for name in ours.keys() & stock.keys()
    )
    return len(names) + sum(not equal for equal in same)
