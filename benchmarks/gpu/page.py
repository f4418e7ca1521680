"""Makes a page of a run's results, with tables in Markdown and two plots, for the README and docs/gpu.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from benchmarks.record import shown

LEFT, WIDTH, BAR, GAP = 240, 420, 15, 16
STYLE = "font: 13px system-ui, sans-serif; fill: #6b7280"
OURS, OTHER, LINE = "#2563eb", "#0d9488", "#9ca3af"
SIDES = ("ours", "plain", "torch", "compile", "liger", "quack")


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


class Bar(NamedTuple):
    value: float
    colour: str
    words: str


def write(results: Path, folder: Path) -> list[Path]:
    """Write the page and its plots into one folder, and return the files."""
    data = json.loads(results.read_text())
    kernels, steps = (folder / f"{results.stem}-{what}.svg" for what in ("kernels", "steps"))
    page = folder / f"{results.stem}.md"
    folder.mkdir(parents=True, exist_ok=True)
    kernels.write_text(kernels_plot(data))
    steps.write_text(steps_plot(data))
    page.write_text(markdown(data, kernels.name, steps.name))
    return [page, kernels, steps]


def markdown(data: dict[str, Any], kernels: str, steps: str) -> str:
    copied = data.get("copy_tb_s")
    about = [f"{data['device']}, {data['date'][:10]}, torch {data['torch']}, Triton {data['triton']}"]
    about += [f"driver {data['driver']}"] if data.get("driver") else []
    about += [f"a copy moves {copied:.3f} TB/s"] if copied else []
    parts = [f"# Measured: {data['device']}", f"{', '.join(about)}; `{data['command']}`."]
    if data["wrong"]:
        parts.append(f"**{len(data['wrong'])} results were wrong** and are not in the tables:")
        parts.append("\n".join(f"- {words}" for words in data["wrong"]))
    for title, plot, rows in (
        ("Kernels", kernels, kernel_rows(data)),
        ("Small tensors", "", small_rows(data)),
        ("Training steps", steps, step_rows(data)),
    ):
        if len(rows) > 1:
            picture = [f"![{title.lower()}]({plot})"] if plot else []
            parts += [f"## {title}", *picture, table(rows)]
    if data["notes"]:
        parts += ["## Left out", "\n".join(f"- {words}" for words in data["notes"])]
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def _by_case(data: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, dict[str, Any]]]:
    """The rows of each case, shape and direction, by side."""
    found: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for row in data["rows"]:
        key = row["case"], "x".join(map(str, row["shape"])), row["direction"]
        found.setdefault(key, {})[row["side"]] = row
    return found


def kernel_rows(data: dict[str, Any]) -> list[list[str]]:
    """Microseconds of each side, and our share of the speed of a copy."""
    there = [side for side in SIDES if any(row["side"] == side for row in data["rows"])]
    rows = [
        ["norm", "shape", "direction", *(f"{side}, µs" for side in there), "share", "times torch's speed"]
    ]
    for key, sides in _by_case(data).items():
        times = [f"{sides[s]['microseconds']:.1f}" if s in sides else "" for s in there]
        ours = sides.get("ours")
        last = ["", ""] if ours is None else [f"{ours['share']:.2f}", f"{ours['torch_over_this']:.2f}"]
        rows.append([*key, *times, *last])
    return rows


def small_rows(data: dict[str, Any]) -> list[list[str]]:
    rows = [["norm", "shape", "side", "µs", "launches", "forward alone"]]
    for row in data["small"]:
        counts = ["" if row[key] is None else str(row[key]) for key in ("launches", "launches_forward")]
        shape = "x".join(map(str, row["shape"]))
        rows.append([row["case"], shape, row["side"], f"{row['microseconds']:.1f}", *counts])
    return rows


def step_rows(data: dict[str, Any]) -> list[list[str]]:
    rows = [["network", "setting", "ms", "time / baseline", "peak / baseline", "kept / baseline"]]
    for row in data["steps"]:
        keys = ("milliseconds_of_stock", "max_memory_allocated_of_stock", "held_bytes_of_stock")
        ratios = ["" if row[key] is None else f"{row[key]:.3f}" for key in keys]
        rows.append([row["network"], shown(row["setting"]), f"{row['milliseconds']:.2f}", *ratios])
    return rows


def kernels_plot(data: dict[str, Any]) -> str:
    """torch's time over ours for each case; longer bars are faster."""
    groups = []
    for (name, shape, direction), sides in _by_case(data).items():
        if "ours" not in sides or direction == "both":
            continue
        ours = sides["ours"]
        compiled = sides.get("compile")
        bars = [
            Bar(ours["torch_over_this"], OURS, f"{ours['torch_over_this']:.2f}, share {ours['share']:.2f}")
        ]
        if compiled is not None:
            bars.append(Bar(compiled["torch_over_this"], OTHER, f"{compiled['torch_over_this']:.2f}"))
        groups.append((f"{name} {shape}, {direction}", bars))
    return plot("Speed relative to torch's operator", {"leannorm": OURS, "torch.compile": OTHER}, groups)


def steps_plot(data: dict[str, Any]) -> str:
    """Time and peak memory of a training step, relative to the baseline; shorter bars are better."""
    groups = []
    for row in data["steps"]:
        time, peak = row["milliseconds_of_stock"], row["max_memory_allocated_of_stock"]
        if time is not None and not row["setting"].startswith("stock"):
            bars = [Bar(time, OURS, f"{time:.2f} of the time"), Bar(peak, OTHER, f"{peak:.2f} of the peak")]
            groups.append((f"{row['network']}, {row['setting']}", bars))
    return plot("A training step, relative to plain PyTorch", {"time": OURS, "peak memory": OTHER}, groups)


def plot(title: str, legend: dict[str, str], groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Groups of bars that start at 0, with a line at 1."""
    most = max((bar.value for _, bars in groups for bar in bars), default=1.0)
    left, unit = LEFT + 120, WIDTH / max(most, 1.0)
    parts = [text(left, 20, title)]
    for i, (name, colour) in enumerate(legend.items()):
        parts.append(f'<rect x="{left + 120 * i}" y="32" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(text(left + 120 * i + 18, 43, name))
    y = 60.0
    for label, bars in groups:
        parts.append(text(left - 10, y + len(bars) * (BAR + 2) / 2 + 4, label, "end"))
        for bar in bars:
            width = f'width="{max(bar.value, 0.0) * unit:.1f}"'
            parts.append(f'<rect x="{left}" y="{y:g}" {width} height="{BAR}" fill="{bar.colour}"/>')
            parts.append(text(left + bar.value * unit + 8, y + BAR - 3, bar.words))
            y += BAR + 2
        y += GAP / 2
    at = left + unit
    parts.append(f'<path d="M{left} 54V{y - 4:g}M{at:g} 54V{y - 4:g}" stroke="{LINE}" fill="none"/>')
    size = f'viewBox="0 0 {left + WIDTH + 200} {y + 20:g}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{STYLE}">\n{body}\n</svg>\n'
