"""A backend's kernels for calls that are passed to them as they are; `autograd/fast.py` decides which."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from leannorm._types import Channels, ChannelTensors, KeptByChannelNorm
from leannorm.ops.backends import CPU, TRITON, Backend
from leannorm.ops.backends.compiled_gated import CompiledGated
from leannorm.ops.backends.reference import Forward
from leannorm.ops.backends.triton import INTERPRETED, imported_by_call, repeated
from leannorm.ops.schema import OPS


class RefusedError(Exception):
    """The kernel has rejected its arguments, or knows no such call, and has written nothing."""


class AsGiven(CompiledGated):
    """The kernels of `whole`, which get tensors as they are: only dy is brought into another layout first.

    Verbs are operators, without a mask. Those of a forward pass raise `RefusedError`.
    """

    as_given = True

    def __init__(self, whole: CompiledGated, operators: dict[str, Callable[..., Any]]) -> None:
        self._whole, self.name, self.launches = whole, whole.name, whole.launches
        self.narrow_lines = whole.narrow_lines
        super().__init__(SimpleNamespace(**operators))

    @property
    def whole(self) -> Backend:
        return self._whole

    def why_not(self, *tensors: Tensor | None, named: bool = False) -> list[str]:
        return self._whole.why_not(*tensors, named=named)

    def _kept(self, kept: KeptByChannelNorm) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return kept[0], kept[1:7]

    def channel_forward(self, tensors: ChannelTensors, norm: Channels) -> Forward:
        x, weight, bias, residual, mean, var, num_batches, mask = tensors
        groups, eps, act, _, momentum, _, _ = norm
        if mean is None:
            return self.ops.channel_forward(x, weight, bias, residual, eps, act, groups, mask)
        running = mean, var, num_batches, momentum
        made = self.ops.channel_forward_tracked_(x, weight, bias, residual, eps, act, *running)
        moved: Any = running[:2] if num_batches is None else running[:3]
        torch._C._increment_version(moved)
        return *made, None

    def channel_evaluate(self, tensors: ChannelTensors, norm: Channels) -> Tensor:
        x, weight, bias, residual, mean, var, _, _ = tensors
        _, eps, act, *_ = norm
        behind = weight, bias, residual, act
        if self.launches:  # fused into one
            return self.ops.channel_evaluate(x, mean, var, eps, *behind)
        return self.ops.channel_normalize(x, *self.ops.constants_of(mean, var, eps), *behind, None)


FORWARD = (
    *("channel_forward", "channel_forward_tracked_", "channel_normalize", "constants_of"),
    *("row_forward", "row_gated_forward"),
)
BACKWARD = "channel_backward", "channel_grad_sums", "channel_input_grad", "row_backward", "row_gated_backward"
EVALUATE = "channel_evaluate"  # Triton only


def _of_cpu(name: str) -> Callable[..., Any]:
    """The operator, called at torch's dispatcher: the wrapper in torch.ops costs time that matters in a small
    call."""
    schema = torch._C._dispatch_find_schema_or_throw(f"leannorm::{name}", "")
    call = partial(torch._C._dispatch_call_boxed, schema)

    def made(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RuntimeError as error:
            raise RefusedError from error

    return made if name in FORWARD else call


def _of_triton(name: str) -> Callable[..., Any]:
    def made(*arguments: Any) -> Any:
        results = repeated(name, arguments)
        if results is None:
            raise RefusedError
        return results

    if name in (*FORWARD, EVALUATE):
        return made
    return imported_by_call(name) if INTERPRETED else getattr(TRITON.ops, name)


CPU_AS_GIVEN = AsGiven(CPU, {name: _of_cpu(name) for name in vars(OPS)})
TRITON_AS_GIVEN = AsGiven(TRITON, {name: _of_triton(name) for name in (*vars(OPS), EVALUATE)})
