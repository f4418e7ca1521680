"""`demo`: what `lean()` saves on two common networks, and a training run that stays the same under it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from leannorm._report import Line, Part, Table, counted
from leannorm.report.demo.digits import WAYS, DigitNetwork, Digits, Trained, check, load, same_bits, train
from leannorm.report.demo.saved import MEMORY, NETWORKS, Network, Saved, measured
from leannorm.report.memory import check_device
from leannorm.report.memory_report import MemoryReport, note_on_times, setting_table, timeline_section
from leannorm.report.profile import profile
from leannorm.report.render import Fact, PagedReport, Section, line_figure, page
from leannorm.report.settings import code_of

NEXT = "For a model of yours: leannorm profile timm:resnet50 --input 8x3x224x224 --report mine.html"


@dataclass(repr=False)
class DemoReport(PagedReport):
    """What `demo` measured; true if training under `lean()` equals plain PyTorch bit for bit.

    `repeats`: whether a second run in plain PyTorch gives the bits of the first. Some kernels on GPUs do not.
    """

    networks: list[Saved]
    digits: MemoryReport
    trained: list[Trained]
    same: bool
    repeats: bool = True

    def __bool__(self) -> bool:
        return self.same or not self.repeats

    def summary(self) -> str:
        stock, lean = self.trained
        equal = "equal bit for bit" if self.same else "DIFFERENT"
        if not self.repeats:
            equal = "other bits at each run here, plain PyTorch's too"
        return (
            f"digits, {counted(len(stock.loss), 'epoch')}, with and without lean(): weights {equal}, "
            f"{lean.accuracy[-1]:.1%} of the test images right"
        )

    def parts(self) -> Iterator[Part]:
        for one in self.networks:
            yield one.table()
        yield setting_table(self.digits)
        yield from note_on_times(*(one.steps for one in self.networks), self.digits)
        yield self._epochs()
        yield Line(f"{self.summary()}.", "bold green" if self else "bold red")
        yield Line(NEXT)

    def _epochs(self) -> Table:
        columns = ["epoch", *(f"{one.name} {what}" for one in self.trained for what in ("loss", "accuracy"))]
        by_epoch = (zip(one.loss, one.accuracy, strict=True) for one in self.trained)
        rows = [
            [str(epoch), *(cell for loss, right in sides for cell in (f"{loss:.4f}", f"{right:.2%}"))]
            for epoch, sides in enumerate(zip(*by_epoch, strict=True), 1)
        ]
        return Table(columns, rows)

    def html(self) -> str:
        """What the networks save, then the digits' loss, memory and time."""
        facts = [fact for one in self.networks for fact in _facts(one)]
        right = [f"{one.accuracy[-1]:.1%}" for one in self.trained]
        facts.append(Fact(right[1], f"of the test digits right, trained under lean(); {right[0]} without"))
        sections = [section for one in self.networks for section in _sections(one)]
        epochs = range(1, len(self.trained[0].loss) + 1)
        losses = {one.name: (list(epochs), one.loss) for one in self.trained}
        sections += [
            Section(
                "Digits: training loss",
                "Mean over each epoch. Same initial weights, batches and dropout; same bits.",
                line_figure(losses, "epoch", "loss"),
            ),
            timeline_section(self.digits, "Digits: memory over one step"),
            Section("Digits: what a step costs", table=setting_table(self.digits)),
            Section("Digits: epoch by epoch", table=self._epochs()),
        ]
        return page("leannorm demo", f"{self.summary()}.\n{NEXT}", facts, sections, self.digits.foot())


def demo(
    networks: Sequence[Network] = NETWORKS,
    *,
    device: str = "cpu",
    epochs: int = 6,
    batch_size: int = 256,
    seed: int = 0,
    digits: Digits | None = None,
    memory: str = MEMORY,
    progress: Callable[[str], None] = lambda doing: None,
) -> DemoReport:
    """Measure the networks in plain PyTorch and under `lean()`; train digits both ways and compare all bits.

    Raises: `InputError` for numbers out of range and for a device that torch cannot use,
    `MissingDependencyError` without scikit-learn.
    """
    check_device(device)
    digits = digits or load()
    check(digits, epochs, batch_size, seed)
    digits = digits.to(device)
    (stock, of_stock), (lean, of_lean) = (
        train(digits, epochs, batch_size, seed, name, progress) for name in WAYS
    )
    same = repeats = same_bits(of_stock, of_lean)
    if not same:
        repeats = same_bits(of_stock, train(digits, epochs, batch_size, seed, "stock", progress)[1])
    labels = digits.labels[:batch_size]
    costs = profile(
        DigitNetwork().to(device),
        digits.images[:batch_size],
        loss=lambda scores: F.nll_loss(scores, labels),
        progress=progress,
    )
    costs.model = "digits"
    torch.manual_seed(seed)
    saved = list(measured(device, networks, memory, progress))
    return DemoReport(saved, costs, [stock, lean], same, repeats)


def _facts(one: Saved) -> list[Fact]:
    stock, lean = one.steps.settings[0], one.leanest
    code = code_of(lean.name).removeprefix("leannorm.")
    return [
        Fact(
            f"{lean.kept / stock.kept:.2f} ×",
            f"bytes kept by {one.network} under {code}, at {lean.time_ratio:.2f} × the time",
        ),
        Fact(f"{one.larger_batch:.1f} ×", f"largest batch of {one.network} in {one.batches.available}"),
    ]


def _sections(one: Saved) -> list[Section]:
    images = ", ".join(one.steps.inputs)
    return [
        timeline_section(one.steps, f"{one.network}, {images}: memory over one step"),
        Section(
            f"{one.network}: what a step costs",
            "Bytes and time of one step, with their ratios to plain PyTorch; the batch is of 224×224 images.",
            table=one.table(),
        ),
    ]
