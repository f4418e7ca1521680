"""`compile_options()`: the promise of `lean()` for `torch.compile`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from leannorm._errors import InputError
from leannorm.compiled import internals
from leannorm.compiled.partition import partition
from leannorm.compiled.report import CompileReport, Planned
from leannorm.planning.goal import Goal, goal
from leannorm.saving import rates

_PARTITIONER = "custom_partitioner_fn"


class CompileOptions(dict[str, Any]):
    """Options for `torch.compile`, and a report of what was done with them."""

    def __init__(self, goal: Goal, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._goal, self._missing = goal, internals.missing()
        self._planned: list[Planned] = []
        if self._missing is None:
            self[_PARTITIONER] = _partitioner()(goal, self._planned)

    def __reduce__(self) -> Any:
        """A copy has a report of its own."""
        options = {name: value for name, value in self.items() if name != _PARTITIONER}
        return CompileOptions, (self._goal, options)

    def report(self) -> CompileReport:
        """What was planned for each graph that was compiled with these options, and why not more."""
        return CompileReport(self._goal, tuple(self._planned), self._missing)


@cache
def _partitioner() -> type[Any]:
    """Make the class of our partition functions, since torch's compiler is imported only when options are
    made."""

    class LeanPartitioner(internals.partitioner_class()):  # type: ignore[misc]
        """Called by inductor for each joint graph."""

        def __init__(self, goal: Goal, planned: list[Planned]) -> None:
            self.goal, self.planned = goal, planned

        def __call__(self, module: Any, inputs: Any, **arguments: Any) -> Any:
            modules, planned = partition(module, inputs, arguments, self.goal)
            self.planned.append(planned)
            return modules

        def uuid(self) -> object:
            """Everything that decides a plan: a part of the keys of torch's caches."""
            return _identity(self.goal)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, LeanPartitioner) and self.goal == other.goal

        def __hash__(self) -> int:
            return hash(self.goal)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return self  # torch copies its whole configuration; all copies add to one report

        def __reduce__(self) -> Any:
            return _again, (self.goal, self.uuid())  # torch's caches include these bytes in their keys

    return LeanPartitioner


def _again(goal: Goal, identity: object) -> Any:
    return _partitioner()(goal, [])


def _identity(goal: Goal) -> tuple[object, ...]:
    devices = map(torch.device, ["cpu"] + (["cuda"] if torch.cuda.is_available() else []))
    prices = (repr(rates.rates_for(goal, device)[0]) for device in devices)
    return "leannorm", _sources(), tuple(goal), *prices


@cache
def _sources() -> str:
    """A hash of the code that makes plans."""
    import hashlib

    root = Path(__file__).parent.parent
    files = sorted(
        [*(root / "planning").glob("*.py"), *(root / "compiled").glob("*.py"), Path(rates.__file__)]
    )
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def compile_options(
    recompute: Literal["norm", "conv"] = "norm",
    *,
    budget: float | None = None,
    overhead: float | None = None,
    peak: float | int | str | None = None,
    mode: str | None = None,
) -> CompileOptions:
    """`lean()` for compiled code: options with which `torch.compile` keeps less for the backward pass.

    Torch's compiler decides what compiled code saves, and `lean()` cannot change that. These options give its
    partition of forward and backward pass a plan of which values to keep and which to recompute. The plan is
    made from the graph of both passes and the cost of each kernel, by shapes. By the plan, never more is kept
    than by torch's own choice, and the peak is never higher.

    Args:
        recompute: "norm" recomputes what takes hardly any time (at most 0.03 of the step's); "conv" also
            products whose bytes are worth their time (at most 0.12).
        budget: instead of `recompute`, a share of the bytes that torch's own choice keeps, in (0, 1].
        overhead: instead of it, the share of the step's time that recomputing may take, 0 or more.
        peak: instead of it, the peak of a step: a share of what it was, in (0, 1], or bytes, as `8 * 2**30`
            or "8GiB". The fastest plan that fits is used; memory outside of the graph (weights, optimizer)
            does not count.
        mode: a mode of `torch.compile`, which takes either a mode or options.

    The result is a dict, whose `report()` shows the plan for each graph: bytes kept and recomputed, the peak,
    and reasons. Random numbers, collectives, running statistics and unknown operators never run twice, and
    your own checkpoints are not changed. A recomputed operation reads what it read in the forward pass, even
    if the graph edits a buffer. Rounding is the compiler's: gradients differ from those of eager code as any
    compiled ones do. The options are for the backend "inductor". If torch's compiler lacks what is needed,
    the model is compiled as without them, and `report().reasons` says so.

    Raises: `InputError` for an unknown `recompute` or `mode`, for a share outside its range, or for two of
    `budget`, `overhead` and `peak`.

    >>> import torch, leannorm
    >>> options = leannorm.compile_options("conv")
    >>> model = torch.compile(torch.nn.Linear(8, 8), options=options)
    >>> options.report().graphs                        # nothing ran yet
    ()
    """
    wanted = goal(recompute, budget, overhead, peak)
    try:
        options = {} if mode is None else internals.mode_options(mode)
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise InputError(f"mode is one of torch.compile's; got {mode!r}: {text}") from None
    return CompileOptions(wanted, options)
