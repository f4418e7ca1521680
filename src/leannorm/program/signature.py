"""A program's inputs: the structure, shapes and dtypes for which it was exported, checked at every call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from leannorm._errors import DtypeError, InputError


class Input(NamedTuple):
    """One input: a tensor's sizes (numbers, or names of dims that may vary) and dtype, or a fixed value."""

    name: str
    sizes: tuple[int | str, ...] = ()
    dtype: torch.dtype | None = None  # None: a fixed value
    value: Any = None


class Signature(NamedTuple):
    """All inputs in order, their structure as (args, kwargs), and the range of each dim that may vary."""

    inputs: tuple[Input, ...]
    structure: pytree.TreeSpec
    ranges: Mapping[str, tuple[int, int | None]]

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The inputs as a flat list; raises InputError if their structure is not the exported one."""
        names = self.structure.child(1).context
        if set(names) == set(kwargs):
            kwargs = {name: kwargs[name] for name in names}
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if structure != self.structure:
            raise InputError(
                f"the program takes {self.describe()}, got {len(args)} positional and the keyword "
                f"arguments {sorted(kwargs)}; call it as the model was called when it was forked"
            )
        return leaves

    def check(self, values: Mapping[str, Any]) -> None:
        """Compare each given value with its input's sizes and dtype."""
        sizes: dict[str, int] = {}
        for input in self.inputs:
            if input.name in values:
                self._check_one(input, values[input.name], sizes)

    def _check_one(self, input: Input, value: Any, sizes: dict[str, int]) -> None:
        if input.dtype is None:
            if value != input.value:
                raise InputError(
                    f"{input.name} was {input.value!r} when the program was forked and is part of it, got "
                    f"{value!r}; fork the model again for another value"
                )
            return
        if not isinstance(value, Tensor):
            raise InputError(f"{input.name} must be a tensor, got {type(value).__name__}")
        if value.dtype != input.dtype:
            raise DtypeError(
                f"{input.name} must have dtype {input.dtype}, got {value.dtype}; convert it, or fork the "
                "model with example inputs of that dtype"
            )
        fits = len(input.sizes) == value.dim()
        for wanted, size in zip(input.sizes, value.shape, strict=False):
            if isinstance(wanted, int):
                fits &= wanted == size
            elif wanted in self.ranges:
                low, high = self.ranges[wanted]
                fits &= (
                    sizes.setdefault(wanted, size) == size and low <= size and (high is None or size <= high)
                )
        if not fits:
            raise InputError(
                f"{input.name} must have shape {self._shape(input)}, got {tuple(value.shape)}; to let a "
                "size vary, fork the model with dynamic_shapes"
            )

    def _shape(self, input: Input) -> str:
        def size(wanted: int | str) -> str:
            if isinstance(wanted, int) or wanted not in self.ranges:
                return str(wanted)
            low, high = self.ranges[wanted]
            return f"{self._word(wanted)}={low}..{'' if high is None else high}"

        return f"({', '.join(map(size, input.sizes))})"

    def _word(self, size: str) -> str:
        """The name of a size that varies: "batch" if it is the first of an input, otherwise by its number.

        The exporter's own names (s31) say nothing.
        """
        if any(input.sizes[:1] == (size,) for input in self.inputs):
            firsts = [input.sizes[0] for input in self.inputs if input.sizes]
            place = list(dict.fromkeys(one for one in firsts if one in self.ranges)).index(size)
            return f"batch{place + 1}" if place else "batch"
        return f"size{list(self.ranges).index(size) + 1}"

    def describe(self) -> str:
        """The inputs as text: names, shapes, dtypes."""
        return ", ".join(
            f"{i.name}={i.value!r}"
            if i.dtype is None
            else f"{i.name} {self._shape(i)} {str(i.dtype).removeprefix('torch.')}"
            for i in self.inputs
        )


def signature_of(train: ExportedProgram, infer: ExportedProgram) -> Signature:
    """The signature that both exports accept: a size that one of them fixes is fixed; ranges intersect."""
    call = train.module_call_graph[0].signature
    if call is None:
        raise AssertionError("an exported program states its call signature")
    inputs = tuple(_joint(a, b) for a, b in zip(_inputs(train), _inputs(infer), strict=True))
    ranges: dict[str, tuple[int, int | None]] = {}
    for program in (train, infer):
        for symbol, bounds in program.range_constraints.items():
            low, high = ranges.get(str(symbol), (0, None))
            top = int(bounds.upper) if bounds.upper.is_Integer else None
            highs = [h for h in (high, top) if h is not None]
            ranges[str(symbol)] = max(low, int(bounds.lower)), min(highs, default=None)
    used = {size for i in inputs for size in i.sizes if isinstance(size, str)}
    return Signature(inputs, call.in_spec, {k: v for k, v in ranges.items() if k in used})


def _inputs(program: ExportedProgram) -> list[Input]:
    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    inputs = []
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            value = values[spec.arg.name]
            if isinstance(spec.arg, ConstantArgument):
                inputs.append(Input(spec.arg.name, value=spec.arg.value))
            elif isinstance(value, Tensor):
                sizes = tuple(s if isinstance(s, int) else str(s) for s in value.shape)
                inputs.append(Input(spec.arg.name, sizes, value.dtype))
            else:
                raise InputError(
                    f"input {spec.arg.name!r} is a number that may vary, which a program does not take; "
                    "pass it as a tensor, or leave it out of dynamic_shapes"
                )
    return inputs


def _joint(a: Input, b: Input) -> Input:
    sizes = tuple(p if isinstance(p, int) else q for p, q in zip(a.sizes, b.sizes, strict=True))
    return a._replace(sizes=sizes)
