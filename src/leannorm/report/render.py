"""A report as one self-contained HTML page, with pictures."""

from __future__ import annotations

import gzip
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

from leannorm._errors import MissingDependencyError
from leannorm._files import write_text
from leannorm._report import Report, Table

COLORS = ("#8a94a6", "#2563eb", "#0d9488", "#d97706", "#9333ea", "#dc2626", "#4d7c0f", "#0e7490")


@dataclass(frozen=True)
class Section:
    """A part of a page: a heading, a sentence, code, a picture, a table; a `folded` one is shown on a
    click."""

    heading: str
    text: str = ""
    figure: Any = None
    table: Table | None = None
    wide: bool = True
    folded: bool = False
    code: str = ""


@dataclass(frozen=True)
class Fact:
    """One number of the headline row, with its label."""

    value: str
    label: str


class PagedReport(Report):
    """A report that can also be written as a page."""

    def html(self) -> str:
        """The page."""
        raise NotImplementedError

    def to_html(self, path: str | Path) -> None:
        """Write one self-contained page, with pictures.

        Raises: MissingDependencyError without jinja2 and plotly, InputError for a folder that is not there.
        """
        write_text(path, self.html())


def require_page() -> None:
    """Raises MissingDependencyError if jinja2 or plotly is missing; called before the measurements start."""
    for name in ("jinja2", "plotly"):
        try:
            import_module(name)
        except ImportError:
            raise MissingDependencyError(
                f"the HTML report needs {name}, which is not installed: "
                f"{sys.executable} -m pip install jinja2 plotly"
            ) from None


def page(
    title: str,
    lead: str,
    facts: Sequence[Fact],
    sections: Sequence[Section],
    foot: Mapping[str, str],
    toggles: Sequence[str] = (),
) -> str:
    """One self-contained HTML file, with styles, pictures and their script; it loads nothing.

    `toggles` are names of lines and bars; each gets a checkbox that shows and hides it in every picture.

    Raises MissingDependencyError if jinja2 or plotly is not installed.
    """
    require_page()
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("leannorm.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pictures = [None if section.figure is None else section.figure.to_json() for section in sections]
    return environment.get_template("page.html").render(
        title=title,
        lead=lead,
        facts=facts,
        parts=list(zip(sections, pictures, strict=True)),
        script=_plotly_script(),
        foot=foot,
        toggles=list(zip(toggles, cycle(COLORS), strict=False)),
    )


def line_figure(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, y: str, *, steps: bool = False
) -> Any:
    """Named lines (xs, ys) in one plot: points at integer x, or a staircase with `steps`."""
    figure = _empty_figure()
    for i, (name, (xs, ys)) in enumerate(lines.items()):
        # the first line is wider, so that it shows behind the others
        width = 1.6 if steps else 2.5 if i else 6
        figure.add_scatter(
            name=name,
            x=list(xs),
            y=list(ys),
            mode="lines" if steps else "lines+markers",
            line={
                "color": COLORS[i % len(COLORS)],
                "width": width,
                "shape": "hv" if steps else "linear",
            },
            marker={"size": 7 if i else 11},
        )
    if not steps:
        figure.update_xaxes(tickformat="d", nticks=10, dtick=1 if len(xs) <= 10 else None)
    return _styled(figure, x, y)


_MOST_NAMES = 90  # the number of groups below one picture, so that they stay readable


def bar_figure(
    bars: Mapping[str, Sequence[float | None]], groups: Sequence[str], y: str, *, written: bool = True
) -> Any:
    """Named bars side by side, none for None, names below; with `written`, values above the bars."""
    figure = _empty_figure()
    for i, (name, values) in enumerate(bars.items()):
        figure.add_bar(
            name=name,
            x=list(groups),
            y=list(values),
            marker={"color": COLORS[i % len(COLORS)]},
            texttemplate="%{y:,.1f}" if written else None,
            textposition="outside",
            cliponaxis=False,
        )
    figure.update_xaxes(type="category")  # names of layers, which may look like numbers
    figure.update_layout(barmode="group", bargap=0.35 if written else 0.1, bargroupgap=0.08 if written else 0)
    if not written:
        figure.update_xaxes(tickangle=-90, tickfont={"size": 9}, dtick=-(-len(groups) // _MOST_NAMES))
    return _styled(figure, "", y)


def _styled(figure: Any, x: str, y: str) -> Any:
    # greys that are visible on white and on black
    grey, faint = "#7c8798", "rgba(128,140,160,0.28)"
    axis = {"gridcolor": faint, "zerolinecolor": faint, "linecolor": faint, "automargin": True}
    figure.update_layout(
        template="none",
        font={"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 13, "color": grey},
        margin={"l": 60, "r": 20, "t": 36, "b": 48},
        height=340,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        xaxis={**axis, "title": {"text": x}, "showgrid": False},
        yaxis={**axis, "title": {"text": y}, "rangemode": "tozero"},
        hovermode="x unified",
        hoverlabel={"bgcolor": "#f8fafc", "font": {"color": "#0f172a"}},
    )
    return figure


def _empty_figure() -> Any:
    require_page()
    from plotly.graph_objects import Figure

    return Figure()


def _plotly_script() -> str:
    """The plot library, compressed: a third of the page's size; the page unpacks it."""
    from plotly.offline import get_plotlyjs

    return b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
