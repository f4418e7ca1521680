"""One small backward pass, of which each rank tells its norms' gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from leannorm._batch import call
from leannorm._catalog import Norm
from leannorm.nn.conv import _ConvBatchNorm
from leannorm.report.doctor.observe import Forward, eager, moved, reshard, tensors_of, unwrapped
from leannorm.report.doctor.ranks import digest_of, part_of
from leannorm.report.doctor.subject import values_of
from leannorm.report.doctor.untouched import untouched

_NUMBERS = (
    4  # by which a gradient is told: products with signs, whose sum over ranks is that of the gradients
)
Gradients = dict[str, tuple[str, list[float]]]


def gradients_of(
    model: Module,
    norms: list[Norm],
    batch: Any,
    forward: Forward | None,
    backward: Callable[[Module, Any], Any] | None,
) -> Gradients:
    """Of every gamma and beta: which copies of its gradient are to be equal, and the gradient in a few numbers.

    With `backward`, a step's own, all ranks' copies are; else those of ranks with equal batches, as what sums
    over the others, such as DistributedDataParallel, does not take part. Dropout is off, batch norms train.
    """
    core = unwrapped(model)
    training = {n.module for n in norms if n.kind == "batch" and (n.module.training or not core.training)}
    whose = "" if backward else f"{digest_of(batch):x}"
    with torch.enable_grad(), eager(core), untouched(model, parameters=False):
        for module in model.modules():
            own = module in training or (isinstance(module, _ConvBatchNorm) and module.bn in training)
            module.training = own
            if isinstance(module, DistributedDataParallel):
                module.require_forward_param_sync = False  # else it sends its buffers, which are the model's
        for parameter in model.parameters():
            parameter.grad = None
        place = next((p.device for p in model.parameters()), None)
        if backward is None:
            _loss((forward or call)(core, moved(batch, place))).backward()  # type: ignore[no-untyped-call]
        else:
            backward(model, moved(batch, place))
        reshard(core)
        told: Gradients = {}
        for norm in norms:
            for name, parameter in norm.affine:
                if parameter.grad is not None:
                    path = f"{norm.path}.{name}" if norm.path else name
                    told[path] = f"{whose} {part_of(parameter)}", _numbers(_summed(parameter.grad))
    return told


def _loss(output: Any) -> Tensor:
    """The output's own loss, or a sum with fixed weights: a square would be constant behind a norm."""
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own.full_tensor() if hasattr(own, "full_tensor") else own
    total: Any = 0.0
    for tensor in tensors_of(output):
        if tensor.requires_grad:
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            weights = torch.linspace(0, 7 * whole.numel() ** 0.5, whole.numel(), device=whole.device).cos()
            total = total + (whole.float() * weights.view(whole.shape)).sum()
    if not isinstance(total, Tensor):
        return torch.zeros((), requires_grad=True)
    return total


def _summed(gradient: Tensor) -> Tensor:
    """A DTensor that says itself that it is a part of a sum is summed by the optimizer."""
    if hasattr(gradient, "placements") and any(p.is_partial() for p in gradient.placements):
        from torch.distributed.tensor import Replicate

        whole = [Replicate() if p.is_partial() else p for p in gradient.placements]
        gradient = gradient.redistribute(placements=whole)  # type: ignore[attr-defined]
    return gradient


def _numbers(gradient: Tensor) -> list[float]:
    values = values_of(gradient)
    if values is None:
        return [0.0] * _NUMBERS
    flat = values.double().flatten()
    places = torch.arange(flat.numel(), device=flat.device, dtype=torch.float64)
    of = [float(flat @ ((places * step).remainder(4096) / 651.9).cos()) for step in (0, 997, 1913, 2731)]
    with suppress(OverflowError):
        return [value if abs(value) < float("inf") else 0.0 for value in of]
    return of
