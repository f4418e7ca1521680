"""Running statistics in plain torch: what evaluation reads, and the update by a batch's statistics."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from leannorm.ops.modes import transformed
from leannorm.ops.precision import statistics_dtype


def _move(running: Tensor, value: Tensor, factor: float | Tensor) -> None:
    """running += factor * (value - running), in place."""
    value = _unwrapped(value, running)
    dtype = torch.promote_types(running.dtype, torch.float32)  # in half precision small steps are lost
    weight = factor.to(dtype) if isinstance(factor, Tensor) else factor
    with _outside_of_transforms(running, value):
        if running.dtype == dtype and not transformed(running, value):  # lerp_ has no batching rule
            running.lerp_(value.to(dtype), weight)
        else:
            running.copy_(torch.lerp(running.to(dtype), value.to(dtype), weight))


def _unwrapped(value: Tensor, buffer: Tensor) -> Tensor:
    """The tensor inside of torch.func.grad's wrapper, if the buffer is not wrapped."""
    functorch = torch._C._functorch
    if torch.compiler.is_compiling() or functorch.is_functorch_wrapped_tensor(buffer):
        return value
    while functorch.is_gradtrackingtensor(value):
        value = functorch.get_unwrapped(value)
    return value


def _outside_of_transforms(*tensors: Tensor) -> AbstractContextManager[object]:
    """Turn functorch off to write to a buffer under torch.func.grad, if none of the tensors is wrapped."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors):
        return nullcontext()
    return torch._C._DisableFuncTorch()


class RunningVerbs:
    """What evaluation reads, and the update by a batch's statistics."""

    def constants_of(self, running_mean: Tensor, running_var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Mean and rstd of evaluation; copies, so that later training may change the buffers."""
        dtype = statistics_dtype(running_mean)
        return running_mean.to(dtype, copy=True), torch.rsqrt(running_var.to(dtype) + eps)

    def move_running(
        self,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        num_batches: Tensor | None,
        momentum: float | None,
        mean: Tensor,
        m2: Tensor,
        count: int | Tensor,
    ) -> None:
        """Move the running mean and (unbiased) variance towards a batch's by `momentum` and count the batch.

        In place; what is None is skipped. `momentum=None` weighs the batch by 1 / the number of batches,
        computed on the device. An empty batch is counted and moves nothing. The number of batches may have
        any dtype, which then rounds the count, as in torch.
        """
        if (
            running_mean is not None
            and running_var is not None
            and not (isinstance(count, int) and count == 0)
        ):
            factor: float | Tensor = 0.0 if momentum is None else momentum
            if momentum is None and num_batches is not None:
                factor = (num_batches + 1).to(mean.dtype).reciprocal()
            degrees = (count - 1).clamp_min(1) if isinstance(count, Tensor) else max(count - 1, 1)
            if isinstance(count, Tensor):  # known on the device alone; 0 if the batch is empty on all ranks
                factor = (count > 0).to(count.dtype) * factor
            for running, value in ((running_mean, mean), (running_var, m2 / degrees)):
                _move(running, value.detach() if value.requires_grad else value, factor)
        if num_batches is not None:
            with _outside_of_transforms(num_batches):
                num_batches.add_(1)
