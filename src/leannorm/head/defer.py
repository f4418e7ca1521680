"""Makes linear layers with many more outputs than inputs return `Logits` within a pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from leannorm.head import forms, readers  # noqa: F401  (they fill the table of readers)
from leannorm.head.formula import Gathered, Product, Slot
from leannorm.head.logits import Logits
from leannorm.head.told import Told
from leannorm.ops.modes import exporting, recording, traced, transformed

_FACTOR = 3  # outputs per input; a fused projection to query, key and value has three
_LEAST = 256  # outputs
_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__}
_LINEAR = {F.linear, *_PRODUCTS}
SUBCLASS = (
    "head=True: a weight of {width} rows is a {kind}, sharded or of another subclass of tensors, whose rows"
    " are not read: its logits are computed as without it"
)


class Heads(TorchFunctionMode):
    """A mode in which heads return `Logits`, unless `refusal(weight)` returns a reason against it.

    `gathered(weight)` returns how long the weight exists, if not always.
    """

    def __init__(
        self,
        told: Told,
        refusal: Callable[[Tensor], str | None],
        gathered: Callable[[Tensor], Gathered | None],
    ) -> None:
        super().__init__()
        self.told, self._refusal, self._gathered = told, refusal, gathered

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LINEAR and torch.is_grad_enabled():
            found = self._deferred(func, *args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)

    def open(self) -> None:
        torch._C._push_on_torch_function_stack(self)

    def close(self) -> None:
        """Remove the mode, which may lie below others if several tasks alternate in one thread."""
        self.told.close()
        above = []
        while torch._C._len_torch_function_stack():
            mode = torch._C._pop_torch_function_stack()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            torch._C._push_on_torch_function_stack(mode)

    def _deferred(
        self, func: Any, input: Any = None, weight: Any = None, bias: Any = None, **more: Any
    ) -> Any:
        if func in _PRODUCTS:
            weight = more.pop("other", weight)
            if not isinstance(weight, Tensor) or weight.dim() != 2:
                return None
        if more or not (isinstance(input, Tensor) and isinstance(weight, Tensor)):
            return None
        outputs, inputs = (
            weight.shape if func is F.linear and weight.dim() == 2 else (*weight.shape[::-1], 0)[:2]
        )
        if outputs <= _FACTOR * inputs or outputs < _LEAST:
            return None
        if (
            (outputs, inputs) in self.told.unfit
            or input.dim() < 2
            or input.shape[-1] != inputs
            or not input.numel()
            or not self._fits(input, weight, bias)
        ):
            return None
        return self._logits(func, input, weight, bias)

    def _fits(self, rows: Tensor, weight: Tensor, bias: Any) -> bool:
        given = [t for t in (rows, weight, bias) if t is not None]
        unlike = next((t for t in given if type(t) not in (Tensor, nn.Parameter)), None)
        if unlike is not None:
            if not isinstance(unlike, Logits):
                self.told.note(
                    max(weight.shape), SUBCLASS.format(width=max(weight.shape), kind=type(unlike).__name__)
                )
            return False
        if not any(t.requires_grad for t in given) or traced() or exporting() or recording():
            return False
        if torch._C._len_torch_dispatch_stack() or transformed(*given):
            return False
        refused = self._refusal(weight)
        if refused is not None:
            self.told.note(max(weight.shape), refused)
            return False
        device = rows.device
        if device.type not in ("cpu", "cuda") or torch.is_inference_mode_enabled():
            return False
        one_dtype = torch.is_autocast_enabled(device.type) or len({t.dtype for t in given}) == 1
        return one_dtype and all(_is_plain(t) and t.device == device for t in given)

    def _logits(self, func: Any, rows: Tensor, weight: Tensor, bias: Any) -> Logits | None:
        device = rows.device.type
        dtype = rows.dtype
        if torch.is_autocast_enabled(device) and dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(device)
        args = (rows, weight) if func in _PRODUCTS else (rows, weight, bias)
        if func in _PRODUCTS:
            weight = weight.t()
        if bias is not None and bias.shape != weight.shape[:1]:
            return None
        self.told.deferred.add((len(weight), weight.shape[1]))
        like = torch.empty((*rows.shape[:-1], len(weight)), dtype=dtype, device="meta")
        gathered = self._gathered(weight)
        product = Product(rows, weight, bias, dtype, None if gathered is None else gathered.edits)
        logits = Logits.of(Slot(0), [product], like, lambda: func(*args), told=self.told)
        if gathered is not None and gathered.frees:
            for module in gathered.modules:
                _compute_at_end(module, logits)
        return logits


def _compute_at_end(module: nn.Module, logits: Logits) -> None:
    """Compute what is left of the logits at the end of the module's forward pass, before its weights go."""
    family = weakref.ref(logits)

    def hook(*_: Any) -> None:
        handle.remove()
        left = family()
        if left is not None:
            end = f"the end of {type(module).__name__}"
            left.make_family(f"{end}, where FSDP2 frees their weight (reshard_after_forward),")

    handle = module.register_forward_hook(hook, prepend=True)


def _is_plain(t: Tensor) -> bool:
    return t.layout is torch.strided and t.is_floating_point() and not t.is_inference()
