"""Which of our norms gives the results of a layer's own code, on rows of very different sizes?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from leannorm.transforms.recognizing.form import LOW, STATISTICS, Form, UnknownFormError, forms
from leannorm.transforms.recognizing.formula_call import Fit, compute
from leannorm.transforms.recognizing.probe import Probe, run

_OTHER_BITS = 0.01  # the share of results that may round the other way, if sums have another order


def fit(
    probe: Probe,
    shape: tuple[int, ...],
    axes: tuple[int, ...] | None,
    dtypes: Sequence[torch.dtype],
    own: torch.dtype,
    tensors: Sequence[tuple[str, torch.Size]],
    likely: Form | None,
) -> Fit:
    """The norm that the layer is; `dtypes`: of its inputs; `own`: of its tensors.

    It is run once more without gradients, under autocast if that makes no difference. `likely` is tried
    first.

    Raises: `UnknownFormError` if none of our norms gives the same output and gradients.
    """
    dtype = dtypes[0]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, device="cpu") for _ in dtypes]
    inputs[0].mul_(_scales(shape, axes or (len(shape) - 1,), dtype))
    inputs = [t.to(dtype).requires_grad_() for t in inputs]
    parameters = {
        name: torch.rand(size, generator=generator, device="cpu").add_(0.5).to(own).requires_grad_()
        for name, size in tensors
    }
    seen = run(probe, inputs, parameters)
    with torch.no_grad():
        try:
            with _autocasting():
                same = _equal(run(probe, inputs, parameters).output, seen.output)
        except (UnknownFormError, RuntimeError):
            same = False
        if not same and not _equal(run(probe, inputs, parameters).output, seen.output):
            raise UnknownFormError("it computes something else without gradients")
    for form in (
        *([likely] if likely else []),
        *forms(seen.clues, len(shape), axes, dict.fromkeys((own, torch.float32))),
    ):
        try:
            ours = compute(form, parameters, *inputs)
        except (RuntimeError, TypeError, IndexError):  # not for these sizes
            continue
        if _agree([ours], [seen.output], form.axes(len(shape)), seen.output.dtype):
            _compare_gradients(form, inputs, parameters, ours, seen.output)
            return Fit(form, seen.neutral and same, seen.device)
    raise UnknownFormError("its output is that of no norm of leannorm")


def _scales(shape: tuple[int, ...], axes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Row by row, from values that eps drowns to ten; one row is all zeros."""
    rows = [1 if axis in axes else n for axis, n in enumerate(shape)]
    count = torch.Size(rows).numel()
    scales = torch.logspace(-3 if dtype in LOW else -7, 1, count, device="cpu")
    if count > 2:
        scales[count // 2] = 0
    return scales.view(rows)


@contextmanager
def _autocasting() -> Iterator[None]:
    """Autocast on the CPU, and the flag of CUDA's, which code may read."""
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            yield
    finally:
        torch.set_autocast_enabled("cuda", before)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(_same(a, b).all())


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _compare_gradients(
    form: Form, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor], ours: Tensor, theirs: Tensor
) -> None:
    leaves = [*inputs, *(parameters[name] for argument, name in form.tensors if argument not in STATISTICS)]
    upstream = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1), device="cpu")
    upstream = upstream.to(theirs.dtype)
    of_ours, of_theirs = (torch.autograd.grad(y, leaves, upstream) for y in (ours, theirs))
    if not _agree(of_ours, of_theirs, form.axes(theirs.dim()), inputs[0].dtype, bits=False):
        raise UnknownFormError("its gradient is not leannorm's on random input")


def _agree(
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    axes: tuple[int, ...],
    dtype: torch.dtype,
    bits: bool = True,
) -> bool:
    """Whether they are equal up to the rounding of sums. With `bits`, of a short dtype, nearly all bit for
    bit."""
    budget = (16 if dtype in LOW else 64) * torch.finfo(dtype).eps  # gradients cancel within a row
    for mine, other in zip(ours, theirs, strict=True):
        if (mine.dtype, mine.shape) != (other.dtype, other.shape):
            return False
        over = axes if other.shape == theirs[0].shape else tuple(range(other.dim()))
        mine, other = mine.detach().double(), other.detach().double()
        same = _same(mine, other)
        largest = other.abs().amax(over, keepdim=True)
        if not bool((same | ((mine - other).abs() <= budget * largest)).all()):
            return False
        if bits and dtype in LOW and (~same).sum() > 1 + _OTHER_BITS * same.numel():
            return False
    return True
