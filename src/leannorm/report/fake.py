"""The memory that a training step would take, counted on fake tensors, which have none."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from leannorm._batch import Arguments
from leannorm.report.loss import mean_square
from leannorm.report.memory import StepMemory
from leannorm.report.settings import Setting

_TABLES = frozenset(vars(nn.Module()))


class _Meter(TorchDispatchMode):
    """Adds up the bytes of the storages that operations allocate, while they are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def ignore(self, tensors: Any) -> None:
        """Do not count these tensors, which exist before the step."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._known.add(tensor.untyped_storage())

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known.add(storage)
            nbytes = storage.nbytes()
            self.alive += nbytes
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._freed, nbytes)

    def _freed(self, nbytes: int) -> None:
        self.alive -= nbytes


def fake_model(make: Callable[[], nn.Module], mode: FakeTensorMode) -> nn.Module:
    """The model that `make` returns, with fake tensors as parameters, buffers and attributes.

    It is made on the meta device, which takes no memory, or, if its constructor reads values, on the CPU.
    """
    try:
        with torch.device("meta"):
            model = make()
    except (RuntimeError, NotImplementedError):
        model = make()
    made: dict[Tensor, Tensor] = {}  # by identity: a tied weight is one

    def fake(tensor: Tensor) -> Tensor:
        if tensor not in made:
            new = _empty_like(tensor)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            made[tensor] = new
        return made[tensor]

    with mode:
        for module in model.modules():
            for table in (module._parameters, module._buffers, vars(module)):
                for name, value in list(table.items()):
                    has_tensors = any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
                    if has_tensors and (table is not vars(module) or name not in _TABLES):
                        table[name] = tree_map_only(Tensor, fake, value)
    return model


def fake_step(model: nn.Module, mode: FakeTensorMode, setting: Setting, inputs: Arguments) -> StepMemory:
    """The memory of a training step on such inputs: held after forward, and peak; with gradients.

    `model` comes from `fake_model` under the same `mode`; `setting` runs it. Workspace memory inside single
    operations is not counted.
    """
    with mode:
        fake = tree_map_only(Tensor, _empty_like, (inputs.args, dict(inputs.kwargs)))
        meter = _Meter()
        meter.ignore([fake, [vars(module) for module in model.modules()]])
        with meter:
            with setting.around():
                loss = mean_square(Arguments(*fake).call(setting.run))
            held = meter.alive
            loss.backward()
            peak = meter.peak
        for parameter in model.parameters():
            parameter.grad = None
    return StepMemory(held, peak)


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)
