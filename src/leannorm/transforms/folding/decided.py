"""Which control flow the example decided: the model runs once, and the values that its Python tests read are
recorded.

When the model's code reads a size from a tensor, it gets a number that records its comparisons. Globals, and
attributes that the forward pass assigns, are found in the source of the functions that ran.
"""

from __future__ import annotations

import ast
import copy
import operator
import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from leannorm._untouched import untouched
from leannorm.transforms.folding.source import function_of, global_read, test_at, tests_in

_OURS = str(Path(__file__).parents[2]) + os.sep
_OPERATORS = (os.path.dirname(torch.__file__) + os.sep, _OURS, "<frozen")  # no code of the model
_DISPATCH = (torch.overrides.__file__, torch._tensor.__file__)  # between a call and the mode that sees it
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_COMPUTE = "add sub mul truediv floordiv mod pow radd rsub rmul rtruediv rfloordiv rmod rpow neg abs"
_COMPUTE += " divmod rdivmod round ceil floor"
_READ = (bool, int, float, torch.dtype, torch.device, torch.layout)
_LONGEST = 60  # characters of a value in the report


class Decided(NamedTuple):
    """A test in the model's code whose outcome the example gave: its place, its text, and what it read."""

    place: str
    test: str
    value: str


def decided(model: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Decided, ...]:
    """The tests that a run of `model` on `inputs` decided; neither is changed."""
    with untouched(model), torch.no_grad():
        watch = _Watch(model)
        try:
            with watch:
                model(*copy.deepcopy(inputs))
            watch.read_source()
        except Exception as error:  # raised by the model; what was recorded before it is kept
            watch.add(type(model).__name__, "all later tests", f"{type(error).__name__}: {error}")
    return tuple(Decided(*where, "; ".join(values)) for where, values in watch.decided.items())


class _Watch(TorchFunctionMode):
    """Within it, the sizes that the model's code reads are tracked, and what its tests read is recorded."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.decided: dict[tuple[str, str], dict[str, None]] = {}
        self._own = {id(t) for t in (*model.parameters(), *model.buffers())}
        self._before = {id(m): dict(vars(m)) for m in model.modules()}
        self._ran: dict[tuple[CodeType, type], tuple[dict[str, Any], torch.nn.Module | None]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        while frame.f_code.co_filename in _DISPATCH:
            frame = frame.f_back
        self._remember(frame)
        result = func(*args, **(kwargs or {}))
        if not _is_models(frame) or (args and id(args[0]) in self._own):
            return result  # a parameter's size does not depend on the example
        name = getattr(func, "__name__", "")
        if name == "__get__" or not name.startswith("__"):
            tracked = self.tracked(result)
            if tracked is not result:
                return tracked
        if isinstance(result, _READ):
            name = func.__self__.__name__ if name == "__get__" else name.strip("_")
            self.note(frame, f"{name} is {result}")
        return result

    def tracked(self, value: Any) -> Any:
        """A number, or a tuple of numbers, that records comparisons; other values unchanged."""
        if type(value) in (int, float):
            number: Any = _Size(value) if type(value) is int else _Ratio(value)
            number.watch = self
            return number
        if type(value) in (torch.Size, tuple) and value:
            return type(value)(map(self.tracked, value))
        return value

    def note(self, frame: FrameType, value: str, without_source: bool = False) -> None:
        """Record that a value from the example was read here, if it was read in a test."""
        if _is_models(frame) and (test := test_at(frame, without_source)) is not None:
            self.add(_place(frame.f_code, test[0]), test[1], value)

    def add(self, place: str, test: str, value: str) -> None:
        self.decided.setdefault((place, test), {})[value] = None

    def _remember(self, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not decided.__code__:
            if _is_models(frame):
                module = _self(frame)
                self._ran.setdefault((frame.f_code, type(module)), (frame.f_globals, module))
            frame = frame.f_back

    def read_source(self) -> None:
        """Record the tests of globals, and of attributes that the forward pass assigns, in what ran."""
        ran = [(function_of(code), code, *rest) for (code, _), rest in self._ran.items()]
        before, self._before, self._ran = self._before, {}, {}
        assigned = {
            (type(module), node.attr)
            for function, code, _, module in ran
            for node in (ast.walk(function) if function and module is not None else ())
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _of_self(node, code)
        }
        for function, code, names, module in ran:
            for test in tests_in(function) if function else ():
                for node in ast.walk(test.expression):
                    values = global_read(node, code, names)
                    if isinstance(node, ast.Attribute) and _of_self(node, code):
                        known = (type(module), node.attr) in assigned
                        values = [before.get(id(module), {}).get(node.attr)] if known else []
                    for value in values:
                        place = _place(code, test.evaluator.lineno)
                        self.add(place, test.text, f"{ast.unparse(node)} is {_short(value)}")


class _Size(int):
    """A size, or what was computed from sizes."""

    watch: _Watch


class _Ratio(float):
    """A quotient of sizes."""

    watch: _Watch


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, _Size) else float(value) if isinstance(value, _Ratio) else value


def _comparison(name: str, sign: str) -> Any:
    def compare(self: Any, other: Any) -> Any:
        left, right = _plain(self), _plain(other)
        result = getattr(operator, name)(left, right)
        if isinstance(result, bool):
            self.watch.note(sys._getframe(1), f"{left} {sign} {right} is {result}", without_source=True)
        return result

    return compare


def _computation(base: type, name: str) -> Any:
    def compute(self: Any, *others: Any) -> Any:
        result = getattr(base, name)(self, *others)
        if result is NotImplemented and type(others[0]) is float:
            result = getattr(float, name)(float(self), *others)
        return self.watch.tracked(result)

    return compute


def _truth(self: Any) -> bool:
    value = _plain(self)
    self.watch.note(sys._getframe(1), f"{value} is {bool(value)}", without_source=True)
    return bool(value)


for _kind, _base in ((_Size, int), (_Ratio, float)):
    for _name, _sign in _COMPARE.items():
        setattr(_kind, f"__{_name}__", _comparison(_name, _sign))
    for _name in (f"__{n}__" for n in _COMPUTE.split()):
        setattr(_kind, _name, _computation(_base, _name))
    for _name, _method in {"bool": _truth, "hash": _base.__hash__}.items():
        setattr(_kind, f"__{_name}__", _method)
    setattr(_kind, "__reduce__", lambda self: (type(_plain(self)), (_plain(self),)))  # noqa: B010


def _is_models(frame: FrameType) -> bool:
    """Whether this is the model's code; functions of torch and leannorm count as operators.

    So does code without a module name, which torch.export and torch.fx generate.
    """
    return "__name__" in frame.f_globals and not frame.f_code.co_filename.startswith(_OPERATORS)


def _self(frame: FrameType) -> torch.nn.Module | None:
    """The torch module whose method runs in the frame; None if it is no such method."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return first if isinstance(first, torch.nn.Module) else None


def _of_self(node: ast.Attribute, code: CodeType) -> bool:
    """Whether this is an attribute of the function's first argument."""
    first = code.co_varnames[0] if code.co_argcount else None
    return isinstance(node.value, ast.Name) and node.value.id == first


def _place(code: CodeType, line: int) -> str:
    name: str = getattr(code, "co_qualname", code.co_name)  # with its class since Python 3.11
    return f"{code.co_filename}:{line} in {name.split('.<locals>.<')[0]}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
