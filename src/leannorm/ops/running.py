"""Running statistics in plain torch: what evaluation reads, and the update by a batch's statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from leannorm._types import Moments, Pool, Running
from leannorm.ops.modes import traced
from leannorm.ops.precision import statistics_dtype

_frozen = False


@contextmanager
def no_stats_update() -> Iterator[None]:
    """Within the context, training uses the batch's statistics, and running statistics and counters stay.

    For a second forward pass over a batch (an adversarial, a generator's, a sharpness-aware step). It applies
    to all layers and functions of leannorm but not to torch's, so `convert` the model first. A backward pass
    may come after the context. The setting is process-wide, as torch's own flags are, so it also applies to
    replicas in threads. `torch.compile` compiles once more for it.

    Raises: nothing.

    >>> import torch, leannorm
    >>> layer = leannorm.nn.BatchNorm1d(4)
    >>> with leannorm.no_stats_update():
    ...     y = layer(torch.randn(16, 4) + 3)
    >>> layer.num_batches_tracked.item(), layer.running_mean.sum().item(), y.mean().abs().item() < 1e-6
    (0, 0.0, True)
    """
    global _frozen
    before, _frozen = _frozen, True
    try:
        yield
    finally:
        _frozen = before


def frozen() -> bool:
    """Whether running statistics stay as they are, so that training works as for a layer without them."""
    return _frozen


def _end(running: Tensor, value: Tensor, factor: float | Tensor) -> tuple[Tensor, Tensor]:
    """running + factor * (value - running), in its dtype, and whether the batch may be counted (see
    below)."""
    dtype = torch.promote_types(running.dtype, torch.float32)  # small steps are lost in half precision
    weight = factor.to(dtype) if isinstance(factor, Tensor) else factor
    end = torch.lerp(running.to(dtype), value.to(dtype), weight).to(running.dtype)
    kept = end.isfinite() | ~running.isfinite()
    return end, (value.isfinite() & kept).all()


def _unwrapped(value: Tensor, buffer: Tensor) -> Tensor:
    """The tensor inside of torch.func.grad's wrapper, if the buffer is not wrapped."""
    functorch = torch._C._functorch
    if traced() or functorch.is_functorch_wrapped_tensor(buffer):
        return value
    while functorch.is_gradtrackingtensor(value):
        value = functorch.get_unwrapped(value)
    return value


def _outside_of_transforms(*tensors: Tensor) -> AbstractContextManager[object]:
    """Turn functorch off to write to a buffer under torch.func.grad, if none of the tensors is wrapped."""
    if traced() or torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors):
        return nullcontext()
    return torch._C._DisableFuncTorch()


def merge_into(pool: Pool, moments: Moments) -> None:
    """Merge a batch into the statistics of several, in place, as Chan, Golub and LeVeque (1983) do."""
    mean, m2 = (_unwrapped(v.detach(), pool.mean) for v in (moments.mean, moments.m2))
    more: int | Tensor = moments.count
    more = _unwrapped(more.detach(), pool.mean) if isinstance(more, Tensor) else more
    with _outside_of_transforms(pool.mean, mean):
        count = pool.counts[1]
        share = more / (count + more).clamp_min(1)
        difference = mean - pool.mean
        pool.m2.add_(m2 + difference * difference * (count * share))
        pool.mean.add_(difference * share)
        pool.counts[1].add_(more)
        pool.counts[0].add_(more > 0 if isinstance(more, Tensor) else int(more > 0))


class RunningVerbs:
    """What evaluation reads, and the update by a batch's statistics."""

    def constants_of(self, running_mean: Tensor, running_var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Mean and rstd of evaluation, as copies, so that later training may change the buffers."""
        dtype = statistics_dtype(running_mean)
        return running_mean.to(dtype, copy=True), torch.rsqrt(running_var.to(dtype) + eps)

    def move_running(self, running: Running, moments: Moments) -> None:
        """Update the running mean and (unbiased) variance with a batch's by `momentum`, and count the batch.

        In place; None is skipped. `momentum=None` weights the batch by 1 / the number of batches,
        computed on the device. The number of batches may have any dtype, which then rounds the count, as in
        torch.

        All are updated, or none: nothing changes if the batch is empty, if one of its statistics is not
        finite, or if a finite running statistic would no longer be finite (in float16 a variance soon is
        not).
        """
        running_mean, running_var, num_batches, momentum = running
        mean, m2, count = moments.mean, moments.m2, moments.count
        if isinstance(count, int) and count == 0:
            return
        # only the device knows it: 0 if the batch is empty on all ranks
        moves: bool | Tensor = (count > 0).detach() if isinstance(count, Tensor) else True
        if running_mean is not None and running_var is not None:
            factor: float | Tensor = 0.0 if momentum is None else momentum
            if momentum is None and num_batches is not None:
                factor = (num_batches + 1).to(mean.dtype).reciprocal()
            degrees = (count - 1).clamp_min(1) if isinstance(count, Tensor) else max(count - 1, 1)
            mean, variance = (_unwrapped(v.detach(), running_mean) for v in (mean, m2 / degrees))
            moves = _unwrapped(moves, running_mean) if isinstance(moves, Tensor) else moves
            with _outside_of_transforms(running_mean, running_var, mean, variance):
                mean, mean_moves = _end(running_mean, mean, factor)
                variance, variance_moves = _end(running_var, variance, factor)
                moves = mean_moves & variance_moves & moves
                running_mean.copy_(torch.where(moves, mean, running_mean))
                running_var.copy_(torch.where(moves, variance, running_var))
        if num_batches is not None:
            one = _unwrapped(moves, num_batches) if isinstance(moves, Tensor) else 1
            with _outside_of_transforms(num_batches, *((one,) if isinstance(one, Tensor) else ())):
                num_batches.add_(one)
