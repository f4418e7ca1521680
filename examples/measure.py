"""What every example prints: the bytes that a forward pass holds for its backward pass, stock and lean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from leannorm import lean
from leannorm.report.memory import measure_step


def held(model: nn.Module, loss_of: Callable[[], Tensor], **settings: Any) -> float:
    """Run a step stock and under `lean(**settings)`, print what each holds and return the ratio.

    `loss_of` is the forward pass. Gradients are dropped before each step, so that they count for both. The
    second step counts: under a plan the first one holds as little as it can.
    """
    nbytes = []
    for around in (None, lean(**settings)):
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            step = measure_step(loss_of if around is None else _within(around, loss_of))
        nbytes.append(step.held)
    model.zero_grad(set_to_none=True)
    stock, ours = nbytes
    print(
        f"held after forward: stock {stock / 1e6:.1f} MB, lean {ours / 1e6:.1f} MB, ratio {ours / stock:.2f}"
    )
    return ours / stock


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    """Are all parameters and buffers equal, bit for bit? Prints the answer."""
    mine, theirs = a.state_dict(), b.state_dict()
    same = mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)
    print(f"weights after training, stock and lean: {'equal bit for bit' if same else 'different'}")
    return same


def _within(context: lean, loss_of: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with context:
            return loss_of()

    return run
