"""What batches show about each norm: the statistics of its inputs, and the outputs of the two modes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.rnn import PackedSequence

from leannorm._batch import batches_of, call, unwrapped
from leannorm._catalog import Norm
from leannorm._types import Moments, Pool
from leannorm._untouched import random_state, untouched
from leannorm.nn.conv import _ConvBatchNorm
from leannorm.ops.running import frozen, merge_into
from leannorm.report.doctor.values import (
    data_in,
    input_of,
    one_value_passes,
    samples_behind,
    values_behind,
    watched,
)

Forward = Callable[[Module, Any], Any]
MOST_BATCHES = 8


@dataclass
class Seen:
    """One norm over all batches: per channel the pooled moments, the least and the largest value.

    `values`: the fewest that one statistic had. `calls`: the most in one forward pass, `moves` of them that
    update running statistics. `samples`: in all batches; `together`: the fewest behind one statistic.
    `padded`: the share of positions in runs of equal ones; `uneven`: whether the runs' lengths differ.
    `source`: the convolution or linear layer whose output the norm reads.
    """

    values: int = 0
    calls: int = 0
    moves: int = 0
    samples: int = 0
    together: int = 0
    pool: Pool | None = None
    least: Tensor | None = None
    largest: Tensor | None = None
    rounding: float = 0.0
    padded: float = 0.0
    uneven: bool = False
    source: Module | None = None

    @property
    def mean(self) -> Tensor | None:
        """Per channel."""
        return None if self.pool is None else self.pool.mean

    @property
    def std(self) -> Tensor | None:
        """Per channel, unbiased as running statistics are."""
        if self.pool is None:
            return None
        return (self.pool.m2 / (self.pool.counts[1] - 1).clamp_min(1)).sqrt()

    @property
    def pooled(self) -> int:
        """The values of each channel in the pool."""
        return 0 if self.pool is None else int(self.pool.counts[1])

    @property
    def dead(self) -> int:
        """The channels that had one and the same value everywhere, up to rounding."""
        if self.pool is None or self.least is None or self.largest is None or self.pooled < 2:
            return 0
        size = torch.maximum(self.least.abs(), self.largest.abs())
        return int((self.largest - self.least <= 4 * self.rounding * size).sum())


def first_batches(batches: Any, model: Module) -> list[Any]:
    """One batch, or the first of several; a loader's random generators are unchanged."""
    with random_state(model), ExitStack() as stack:
        for holder in (batches, getattr(batches, "sampler", None), getattr(batches, "batch_sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                stack.callback(generator.set_state, generator.get_state())
        return list(islice(batches_of(batches), MOST_BATCHES))


def observe(
    model: Module, norms: list[Norm], batches: list[Any], forward: Forward | None
) -> tuple[dict[str, Seen], float | None]:
    """What each norm got in training mode, and the relative difference of the modes' outputs.

    In evaluation mode dropout is off. For the difference the first batch is run in that mode, with running
    statistics and then with the batch's own in the layers that use these in training.
    """
    run = forward or call
    core = unwrapped(model)
    seen = {norm.name: Seen() for norm in norms}
    place = place_of(core)
    with torch.no_grad(), eager(core):
        with untouched(core), one_value_passes(norms), _watched(norms, seen) as begin:
            if not core.training:
                core.train()
            by_batch = [n.module for n in norms if n.tracks and n.kind == "batch" and n.module.training]
            for batch in batches:
                begin()
                run(core, moved(batch, place))
        seen = {name: one for name, one in seen.items() if one.calls}
        outputs = []
        for trained in ([], by_batch):
            with untouched(core), one_value_passes(norms) as alone:
                set_modes(core, trained)
                outputs.append([t.double() for t in tensors_of(run(core, moved(batches[0], place)))])
    return seen, None if alone else _difference(*outputs)  # a single value has no second mode


def obeys(module: Module) -> bool:
    """Whether its statistics stay within `no_stats_update`, as only those of leannorm's layers do."""
    return any(cls.__module__.startswith("leannorm.") for cls in type(module).__mro__)


def eager(model: Module) -> AbstractContextManager[Any]:
    """Run compiled parts as they were written, since hooks do not run in compiled code."""
    compiled = any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


@contextmanager
def _watched(norms: list[Norm], seen: dict[str, Seen]) -> Iterator[Callable[[], None]]:
    """Hooks on every norm, which fill `seen`; yields the function that begins a forward pass."""
    calls: dict[str, int] = {}
    moves: dict[str, int] = {}
    outputs: dict[int, tuple[Module, Tensor]] = {}  # stored with the tensor, so that no id is reused

    def after(module: Module, args: object, output: Tensor) -> None:
        outputs[id(output)] = module, output

    def begin() -> None:
        calls.clear()
        moves.clear()
        outputs.clear()

    def watch(norm: Norm) -> Callable[..., None]:
        def before(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = input_of(module, args, kwargs)
            if x is None:
                return
            one = seen[norm.name]
            one.source = outputs.get(id(x), (None, None))[0]
            calls[norm.name] = calls.get(norm.name, 0) + 1
            one.calls = max(one.calls, calls[norm.name])
            moves[norm.name] = moves.get(norm.name, 0) + (not (frozen() and obeys(module)))
            one.moves = max(one.moves, moves[norm.name])
            samples = samples_behind(norm, x)
            one.together = min(one.together or samples, samples)
            data = data_in(norm, x, kwargs)
            if data is not None:
                _add(one, norm, data)

        return before

    with ExitStack() as hooks:
        for norm in norms:
            for module in watched(norm):
                hooks.enter_context(module.register_forward_pre_hook(watch(norm), with_kwargs=True))
            for parent, _, _ in norm.parents:
                for child in parent.children():
                    if isinstance(child, (_ConvNd, Linear)) and child.bias is not None:
                        hooks.enter_context(child.register_forward_hook(after))
        yield begin


def _add(one: Seen, norm: Norm, x: Tensor) -> None:
    """Merges the moments of an input into those seen before."""
    values = values_behind(norm, x)
    if values is not None:
        one.values = min(one.values or values, values)
    if norm.kind not in ("batch", "frozen", "instance", "group") or x.dim() < 2 or x.numel() == 0:
        return
    if getattr(norm.module, "data_layout", "NCHW") == "NHWC":
        x = x.movedim(-1, 1)
    one.samples += x.shape[0]
    x, part = _in_parts(x)
    _find_padding(one, part)
    if norm.channels != x.shape[1]:
        return
    one.rounding = torch.finfo(x.dtype).eps
    for count, mean, m2, least, largest in _on_every_rank(x, _told_by(part)).cpu():
        one.pool = one.pool or Pool(norm.channels, mean.device)
        merge_into(one.pool, Moments(mean, m2, int(count[0])))
        one.least = least if one.least is None else torch.minimum(one.least, least)
        one.largest = largest if one.largest is None else torch.maximum(one.largest, largest)


def _in_parts(x: Any) -> tuple[Tensor, Tensor]:
    """An input, and this rank's part of it, which has all channels."""
    if not hasattr(x, "placements"):
        return x, x
    from torch.distributed.tensor import Shard

    whole = x.redistribute(
        placements=[Shard(0) if p.is_shard(1) or p.is_partial() else p for p in x.placements]
    )
    return whole, whole.to_local()


def _told_by(part: Tensor) -> Tensor:
    """The count, the mean, the sum of squared deviations, the least and the largest value of each channel."""
    others = [axis for axis in range(part.dim()) if axis != 1]
    told = part.new_zeros(5, part.shape[1], dtype=torch.float64)
    if part.numel() == 0:
        told[3], told[4] = torch.inf, -torch.inf
        return told
    told[0] = part.numel() // part.shape[1]
    var, told[1] = torch.var_mean(part if part.dtype == torch.float64 else part.float(), others, correction=0)
    told[2] = var.double() * told[0]
    told[3], told[4] = part.amin(others), part.amax(others)
    return told


def _on_every_rank(x: Any, told: Tensor) -> Tensor:
    """What the ranks that share an input have sent, one after the other."""
    if not hasattr(x, "placements"):
        return told[None]
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [Replicate() if p.is_replicate() else Shard(0) for p in x.placements]
    every: Tensor = DTensor.from_local(told[None], x.device_mesh, placements, run_check=False).full_tensor()
    return every


def _find_padding(one: Seen, x: Tensor) -> None:
    """Looks for runs of equal positions whose lengths differ between samples, along the last two axes."""
    if x.dim() < 3 or x.shape[0] < 2:
        return
    for axis in range(max(2, x.dim() - 2), x.dim()):
        length = x.shape[axis]
        if length < 4:
            continue
        same = x.narrow(axis, 1, length - 1) == x.narrow(axis, 0, length - 1)
        same = same.movedim(axis, 1).flatten(2).all(2)
        at = torch.arange(length - 1, device=same.device)
        longest = (at - torch.where(same, -1, at).cummax(1).values).amax(1)
        share = float(longest.sum()) / (len(same) * length)
        if share > one.padded and int(longest.max() - longest.min()) * 3 >= length:
            one.padded, one.uneven = share, True


def set_modes(model: Module, trained: Collection[Module]) -> None:
    """These norms in training mode, with the layers that compute them; everything else in evaluation mode."""
    for module in model.modules():
        norm = module.bn if isinstance(module, _ConvBatchNorm) else module
        module.training = norm in trained


def place_of(model: Module) -> torch.device | None:
    """The device of its first parameter."""
    return next((p.device for p in model.parameters()), None)


def moved(batch: Any, place: torch.device | None) -> Any:
    """A copy of the batch on the model's device, which the model may edit."""
    if isinstance(batch, Tensor):
        return batch.to(place, copy=True)
    if isinstance(batch, PackedSequence):
        data, lengths, *indices = batch
        return PackedSequence(moved(data, place), lengths, *(moved(one, place) for one in indices))
    is_named = isinstance(batch, tuple) and hasattr(batch, "_fields")
    if is_named or type(batch) in (tuple, list):
        parts = [moved(part, place) for part in batch]
        return type(batch)(*parts) if is_named else type(batch)(parts)
    if is_dataclass(batch) and not isinstance(batch, type):
        made = _opened(batch)
        for field in fields(batch):
            if hasattr(batch, field.name):
                object.__setattr__(made, field.name, moved(getattr(batch, field.name), place))
        return made
    if isinstance(batch, Mapping):
        parts_of = {name: moved(part, place) for name, part in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return parts_of
        try:
            made = _opened(batch)
            made.update(parts_of)
        except Exception:  # a class with rules of its own
            return parts_of
        return made
    return batch


def _opened(batch: Any) -> Any:
    """A copy whose entries can be replaced without changing the original's containers."""
    made = copy.copy(batch)
    for name, held in [*vars(made).items()] if hasattr(made, "__dict__") else ():
        if isinstance(held, (dict, list)):
            object.__setattr__(made, name, copy.copy(held))
    return made


def tensors_of(output: Any) -> Iterable[Tensor]:
    """The floating-point tensors of an output, in whatever containers."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        parts = list(output.values())
    elif isinstance(output, (tuple, list)):
        parts = list(output)
    elif is_dataclass(output) and not isinstance(output, type):
        parts = [getattr(output, f.name) for f in fields(output)]
    else:
        parts = []
    return [tensor for part in parts for tensor in tensors_of(part)]


def _difference(evaluated: list[Tensor], trained: list[Tensor]) -> float | None:
    """The norm of the difference relative to that of the outputs; None if they cannot be compared."""
    if len(evaluated) != len(trained) or any(
        a.shape != b.shape for a, b in zip(evaluated, trained, strict=True)
    ):
        return None
    apart = sum(float((a - b).square().sum()) for a, b in zip(evaluated, trained, strict=True))
    size = sum(float(b.square().sum()) for b in trained)
    return (apart / size) ** 0.5 if size else None
