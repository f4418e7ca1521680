"""A layer's formula, when it holds, and the call of our function that computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from leannorm.ops.modes import autocasts, sharded
from leannorm.ops.precision import compute_dtype
from leannorm.transforms.recognizing.form import STATISTICS, Form
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
            first = form.axes(x.dim())[0]
            if x.shape[first : first + len(self.sizes)] != self.sizes:
                return False
        if any(gate.shape != x.shape for gate in inputs[1:]):
            return False
        if any(tensors[name].requires_grad for argument, name in form.tensors if argument in STATISTICS):
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
    """The form's call, with a layer's parameters."""
    given = {argument: tensors[name] for argument, name in form.tensors}
    if form.shift is not None:
        offset, dtype = form.shift
        given["weight"] = given["weight"].to(dtype) + offset
    if form.parts == 1:
        return _called(form, given, x, gate)
    weight, parts = given.pop("weight", None), (form.parts, -1)
    gate = None if gate is None else gate.unflatten(-1, parts)
    y = _called(form, given, x.unflatten(-1, parts), gate).flatten(-2)
    return y if weight is None else weight * y


def _called(form: Form, given: Mapping[str, Tensor], x: Tensor, gate: Tensor | None) -> Tensor:
    function, settings = form.function, form.settings
    if not form.last:
        return function(x, **given, **settings)
    sizes = tuple([x.shape[axis] for axis in form.axes(x.dim())])
    if gate is None:
        return function(x, normalized_shape=sizes, **given, **settings)
    if "act" in settings:
        return function(x, gate, sizes, **given, **settings)
    wide = x.to(compute_dtype(x))  # a sigmoid behind the norm
    y = function(wide, sizes, **given, **settings) * torch.sigmoid(gate.to(wide.dtype))
    return y.to(x.dtype)
