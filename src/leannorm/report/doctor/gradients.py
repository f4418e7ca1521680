"""One small backward pass, after which each rank reports its norms' gradients."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from leannorm._batch import call, unwrapped
from leannorm._catalog import Norm
from leannorm._errors import InputError
from leannorm._untouched import Copies, untouched
from leannorm.report.doctor.observe import Forward, eager, moved, place_of, set_modes, tensors_of
from leannorm.report.doctor.ranks import digest_of, in_numbers, part_of
from leannorm.report.doctor.subject import values_of
from leannorm.report.doctor.values import one_value_passes

Gradients = dict[str, tuple[str, list[float]]]


def gradients_of(
    model: Module,
    norms: list[Norm],
    batch: Any,
    forward: Forward | None,
    backward: Callable[[Module, Any], Any] | None,
) -> Gradients:
    """For every gamma and beta: which copies of its gradient should be equal, and the gradient in a few
    numbers.

    With `backward`, from a real step, all ranks' copies should be; otherwise those of ranks with equal
    batches, because DistributedDataParallel, which sums over ranks, does not take part. Dropout is off, batch
    norms train.
    """
    core = unwrapped(model)
    training = {n.module for n in norms if n.kind == "batch" and (n.module.training or not core.training)}
    whose = "" if backward else f"{digest_of(batch)}"
    kept = untouched(model, Copies(parameters=False))  # DistributedDataParallel has references to these
    with torch.inference_mode(False), torch.enable_grad(), eager(core), kept:
        with _no_steps(), one_value_passes(norms):
            set_modes(model, training)
            for parameter in model.parameters():
                parameter.grad = None
            place = place_of(model)
            _seed(place)
            if backward is not None:
                backward(model, moved(batch, place))
            else:
                _backward(model, _loss((forward or call)(core, moved(batch, place))))
        return dict(_told(norms, whose))


def _told(norms: list[Norm], whose: str) -> Iterator[tuple[str, tuple[str, list[float]]]]:
    for norm in norms:
        for name, parameter in norm.affine:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else _summed(parameter.grad)
            values = values_of(gradient)
            if values is not None and parameter.requires_grad:
                path = f"{norm.path}.{name}" if norm.path else name
                yield path, (f"{whose} {part_of(parameter)}", in_numbers(values))


def _backward(model: Module, loss: Tensor) -> None:
    """`loss.backward()`, hidden from DistributedDataParallel, which may wait for one of its own."""
    if not any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        loss.backward()
        return
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
        if gradient is not None:
            p.grad = gradient
            for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(p)


@contextmanager
def _no_steps() -> Iterator[None]:
    """Keeps an optimizer, which has references to parameters and gradients, from making a step."""

    def refuse(optimizer: object, args: object, kwargs: object) -> None:
        raise InputError(
            "doctor's backward pass must leave gradients and change nothing, but in it "
            f"{type(optimizer).__name__} takes a step; pass backward=, a step without optimizer.step()"
        )

    refusal = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        refusal.remove()


def _seed(place: torch.device | None) -> None:
    """Makes a forward pass draw the same numbers on all ranks, as gradients of equal batches are compared."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    if place is not None and place.type == "cuda":
        index = torch.cuda.current_device() if place.index is None else place.index
        torch.cuda.default_generators[index].manual_seed(0)


def _loss(output: Any) -> Tensor:
    """The output's own loss, or a sum with fixed weights: the mean square is constant after a norm."""
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return _whole(own)
    total = torch.zeros((), requires_grad=True)
    for tensor in tensors_of(output):
        if tensor.requires_grad:
            whole = _whole(tensor)
            weights = torch.linspace(0, 7 * whole.numel() ** 0.5, whole.numel(), device=whole.device).cos()
            total = total.to(whole.device) + (whole.float() * weights.view(whole.shape)).sum()
    return total


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _summed(gradient: Any) -> Tensor:
    """A DTensor that is marked as part of a sum is summed by the optimizer."""
    if hasattr(gradient, "placements") and any(p.is_partial() for p in gradient.placements):
        from torch.distributed.tensor import Replicate

        whole = [Replicate() if p.is_partial() else p for p in gradient.placements]
        gradient = gradient.redistribute(placements=whole)
    summed: Tensor = gradient
    return summed
