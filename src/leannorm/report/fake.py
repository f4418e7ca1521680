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

_BLOCK, _FEW = 16, 4  # from this number of channels oneDNN uses blocked layouts; images have fewer
_NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm")
_WITHOUT_GAPS = {*_NORMS, *(f"{name}_backward" for name in _NORMS)}
"""Operations that read their arguments in a copy where these have gaps, or axes in another order."""


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
        self.peak = max(self.peak, self.alive + _working(func, args, out))
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


def _working(func: Any, args: Any, out: Any) -> int:
    """The most that an operation allocates in addition to its outputs: layouts of its own, and copies."""
    name = func.overloadpacket.__name__
    if name == "convolution":
        x, weight, groups = args[0], args[1], args[-1]
        there, nbytes = _blocked(out), int(out.nbytes)
        return max(_blocked(x) + _blocked_weight(weight, groups) + there - nbytes, there)
    if name == "convolution_backward":
        x, weight, groups = args[1], args[2], args[-2]
        there, nbytes = _blocked_weight(weight, groups), int(weight.nbytes)
        return max(_blocked(x) + _blocked(args[0]) + there - nbytes, there)
    if name in _WITHOUT_GAPS:
        tensors = (t for t in args if isinstance(t, Tensor) and t.dim() > 1)
        return sum(t.nbytes for t in tensors if not t.is_contiguous())
    return 0


def _blocked(x: Tensor) -> int:
    """The bytes in a blocked layout of channels."""
    return x.nbytes // max(x.shape[1], 1) * _in_blocks(x.shape[1], _FEW)


def _blocked_weight(weight: Tensor, groups: int) -> int:
    """With several groups each has blocks of its own, however few channels it has."""
    outputs, inputs = weight.shape[0] // groups, weight.shape[1]
    few = _FEW if groups == 1 else 0
    each = weight.nbytes // max(weight.shape[0] * inputs, 1)
    return each * groups * _in_blocks(outputs, few) * _in_blocks(inputs, few)


def _in_blocks(channels: int, few: int) -> int:
    return channels if channels <= few else -(-channels // _BLOCK) * _BLOCK


def fakes(mode: FakeTensorMode) -> Callable[[Tensor], Tensor]:
    """For `untouched`: a fake tensor of the mode replaces each of a model's tensors."""

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            return _empty_like(tensor)

    return fake


def fake_step(model: nn.Module, mode: FakeTensorMode, setting: Setting, inputs: Arguments) -> StepMemory:
    """The memory of a training step on such inputs, with gradients: kept after forward, and peak.

    `model` has `fakes` of the same `mode`; `setting` runs it. A convolution's workspace is counted as oneDNN
    allocates it, so a peak tends to be above that of a real step.
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
