"""The memory of a training step without the memory: fake tensors, counted by their storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leannorm.report.memory import StepMemory
from leannorm.report.models import mean_square
from leannorm.report.settings import Setting


class _Meter(TorchDispatchMode):
    """Adds up the storages that operations bring into being, until they are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def know(self, tensors: Any) -> None:
        """These are there before the step and count as nothing."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._known.add(tensor.untyped_storage())

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known.add(storage)
            nbytes = storage.nbytes()
            self.alive += nbytes
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._gone, nbytes)

    def _gone(self, nbytes: int) -> None:
        self.alive -= nbytes


def fake_step(
    model: nn.Module, mode: FakeTensorMode, setting: Callable[[nn.Module], Setting], shape: tuple[int, ...]
) -> StepMemory:
    """What a training step on an input of `shape` would hold and its peak; `model` was made under `mode`.

    Gradients of parameters are part of the peak, as in `measure_step`.
    """
    chosen = setting(model)
    with mode:
        images = torch.empty(shape)
        meter = _Meter()
        meter.know([images, list(model.parameters()), list(model.buffers())])
        with meter:
            with chosen.around():
                loss = mean_square(chosen.run(images))
            held = meter.alive
            loss.backward()
    peak = meter.peak
    for parameter in model.parameters():
        parameter.grad = None
    return StepMemory(held, peak)
