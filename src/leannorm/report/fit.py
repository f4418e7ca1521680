"""`fit`: the largest batch that fits in a memory, with and without lean(), found without that memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from leannorm import _checks
from leannorm._batch import Arguments, inputs_of
from leannorm._errors import InputError
from leannorm._report import Line, Part, Report, Table, bytes_in_words, column_of_bytes
from leannorm._untouched import left_alone, random_state, untouched
from leannorm.planning.goal import bytes_of
from leannorm.report.fake import fake_step, fakes
from leannorm.report.settings import LEAN, Setting, code_of, settings_for
from leannorm.saving import log, recorded_pass
from leannorm.saving.remembered import nothing_remembered

OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}  # tensors of state for each parameter
# temporaries the size of a state tensor: on a GPU for all at once, otherwise two at a time
_WITH_ROOTS = ("adam", "adamw")
_SMALLEST = 2  # batch norm over 1×1 images raises an error for one sample


class Fit(NamedTuple):
    """A setting, the largest batch that fits (0: fewer than two samples), and the bytes that it takes.

    `later`: where the first pass makes a plan, the bytes of passes that follow it.
    """

    name: str
    batch: int
    nbytes: int
    later: int | None = None


@dataclass(frozen=True, repr=False)
class FitReport(Report):
    """What `fit` found in `memory` bytes; `fits[0]` is plain PyTorch.

    `parameter_bytes`: the bytes of parameters, the optimizer's state and buffers, whatever the batch.

    >>> import torch, leannorm
    >>> report = leannorm.fit(lambda: torch.nn.Linear(8, 8), (8,), "1MB", recompute=["norm"])
    >>> report.memory, report.sample, [one.name for one in report.fits]
    (1000000, ('8',), ['stock', 'norm'])
    """

    memory: int
    optimizer: str
    sample: tuple[str, ...]
    fits: list[Fit]
    parameter_bytes: int
    asked: str = ""

    @property
    def available(self) -> str:
        """The memory that was asked for."""
        return self.asked or bytes_in_words(self.memory)

    def summary(self) -> str:
        largest = max(self.fits, key=lambda one: one.batch)
        return f"batch {largest.batch} under {largest.name}, {self.fits[0].batch} in plain PyTorch"

    def parts(self) -> Iterator[Part]:
        stock = self.fits[0].batch
        bytes_of_each = [one.nbytes for one in self.fits]
        left = [self.memory - one.nbytes if one.batch else 0 for one in self.fits]
        rows = [
            [
                one.name,
                str(one.batch) if one.batch else "none",
                f"{one.batch / stock:.2f}" if stock else "–",
                needed,
                headroom if one.batch else "–",
            ]
            for one, needed, headroom in zip(
                self.fits, self._in_words(bytes_of_each), self._in_words(left), strict=True
            )
        ]
        title = f"samples of {', '.join(self.sample)}, {self.optimizer}, {self.available}"
        yield Table(["", "largest batch", "of plain PyTorch", "bytes needed", "headroom"], rows, title)
        yield from map(Line, self._what_to_type())
        yield from map(Line, self._why_no_larger())
        yield from map(Line, self._first_passes())
        yield from map(Line, self._of_other_sizes())

    def _what_to_type(self) -> Iterator[str]:
        """The line of code for the largest batch; if two settings are equal, the cheaper one."""
        stock, *others = self.fits
        best = max(others, key=lambda one: one.batch, default=stock)
        if best.batch > stock.batch:
            before = (
                f"in place of {stock.batch}" if stock.batch else "where plain PyTorch cannot hold two samples"
            )
            yield f"batch {best.batch} {before}: with {code_of(best.name)}:  # around the forward pass"

    def _why_no_larger(self) -> Iterator[str]:
        stock, *others = self.fits
        equal = [one.name for one in others if one.batch == stock.batch]
        least = min(one.nbytes for one in self.fits)
        needed, there = self._in_words([least, self.parameter_bytes])
        same = f"{' and '.join(equal)}: the same batch as plain PyTorch"
        if not any(one.batch for one in self.fits):
            yield (
                f"Not even {_SMALLEST} samples fit in {self.available}: they need {needed}, of which "
                f"parameters and optimizer take {there}."
            )
        elif equal and 2 * self.parameter_bytes > self.memory:
            yield (
                f"{same}, as parameters and optimizer, which lean() leaves, take {there} of {self.available}."
            )
        elif equal and recorded_pass.LOG is log:
            yield (
                f"{same}: what lean() rebuilds is not seen on tensors without data, with which batches are"
                " tried, as leannorm was installed without the C++ nodes; profile measures it."
            )
        elif equal:
            yield f"{same}, as nothing that is rebuilt is there at the step's peak."

    def _first_passes(self) -> Iterator[str]:
        for one in self.fits:
            if one.batch and one.later is not None and one.later < one.nbytes:
                (later,) = self._in_words([one.later])
                yield (
                    f"{one.name}: as many samples as fit in the first pass, which makes the plan; "
                    f"later passes take {later}."
                )

    def _of_other_sizes(self) -> Iterator[str]:
        """The line of code for batches that are not like these samples; it keeps to the memory by itself."""
        if any(one.batch for one in self.fits):
            limit = self.asked or f"{self.memory}B"
            yield (
                f'If sizes vary from batch to batch, on a CPU: with leannorm.lean(limit="{limit}"):  # the'
                " whole process's memory"
            )

    def _in_words(self, column: Sequence[int]) -> list[str]:
        """In the unit in which the memory was asked for."""
        unit = self.asked.lstrip("0123456789. ")
        if not unit:
            return column_of_bytes(column)
        scale = bytes_of(f"1{unit}")
        return [f"<0.01 {unit}" if 0 < n < 0.005 * scale else f"{n / scale:,.2f} {unit}" for n in column]


def fit(
    model: nn.Module | Callable[[], nn.Module],
    sample: Sequence[int] | Any,
    memory: int | str,
    *,
    recompute: Sequence[str] = LEAN,
    budgets: Sequence[float] = (),
    optimizer: str = "adam",
    progress: Callable[[str], None] = lambda doing: None,
) -> FitReport:
    """The largest batch of samples like `sample` that trains in `memory`, by setting.

    `model` is a model, which is not changed, or a function that makes one; then the model takes no memory.
    `sample` is one sample without its batch: sizes of a float32 tensor, a tensor, a tuple of all arguments,
    or a mapping of them by name; only the shapes and dtypes of tensors count. `memory` is text with a unit,
    like "24GiB", or a number of bytes above 1,000. `recompute` and `budgets` are those of `profile`; "peak
    0.6" and "overhead 0.1" are settings, too. It counts parameters, buffers, gradients, the optimizer's state
    ("sgd", "momentum", "adam" or "adamw") and the temporaries of its step, the batch and the peak of the
    step, including convolutions' workspaces. It does not count what a GPU's driver, libraries and allocator
    take: leave the report's headroom for them. A model in evaluation mode is counted in the mode that its
    `train()` sets. It runs on fake tensors: no value is computed, so a small machine answers for a large one.

    Raises: `InputError` for an unknown optimizer or setting, a memory without a unit, and a model that needs
    values to run.

    >>> import leannorm
    >>> from torch import nn
    >>> block = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3)
    >>> report = leannorm.fit(nn.Sequential(*block), (3, 32, 32), "10MB", recompute=["norm"])
    >>> stock, norm = report.fits
    >>> norm.batch > stock.batch
    True
    """
    if optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer is one of {', '.join(OPTIMIZERS)}; got {optimizer!r}")
    if not isinstance(memory, str) and memory < 1000:
        raise InputError(f"a memory is written like '24GiB', or in bytes; got {memory!r} without its unit")
    available = bytes_of(memory) if isinstance(memory, str) else memory
    one = inputs_of(_tensor_of(sample), "sample")
    nbytes_each = sum(t.nbytes for t in tree_leaves((one.args, dict(one.kwargs))) if isinstance(t, Tensor))
    mode = FakeTensorMode()
    network = _made(model)
    one.checked(network)
    with untouched(network, fakes(mode)):
        if not network.training:
            network.train()
        tensors = [*network.parameters(), *network.buffers()]
        each = [p.nbytes for p in network.parameters() if p.requires_grad]
        trained = sum(each)
        there = sum(t.nbytes for t in tensors) + OPTIMIZERS[optimizer] * trained
        roots = max(trained, 2 * max(each, default=0)) if optimizer in _WITH_ROOTS else 0
        results = []
        for setting in settings_for(network, recompute, budgets):

            def needed(batch: int, setting: Setting = setting) -> tuple[int, ...]:
                """By the first pass, and by the next, which follows a plan if the setting makes one."""
                progress(f"{setting.name}, batch {batch}")
                passes = 1 if setting.name in ("stock", "norm", "conv") else 2
                with nothing_remembered(), untouched(network, left_alone), warnings.catch_warnings():
                    # the report prints how much
                    warnings.filterwarnings("ignore", "leannorm: (budget|peak)=")
                    peaks = [
                        fake_step(network, mode, setting, _batch_of(one, batch)).peak for _ in range(passes)
                    ]
                return tuple(there + batch * nbytes_each + max(peak, trained + roots) for peak in peaks)

            try:
                batch, taken = _largest(needed, available)
            except (RuntimeError, NotImplementedError, AssertionError) as error:
                why = str(error).strip().splitlines()[0]
                raise InputError(
                    f"the model does not run on fake tensors of {', '.join(one.described())} ({why}): check "
                    "the input's sizes, or measure it with profile"
                ) from error
            results.append(Fit(setting.name, batch, max(taken), taken[-1] if taken[1:] else None))
    asked = memory.strip() if isinstance(memory, str) else ""
    return FitReport(available, optimizer, tuple(one.described()), results, there, asked)


def _made(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """The model; or the one that a function makes, on the meta device, which takes no memory, or, if its
    constructor reads values, on the CPU."""
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise InputError(
            f"fit takes a model, or a function that makes it, got {type(model).__name__}; pass the model, or "
            "lambda: Model()"
        )
    with random_state():
        try:
            with torch.device("meta"):
                made = model()
        except (RuntimeError, NotImplementedError):
            made = model()
    _checks.module(made, "fit")
    return made


def _tensor_of(sample: Any) -> Any:
    sizes = isinstance(sample, (tuple, list)) and all(isinstance(size, int) for size in sample)
    return torch.empty(tuple(sample), device="meta") if sizes else sample


def _batch_of(one: Arguments, batch: int) -> Arguments:
    """The same for a batch of this many samples, without memory."""

    def several(tensor: Tensor) -> Tensor:
        return torch.empty((batch, *tensor.shape), dtype=tensor.dtype, device="meta")

    return Arguments(*tree_map_only(Tensor, several, (one.args, dict(one.kwargs))))


def _largest(needed: Callable[[int], tuple[int, ...]], memory: int) -> tuple[int, tuple[int, ...]]:
    """The largest batch with all of needed(batch) <= memory, and what it needs; `needed` is nearly linear."""
    known = {_SMALLEST: needed(_SMALLEST)}
    if max(known[_SMALLEST]) > memory:
        return 0, known[_SMALLEST]
    low, high = _SMALLEST, None
    while high is None or high - low > 1:
        probe = _next({batch: max(taken) for batch, taken in known.items()}, low, high, memory)
        known[probe] = needed(probe)
        if max(known[probe]) <= memory:
            low = probe
        else:
            high = probe
    return low, known[low]


def _next(known: dict[int, int], low: int, high: int | None, memory: int) -> int:
    """The next batch to try, between low and high: where a line through two known points reaches `memory`."""
    others = [batch for batch in known if batch != low]
    if not others:
        return 2 * low
    other = high if high is not None else max(others)
    slope = (known[low] - known[other]) / (low - other)
    guess = low + int((memory - known[low]) / slope) if slope > 0 else 2 * low
    return max(guess, low + 1) if high is None else min(max(guess, low + 1), high - 1)
