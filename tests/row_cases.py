"""The table of row-norm cases, the float64 oracle, and the error budget that follows from torch's error."""

from __future__ import annotations

from typing import NamedTuple

import torch
from cases import budget, error, lay_out
from torch import Tensor

from leannorm import functional

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class RowCase(NamedTuple):
    """An input's shape, what of it is normalized (`dim` None: the last axes), and how it lies in memory."""

    shape: tuple[int, ...]
    normalized_shape: tuple[int, ...]
    dim: int | None = None
    layout: str = "contiguous"

    @property
    def axes(self) -> tuple[int, ...]:
        if self.dim is not None:
            return (self.dim % len(self.shape),)
        return tuple(range(len(self.shape) - len(self.normalized_shape), len(self.shape)))

    def __str__(self) -> str:
        axis = "" if self.dim is None else f"-dim{self.dim}"
        return f"{'x'.join(map(str, self.shape))}{axis}-{self.layout}"


CASES = [
    RowCase((7,), (7,)),
    RowCase((5, 1), (1,)),
    RowCase((3, 16), (16,)),
    RowCase((2, 5, 17), (17,)),
    RowCase((2, 3, 4, 5), (4, 5)),
    RowCase((2, 3, 4, 2, 3), (3, 4, 2, 3)),
    RowCase((2, 3, 4, 5), (2, 3, 4, 5)),
    RowCase((4, 33), (33,), layout="sliced"),
    RowCase((4, 33), (33,), layout="offset"),
    RowCase((4, 33), (33,), layout="expanded"),
    RowCase((6, 5, 9), (9,), layout="transposed"),
    RowCase((2, 9, 3, 5), (9,), 1),
    RowCase((2, 9, 3, 5), (9,), -3, "channels_last"),
    RowCase((2, 9, 3, 5), (9,), 1, "sliced"),
    RowCase((2, 4, 3, 2, 5), (4,), 1, "channels_last"),
    RowCase((6, 8), (6,), 0),
    RowCase((2, 3, 5, 4), (5,), 2),
    RowCase((2, 3, 5, 4), (4,), layout="channels_last"),
    RowCase((0, 8), (8,)),
    RowCase((0, 8, 2, 2), (8,), 1),
    RowCase((4, 0), (0,)),
    RowCase((2, 8, 0), (8,), 1),
]


def make(case: RowCase, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return lay_out((torch.randn(case.shape, dtype=torch.float64) * std + mean).to(dtype), case.layout)


def exact(
    x: Tensor, axes: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> Tensor:
    """The definition, in float64, differentiable."""
    x = x.double()
    centred = x if rms else x - x.mean(axes, keepdim=True)
    y = centred / (centred.square().mean(axes, keepdim=True) + eps).sqrt()
    trailing = (1,) * (x.dim() - axes[-1] - 1)
    for parameter, apply in ((weight, torch.mul), (bias, torch.add)):
        if parameter is not None:
            y = apply(y, parameter.double().reshape(*parameter.shape, *trailing))
    return y


def ours(x, case, weight, bias, eps, rms):  # type: ignore[no-untyped-def]
    if rms:
        return functional.rms_norm(x, case.normalized_shape, weight, eps, dim=case.dim)
    return functional.layer_norm(x, case.normalized_shape, weight, bias, eps, dim=case.dim)


def theirs(x, case, weight, bias, eps, rms):  # type: ignore[no-untyped-def]
    """torch's own op, on moved axes where the case normalizes an inner one."""
    moved = x if case.dim is None else x.movedim(case.dim, -1)
    if rms:
        y = torch.nn.functional.rms_norm(moved, case.normalized_shape, weight, eps)
    else:
        y = torch.nn.functional.layer_norm(moved, case.normalized_shape, weight, bias, eps)
    return y if case.dim is None else y.movedim(-1, case.dim)


def run(function, case, x, weight, bias, dy, eps, rms):  # type: ignore[no-untyped-def]
    """Output and the gradients of x, weight and bias (where they are)."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias)]
    y = function(leaves[0], case, leaves[1], leaves[2], eps, rms)
    wanted = [t for t in leaves if t is not None]
    return [y.detach(), *torch.autograd.grad(y, wanted, dy.to(y.dtype), allow_unused=True)]


def run_exact(case, x, weight, bias, dy, eps, rms):  # type: ignore[no-untyped-def]
    def function(x, case, weight, bias, eps, rms):  # type: ignore[no-untyped-def]
        return exact(x, case.axes, weight, bias, eps, rms)

    doubles = [None if t is None else t.double() for t in (x, weight, bias)]
    return run(function, case, *doubles, dy, eps, rms)


def direct_term(case, x, weight, dy, eps, rms):  # type: ignore[no-untyped-def]
    """rstd * dy * weight: the input's gradient but for what comes back through the statistics."""
    x = x.double()
    centred = x if rms else x - x.mean(case.axes, keepdim=True)
    rstd = (centred.square().mean(case.axes, keepdim=True) + eps).rsqrt()
    trailing = (1,) * (x.dim() - case.axes[-1] - 1)
    return rstd * dy.double() * weight.double().reshape(*weight.shape, *trailing)


def assert_within_budget(case, x, weight, bias, dy, eps, rms):  # type: ignore[no-untyped-def]
    """Output and every gradient: torch's dtype and shape, and an error that torch's own allows."""
    results = [run(f, case, x, weight, bias, dy, eps, rms) for f in (ours, theirs)]
    want = run_exact(case, x, weight, bias, dy, eps, rms)
    direct = [None, direct_term(case, x, weight, dy, eps, rms), None, None]
    for g, t, w, d in zip(*results, want, direct, strict=False):
        assert (g.dtype, g.shape) == (t.dtype, t.shape)
        assert error(g, w) <= budget(t, w, d)
