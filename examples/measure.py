"""What every example prints: the bytes that a forward pass keeps for backward, without and with `lean()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from leannorm import lean
from leannorm.report.memory import measure_step


def held(model: nn.Module, loss_of: Callable[[], Tensor], **settings: Any) -> float:
    """Run steps without and with `lean(**settings)`, print what each keeps, and return the ratio.

    `loss_of` is the forward pass. Gradients are dropped before each step, so that they count for both. The
    last of four steps counts: the first keeps as little as possible, and later ones correct the plan.
    """
    nbytes = []
    for around in (None, lean(**settings)):
        for _ in range(4):
            model.zero_grad(set_to_none=True)
            step = measure_step(loss_of if around is None else _within(around, loss_of))
        nbytes.append(step.held)
    model.zero_grad(set_to_none=True)
    stock, ours = nbytes
    print(
        f"kept after forward: plain PyTorch {stock / 1e6:.1f} MB, lean {ours / 1e6:.1f} MB, "
        f"ratio {ours / stock:.2f}"
    )
    return ours / stock


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    """Whether all parameters and buffers are equal bit for bit; also prints the answer."""
    mine, theirs = a.state_dict(), b.state_dict()
    same = mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)
    print(f"weights after training, plain PyTorch and lean: {'equal bit for bit' if same else 'different'}")
    return same


def _within(context: lean, loss_of: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with context:
            return loss_of()

    return run
