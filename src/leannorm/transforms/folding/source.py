"""The tests in a model's source: `if`, `while`, conditional expressions, and comparisons used as values."""

from __future__ import annotations

import ast
import itertools
import linecache
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import torch

_CHECKS = ("_assert", "_check")  # torch._assert, torch._check
_NOT_THE_MODELS = {*sys.stdlib_module_names, "torch"}  # modules whose attributes are constants


class Test(NamedTuple):
    """A test's expression, its text, and the statement or expression that evaluates it."""

    expression: Any
    text: str
    evaluator: Any


class _File(NamedTuple):
    lines: list[str]
    tree: ast.Module | None  # None: the file is not valid Python
    tests: list[Test]
    checks: list[Test]


_FILES: dict[str, _File] = {}


def _file(name: str) -> _File:
    lines = linecache.getlines(name)
    if name not in _FILES or _FILES[name].lines != lines:
        try:
            tree = ast.parse("".join(lines)) if lines else None
        except SyntaxError:  # a notebook's cell with magic commands
            tree = None
        tests = ([*tests_in(tree), *_comparisons_in(tree)], list(_checks_in(tree))) if tree else ([], [])
        _FILES[name] = _File(lines, tree, *tests)
    return _FILES[name]


def _only_raises(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and all(isinstance(n, ast.Raise) for n in node.body)


def tests_in(tree: ast.AST) -> Iterator[Test]:
    """The tests that decide which code runs, outermost first; not those that only raise an error."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not _only_raises(node):
            yield Test(node.test, ast.unparse(node.test), node)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            yield from (Test(e, ast.unparse(e), node) for g in node.generators for e in g.ifs)
        elif isinstance(node, ast.Match):
            text = f"match {ast.unparse(node.subject)}"
            yield from (Test(e, text, node) for e in (node.subject, *(case.pattern for case in node.cases)))


def _comparisons_in(tree: ast.AST) -> Iterator[Test]:
    """Boolean expressions, whose result may be tested later: a comparison, `and`, `or`, `not`, `bool`."""
    for node in ast.walk(tree):
        called = isinstance(node, ast.Call) and ast.unparse(node.func) == "bool"
        negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        if isinstance(node, ast.Compare | ast.BoolOp) or called or negated:
            yield Test(node, ast.unparse(node), node)


def _checks_in(tree: ast.AST) -> Iterator[Test]:
    """Tests that can only raise: `assert`, `torch._check`, an `if` that raises."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and _only_raises(node)):
            yield Test(node.test, "", node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(_CHECKS):
            yield Test(node, "", node)


def test_at(frame: FrameType, without_source: bool) -> tuple[int, str] | None:
    """Line and text of the outermost test that the frame is evaluating; None if there is none, or a check.

    Without source, everything counts as a test if `without_source`, and nothing otherwise.
    """
    code, line = frame.f_code, frame.f_lineno
    low, high = (line, 0), (line, 0)
    columns = hasattr(code, "co_positions")  # since Python 3.11; before, only the line is known
    if columns:
        first, last, left, right = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
        low, high = (first or line, left or 0), (last or line, right or 0)

    def is_evaluated(test: Test) -> bool:
        start, end = _span(test.expression)
        if not columns:
            return start[0] <= line <= end[0]
        return (start <= low and high <= end) or (low, high) == _span(test.evaluator)

    file = _file(code.co_filename)
    if file.tree is None:
        return (line, "a test without source") if without_source else None
    if any(map(is_evaluated, file.checks)):
        return None
    return next(((test.evaluator.lineno, test.text) for test in file.tests if is_evaluated(test)), None)


def _span(node: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def function_of(code: CodeType) -> ast.FunctionDef | None:
    """The definition of a function; None for a lambda or without source."""
    for node in ast.walk(_file(code.co_filename).tree or ast.Module([], [])):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = [node.lineno, *(d.lineno for d in node.decorator_list)]
            if code.co_firstlineno in first:
                return node
    return None


def global_read(node: ast.AST, code: CodeType, names: dict[str, Any]) -> list[Any]:
    """A list with the value, if the node reads data from a global or an imported module; else empty."""
    local = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
    name = node.value if isinstance(node, ast.Attribute) else node
    if not isinstance(name, ast.Name) or name.id in local or name.id not in names:
        return []
    value = names[name.id]
    if name is not node:
        if not isinstance(value, ModuleType) or value.__name__.split(".")[0] in _NOT_THE_MODELS:
            return []
        value = getattr(value, str(getattr(node, "attr", "")), None)
    return [] if callable(value) or isinstance(value, ModuleType | torch.Tensor) else [value]
