"""The comparison as tables and as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from leannorm._report import Table, bytes_in_words, milliseconds
from leannorm.demo.headline import Saved
from leannorm.demo.train import Comparison, Side
from leannorm.report.memory_report import setting_table, timeline_section
from leannorm.report.render import Fact, Section, bar_figure, line_figure, page


def cost_table(result: Comparison) -> Table:
    """One column per side: the cost of a training step with its ratio to stock, and the gradients' errors."""
    stock = result.sides[0]

    def column(side: Side) -> list[str]:
        return [
            f"{bytes_in_words(side.held)}  {side.held / stock.held:.2f}",
            f"{bytes_in_words(side.peak)}  {side.peak / stock.peak:.2f}",
            f"{milliseconds(side.step_seconds)}  {side.time_ratio:.2f}",
            "–" if side is stock else f"{side.gradient_difference:.1e}",
            "–" if side is stock else f"{side.relative_difference:.1e}",
            "–" if side is stock else f"{side.double_difference:.1e}",
        ]

    names = [
        "held after forward",
        "peak of a step",
        "step time",
        "gradients differ by",
        "  relative",
        "  in float64",
    ]
    rows = [list(row) for row in zip(names, *map(column, result.sides), strict=True)]
    return Table(["", *(side.name for side in result.sides)], rows)


def epoch_table(result: Comparison) -> Table:
    """One row per epoch: training loss and test accuracy of every side."""
    columns = ["epoch"] + [f"{side.name} {what}" for side in result.sides for what in ("loss", "accuracy")]
    rows = [
        [str(epoch + 1)]
        + [
            text
            for side in result.sides
            for text in (f"{side.loss[epoch]:.4f}", f"{side.accuracy[epoch]:.2%}")
        ]
        for epoch in range(result.settings.epochs)
    ]
    return Table(columns, rows)


NEXT = "leannorm profile timm:resnet50 --input 8x3x224x224 --report mine.html"


def html(result: Comparison, saved: Sequence[Saved] = ()) -> str:
    """What the larger networks save; then the digit network's loss curves, memory and tables: one file."""
    stock, lean = result.sides[0], result.sides[1]
    epochs = range(1, result.settings.epochs + 1)
    facts = [fact for one in saved for fact in _facts(one)]
    facts += [
        Fact(f"{1 - lean.held / stock.held:.0%} less", f"held after forward, digit network, {lean.name}"),
        Fact(f"{lean.accuracy[-1]:.1%}", f"its accuracy on test images; stock {stock.accuracy[-1]:.1%}"),
    ]
    sections = [section for one in saved for section in _sections(one)]
    sections += [
        Section(
            "The digit network: training loss",
            "Mean over each epoch. Same initial weights, batches and dropout.",
            line_figure({s.name: (list(epochs), s.loss) for s in result.sides}, "epoch", "loss"),
            wide=False,
        ),
        Section(
            "Memory of one training step",
            f"Batch of {result.settings.batch_size}; bytes above those before the step.",
            bar_figure(
                {s.name: [s.held / 1e6, s.peak / 1e6] for s in result.sides},
                ["held after forward", "peak"],
                "MB",
            ),
            wide=False,
        ),
        Section(
            "What a step costs",
            "Bytes and time of one step, each with its ratio to stock.",
            table=cost_table(result),
        ),
        Section("Epoch by epoch", table=epoch_table(result)),
    ]
    foot = {
        "data": f"{result.data_name}, {result.images} + {result.test_images} images",
        "device": result.settings.device,
        "threads": str(result.threads),
        "seed": str(result.settings.seed),
        "torch": torch.__version__,
        "memory": result.freed_memory,
    }
    lines = [*(one.in_words() + "." for one in saved), result.verdict, f"For a model of yours: {NEXT}"]
    return page("leannorm demo", "\n".join(lines), facts, sections, foot)


def _facts(one: Saved) -> list[Fact]:
    stock, lean = one.steps.settings[0], one.leanest
    return [
        Fact(f"{lean.kept / stock.kept:.2f} ×", f'bytes held, {one.network} under lean("{lean.name}")'),
        Fact(f"{one.larger_batch:.1f} ×", f"largest batch in {one.batches.memory / 1e9:g} GB"),
        Fact(f"{lean.time_ratio:.2f} ×", "step time (median of the turns' ratios)"),
    ]


def _sections(one: Saved) -> list[Section]:
    images = ", ".join(one.steps.inputs)
    return [
        timeline_section(one.steps, f"{one.network}, {images}: memory over one step"),
        Section(
            f"{one.network}: what a step costs",
            "Bytes and time of one step, each with its ratio to stock; the batch is of 224×224 images.",
            table=saved_table(one),
        ),
    ]


def saved_table(one: Saved) -> Table:
    """The settings of one network: bytes, time, gradients, and the largest batch."""
    table = setting_table(one.steps)
    batches = {fit.name: str(fit.batch) for fit in one.batches.fits}
    return Table(
        [*table.columns, f"batch in {one.batches.memory / 1e9:g} GB"],
        [[*row, batches.get(row[0], "–")] for row in table.rows],
        table.title,
    )
