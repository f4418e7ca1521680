"""Norms on a GPU, rebuilt from their saved statistics in one pass with what follows them.

That is Triton's pass where it gives torch's bits: it computes what torch's kernels compute (as_torch.py), and
is compared with them once for each dtype and device, on numbers among which are zeros, infinities and NaN.
Elsewhere each function is torch's operators one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from leannorm._types import KeptByChannelNorm
from leannorm.ops.backends import TRITON
from leannorm.ops.backends.compiled import is_dense
from leannorm.ops.layout import memory_format
from leannorm.saving.device import capturing
from leannorm.saving.recipes.fused_norm_act import ACTIVATIONS, EXACT, joined, same_bits
from leannorm.saving.steps import Step
from leannorm.saving.values import Value

Maybe = Tensor | None
_SAMPLE = 4, 768, 32, 32
_checked: dict[Hashable, bool] = {}


def serves(statistic: Value) -> bool:
    """Is it on a GPU, and has it values? torch's operator for saved statistics has no fake kernel."""
    held = statistic.tensor
    return held is not None and held.is_cuda and not isinstance(held, FakeTensor)


def batch_norm(x: Tensor, weight: Maybe, bias: Maybe, mean: Tensor, rstd: Tensor, eps: float = 0.0) -> Tensor:
    """The second half of torch.native_batch_norm, which reads no eps."""
    return torch.batch_norm_elemt(x, weight, bias, mean, rstd, eps)


def norm_act(x: Tensor, *rest: Any) -> Tensor:
    """act(norm(x)), or act(norm(x) + added)."""
    *residual, weight, bias, mean, rstd, act = rest
    added = residual[0] if residual else None
    y = in_one_pass(x, added, weight, bias, mean, rstd, act, False)
    if y is not None:
        return y
    y = batch_norm(x, weight, bias, mean, rstd)
    return ACTIVATIONS[act](y if added is None else y + added)


def in_one_pass(
    x: Tensor, added: Maybe, weight: Maybe, bias: Maybe, mean: Tensor, rstd: Tensor, act: str, own: bool
) -> Maybe:
    """act(norm(x) + added), of torch's norm or leannorm's own, by Triton; None where that does not serve."""
    alike = added is None or (added.shape, added.stride(), added.dtype) == (x.shape, x.stride(), x.dtype)
    if not (alike and is_dense(x) and _are_lines(weight, bias)):
        return None
    kind = act, own, memory_format(x), *_dtypes(x, weight, bias, mean)
    if not _serves(x, kind, _channels_agree):
        return None
    return _by_triton(x, added, weight, bias, mean, rstd, act, own)


def _by_triton(
    x: Tensor, added: Maybe, weight: Maybe, bias: Maybe, mean: Tensor, rstd: Tensor, act: str, own: bool
) -> Tensor:
    signed = _keeps_sign(act, x.dtype, x.device)
    return TRITON.channel_as_torch(x, mean, rstd, weight, bias, added, act, own, signed)


@lru_cache
def _keeps_sign(act: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Is torch's activation of -0.0 that, or 0.0? Asked first where the kernel is compared with torch."""
    return bool(ACTIVATIONS[act](torch.full((64,), -0.0, dtype=dtype, device=device)).signbit().all())


def then(step: Step, act: str, added: Value | None = None) -> Step | None:
    """The step with an activation, or an addition, in the same pass."""
    if act not in EXACT or TRITON.why_not(step.captured[2]):
        return None
    return joined(step, norm_act, (act,), added, then)


def layer_norm(
    x: Tensor, weight: Maybe, bias: Maybe, mean: Tensor, rstd: Tensor, shape: tuple[int, ...], eps: float
) -> Tensor:
    """Layer norm over the last axes, of this shape."""
    return layer_norm_cast(x, weight, bias, mean, rstd, shape, x.dtype, eps)


def layer_norm_cast(
    x: Tensor,
    weight: Maybe,
    bias: Maybe,
    mean: Tensor,
    rstd: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    eps: float,
) -> Tensor:
    """The same, cast."""
    kept = torch.Size(shape).numel()
    lines = x.is_contiguous() or (x.dim() == 3 and len(shape) == 1 and x.stride(2) == 1)
    kind = dtype, *_dtypes(x, weight, bias, mean)
    if lines and _are_lines(weight, bias) and _serves(x, kind, _rows_agree):
        return TRITON.row_as_torch(x, mean, rstd, weight, bias, kept, dtype)
    return torch.native_layer_norm(x, shape, weight, bias, eps)[0].to(dtype)


def then_cast(step: Step, act: object, added: Value | None = None) -> Step | None:
    """The step of a layer norm with a cast in the same pass."""
    if not isinstance(act, torch.dtype) or added is not None or TRITON.why_not(step.captured[2]):
        return None
    shape, eps = step.constants
    return Step(layer_norm_cast, step.inputs, step.captured, (shape, act, eps))


def _are_lines(*parameters: Maybe) -> bool:
    return all(v is None or v.is_contiguous() for v in parameters)


def _dtypes(*tensors: Maybe) -> tuple[torch.dtype | None, ...]:
    return tuple([None if t is None else t.dtype for t in tensors])


def _serves(x: Tensor, kind: tuple[Any, ...], agrees: Callable[..., bool]) -> bool:
    """Does Triton's kernel give torch's bits? That is seen once, and not while a CUDA graph is captured."""
    key = x.device, *kind
    if x.numel() == 0:
        return False
    if key not in _checked:
        if capturing(x) or TRITON.why_not(x):
            return False
        try:
            with unset_fake_temporarily(), torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                _checked[key] = agrees(*kind, x.device)
        except Exception:  # no memory, or a compiler that fails: torch's operators serve
            _checked[key] = False
    return _checked[key]


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, first: float = 0.0) -> Tensor:
    """Without a generator, whose state is the program's."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    count = torch.Size(shape).numel()
    numbers = torch.arange(count, dtype=wide, device=device) * 0.7391 + first
    return numbers.sin_().view(shape).to(dtype)


def _parameters(
    count: int, of_weight: torch.dtype | None, of_bias: torch.dtype | None, device: torch.device
) -> Iterator[Maybe]:
    for of, first in ((of_weight, 2.0), (of_bias, 3.0)):
        yield None if of is None else _numbers((count,), of, device, first) + 1


def _channels_agree(
    act: str,
    own: bool,
    form: torch.memory_format,
    dtype: torch.dtype,
    of_weight: torch.dtype | None,
    of_bias: torch.dtype | None,
    of_mean: torch.dtype,
    device: torch.device,
) -> bool:
    """On 3 million numbers: of as many in bfloat16, 30 or more are others if one operation is another.

    There are few of 16 bits, but each channel makes something else of them. Three are special: one has NaN,
    infinities and products with 0, one puts out -0.0, and one numbers that 16 bits round to it.
    """
    shape = (*_SAMPLE[:2], 1, *_SAMPLE[2:]) if form is torch.channels_last_3d else _SAMPLE
    x = _numbers(shape, dtype, device) * 4 + 0.7
    x.view(-1)[:5] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan], dtype=dtype, device=device)
    weight, bias = _parameters(shape[1], of_weight, of_bias, device)
    mean, rstd = (_numbers((shape[1],), of_mean, device, first) + 1.1 for first in (4.0, 5.0))
    if weight is not None and bias is not None:
        weight[:3] = torch.tensor([0.0, -1.0, 1e-8], device=device)
        bias[1:3] = torch.tensor([-0.0, 0.0], device=device)
        mean[1] = x.select(1, 1).flatten()[0]
    x = x.contiguous(memory_format=form)
    added = _numbers(shape, dtype, device, 1.0).contiguous(memory_format=form)
    if own:
        stock = TRITON.channel_normalize(KeptByChannelNorm(x, mean, rstd, weight, bias))
    else:
        stock = batch_norm(x, weight, bias, mean, rstd)
    return all(
        same_bits(_by_triton(x, other, weight, bias, mean, rstd, act, own), ACTIVATIONS[act](y))
        for other, y in ((None, stock), (added, stock + added))
    )


def _rows_agree(
    into: torch.dtype,
    dtype: torch.dtype,
    of_weight: torch.dtype | None,
    of_bias: torch.dtype | None,
    of_mean: torch.dtype,
    device: torch.device,
) -> bool:
    """On rows that torch reads by fours, and on rows that it does not."""
    for kept in (384, 333):
        x = _numbers((8192, kept), dtype, device) * 4 + 0.7
        x[:3, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype, device=device)
        weight, bias = _parameters(kept, of_weight, of_bias, device)
        y, mean, rstd = torch.native_layer_norm(x, (kept,), weight, bias, 1e-5)
        if mean.dtype != of_mean:
            return False
        ours = TRITON.row_as_torch(x, mean, rstd, weight, bias, kept, into)
        if not same_bits(ours, y.to(into)):
            return False
    return True
