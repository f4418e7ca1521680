"""`fold`: batch norms folded into neighbouring layers for inference, and the check of the outputs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from leannorm._batch import inputs_of, positional
from leannorm._errors import FoldError, InputError
from leannorm._report import Line, Part, Report, Table, as_data, grouped
from leannorm._untouched import random_state, themselves, untouched
from leannorm.functional.exporter import export
from leannorm.nn.conv import _ConvBatchNorm
from leannorm.program.program import Program
from leannorm.transforms.folding.decided import Decided, decided
from leannorm.transforms.folding.graph import all_variables, double, find_all, fold_graph, in_float64
from leannorm.transforms.folding.match import Fold, Skip, owner, path_of
from leannorm.transforms.folding.modules import fold_modules
from leannorm.transforms.fusing.fuse import unfused

ROUNDINGS = 1e4  # a hundred layers, ten roundings each, amplified ten times
TIMES_ONE_ROUNDING = 10.0  # folding rounds a weight several times, the comparison once


class Folded(NamedTuple):
    """A norm that was folded, and the layers into which it was folded."""

    norm: str
    into: tuple[str, ...]


class Skipped(NamedTuple):
    """A norm that stayed, and why."""

    norm: str
    reason: str


@dataclass(frozen=True, repr=False)
class FoldReport(Report):
    """What `fold` did: the result, which norms were folded and which were not, and how exact it is.

    `model` is the result. `difference` is the largest one between the outputs, in the outputs' own units and
    dtype; it and `checked` (the same in float64, if possible) are None if nothing was verified. `scale`
    is the largest output. `decided` are the tests in the model's Python code whose outcome the example gave:
    another input may take another path through the model, for which the folding was neither made nor checked.

    >>> import torch, leannorm
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8))
    >>> report = leannorm.fold(net, (torch.randn(2, 3),))
    >>> len(report.folded), report.skipped, report.difference < 1e-5
    (1, (), True)
    """

    model: Any
    folded: tuple[Folded, ...]
    skipped: tuple[Skipped, ...]
    difference: float | None = None
    checked: float | None = None
    scale: float | None = None
    decided: tuple[Decided, ...] = ()

    def summary(self) -> str:
        told = f"{len(self.folded)} folded, {len(self.skipped)} skipped"
        if self.difference is None:
            return told
        return f"{told}; largest output difference {self.difference:.2g} of {self.scale:.2g}"

    def parts(self) -> Iterator[Part]:
        rows = [["folded", f.norm, f"into {', '.join(f.into)}"] for f in self.folded]
        rows += [["skipped", s.norm, s.reason] for s in self.skipped]
        rows += [["decided", d.place, f"`{d.test}` ({d.value})"] for d in self.decided]
        if rows:
            yield Table(["", "norm", "how"], rows, numbers_from=3)
        yield Line(self.summary())

    def data(self) -> dict[str, Any]:
        return {
            **{name: as_data(getattr(self, name)) for name in ("folded", "skipped", "decided", "difference")},
            "difference_in_float64": self.checked,
            "largest_output": self.scale,
        }


def fold(
    model: Any,
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    verify: bool = True,
) -> FoldReport:
    """Fold every batch norm that can be folded into the convolution or linear layer before or after it.

        s = weight / sqrt(running_var + eps)
        W' = s * W,  b' = s * (b - running_mean) + bias          the layer before the norm
        W' = W * s,  b' = b + W (bias - s * running_mean)        the layer after it, if it pads no zeros

    Neighbours are found by the flow of data in the model's evaluation graph (`torch.export`), not by the
    order of declaration. `model` is a module, or a `Program`. For a module the result is a folded copy in
    evaluation mode, of the same classes, with `torch.nn.Identity` instead of the norms; layers that have
    hooks or parametrizations, are called both with and without their norm, or share parameters, stay and are
    named. For a program it is the folded inference branch as a `torch.export.ExportedProgram`, in which each
    call has its own weights. The original is not changed. Sums are done in float64 and rounded once, to the
    weight's dtype.

    A converted model, with or without fused blocks, is folded like the original one. If nothing is folded, a
    `UserWarning` says why.

    The graph is the path that the example took. Tests in the model's Python code that read the input's shape
    or dtype, a global, or an attribute that the forward pass assigns are named in `report.decided`.

    `verify` runs both on the `example_inputs` (a tensor, a tuple, or a mapping by name; random ones for a
    program) and compares, in float64 if the model runs in it.

    Returns: a `FoldReport`.
    Raises: `FoldError` if the outputs differ by more than 10,000 roundings of the largest output, or ten
    times what one rounding of every weight changes; `InputError` if the model cannot be exported.
    Source: Jacob et al., 2018, arXiv:1712.05877, section 3.2.

    >>> import torch, leannorm
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    >>> report = leannorm.fold(net, (torch.randn(2, 3, 8, 8),))
    >>> report.folded
    (Folded(norm='1', into=('0',)),)
    >>> report.model[1]
    Identity()
    """
    if isinstance(model, Program):
        inputs = None if example_inputs is None else inputs_of(example_inputs, "example_inputs").args
        return _fold_program(model, inputs, verify)
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"fold takes a module or a program, got {type(model).__name__}; pass the model")
    if example_inputs is None:
        raise InputError(
            "a module is folded along its graph, which needs example_inputs; pass a tuple of inputs"
        )
    inputs = positional(model, example_inputs)
    original = copy.deepcopy(model).eval()
    tests = decided(_unfused(original), inputs)
    result = _with_pairs(original)
    graph = _evaluation_graph(_unfused(result), inputs, tests)
    matched = find_all(graph, all_variables(result))
    matches, skips = fold_modules(result, graph, *matched)
    report = replace(_report(result, matches, skips), decided=tests)
    _warn_of_nothing(report, type(model).__name__)
    if not verify:
        return report

    def again(wide: torch.nn.Module) -> torch.nn.Module:
        other = _with_pairs(wide)
        fold_modules(other, graph, *matched)
        return other

    return _verified(report, original, result, copy.deepcopy(original).double(), again, inputs)


def _fold_program(program: Program, inputs: tuple[Any, ...] | None, verify: bool) -> FoldReport:
    parts: list[fx.GraphModule] = []
    reports: list[FoldReport] = []

    def rewrite(module: fx.GraphModule) -> fx.GraphModule:
        result, matches, skips = fold_graph(module)
        parts.extend((module, result))
        reports.append(_report(result, matches, skips))
        return result

    exported = program.to_exported("infer", rewrite)
    report = replace(reports[0], model=exported)
    _warn_of_nothing(report, "the program")
    if not verify:
        return report
    if inputs is None:
        with random_state():
            inputs = pytree.tree_map(_random, exported.example_inputs[0])
    original, result = parts
    return _verified(
        report,
        original,
        result,
        in_float64(original),
        lambda m: fold_graph(cast(fx.GraphModule, m))[0],
        inputs,
    )


def _unfused(model: torch.nn.Module) -> torch.nn.Module:
    """A copy on the same tensors, in which calls that `convert` has fused are separate calls."""
    tensors = chain(model.parameters(), model.buffers())
    return unfused(copy.deepcopy(model, {id(t): t for t in tensors}))


def _warn_of_nothing(report: FoldReport, model: str) -> None:
    if not report.folded:
        reasons = dict.fromkeys(skipped.reason for skipped in report.skipped)
        why = "; ".join(list(reasons)[:3]) or "it has no batch norm that can be"
        warnings.warn(f"fold folded nothing in {model}: {why}", stacklevel=3)


def _random(value: Any) -> Any:
    """Random numbers in the shape of a floating-point tensor; anything else unchanged."""
    return torch.randn_like(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def _evaluation_graph(
    model: torch.nn.Module, inputs: tuple[Any, ...], tests: tuple[Decided, ...]
) -> fx.Graph:
    try:
        with untouched(model, themselves):  # the result's are recognized by these
            exported = export(model, inputs)
    except InputError as error:
        why = "".join(f"; the example decided {d.place}: `{d.test}` ({d.value})" for d in tests)
        raise InputError(f"{error}; so its neighbours are not known{why}") from error.__cause__
    module: Any = exported.module(check_guards=False)
    graph: fx.Graph = module.graph
    return graph


def _with_pairs(model: torch.nn.Module) -> torch.nn.Module:
    """A copy in which each ConvBatchNorm is a convolution and a norm, so that the norm can be folded."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, _ConvBatchNorm) and child.eps_mode == "inside":
                parent._modules[name] = torch.nn.Sequential(*child.to_pair())
    return model


def _report(result: torch.nn.Module, matches: list[Fold], skips: list[Skip]) -> FoldReport:
    folded = grouped((path_of(m.norm.node), owner(layer.weight)) for m in matches for layer in m.layers)
    skipped = {path_of(s.norm): s.reason for s in skips}
    return FoldReport(
        result,
        tuple(Folded(norm, tuple(dict.fromkeys(into))) for norm, into in folded.items()),
        tuple(Skipped(norm, reason) for norm, reason in skipped.items()),
    )


def _verified(
    report: FoldReport,
    original: torch.nn.Module,
    result: torch.nn.Module,
    wide: torch.nn.Module,
    again: Callable[[torch.nn.Module], torch.nn.Module],
    inputs: tuple[Any, ...],
) -> FoldReport:
    """The report with measured differences. `again` repeats the folding in float64, in which it is
    checked."""
    before, after = _outputs(original, inputs), _outputs(result, inputs)
    difference, scale, eps = _difference(before, after)
    checked, largest, allowed = difference, scale, ROUNDINGS * eps * scale
    with suppress(RuntimeError):  # a model that casts may not run in float64: then the check above counts
        inputs = pytree.tree_map(double, inputs)
        exact = _outputs(wide, inputs)
        checked, largest, eps = _difference(exact, _outputs(again(wide), inputs))
        # a model that amplifies a rounding of its weights also amplifies the roundings of folding
        response = _difference(exact, _outputs(_rounded_once(wide), inputs))[0]
        allowed = max(ROUNDINGS * eps * largest, TIMES_ONE_ROUNDING * response)
    if not checked <= allowed:
        raise FoldError(
            f"folding changed the output by {checked:.3g} of {largest:.3g}, more than rounding does; please "
            "report the model; verify=False returns the folded model all the same"
        )
    return replace(report, difference=difference, checked=checked, scale=scale)


def _rounded_once(wide: torch.nn.Module) -> torch.nn.Module:
    """A copy whose float64 variables are changed by up to one rounding each, at random from a fixed seed."""
    moved = copy.deepcopy(wide)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for v in (v for v in chain(moved.parameters(), moved.buffers()) if v.dtype == torch.float64):
            step = torch.empty(v.shape, dtype=v.dtype).uniform_(-1, 1, generator=generator)
            v.mul_(1 + torch.finfo(v.dtype).eps * step.to(v.device))
    return moved


def _outputs(model: torch.nn.Module, inputs: tuple[Any, ...]) -> list[Any]:
    """What the model returns from its present state and random numbers, which stay."""
    with untouched(model), torch.no_grad():
        return pytree.tree_leaves(model(*copy.deepcopy(inputs)))


def _difference(left: list[Any], right: list[Any]) -> tuple[float, float, float]:
    """The largest difference between the outputs, the largest output, and the machine epsilon."""
    difference, scale, eps = 0.0, 0.0, torch.finfo(torch.float64).eps
    for mine, theirs in zip(left, right, strict=True):
        if isinstance(mine, Tensor) and mine.is_floating_point() and mine.numel():
            eps = max(eps, torch.finfo(mine.dtype).eps)
            gap = (mine.double() - theirs.double()).abs().max().item()
            difference = gap if gap != gap else max(difference, gap)
            scale = max(scale, mine.double().abs().max().item())
    return difference, scale, eps
