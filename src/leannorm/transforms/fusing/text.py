"""The source of a function, if it compiles to the code that runs, and a new function from changed source."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import types
from collections.abc import Iterator, Mapping
from typing import Any

# a function that uses one of these may read its locals without naming them
_LOOKS_AT_LOCALS = {"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe", "stack"}


def read(function: types.FunctionType) -> ast.FunctionDef | None:
    """The definition of this function; None if no source compiles to exactly its code."""
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


def can_be_rewritten(node: ast.FunctionDef, code: types.CodeType) -> bool:
    """Does no other code see this function's locals, and do its statements simply run in order?"""
    private = any(
        name.startswith("__") and not name.endswith("__")
        for child in ast.walk(node)
        if (name := getattr(child, "attr", getattr(child, "id", None))) is not None
    )
    refused = (
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
        or any(isinstance(child, refused) or type(child).__name__ == "TryStar" for child in ast.walk(node))
    )


def function_like(
    function: types.FunctionType, node: ast.FunctionDef, names: Mapping[str, Any]
) -> types.FunctionType:
    """`function` with the body of `node` and the same globals and closure; `names` are added to its names."""
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
    """The parameters without defaults and annotations, which are set on the function object."""

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
