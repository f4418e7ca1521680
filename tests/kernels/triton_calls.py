"""Calls of every Triton operator on tensors without memory, for `triton_variants.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


class Call(NamedTuple):
    """A call that launches kernels; `sample`: compiled by every test run, and not just by the sweep."""

    name: str
    run: Callable[[], object]
    sample: bool = False


def meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def row_call(
    shape: tuple[int, ...],
    dtype: torch.dtype = BF16,
    rms: bool = False,
    residual: bool = False,
    parameters: torch.dtype | None = None,
    sample: bool = False,
    cast: bool = False,
    masked: bool = False,
) -> Call:
    """Forward and backward pass of a layer or RMS norm along the second axis."""

    def run() -> None:
        from leannorm.ops.backends.triton import rows

        x, other = meta(shape, dtype), meta(shape, dtype) if residual else None
        weight, bias = (meta((shape[1],), parameters or dtype) for _ in range(2))
        span = (1, 2)
        valid = meta((shape[0], 1, *shape[2:]), torch.bool) if masked else None
        _, _, mean, rstd = rows.row_forward(
            x, other, weight, None if rms else bias, *span, 1e-5, rms, 0.0, cast, valid
        )
        rows.row_backward(x, other, x, mean, rstd, weight, *span, rms, True, not rms, 0.0, valid)

    words = ["rms" if rms else "layer", "x".join(map(str, shape)), str(dtype)]
    words += ["residual"] * residual + ["cast"] * cast + [f"parameters {parameters}"] * bool(parameters)
    words += ["masked"] * masked
    return Call(" ".join(words).replace("torch.", ""), run, sample)


def heads_call(kept: int, dtype: torch.dtype = BF16, rms: bool = True, sample: bool = False) -> Call:
    """Layer or RMS norm of the heads of q in a projection of q, k and v, without a copy."""

    def run() -> None:
        from leannorm.ops.backends.triton import rows

        x = meta((8, 1024, 3, 16, kept), dtype)[:, :, 1]
        dy, weight = meta((8, 16, 1024, kept), dtype).transpose(1, 2), meta((kept,), dtype)
        bias = None if rms else weight
        _, _, mean, rstd = rows.row_forward(x, None, weight, bias, 3, 4, 1e-5, rms, 1.0, False)
        rows.row_backward(dy, None, x, mean, rstd, weight, 3, 4, rms, True, not rms, 1.0)

    words = f"{'rms' if rms else 'layer'} {kept} of a view {dtype}"
    return Call(words.replace("torch.", ""), run, sample)


def modulated_call(
    shape: tuple[int, int],
    groups: int,
    dtype: torch.dtype = BF16,
    lines: torch.dtype = F32,
    rms: bool = False,
    branch: bool = False,
    sample: bool = False,
) -> Call:
    """A norm with a scale and a shift for every group of rows, forward and backward; with a gated branch."""

    def run() -> None:
        from leannorm.ops.backends.triton import rows

        x, line = meta(shape, dtype), meta((groups, shape[1]), lines)
        other, gate = (x, line) if branch else (None, None)
        forward = rows.row_forward(x, other, line, line, 1, 2, 1e-5, rms, 1.0, False, None, gate)
        of_backward = x, other, x, *forward[2:], line, 1, 2, rms, True, True, 1.0, None, gate, other
        rows.row_backward(*of_backward)

    words = [f"ada {'rms' if rms else 'layer'} {shape[0]}x{shape[1]} {groups} lines {lines} {dtype}"]
    return Call(" ".join(words + ["branch"] * branch).replace("torch.", ""), run, sample)


def gated_call(
    shape: tuple[int, int],
    dtype: torch.dtype = BF16,
    act: str = "silu",
    before: bool = True,
    cast: bool = False,
    sample: bool = False,
) -> Call:
    """RMS norm with a gate, a slice of a projection, forward and backward."""

    def run() -> None:
        from leannorm.ops.backends.triton import gated

        x, gate = meta((shape[0], 2 * shape[1]), dtype).chunk(2, 1)
        dy, weight = meta(shape, dtype), meta(shape[1:], F32)
        _, rstd = gated.row_gated_forward(x, gate, weight, 1e-5, act, before, cast)
        gated.row_gated_backward(dy, x, gate, rstd, weight, act, before, True)

    words = ["gated", "x".join(map(str, shape)), act, str(dtype), "before" if before else "behind"]
    return Call(" ".join(words + ["cast"] * cast).replace("torch.", ""), run, sample)


def channel_call(
    shape: tuple[int, ...],
    dtype: torch.dtype = BF16,
    act: str = "relu",
    last: bool = False,
    groups: int = 0,
    residual: bool = False,
    sample: bool = False,
) -> Call:
    """Forward and backward pass of a per-channel norm, and single verbs; with a residual, from the output."""

    def run() -> None:
        from leannorm.ops.backends.triton import channel, channel_gradients

        layout = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)] if last else None
        x = meta(shape, dtype) if layout is None else meta(shape, dtype).to(memory_format=layout)
        other = x if residual else None
        weight, bias = meta((shape[1],), F32), meta((shape[1],), F32)
        y, mean, _, rstd, _ = channel.channel_forward(x, weight, bias, other, 1e-5, act, groups, None)
        out = y if residual else None
        saved = x, mean, rstd, weight, bias, other, out
        for constant in (False, True):
            channel_gradients.channel_backward(x, *saved, act, groups, residual, constant)
        channel.channel_moments(x, groups)
        channel.channel_normalize(x, mean, rstd, weight, bias, other, act)
        channel.channel_evaluate(x, weight, bias, 1e-5, weight, bias, other, act)
        sums = channel_gradients.channel_grad_sums(x, x, mean, rstd, weight, bias, other, out, act)
        p, q = (meta(tuple(mean.shape), F64) for _ in sums)
        channel_gradients.channel_input_grad(x, x, mean, rstd, weight, bias, other, out, p, q, act, residual)

    words = ["channels", "x".join(map(str, shape)), str(dtype).removeprefix("torch."), act]
    words += ["channels_last"] * last + [f"{groups} groups"] * bool(groups) + ["residual"] * residual
    return Call(" ".join(words), run, sample)


def masked_call(
    shape: tuple[int, ...],
    dtype: torch.dtype = BF16,
    act: str = "relu",
    last: bool = False,
    groups: int = 0,
    residual: bool = False,
    sample: bool = False,
) -> Call:
    """Forward and backward pass of a per-channel norm with a mask, and single verbs."""

    def run() -> None:
        from leannorm.ops.backends.triton import channel, channel_gradients

        x, mask = meta(shape, dtype), meta((shape[0], math.prod(shape[2:])), torch.bool)
        x = x.to(memory_format=torch.channels_last) if last else x
        other, weight = x if residual else None, meta((shape[1],), F32)
        y, mean, _, rstd, n = channel.channel_forward(x, weight, weight, other, 1e-5, act, groups, mask)
        saved = mean, rstd, weight, weight, other, y if residual else None, act, groups, residual
        channel_gradients.channel_backward(x, x, *saved, False, mask, n)
        channel.channel_moments(x, groups, mask)
        channel.channel_normalize(x, mean, rstd, weight, weight, other, act, mask)

    words = ["masked", "x".join(map(str, shape)), str(dtype).removeprefix("torch."), act]
    words += ["channels_last"] * last + [f"{groups} groups"] * bool(groups) + ["residual"] * residual
    return Call(" ".join(words), run, sample)


def statistics_call(channels: int, dtype: torch.dtype = F32) -> Call:
    """What happens to the statistics of a layer, of one rank or several."""

    def run() -> None:
        from leannorm.ops.backends.triton import statistics

        mean, m2, total = meta((channels,), F64), meta((channels,), F64), meta((1 + 4 * channels,), F64)
        running, batches, count = meta((channels,), dtype), meta((), torch.int64), meta((), F64)
        statistics.move_running_(running, running, batches, 0.1, mean, m2, 100, None)
        statistics.move_running_(running, running, batches, None, mean, m2, 0, count)
        statistics.constants_of(running, running, 1e-5)
        statistics.sums_of(mean, m2, 100)
        statistics.message_of([total], (1, 2), 0, 100, 4096)
        statistics.message_of([mean, m2], (1, 2), 0, 0, 4096)
        statistics.moments_of(total, 1e-5)
        statistics.means_of(total[: 1 + 2 * channels], running, count)

    return Call(f"statistics {channels} {dtype}".replace("torch.", ""), run, dtype == F32)
