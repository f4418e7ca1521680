"""The text of a function, where it is proved to be the text of what runs, and a function from new text."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import types
from collections.abc import Iterator, Mapping
from typing import Any

# in a function that calls one of these, locals may be seen by other ways than their names
_LOOKS_AT_LOCALS = {"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe", "stack"}


def read(function: types.FunctionType) -> ast.FunctionDef | None:
    """The definition of this function; None where there is no text that compiles to its very code."""
    code = function.__code__
    lines = tuple(linecache.getlines(code.co_filename, function.__globals__))
    for node, compiled in _definitions(code.co_filename, lines):
        if compiled == code:
            return node
    return None


@functools.lru_cache(maxsize=256)
def _definitions(filename: str, lines: tuple[str, ...]) -> list[tuple[ast.FunctionDef, types.CodeType]]:
    try:
        tree = ast.parse("".join(lines))
        compiled = {
            (c.co_name, c.co_firstlineno): c
            for c in _codes(compile(tree, filename, "exec", dont_inherit=True))
        }
    except (SyntaxError, ValueError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if (node.name, first) in compiled:
                found.append((node, compiled[node.name, first]))
    return found


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def is_open(node: ast.FunctionDef, code: types.CodeType) -> bool:
    """Are this function's locals its own, and its statements run one behind the other?"""
    private = any(
        name.startswith("__") and not name.endswith("__")
        for child in ast.walk(node)
        if (name := getattr(child, "attr", getattr(child, "id", None))) is not None
    )
    closed = (
        ast.Try,
        ast.Lambda,
        ast.Yield,
        ast.YieldFrom,
        ast.Await,
        ast.Global,
        ast.Nonlocal,
        ast.ClassDef,
    )
    return not (
        private
        or code.co_flags & inspect.CO_GENERATOR
        or _LOOKS_AT_LOCALS & {*code.co_names, *code.co_freevars}
        or any(isinstance(child, closed) or type(child).__name__ == "TryStar" for child in ast.walk(node))
    )


def function_like(
    function: types.FunctionType, node: ast.FunctionDef, names: Mapping[str, Any]
) -> types.FunctionType:
    """`function` with the body of `node`, in the same globals and closure; `names` are further names."""
    plain = ast.FunctionDef(node.name, _without_values(node.args), node.body, [], None)
    free = [*function.__code__.co_freevars, *names]
    around = ast.FunctionDef(
        "around",
        ast.arguments([], [ast.arg(name) for name in free], None, [], [], None, []),
        [plain],
        [],
        None,
    )
    for definition in (plain, around):
        if "type_params" in definition._fields:  # Python 3.12
            vars(definition)["type_params"] = []
    module = ast.fix_missing_locations(ast.copy_location(ast.Module([around], []), node))
    outer = compile(module, function.__code__.co_filename, "exec", dont_inherit=True)
    code = next(c for c in _codes(outer) if c.co_name == node.name)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells |= {name: types.CellType(value) for name, value in names.items()}
    closure = tuple(cells[name] for name in code.co_freevars)
    new = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    new.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(new, function)
    del vars(new)["__wrapped__"]
    return new


def _without_values(arguments: ast.arguments) -> ast.arguments:
    """The parameters without defaults and annotations, which the function object has."""

    def bare(given: ast.arg) -> ast.arg:
        return ast.arg(given.arg)

    return ast.arguments(
        [bare(a) for a in arguments.posonlyargs],
        [bare(a) for a in arguments.args],
        bare(arguments.vararg) if arguments.vararg else None,
        [bare(a) for a in arguments.kwonlyargs],
        [None for _ in arguments.kwonlyargs],
        bare(arguments.kwarg) if arguments.kwarg else None,
        [],
    )
