"""A layer's formula, when it holds, and the call of our function that computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from leannorm.functional.batch import batch_norm
from leannorm.functional.gated import gated_rms_norm
from leannorm.functional.group import group_norm
from leannorm.functional.layer import layer_norm, rms_norm
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.modes import autocasts, sharded
from leannorm.ops.precision import compute_dtype
from leannorm.transforms.recognizing.form import Form
from leannorm.transforms.recognizing.probe import Missing

Key = tuple[int | torch.dtype, ...]  # rank, number of inputs, their dtypes and those of the tensors


class Fit(NamedTuple):
    """The norm that a layer is, whether autocast leaves it alone, and whether its code asked for the
    device."""

    form: Form
    neutral: bool
    device: bool


class Formula(NamedTuple):
    """What a layer computes, and what must be unchanged for that to hold.

    `inputs` are the names of its arguments, the second a gate's; `reads` the attributes that its forward
    read, `functions` its methods with their code, `constants` the numbers among their globals, `tensors` its
    parameters and buffers with their shapes; `sizes` those of the normalized axes, None if any will do;
    `fits` what it computes, by the rank and the dtype of its inputs and the dtypes of the tensors.
    """

    inputs: tuple[str, ...]
    reads: tuple[tuple[str, Any], ...]
    functions: tuple[tuple[str, Any, Any], ...]
    constants: tuple[tuple[dict[str, Any], str, Any], ...]
    tensors: tuple[tuple[str, torch.Size], ...]
    sizes: tuple[int, ...] | None
    fits: Mapping[Key, Fit]

    def holds(self, layer: Module, cls: type[Module]) -> bool:
        """Whether everything that the run read is unchanged."""
        for name, value in self.reads:
            now = getattr(layer, name, Missing)
            if type(now) is not type(value) or now != value:
                return False
        for name, function, code in self.functions:
            now = getattr(cls, name, None)
            if now is not function or getattr(now, "__code__", None) is not code:
                return False
        return all(names.get(name) == value for names, name, value in self.constants)

    def inputs_of(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any] | None:
        """The input, and the gate if there is one; None for any other arguments."""
        if len(args) == 1 and not named:
            return list(args)
        by_name = {**dict(zip(self.inputs, args, strict=False)), **named}
        expected = self.inputs[: len(by_name)]
        if by_name.keys() != {*expected} or len(args) + len(named) != len(by_name):
            return None
        return [by_name[name] for name in expected]

    def find(self, layer: Module, inputs: Sequence[Any]) -> tuple[Form, dict[str, Tensor]] | None:
        """What the layer computes of this, and its tensors; None if that is not known."""
        tensors: dict[str, Tensor] = {}
        for name, shape in self.tensors:
            tensor: Any = getattr(layer, name, None)
            if not _is_plain(tensor) or tensor.shape != shape:
                return None
            tensors[name] = tensor
        if not all(_is_plain(x) for x in inputs):
            return None
        dtypes = [t.dtype for t in (*inputs, *tensors.values())]
        fit = self.fits.get((inputs[0].dim(), len(inputs), *dtypes))
        if fit is None or not self._serves(fit, inputs, tensors):
            return None
        return fit.form, tensors

    def _serves(self, fit: Fit, inputs: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> bool:
        x, form = inputs[0], fit.form
        if self.sizes is not None:
            last = form.dim is None and form.kind not in ("group", "running")
            first = x.dim() - len(self.sizes) if last else form.dim or 1
            if x.shape[first : first + len(self.sizes)] != self.sizes:
                return False
        if any(gate.shape != x.shape for gate in inputs[1:]):
            return False
        if any(tensors[name].requires_grad for name in (form.mean, form.var) if name is not None):
            return False  # our batch norm has no gradients for running statistics
        if fit.device and x.device.type != "cpu":  # the device of the runs
            return False
        return fit.neutral or not autocasts(x)


def _is_plain(tensor: Any) -> bool:
    """Whether it is a tensor that our functions take as it is (no proxy, no DTensor)."""
    cls = type(tensor)
    if cls is Tensor or cls is Parameter:
        return True
    return (
        isinstance(tensor, Tensor)
        and cls.__torch_function__ is torch._C._disabled_torch_function_impl
        and not is_traceable_wrapper_subclass(tensor)  # which is never true in compiled code
        and not sharded(tensor)
    )


def compute(form: Form, tensors: Mapping[str, Tensor], x: Tensor, gate: Tensor | None = None) -> Tensor:
    """The form computed by our functions, with a layer's parameters."""
    weight = None if form.weight is None else tensors[form.weight]
    bias = None if form.bias is None else tensors[form.bias]
    if form.kind == "group":
        return group_norm(x, form.groups, weight, bias, form.eps)
    if form.kind == "running":
        mean, var = tensors[str(form.mean)], tensors[str(form.var)]
        return batch_norm(x, mean, var, weight, bias, eps=form.eps)
    if form.groups > 1:
        parts = (form.groups, -1)
        gate = None if gate is None else gate.unflatten(-1, parts)
        y = _rms_norm(form, None, x.unflatten(-1, parts), gate).flatten(-2)
        return y if weight is None else weight * y
    if form.kind == "rms":
        return _rms_norm(form, weight, x, gate)
    if weight is not None and form.offset_dtype is not None:
        weight = weight.to(form.offset_dtype) + form.offset
    return layer_norm(x, _sizes(form, x), weight, bias, form.eps, dim=form.dim)


def _rms_norm(form: Form, weight: Tensor | None, x: Tensor, gate: Tensor | None) -> Tensor:
    sizes, offset = _sizes(form, x), form.offset
    if gate is None or form.gate is None:
        return rms_norm(x, sizes, weight, form.eps, dim=form.dim, weight_offset=offset, cast=form.cast)
    if form.gate not in ACTIVATIONS:  # sigmoid
        wide = x.to(compute_dtype(x))
        y = rms_norm(wide, sizes, weight, form.eps) * torch.sigmoid(gate.to(wide.dtype))
        return y.to(x.dtype)
    gating = form.gate, not form.gate_first
    return gated_rms_norm(x, gate, sizes, weight, form.eps, *gating, cast=form.cast)


def _sizes(form: Form, x: Tensor) -> tuple[int, ...]:
    return (x.shape[form.dim],) if form.dim is not None else tuple(x.shape[x.dim() - form.last :])
