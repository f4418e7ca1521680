"""`mask=` and `lengths=`, checked, as one description of the positions that are data."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from leannorm import _checks
from leannorm._errors import InputError
from leannorm._types import Maybe, Valid
from leannorm.functional.declare import Arguments
from leannorm.ops.modes import traced, transformed

Lengths = Tensor | Sequence[int]
# the arguments mask, lengths and fill of a call, and those of one without a mask
Masking = tuple[Tensor | None, Lengths | None, str]
UNMASKED: Masking = (None, None, "zero")
FILLS = ("zero", "normalize")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def masking_of(call: Arguments) -> Masking:
    """The arguments mask, lengths and fill of a function, which may lack them."""
    return call.get("mask"), call.get("lengths"), call.get("fill", "zero")


def valid_positions(
    input: Tensor, mask: Maybe, lengths: Lengths | None, fill: str = "zero", kept: tuple[int, int] = (1, 2)
) -> Valid | None:
    """Which positions of `input` are data; None if all are, as far as the host knows.

    A position is an index of all axes but `kept[0]` to `kept[1] - 1`: the channel, or what a row norm
    normalizes. `mask` broadcasts against these, or has the kept axes too, of size 1. `lengths` are along the
    last of them, one per sample. Values are checked if the host has them; otherwise a length is clamped.
    """
    if mask is None and lengths is None and fill == "zero":
        return None
    data, count, positions = _data_of(input, mask, lengths, fill, kept)
    if data is None:
        return None
    if count is not None and count == prod(positions):
        return None
    if data.shape != positions or data.dim() != 2:
        data = data.expand(positions).reshape(positions[0], prod(positions[1:]))
    return Valid(data.contiguous(), count)


def positions_of_data(
    input: Tensor, mask: Tensor | None, lengths: Lengths | None, fill: str, kept: tuple[int, int]
) -> Tensor | None:
    """The mask of a DTensor, without the kept axes; for lengths (of the whole batch) a plain tensor."""
    if isinstance(lengths, Tensor) and hasattr(lengths, "full_tensor"):
        lengths = lengths.full_tensor()
    return _data_of(input, mask, lengths, fill, kept)[0]


def _data_of(
    input: Tensor, mask: Tensor | None, lengths: Lengths | None, fill: str, kept: tuple[int, int]
) -> tuple[Tensor | None, int | None, tuple[int, ...]]:
    """A mask that broadcasts to the positions (True at data), the number of data positions, and the
    positions' sizes."""
    if fill != "zero":
        _checks.one_of("fill", fill, FILLS)
    if mask is None and lengths is None:
        return None, None, ()
    if mask is not None and lengths is not None:
        raise InputError("mask and lengths say the same thing twice, both are given; pass one of them")
    shape = tuple(input.shape)
    positions = shape[: kept[0]] + shape[kept[1] :]
    if not positions:
        raise InputError(f"mask and lengths need an axis of positions, got an input of shape {shape}")
    if mask is not None:
        return *_of_mask(input, mask, positions, kept), positions
    assert lengths is not None
    return *_of_lengths(input, lengths, positions), positions


def _on_host(tensor: Tensor) -> bool:
    """Whether its values can be read now, and will be the same the next time this code runs."""
    if traced() or type(tensor) is not Tensor or tensor.device.type != "cpu":
        return False
    return not transformed(tensor)


def _of_mask(
    input: Tensor, mask: Tensor, positions: tuple[int, ...], kept: tuple[int, int]
) -> tuple[Tensor, int | None]:
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        what = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"mask must be a bool tensor, True where there is data, got {what}; pass mask.bool()"
        )
    if mask.layout is not torch.strided:
        raise InputError(f"mask must be a dense tensor, got layout {mask.layout}; pass mask.to_dense()")
    _checks.same_device("mask", mask, input)
    first, stop = kept
    without = mask
    if mask.dim() == input.dim():  # the kept axes are included
        if any(size != 1 for size in mask.shape[first:stop]):
            raise InputError(_wrong_shape(input, mask, positions))
        without = mask.reshape(mask.shape[:first] + mask.shape[stop:])
    sizes = zip(reversed(without.shape), reversed(positions), strict=False)
    if without.dim() > len(positions) or any(size != 1 and size != of_input for size, of_input in sizes):
        raise InputError(_wrong_shape(input, mask, positions))
    if not _on_host(without):
        return without, None
    repeats = prod(positions) // max(without.numel(), 1)
    return without, int(torch.count_nonzero(without)) * repeats


def _wrong_shape(input: Tensor, mask: Tensor, positions: tuple[int, ...]) -> str:
    return (
        f"mask must broadcast to the input's positions {positions} (input {tuple(input.shape)}), got "
        f"{tuple(mask.shape)}; a mask has no channels: one value says whether a position is data"
    )


def _of_lengths(input: Tensor, lengths: Lengths, positions: tuple[int, ...]) -> tuple[Tensor, int | None]:
    if len(positions) < 2:
        raise InputError(
            f"lengths run along a last axis of positions, got an input of shape {tuple(input.shape)} without "
            "one; pass mask, one value a sample"
        )
    lengths = lengths if isinstance(lengths, Tensor) else torch.as_tensor(lengths)
    samples, longest = positions[0], positions[-1]
    if lengths.dtype not in _INTEGERS and lengths.numel():
        raise InputError(f"lengths must be integers, got {lengths.dtype}; pass lengths.long()")
    if lengths.shape != (samples,):
        raise InputError(
            f"lengths must have one value a sample, shape ({samples},) for input {tuple(input.shape)}, got "
            f"{tuple(lengths.shape)}; for anything else pass mask"
        )
    if lengths.device.type != "cpu":
        _checks.same_device("lengths", lengths, input)
    count = None
    if _on_host(lengths):
        values = lengths.tolist()
        if values and not (min(values) >= 0 and max(values) <= longest):
            worst = min(values) if min(values) < 0 else max(values)
            raise InputError(
                f"lengths must be from 0 to {longest}, the size of the input's last axis of positions, got "
                f"{worst}; behind a layer with a stride or padding compute them again"
            )
        count = int(sum(values)) * prod(positions[1:-1])
    index = torch.arange(longest, device=input.device)
    data = index < lengths.to(input.device, torch.int64).unsqueeze(-1)
    if len(positions) > 2:
        data = data.reshape(samples, *(1,) * (len(positions) - 2), longest)
    return data, count


def of_one_sample(lengths: Lengths | int) -> Lengths:
    """The length of an input without a batch axis, as that of a batch of one."""
    if isinstance(lengths, Tensor):
        return lengths.reshape(1) if lengths.numel() == 1 else lengths
    return [lengths] if isinstance(lengths, int) else lengths


def refuse_to_export(arguments: Arguments) -> None:
    """An exported graph has no pool, no statistics of groups of samples, and none of the valid positions of a
    batch."""
    if arguments.get("mask") is not None or arguments.get("lengths") is not None:
        raise InputError(
            "a norm by the statistics of a batch with mask= or lengths= cannot be exported or traced; export "
            "the model in evaluation mode, with running statistics"
        )
    if (size := arguments.get("group_size")) is not None:
        raise InputError(
            f"a batch norm with group_size={size} cannot be exported or traced by the statistics of a "
            "batch; export it in evaluation mode, with running statistics"
        )
    if arguments.get("pool") is not None:
        raise InputError(
            "within accumulate_stats() a model cannot be exported or traced: its graph would move statistics "
            "at every call; leave the context first"
        )


def exported_at_data(y: Tensor, mask: Tensor | None, lengths: Lengths | None, fill: str) -> Tensor:
    """What evaluation leaves at padding, for an exported graph: torch's functions, which read no size."""
    if fill == "normalize" or (mask is None and lengths is None):
        return y
    return y.masked_fill(~exported_positions(y, mask, lengths), 0)


def exported_positions(
    x: Tensor, mask: Tensor | None, lengths: Lengths | None, kept: tuple[int, int] = (1, 2)
) -> Tensor:
    """`valid_positions` for an exported graph: a mask that broadcasts against x; no size is read."""
    if mask is not None and lengths is not None:
        raise InputError("mask and lengths say the same thing twice, both are given; pass one of them")
    rank, (first, stop) = x.dim(), kept
    if mask is None:
        axis = rank - 1 if stop < rank else first - 1
        lengths = torch.as_tensor(lengths, device=x.device)
        index = torch.arange(x.shape[axis], device=x.device).view(-1, *(1,) * (rank - 1 - axis))
        return index < lengths.view(-1, *(1,) * (rank - 1))
    behind = rank - stop
    if behind <= mask.dim() < rank:
        for _ in range(stop - first):
            mask = mask.unsqueeze(-behind - 1)
    return mask
