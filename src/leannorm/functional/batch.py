"""Batch norm as functions: checks, then one call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from leannorm import _checks
from leannorm.autograd.channel import channel_affine, channel_norm, values_per_channel
from leannorm.autograd.sync import Sharing, sync_norm
from leannorm.ops.modes import rebuilding, transformed
from leannorm.ops.precision import statistics_dtype


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    r"""Normalize each channel over the batch and all positions; as `torch.nn.functional.batch_norm`.

    .. math:: y = (x - \mathrm{E}[x]) / \sqrt{\mathrm{Var}[x] + \epsilon} \cdot \gamma + \beta

    In training the mean and the biased variance are the batch's, and `running_mean`, `running_var`
    (unbiased) move towards them by `momentum`; in evaluation they are the running ones.

    Shapes: input (N, C, *), vectors (C,), output as input, in its memory layout.
    Dtypes: float32, float64, bfloat16, float16 input, any floating vectors; the output has the input's
    dtype, statistics are computed in float64 from float32 (or wider) arithmetic.
    Kept for the backward pass: the input and 2 C float64 values.
    Raises: `InputError` (a ValueError and a RuntimeError) where a rule is broken; nothing is changed then.
    Source: Ioffe and Szegedy, 2015, arXiv:1502.03167.

    >>> import torch
    >>> from leannorm import functional as F
    >>> y = F.batch_norm(torch.randn(8, 3, 4, 4), None, None, training=True)
    >>> y.mean((0, 2, 3)).abs().max().item() < 1e-6
    True
    """
    return batch_norm_act(
        input, running_mean, running_var, weight, bias, training, momentum, eps, act="identity"
    )


def batch_norm_act(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    act: str = "relu",
    residual: Tensor | None = None,
) -> Tensor:
    r"""Batch norm, plus a residual, through an activation, as one operation.

    .. math:: y = \mathrm{act}(\mathrm{batch\_norm}(x) + r)

    `act` is one of identity, relu, leaky_relu (slope 0.01), silu, gelu, gelu_tanh, hardswish, hardtanh
    (-1 to 1), relu6, elu (alpha 1), mish. Everything else is as in `batch_norm`; `residual` has the input's
    shape and may have another floating dtype.

    Kept for the backward pass: the input and 2 C float64 values. With a residual and an activation also
    the output, which the next layer keeps anyway (relu, leaky_relu, hardtanh, relu6, elu), or the residual
    (silu, gelu, gelu_tanh, hardswish, mish, whose derivative the output does not tell).

    >>> import torch
    >>> from leannorm import functional as F
    >>> x, r = torch.randn(8, 3, 4, 4), torch.randn(8, 3, 4, 4)
    >>> y = F.batch_norm_act(x, None, None, training=True, act="relu", residual=r)
    >>> bool((y >= 0).all())
    True
    """
    if has_torch_function_variadic(input, running_mean, running_var, weight, bias, residual):
        return handle_torch_function(
            batch_norm_act,
            (input, running_mean, running_var, weight, bias, residual),
            input,
            running_mean,
            running_var,
            weight,
            bias,
            training,
            momentum,
            eps,
            act=act,
            residual=residual,
        )
    _check(input, running_mean, running_var, weight, bias, training, momentum, eps, act, residual)
    return _batch_norm_act(
        input, running_mean, running_var, weight, bias, training, momentum, eps, act, residual
    )


def tracked_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    ranks: Sequence[int],
    act: str = "identity",
    residual: Tensor | None = None,
    sharing: Sharing | None = None,
) -> Tensor:
    """What the layers call: `batch_norm_act` which also counts batches and knows the layer's ranks.

    `num_batches_tracked` is given while the running statistics are to be updated, and counts this batch;
    `momentum=None` weighs it by 1 / its count, on the device. Without running statistics the batch's own
    are used, in evaluation too. A forward pass that a backward pass repeats, to rebuild what was not kept,
    does not update them a second time. With `sharing` the batch is that of all ranks that share.
    """
    tensors = (input, running_mean, running_var, num_batches_tracked, weight, bias, residual)
    if has_torch_function_variadic(*tensors):
        return handle_torch_function(
            tracked_batch_norm,
            tensors,
            *tensors[:-1],
            training,
            momentum,
            eps,
            ranks,
            act,
            residual,
            sharing,
        )
    use_batch = training or running_mean is None
    if sharing is not None:
        sharing = sharing._replace(mode="training" if training else "evaluation")
    _checks.rank(input, ranks)
    _check(input, running_mean, running_var, weight, bias, use_batch, momentum, eps, act, residual, sharing)
    if rebuilding() and use_batch:
        running_mean = running_var = num_batches_tracked = None
    factor: float | Tensor = 0.0 if momentum is None else momentum
    if num_batches_tracked is not None and momentum is None:
        factor = (num_batches_tracked.to(statistics_dtype(input)) + 1).reciprocal()
    y = _batch_norm_act(
        input, running_mean, running_var, weight, bias, use_batch, factor, eps, act, residual, sharing
    )
    count_batch(num_batches_tracked)
    return y


def _check(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    act: str,
    residual: Tensor | None,
    sharing: Sharing | None = None,
) -> None:
    _checks.floating("input", input)
    _checks.at_least_2d(input)
    _checks.parameters(input, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    _checks.running_statistics(running_mean, running_var, training)
    _checks.positive_eps(eps)
    _checks.momentum(momentum)
    _checks.activation(act)
    _checks.same_shape("residual", residual, input)
    if training and sharing is None:
        _checks.more_than_one_value(input, values_per_channel(input))


def _batch_norm_act(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float | Tensor,
    eps: float,
    act: str,
    residual: Tensor | None,
    sharing: Sharing | None = None,
) -> Tensor:
    if not training and running_mean is not None and running_var is not None:
        mean, rstd = running_mean_and_rstd(input, running_mean, running_var, eps)
        return channel_affine(input, mean, rstd, weight, bias, residual, act)
    count: int | Tensor
    if sharing is None:
        y, mean, m2 = channel_norm(input, weight, bias, residual, eps, act)
        count = values_per_channel(input)
    else:
        y, mean, m2, count = sync_norm(input, weight, bias, residual, eps, act, sharing)
    if running_mean is not None and running_var is not None:
        update_running_statistics(running_mean, running_var, mean, m2, count, momentum)
    return y


def running_mean_and_rstd(
    input: Tensor, running_mean: Tensor, running_var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The constants of evaluation, copied, so that later training may change the buffers."""
    dtype = statistics_dtype(input)
    mean = running_mean.detach().to(dtype, copy=True)
    return mean, torch.rsqrt(running_var.detach().to(dtype) + eps)


def update_running_statistics(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    m2: Tensor,
    count: int | Tensor,
    factor: float | Tensor,
) -> None:
    """Move the running mean and the running (unbiased) variance towards a batch's by `factor`, in place.

    An empty batch changes nothing.
    """
    if isinstance(count, int) and count == 0:
        return
    degrees = (count - 1).clamp_min(1) if isinstance(count, Tensor) else max(count - 1, 1)
    if isinstance(count, Tensor):  # on the device: empty on all ranks
        factor = (count > 0).to(count.dtype) * factor
    for running, value in ((running_mean, mean), (running_var, m2 / degrees)):
        value = _unwrapped(value.detach() if value.requires_grad else value, running)
        dtype = torch.promote_types(running.dtype, torch.float32)  # halves would not move by small steps
        weight = factor.to(dtype) if isinstance(factor, Tensor) else factor
        with _outside_of_transforms(running, value):
            if running.dtype == dtype and not transformed(running, value):  # lerp_ has no batching rule
                running.lerp_(value.to(dtype), weight)
            else:
                running.copy_(torch.lerp(running.to(dtype), value.to(dtype), weight))


def _unwrapped(value: Tensor, buffer: Tensor) -> Tensor:
    """The plain tensor inside torch.func.grad's wrapper, where the buffer is outside of the transform."""
    functorch = torch._C._functorch
    if torch.compiler.is_compiling() or functorch.is_functorch_wrapped_tensor(buffer):
        return value
    while functorch.is_gradtrackingtensor(value):
        value = functorch.get_unwrapped(value)
    return value


def _outside_of_transforms(*tensors: Tensor) -> AbstractContextManager[object]:
    """Lets torch.func.grad write a buffer, where neither it nor the value belongs to a transform."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors):
        return nullcontext()
    return torch._C._DisableFuncTorch()


def count_batch(num_batches_tracked: Tensor | None) -> None:
    """One batch more, in place."""
    if num_batches_tracked is not None:
        with _outside_of_transforms(num_batches_tracked):
            num_batches_tracked.add_(1)
