"""One function per rule on arguments, called before anything is computed or changed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import inf, prod

import torch
from torch import Tensor

from leannorm._errors import DtypeError, InputError
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.modes import traced, transformed
from leannorm.ops.plan import values_per_channel

_STRIDED = torch.strided


def _fits(tensor: Tensor, input: Tensor, shape: Sequence[int]) -> bool:
    """Whether it is floating and strided, on the input's device, and has this shape, as is most often so."""
    if tensor.layout is not _STRIDED or not tensor.is_floating_point() or tensor.shape != shape:
        return False
    return (tensor.is_cpu and input.is_cpu) or tensor.device == input.device  # which takes longer


def _shaped(name: str, tensor: Tensor, input: Tensor, shape: Sequence[int], rule: str, remedy: str) -> None:
    """Floating point, on the input's device, of this shape; the `rule` says which one that is."""
    floating(name, tensor)
    same_device(name, tensor, input)
    if tensor.shape != shape:
        raise InputError(f"{name} must have {rule}, got {tuple(tensor.shape)}; {remedy}")


def module(model: object, function: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"{function} is for a torch.nn.Module, got {type(model).__name__}; pass the model")


def floating(name: str, tensor: Tensor) -> None:
    """Floating point and strided: no kernel and no formula here reads sparse or mkldnn tensors."""
    if tensor.layout is not _STRIDED:
        remedy = "torch.nested.to_padded_tensor" if tensor.is_nested else f"{name}.to_dense()"
        raise InputError(
            f"{name} must be a dense tensor (layout torch.strided), got layout {tensor.layout}; "
            f"convert it first with {remedy}"
        )
    if not tensor.is_floating_point():
        raise DtypeError(
            f"{name} must be floating point (float32, float64, bfloat16 or float16), got {tensor.dtype}; "
            f"convert it first, for example with {name}.float()"
        )


def dim(tensor: Tensor, dims: Sequence[int]) -> None:
    if tensor.dim() not in dims:
        wanted = " or ".join(f"{r}D" for r in dims)
        raise InputError(
            f"expected {wanted} input (got {tensor.dim()}D input of shape {tuple(tensor.shape)}); "
            "use the layer of the input's rank, or add or remove an axis"
        )


def at_least_2d(tensor: Tensor) -> None:
    if tensor.dim() < 2:
        raise InputError(
            f"expected at least 2D input (N, C, ...), got shape {tuple(tensor.shape)}; "
            "add a batch axis with input.unsqueeze(0)"
        )


def same_device(name: str, tensor: Tensor | None, input: Tensor) -> None:
    if tensor is not None and tensor.device != input.device:
        raise InputError(
            f"{name} must be on the input's device {input.device}, got {tensor.device}; "
            "move the layer or the input with .to(device)"
        )


def may_be_kept(**tensors: Tensor | None) -> None:
    """Reject, before running statistics move, a tensor that autograd would only reject after they had
    moved."""
    if traced():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.is_inference():
            raise InputError(
                f"{name} must not be of inference mode where gradients are recorded, as autograd cannot keep "
                f"it for the backward pass; clone it outside of torch.inference_mode()"
            )


def positive_eps(eps: float) -> None:
    if not eps > 0:
        raise InputError(f"eps must be positive, got {eps}; the default is 1e-5")


def group_size(size: int | None) -> None:
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise InputError(
            f"group_size must be a positive number of samples or None, got {size!r}; None is all"
        )


def more_than_one_value_in_a_group(input: Tensor, samples: int) -> None:
    if values_per_channel((samples, *input.shape[1:])) == 1:
        raise InputError(
            f"Expected more than 1 value per channel when training, got a group of 1 in {tuple(input.shape)}"
            "; use another group_size, or drop the last batch"
        )


def stats_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(
            f"stats_dtype must be a floating dtype or None, got {dtype}; torch.float32 is wide enough"
        )


def momentum(value: float | Tensor | None) -> None:
    if isinstance(value, (int, float)) and not 0 <= value <= 1:
        raise InputError(
            f"momentum must be in [0, 1] or None (cumulative average), got {value}; "
            "it weighs the new value: frameworks that weigh the old one write 1 - momentum"
        )


def momentum_is_a_number(value: float | None) -> None:
    if value is None:
        raise InputError(
            "momentum=None (cumulative average) needs a count of the batches, got none; "
            "use the layer, which counts them, or pass momentum=1/number of batches"
        )


def _can_be_updated(tensor: Tensor) -> bool:
    """An in-place call must not write to a leaf that needs a gradient, to an expanded tensor, or to an
    inference tensor outside of inference mode."""
    if not (tensor.requires_grad or tensor.is_inference()) and tensor.is_contiguous():
        return True
    if transformed(tensor):
        return True
    frozen = tensor.is_inference() and not torch.is_inference_mode_enabled()
    overlaps = tensor.shape[0] > 1 and tensor.stride(0) == 0
    return not (frozen or overlaps or (tensor.requires_grad and tensor.is_leaf))


def running_statistics(mean: Tensor | None, var: Tensor | None, training: bool) -> None:
    if (mean is None) != (var is None):
        raise InputError("running_mean and running_var must both be given or both be None; one is None")
    if training and mean is not None and var is not None:
        writable(running_mean=mean, running_var=var)
    if mean is None and not training:
        raise InputError(
            "evaluation needs running_mean and running_var, got None; "
            "pass them, or training=True to use the batch's own statistics"
        )


def writable(**statistics: Tensor) -> None:
    for name, statistic in statistics.items():
        if not (traced() or _can_be_updated(statistic)):
            raise InputError(
                f"{name} is updated in place, so it must own its memory and need no gradient, got strides "
                f"{statistic.stride()}, requires_grad={statistic.requires_grad}; pass {name}.detach().clone()"
            )


def more_than_one_value(input: Tensor, count: int) -> None:
    if count == 1:
        raise InputError(
            f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)}; "
            "use a larger batch (drop_last=True drops a last batch of one), or evaluation mode"
        )


def more_than_one_valid(input: Tensor, total: int | None) -> None:
    """`total`: the number of positions that are data, if the host knows it."""
    if total is not None and total < 2:
        raise InputError(
            f"Expected more than 1 value per channel when training, got {total} valid position"
            f"{'s' * (total != 1)} in input size {tuple(input.shape)}; use a larger batch, or evaluation mode"
        )


def no_groups_of_samples(group_size: int | None) -> None:
    if group_size is not None:
        raise InputError(
            f"group_size must be None with mask or lengths, got {group_size}; leave one of them out"
        )


def activation(act: str) -> None:
    if act not in ACTIVATIONS:
        raise InputError(f"act must be one of {', '.join(ACTIVATIONS)}; got {act!r}")


def like_input(name: str, tensor: Tensor | None, input: Tensor) -> None:
    """Floating point, on the input's device, of its shape."""
    if tensor is not None and not _fits(tensor, input, input.shape):
        remedy = f"broadcast it first, for example with {name}.expand_as(input)"
        _shaped(name, tensor, input, input.shape, f"the input's shape {tuple(input.shape)}", remedy)


def one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise InputError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def parameters(input: Tensor, **tensors: Tensor | None) -> None:
    """Each tensor given is floating point, on the input's device, with one entry per channel.

    Sparse tensors are rejected where the backend is picked.
    """
    shape, device = (input.shape[1],), input.device
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not (tensor.is_floating_point() and tensor.device == device and tensor.shape == shape):
            rule = f"one entry per channel, shape {shape} for input {tuple(input.shape)}"
            _shaped(name, tensor, input, shape, rule, "make num_features equal to the input's axis 1")


def one_per_output_channel(name: str, vector: Tensor | None, conv_weight: Tensor) -> None:
    shape = (conv_weight.shape[0],)
    if vector is not None and not _fits(vector, conv_weight, shape):
        remedy = "make the norm's num_features equal to the convolution's out_channels"
        _shaped(name, vector, conv_weight, shape, f"one entry per output channel, shape {shape}", remedy)


def non_negative_eps(eps: float) -> None:
    if not eps >= 0:
        raise InputError(f"eps must not be negative, got {eps}; the usual value is 1e-5")


def weight_offset(offset: float) -> None:
    if not (isinstance(offset, (int, float)) and -inf < offset < inf):  # torch's compiler has no isfinite
        raise InputError(
            f"weight_offset must be a finite number, got {offset!r}; 1.0 gives 1 + weight (Gemma's), 0.0 the "
            "weight alone"
        )


def cast(word: str) -> None:
    if word not in ("after", "before"):
        raise InputError(
            f"cast must be 'before' or 'after', got {word!r}; 'before' rounds the normalized value to the "
            "input's dtype before it meets the weight (Llama), 'after' rounds the product alone (Gemma)"
        )


def single_axis(normalized_shape: Sequence[int], dim: int | None) -> None:
    if dim is not None and len(normalized_shape) != 1:
        raise InputError(
            f"dim normalizes a single axis, got normalized_shape={tuple(normalized_shape)}; "
            "leave dim out for several"
        )


def normalized_axes(input: Tensor, normalized_shape: Sequence[int], dim: int | None) -> tuple[int, int]:
    """The normalized axes, start..stop-1; the input's sizes there must be `normalized_shape`."""
    wanted, rank = tuple(normalized_shape), input.dim()
    if not wanted:
        raise InputError("normalized_shape must name at least one axis, got (); pass the size of the last")
    single_axis(wanted, dim)
    first = -len(wanted) if dim is None else dim
    start = first + rank if first < 0 else first
    stop = start + len(wanted)
    if start < 0 or stop > rank or input.shape[start:stop] != wanted:
        place = f"the last {len(wanted)} sizes" if dim is None else f"the size of axis {dim}"
        raise InputError(
            f"normalized_shape {wanted} must equal {place} of the input, got an input of shape "
            f"{tuple(input.shape)}; change normalized_shape or move the axes of the input"
        )
    return start, stop


def row_parameters(input: Tensor, normalized_shape: Sequence[int], **tensors: Tensor | None) -> None:
    """Each tensor given is floating point, on the input's device, of the normalized shape."""
    wanted = tuple(normalized_shape)
    for name, tensor in tensors.items():
        if tensor is not None and not _fits(tensor, input, wanted):
            rule = f"the shape normalized_shape = {wanted}"
            _shaped(name, tensor, input, wanted, rule, "reshape it or leave it out")


def lengths_of_rows(input: Tensor, start: int, stop: int) -> None:
    if input.dim() - (stop - start) != 2:
        raise InputError(
            "lengths are for rows of two indices, (sample, position), got an input of shape "
            f"{tuple(input.shape)} with the axes {start} to {stop - 1} normalized; pass mask, which says of "
            "each row whether it is data"
        )


def modulations(input: Tensor, start: int, **tensors: Tensor | None) -> None:
    """Each tensor given has the normalized shape behind leading axes of the input, of their sizes or 1."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        floating(name, tensor)
        same_device(name, tensor, input)
        leading_axes = tensor.dim() - (input.dim() - start)
        leading = zip(tensor.shape[: max(leading_axes, 0)], input.shape, strict=False)
        if (
            not 0 <= leading_axes <= start
            or tensor.shape[leading_axes:] != input.shape[start:]
            or any(size not in (1, of_input) for size, of_input in leading)
        ):
            raise InputError(
                f"{name} must end in the normalized shape {tuple(input.shape[start:])}, behind first axes of "
                f"the input {tuple(input.shape)}, each of the input's size or 1, got {tuple(tensor.shape)}; "
                f"for one a sample take (N, C), for one a token (N, L, C)"
            )


def same_modulation(scale: Tensor, shift: Tensor | None) -> None:
    if shift is not None and shift.shape != scale.shape:
        raise InputError(
            f"shift must have the scale's shape {tuple(scale.shape)}, got {tuple(shift.shape)}; "
            "expand the smaller one, for example with shift.expand_as(scale)"
        )


def divisible_groups(input: Tensor, num_groups: int) -> None:
    if num_groups < 1 or input.shape[1] % num_groups:
        raise InputError(
            f"Expected number of channels in input to be divisible by num_groups, got {input.shape[1]} "
            f"channels (input {tuple(input.shape)}) and num_groups={num_groups}; choose a divisor"
        )


def more_than_one_spatial_element(input: Tensor) -> None:
    if prod(input.shape[2:]) == 1:
        raise InputError(
            f"Expected more than 1 spatial element when training, got input size {tuple(input.shape)}; "
            "instance norm of a single value is always 0: use another norm here"
        )


def instance_channels(input: Tensor, dim: int, num_features: int, affine: bool) -> None:
    """The layer's channels must match the input's axis `dim`; without parameters a mismatch only warns."""
    channels = input.shape[dim]
    if channels == num_features:
        return
    if affine:
        raise InputError(
            f"expected input's size at dim={dim} to match num_features ({num_features}), but got: "
            f"{channels}; make num_features equal to it"
        )
    warnings.warn(
        f"input's size at dim={dim} does not match num_features. You can silence this warning by not "
        "passing in num_features, which is not used because affine=False",
        stacklevel=7,
    )


def timeout(seconds: float | None) -> None:
    if seconds is not None and not seconds > 0:
        raise InputError(
            f"timeout must be positive seconds, or None for the process group's own, got {seconds}"
        )


def same_dtype(name: str, tensor: Tensor, input: Tensor) -> None:
    if tensor.dtype != input.dtype:
        raise DtypeError(
            f"{name} must have the input's dtype {input.dtype}, got {tensor.dtype}; "
            "convert the layer or the input with .to(dtype), or run under torch.autocast"
        )


def positive_output(sizes: Sequence[int], input: Tensor, conv_weight: Tensor) -> None:
    if any(size < 1 for size in sizes):
        raise InputError(
            f"the kernel {tuple(conv_weight.shape[2:])} must fit into the padded input, got input of shape "
            f"{tuple(input.shape)}; use a larger input, more padding or less dilation"
        )
