"""Draws the pages' pictures from `benchmarks/results/`: kept activations and peak memory against step time.

    python -m benchmarks.pictures [--into docs]

The picture of compiled code shows only the peak. The picture of overheads shows the time that a setting took
against the time that was asked for. Every picture carries the rows that it was drawn from, and a test
compares them with the files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.ticker import MultipleLocator, PercentFormatter

from benchmarks import record
from benchmarks.overhead import NEAR

matplotlib.use("svg")
matplotlib.rcParams.update({
    "svg.hashsalt": "leannorm", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9,
    "text.color": "#6b7280", "axes.labelcolor": "#6b7280", "axes.edgecolor": "#9ca3af",
    "xtick.color": "#6b7280", "ytick.color": "#6b7280", "axes.spines.top": False, "axes.spines.right": False,
})  # fmt: skip
COLOURS = {"lean": "#2563eb", "compile_options": "#2563eb", "checkpoint": "#ea580c",
           "torch.compile": "#7c3aed", "activation_memory_budget": "#7c3aed"}  # fmt: skip
COMPILED_CODE = "lean_compiled_cpu"
COMPILED = {"resnet18": "ResNet-18", "vit_tiny": "ViT-tiny, 6 layers", "llama float32": "Llama"}
TITLES = {"llama": "Llama", "qwen3": "Qwen3", "gemma2": "Gemma-2", "olmo2": "OLMo-2", "vit_base": "ViT-B",
          "dit": "DiT", "unet": "UNet", "resnet50": "ResNet-50",
          "vit_small_patch16_224": "ViT-S", "resnet18": "ResNet-18", "efficientnet_b0": "EfficientNet-B0",
          "convnext_tiny": "ConvNeXt-T", "mobilenetv3_large_100": "MobileNetV3-L",
          "regnety_008": "RegNetY-8", "poolformer_s12": "PoolFormer-S12",
          "densenet121": "DenseNet-121"}  # fmt: skip
FIRST = (("lean_cpu", "resnet50", None), ("lean_cpu", "vit_small_patch16_224", None),
         ("lean_transformers_large_cpu", "llama", "bfloat16"))  # fmt: skip

KEPT, PEAK = "activation memory kept", "peak memory of a step"
SIZE = 7.5  # of labels, in points
MARKERS = "os^Dvphd*"
Point = tuple[str, dict[str, float], float]  # setting, sizes by axis, time
Box = tuple[float, float, float, float]


def points(file: str, model: str, dtype: str | None) -> list[Point]:
    """(setting, bytes kept and peak, time) of one model, the baseline first, to three decimals."""
    axes = [PEAK] if file == COMPILED_CODE else [KEPT, PEAK]
    found: list[Point] = [("baseline", dict.fromkeys(axes, 1.0), 1.0)]
    for row in record.read(record.FOLDER / f"{file}.json"):
        if (
            row["model"] != model
            or row.get("dtype") != dtype
            or row["setting"] == "stock"
            or row.get("convert")
        ):
            continue
        time: Any = row.get("ratio", row.get("time"))
        name = _compiled_name(row["setting"]) if file == COMPILED_CODE else _name(row["setting"])
        of_axis: dict[str, Any] = {
            KEPT: row.get("kept_ratio", row.get("held")),
            PEAK: row.get("peak_ratio", row["peak"]),
        }
        sizes = {axis: round(of_axis[axis], 3) for axis in axes}
        found.append((name, sizes, round(time, 3)))
    return found


def _name(setting: str) -> str:
    names = {"lean": "lean()", "norm": 'lean("norm")', "conv": 'lean("conv")'}
    names["checkpoint"] = "checkpoint, every block"
    kind, _, value = setting.partition(" ")
    return names.get(setting, f"lean({kind}={value})" if kind == "budget" else setting)


def _compiled_name(setting: str) -> str:
    if setting == "checkpoint":
        return _name(setting)
    kind, _, value = setting.partition(" ")
    return f"activation_memory_budget {value}" if kind == "torch" else f"compile_options {setting}"


def draw(axes: Any, found: Sequence[Point], title: str, axis: str) -> None:
    for kind, colour in COLOURS.items():
        mine = [point for point in found if point[0].startswith(kind)]
        if mine:
            _, sizes, time = zip(*mine, strict=True)
            axes.scatter(time, [size[axis] for size in sizes], s=22, color=colour, label=kind)
    axes.scatter([1], [1], s=22, color="#6b7280", label="baseline: plain PyTorch")
    times = [time for _, _, time in found]
    fastest, slowest = min(times), max(times)
    across = min(0.93, fastest - 0.04), max(1.35, slowest + 0.12)
    axes.set(title=title, xlabel="time of a step", ylim=(0, 1.08), xlim=across)
    axes.xaxis.set_major_locator(MultipleLocator(0.1))
    axes.grid(color="#9ca3af", alpha=0.25, linewidth=0.6)


def label(axes: Any, found: Sequence[Point], axis: str) -> None:
    """Write each setting next to its point, where the label covers no other label or point."""
    dots = [axes.transData.transform((time, sizes[axis])) * 72 / axes.figure.dpi for _, sizes, time in found]
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in dots]
    left, _, right, _ = (edge * 72 / axes.figure.dpi for edge in axes.bbox.extents)
    for (setting, sizes, time), (x, y) in zip(found, dots, strict=True):
        words = setting.removeprefix("checkpoint, ").removeprefix("lean(").removesuffix(")") or "lean()"
        words = words.removeprefix("compile_options ").removeprefix("activation_memory_budget ")
        words = words.replace("torch.compile(", "compiled, budget=")
        width = 0.58 * SIZE * len(words)  # average width of the letters
        places = [(side, dy) for dy in (-9, 2, -4, -13, 6, -18, 11) for side in (1, -1)]

        def box(place: tuple[int, int], x: float = x, y: float = y, width: float = width) -> Box:
            start = x + 5 if place[0] > 0 else x - 5 - width
            return start, y + place[1], start + width, y + place[1] + SIZE

        def covered(place: tuple[int, int], box: Any = box) -> float:
            a, b, c, d = box(place)
            over = (max(0, min(c, q[2]) - max(a, q[0])) * max(0, min(d, q[3]) - max(b, q[1])) for q in taken)
            near = sum(a - 6 < u < c + 6 and b - 4 < v < d + 4 for u, v in dots)  # counts its own point too
            return (
                sum(over)
                + 8 * abs(near - 1)
                + 4 * (place[1] not in (-9, 2))
                + 100 * (a < left or c > right + 8)
            )

        side, dy = place = min(places, key=covered)  # the first of the best places
        taken.append(box(place))
        axes.annotate(words, (time, sizes[axis]), xytext=(5 * side, dy), textcoords="offset points",
                      fontsize=SIZE, ha="left" if side > 0 else "right")  # fmt: skip


def picture(path: Path, panels: dict[str, list[Point]]) -> None:
    """Draw one column of panels per model, and one row for each axis of bytes."""
    from matplotlib import pyplot

    rows = list(next(iter(panels.values()))[0][1])
    figure, grid = pyplot.subplots(
        len(rows),
        len(panels),
        figsize=(3.4 * len(panels) + 0.4, 2.9 * len(rows) + 0.4),
        sharey=True,
        squeeze=False,
    )
    for axis, across in zip(rows, grid, strict=True):
        for axes, (title, found) in zip(across, panels.items(), strict=True):
            draw(axes, found, title if axis == rows[0] else "", axis)
        across[0].set_ylabel(axis)
    for axes in grid[:-1].flat:
        axes.set_xlabel("")
    handles = {label: handle for axes in grid[0]
               for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}  # fmt: skip
    foot = 0.2 / figure.get_figheight()
    figure.legend(handles.values(), handles, loc="lower center", ncols=len(handles), frameon=False)
    figure.suptitle(
        "relative to plain PyTorch; lower and further left is better", fontsize=8.5, x=0.99, ha="right"
    )
    figure.tight_layout(rect=(0, foot, 1, 1))
    for axis, across in zip(rows, grid, strict=True):
        for axes, found in zip(across, panels.values(), strict=True):
            label(axes, found, axis)
    figure.savefig(path, transparent=True, metadata={"Date": None, "Description": json.dumps(panels)})
    pyplot.close(figure)


def picture_of_overheads(path: Path, found: dict[str, list[tuple[float, float]]]) -> None:
    """Draw the overhead taken against the overhead asked for, with a band of what counts as kept."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(4.6, 3.6))
    ends = [0.0, 0.25]
    axes.plot(ends, ends, color="#6b7280", linewidth=0.8)
    axes.fill_between(ends, [a - NEAR for a in ends], [a + NEAR for a in ends], color="#9ca3af", alpha=0.2,
                      label=f"asked ± {NEAR:.0%}")  # fmt: skip
    for (title, pairs), marker in zip(found.items(), MARKERS, strict=False):
        asked, taken = zip(*pairs, strict=True)
        axes.scatter(asked, taken, s=26, marker=marker, color=COLOURS["lean"], label=title)
    axes.set(xlabel="overhead asked for", ylabel="overhead taken", xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
        axis.set_major_locator(MultipleLocator(0.05))
    axes.grid(color="#9ca3af", alpha=0.25, linewidth=0.6)
    axes.legend(frameon=False, fontsize=SIZE)
    figure.tight_layout()
    figure.savefig(path, transparent=True, metadata={"Date": None, "Description": json.dumps(found)})
    pyplot.close(figure)


def overheads() -> dict[str, list[tuple[float, float]]]:
    """By network, the overheads that were asked for and taken, on an idle machine."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in record.read(record.FOLDER / "overhead.json"):
        if not row["busy"] and row["kept"] < 0.99:
            title = TITLES.get(row["model"], row["model"])
            found.setdefault(title, []).append((row["asked"], round(row["taken"], 3)))
    return found


def pictures() -> dict[str, dict[str, list[Point]]]:
    """The panels of each picture: one for each dtype of a model, or for each of the README's models."""
    shown = {"lean.svg": {_title(model, dtype): points(file, model, dtype) for file, model, dtype in FIRST}}
    by_torch = [p for p in points("models_compile_cpu", "resnet50", None) if p[0].startswith("torch.compile")]
    shown["lean.svg"]["ResNet-50, float32"] += by_torch
    rows = record.read(record.FOLDER / "lean_transformers_cpu.json")
    for model, dtype in dict.fromkeys((row["model"], row["dtype"]) for row in rows):
        panels = shown.setdefault(f"lean_{model}.svg", {})
        panels[_title(model, dtype)] = points("lean_transformers_cpu", model, dtype)
    shown["compiled.svg"] = {
        f"{title}, float32": points(COMPILED_CODE, model, None) for model, title in COMPILED.items()
    }
    return shown


def _title(model: str, dtype: str | None) -> str:
    return f"{TITLES[model]}, {dtype or 'float32'}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, default=Path("docs"), help="the folder of the pictures")
    into = parser.parse_args().into
    for name, panels in pictures().items():
        picture(into / name, panels)
    picture_of_overheads(into / "overhead.svg", overheads())


if __name__ == "__main__":
    main()
