"""The comparison as tables and as one HTML page."""

from __future__ import annotations

import torch

from leannorm.demo.train import Comparison, Side
from leannorm.report.render import (
    Fact,
    Section,
    Table,
    bar_figure,
    bytes_in_words,
    line_figure,
    milliseconds,
    page,
)


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


def html(result: Comparison) -> str:
    """Loss curves, memory bars and both tables in one self-contained file."""
    stock, lean = result.sides[0], result.sides[1]
    epochs = range(1, result.settings.epochs + 1)
    facts = [
        Fact(f"{1 - lean.held / stock.held:.0%} less", f"held after forward, {lean.name}"),
        Fact(f"{1 - lean.peak / stock.peak:.0%} less", f"peak of a training step, {lean.name}"),
        Fact(f"{lean.time_ratio:.2f} ×", "stock's step time, on the same batches"),
        Fact(f"{lean.relative_difference:.0e}", "largest relative difference of a gradient (float32)"),
        Fact(f"{lean.accuracy[-1]:.1%}", f"test accuracy; stock {stock.accuracy[-1]:.1%}"),
    ]
    sections = [
        Section(
            "Training loss",
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
    return page("leannorm demo: handwritten digits", result.verdict, facts, sections, foot)
