"""How is a result reported? As data, and derived from it as JSON, text, and tables on a terminal or in a
notebook."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from html import escape
from itertools import zip_longest
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from unicodedata import combining, east_asian_width

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; columns from `numbers_from` on are right-aligned."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    numbers_from: int = 1

    def rich(self) -> RenderableType:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        title = Text(self.title) if self.title else None
        table = RichTable(title=title, title_justify="left", box=SIMPLE_HEAD)
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i >= self.numbers_from else "left")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def text(self) -> str:
        """As `rich` draws it, on lines as long as the cells are."""
        table = (self.columns, *self.rows)
        lines = [[cell.splitlines() or [""] for cell in row] for row in table]
        widths = [max(_width(line) for cell in cells for line in cell) for cells in zip(*lines, strict=True)]
        rule = f" {'─' * (sum(widths) + 3 * len(widths) - 1)} "
        head, *rows = ["\n".join(self._drawn(row, widths)) for row in lines]
        return "\n".join([*filter(None, [self.title]), "", head, rule, *rows, ""])

    def _drawn(self, row: Sequence[list[str]], widths: Sequence[int]) -> Iterator[str]:
        for line in zip_longest(*row, fillvalue=""):
            gaps = [" " * (width - _width(cell)) for cell, width in zip(line, widths, strict=True)]
            padded = [
                gap + cell if i >= self.numbers_from else cell + gap
                for i, (cell, gap) in enumerate(zip(line, gaps, strict=True))
            ]
            yield f"  {'   '.join(padded)}"

    def html(self) -> str:
        head, *rows = (
            "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
            for tag, row in (("th", self.columns), *(("td", row) for row in self.rows))
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        title = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Line(NamedTuple):
    """A line of text between the tables; its style is one of rich's."""

    text: str
    style: str = ""


Part = Table | Line


class Report:
    """What one of leannorm's measurements returns: a dataclass that describes its parts in words.

    `print(report)` prints them as plain text, `report.print()` on the terminal, a notebook shows them. The
    repr is one line, `summary`.
    """

    def parts(self) -> Iterable[Part]:
        """The tables and lines, in their order."""
        raise NotImplementedError

    def summary(self) -> str:
        """The report in a few words."""
        raise NotImplementedError

    def data(self) -> Any:
        """What `to_json` writes."""
        return as_data(self)

    def to_json(self) -> str:
        """Every number, as indented JSON."""
        return json.dumps(self.data(), indent=1, allow_nan=False) + "\n"

    def print(self) -> None:
        """The report on the terminal."""
        try:
            from rich.console import Console
        except ModuleNotFoundError:  # needed by the command alone; without it there are no colours
            print(self)
        else:
            _tell(self.parts(), Console())

    def __str__(self) -> str:
        text = "\n".join(part.text() if isinstance(part, Table) else part.text for part in self.parts())
        return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.summary()})"

    def _repr_html_(self) -> str:
        return "".join(
            part.html() if isinstance(part, Table) else f"<div>{escape(part.text)}</div>"
            for part in self.parts()
        )


def _width(text: str) -> int:
    """The columns that the text takes on a terminal: two for a wide character, none for a combining one."""
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def _tell(parts: Iterable[Part], console: Console) -> None:
    for part in parts:
        if isinstance(part, Table):
            console.print(part.rich())
        else:
            console.print(
                part.text, style=part.style, highlight=False, markup=False, emoji=False, soft_wrap=True
            )


def as_data(value: Any) -> Any:
    """Records, mappings and sequences as JSON types; numbers that are not finite become null.

    >>> as_data({"line": Line("text"), "several": (1, float("nan"))})
    {'line': {'text': 'text', 'style': ''}, 'several': [1, None]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_data(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return as_data(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): as_data(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_data(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """The values of each key, in their order.

    >>> grouped([("batch", 1), ("layer", 2), ("batch", 3)])
    {'batch': [1, 3], 'layer': [2]}
    """
    groups: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def counted(count: int, one: str, many: str = "") -> str:
    """A count with its noun.

    >>> counted(1, "layer"), counted(2, "batch", "batches")
    ('1 layer', '2 batches')
    """
    return f"{count} {one if count == 1 else many or one + 's'}"


def bytes_in_words(nbytes: float) -> str:
    """Decimal megabytes (10^6 bytes), or kilobytes where those would be few.

    >>> bytes_in_words(12_345_678), bytes_in_words(12_345), bytes_in_words(0)
    ('12.3 MB', '12.3 KB', '0.0 MB')
    """
    return f"{nbytes / 1e3:,.1f} KB" if 0 < nbytes < 1e5 else f"{nbytes / 1e6:,.1f} MB"


def column_of_bytes(column: Sequence[float]) -> list[str]:
    """The same for a column, all in the unit of its largest entry.

    >>> column_of_bytes([12_345_678, 12_345, 0])
    ['12.3 MB', '<0.1 MB', '0.0 MB']
    """
    unit, scale = ("KB", 1e3) if max(column, default=0) < 1e5 else ("MB", 1e6)
    return [f"<0.1 {unit}" if 0 < one / scale < 0.05 else f"{one / scale:,.1f} {unit}" for one in column]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
