"""A layer's formula, when it holds, and the call of ours that computes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from leannorm.functional.group import group_norm
from leannorm.functional.layer import layer_norm, rms_norm
from leannorm.transforms.formula import Form
from leannorm.transforms.stand_ins import Missing, Run


class Formula(NamedTuple):
    """What a layer computes, and what has to be as it was for that to be so.

    `reads` are the attributes that its forward read, `functions` its methods with their code, `tensors` its
    parameters and buffers with their shapes; `sizes` those of the normalized axes, None if any will do;
    `runs` what it computes, by the dtype and the rank of the input and the dtypes of the tensors.
    """

    input_name: str
    reads: tuple[tuple[str, Any], ...]
    functions: tuple[tuple[str, Any, Any], ...]
    tensors: tuple[tuple[str, torch.Size], ...]
    sizes: tuple[int, ...] | None
    device: str
    runs: Mapping[tuple[Any, ...], Run]

    def holds(self, layer: Module, cls: type[Module]) -> bool:
        """Is all that the run read as it was?"""
        for name, value in self.reads:
            now = getattr(layer, name, Missing)
            if type(now) is not type(value) or now != value:
                return False
        for name, function, code in self.functions:
            now = getattr(cls, name, None)
            if now is not function or getattr(now, "__code__", None) is not code:
                return False
        return True

    def compute(self, layer: Module, x: Any) -> Tensor | None:
        """The layer's output by our functions; None if it is not known what the layer computes here."""
        if not _is_plain(x):
            return None
        tensors: dict[str, Tensor] = {}
        for name, shape in self.tensors:
            tensor = getattr(layer, name, None)
            if not _is_plain(tensor) or tensor.shape != shape:
                return None
            tensors[name] = tensor
        run = self.runs.get((x.dtype, x.dim(), *[t.dtype for t in tensors.values()]))
        if run is None or not self._fits(run, x):
            return None
        return compute(run.form, tensors, x)

    def _fits(self, run: Run, x: Tensor) -> bool:
        if self.sizes is not None:
            first = x.dim() - len(self.sizes) if run.form.dim is None else run.form.dim
            first = 1 if run.form.groups else first
            if x.shape[first : first + len(self.sizes)] != self.sizes:
                return False
        if run.device and x.device.type != self.device:
            return False
        return run.neutral or not torch.is_autocast_enabled(x.device.type)


def _is_plain(tensor: Any) -> bool:
    """Is it a tensor that our functions take as it is (no proxy, no DTensor)?"""
    cls = type(tensor)
    if cls is Tensor or cls is Parameter:
        return True
    return (
        isinstance(tensor, Tensor)
        and cls.__torch_function__ is torch._C._disabled_torch_function_impl
        and not is_traceable_wrapper_subclass(tensor)
    )


def compute(form: Form, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The form by our functions, with a layer's parameters."""
    weight = None if form.weight is None else tensors[form.weight]
    bias = None if form.bias is None else tensors[form.bias]
    if form.kind == "group":
        return group_norm(x, form.groups, weight, bias, form.eps)
    sizes = (x.shape[form.dim],) if form.dim is not None else tuple(x.shape[x.dim() - form.count :])
    if form.kind == "rms":
        offset, cast = form.offset, form.cast
        return rms_norm(x, sizes, weight, form.eps, dim=form.dim, weight_offset=offset, cast=cast)
    if weight is not None and form.offset_dtype is not None:
        weight = weight.to(form.offset_dtype) + form.offset
    return layer_norm(x, sizes, weight, bias, form.eps, dim=form.dim)
