"""A forked graph as text and as a picture: one row for each call of a module, the branches side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from html import escape
from itertools import zip_longest
from typing import NamedTuple

from torch import fx

from leannorm._files import write_text
from leannorm.program.join import INFER, SHARED, TRAIN

_WIDTH, _ROW, _BOX, _GAP = 380, 34, 26, 40
_COLOURS = {SHARED: "#e2e8f0", TRAIN: "#fde2c8", INFER: "#cfe8dc"}
_TITLES = {SHARED: "shared", TRAIN: "training branch", INFER: "inference branch"}


class Row(NamedTuple):
    """Consecutive operators of one call of one module; `changes` are the variables that they write."""

    path: str
    kind: str
    operators: tuple[str, ...]
    changes: tuple[str, ...]

    def text(self) -> str:
        name = f"{self.path} {self.kind}".strip()
        head = f"{name}: " if name else ""
        changed = f" (changes {', '.join(self.changes)})" if self.changes else ""
        return f"{head}{', '.join(self.operators)}{changed}"


def rows(graph: fx.Graph, kinds: Mapping[str, str]) -> dict[str, list[Row]]:
    """The rows of each branch, in the order of execution."""
    variables = {n.name: str(n.target) for n in graph.nodes if n.op == "get_attr"}
    result: dict[str, list[Row]] = {SHARED: [], TRAIN: [], INFER: []}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        path = node.meta["scopes"][-1] if node.meta["scopes"] else ""
        operator = str(node.target).removeprefix("aten.").removesuffix(".default")
        if operator.startswith("<built-in function "):
            operator = operator.split()[-1].rstrip(">")
        changes = tuple(
            variables[v].removeprefix(f"{path}.") for v in node.meta.get("writes", ()) if v in variables
        )
        row = Row(path, kinds.get(path, "") if path else "", (operator,), changes)
        column = result[node.meta["branch"]]
        if path and column and column[-1].path == path:
            last = column.pop()
            row = row._replace(operators=last.operators + row.operators, changes=last.changes + row.changes)
        column.append(row)
    return result


def describe(graph: fx.Graph, kinds: Mapping[str, str], inputs: str) -> str:
    """The rows under the headings of the shared part and of the two branches."""
    lines = [f"inputs: {inputs}"]
    for branch, column in rows(graph, kinds).items():
        count = sum(len(row.operators) for row in column)
        lines += [f"{_TITLES[branch]} ({count} operators)", *(f"  {row.text()}" for row in column)]
    return "\n".join(lines)


def draw(graph: fx.Graph, kinds: Mapping[str, str], path: str | os.PathLike[str]) -> None:
    """Write an SVG file: the shared part at the top, the training branch left, the inference branch right."""
    write_text(os.fspath(path), "\n".join(_picture(rows(graph, kinds))))


def _picture(columns: Mapping[str, list[Row]]) -> Iterator[str]:
    left, right = _GAP, _GAP * 2 + _WIDTH
    middle = (left + right) // 2
    fork = (len(columns[SHARED]) + 2) * _ROW
    height = fork + (max(len(columns[TRAIN]), len(columns[INFER])) + 2) * _ROW
    width = right + _WIDTH + _GAP
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="12">'
    )
    yield f'<rect width="{width}" height="{height}" fill="white"/>'
    yield from _column(columns[SHARED], SHARED, middle, _ROW)
    for branch, x in ((TRAIN, left), (INFER, right)):
        if columns[branch]:
            start, end = middle + _WIDTH // 2, x + _WIDTH // 2
            top = fork - _ROW + _BOX // 2
            yield (
                f'<path d="M{start} {top} C{start} {fork} {end} {top} {end} {fork + 4}" '
                'fill="none" stroke="#64748b" stroke-width="2"/>'
            )
        yield from _column(columns[branch], branch, x, fork + _ROW)
    yield "</svg>"


def _column(column: list[Row], branch: str, x: int, y: int) -> Iterator[str]:
    if not column:
        return
    title = f'text-anchor="middle" font-weight="bold">{_TITLES[branch]}'
    yield f'<text x="{x + _WIDTH // 2}" y="{y - 10}" {title}</text>'
    for row, following in zip_longest(column, column[1:]):
        centre = x + _WIDTH // 2
        if following is not None:
            yield f'<line x1="{centre}" y1="{y + _BOX}" x2="{centre}" y2="{y + _ROW}" stroke="#64748b"/>'
        text = escape(row.text())
        shown = text if len(row.text()) <= 60 else escape(row.text()[:59]) + "…"
        border = ' stroke="#c2410c" stroke-width="2"' if row.changes else ' stroke="#94a3b8"'
        yield (
            f'<g><title>{text}</title><rect x="{x}" y="{y}" width="{_WIDTH}" height="{_BOX}" rx="6" '
            f'fill="{_COLOURS[branch]}"{border}/><text x="{centre}" y="{y + 17}" text-anchor="middle">'
            f"{shown}</text></g>"
        )
        y += _ROW
