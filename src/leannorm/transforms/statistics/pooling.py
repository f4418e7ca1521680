"""Running statistics of several batches together: `accumulate_stats` and `recalibrate`.

Both merge each batch into a layer's pool (`merge_into`), which then has the statistics of all values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from leannorm import _checks
from leannorm._batch import batches_of, call_for
from leannorm._catalog import batch_norms_with_statistics, norms_of
from leannorm._errors import InputError, SyncError
from leannorm._report import Line, Part, Report, Table, counted
from leannorm._types import Moments, Pool, Running
from leannorm._untouched import untouched
from leannorm.distributed.call import Call
from leannorm.distributed.collective import add_up
from leannorm.distributed.joining import join
from leannorm.distributed.membership import sharing_group
from leannorm.functional.running import update_running_statistics
from leannorm.functional.valid import valid_positions
from leannorm.nn._layer import Layer
from leannorm.ops.running import merge_into
from leannorm.ops.select import pick


def _inside_convolutions(model: Module) -> set[Module]:
    """Batch norms that a fused convolution layer computes: their own forward is not called."""
    return {norm.module for norm in norms_of(model) if norm.convolution is not None}


def _new_pool(layer: _BatchNorm, of_rank: bool = False) -> Pool:
    assert layer.running_mean is not None
    return Pool(layer.running_mean.numel(), layer.running_mean.device, of_rank)


@contextmanager
def _collecting(pools: Mapping[_BatchNorm, Pool]) -> Iterator[None]:
    """Within it, these leannorm layers add their batches to the pools."""
    for layer, pool in pools.items():
        vars(layer)["_pool"] = pool
    try:
        yield
    finally:
        for layer in pools:
            del vars(layer)["_pool"]


@contextmanager
def accumulate_stats(model: Module) -> Iterator[None]:
    """Around the micro-batches of one optimizer step: running statistics are updated once, as for one batch.

    They are updated with the mean and the unbiased variance of all values that a layer got within the
    context, with its momentum; the counter counts one batch. Each micro-batch is normalized by its own
    statistics, as without the context. Nothing is updated after an error, nor in a layer for which one
    micro-batch was not finite.

    For leannorm's batch norms, over ranks too (`SyncBatchNorm`), under DistributedDataParallel, autocast,
    checkpointing and `torch.compile`, which compiles once more for it. Instance norms with running
    statistics still update with every micro-batch. No graph can be exported within it.

    Raises: `InputError` if a batch norm in training mode is not leannorm's, and within another
    `accumulate_stats` of the same layers.

    >>> import torch, leannorm
    >>> layer, x = leannorm.nn.BatchNorm1d(4, momentum=1.0), torch.randn(16, 4)
    >>> with leannorm.accumulate_stats(layer):
    ...     for micro_batch in x.split(4):
    ...         _ = layer(micro_batch)
    >>> layer.num_batches_tracked.item(), torch.allclose(layer.running_var, x.var(0))
    (1, True)
    """
    _checks.module(model, "accumulate_stats")
    ours, inside = {}, _inside_convolutions(model)
    for name, layer in batch_norms_with_statistics(model):
        if isinstance(layer, Layer) or layer in inside:
            if getattr(layer, "_pool", None) is not None:
                raise InputError(f"accumulate_stats is entered already for layer {name!r}; leave it first")
            ours[layer] = _new_pool(layer)
        elif layer.training:
            raise InputError(
                f"accumulate_stats is for batch norms of leannorm, layer {name!r} is a "
                f"{type(layer).__module__}.{type(layer).__name__}; call leannorm.convert(model) first, or "
                "put the layer in evaluation mode"
            )
    with _collecting(ours):
        yield
    for layer, pool in ours.items():
        if pool.used:
            buffers: list[Any] = [layer.running_mean, layer.running_var, layer.num_batches_tracked]
            # this rank's part of a DTensor; for statistics that every rank has, the whole
            mean, var, count = (b.to_local() if hasattr(b, "placements") else b for b in buffers)
            running = Running(mean, var, count, layer.momentum)
            update_running_statistics(running, Moments(pool.mean, pool.m2, pool.counts[1]))


@dataclass(frozen=True)
class Recalibrated:
    """One layer: the number of batches and of values per channel behind its statistics, and their change.

    `mean_moved` is in standard deviations, `var_moved` a factor, each the largest of all channels.

    >>> from leannorm.transforms import Recalibrated
    >>> Recalibrated("bn", batches=2, values=64, mean_moved=0.5, var_moved=1.5).values
    64
    """

    layer: str
    batches: int
    values: int
    mean_moved: float
    var_moved: float


@dataclass(frozen=True, repr=False)
class RecalibrationReport(Report):
    """What `recalibrate` changed, layer by layer, and which layers it left alone, by name with the reason.

    >>> import torch, leannorm
    >>> report = leannorm.recalibrate(leannorm.nn.BatchNorm1d(4), [torch.randn(16, 4)])
    >>> [layer.values for layer in report.layers], report.left
    ([16], {})
    """

    layers: tuple[Recalibrated, ...]
    left: dict[str, str]

    def summary(self) -> str:
        return f"{counted(len(self.layers), 'layer')} recalibrated, {len(self.left)} left"

    def parts(self) -> Iterator[Part]:
        rows = [
            [
                one.layer,
                str(one.batches),
                f"{one.values:,}",
                f"{one.mean_moved:.3g} standard deviations",
                f"a factor of {one.var_moved:.3g}",
            ]
            for one in self.layers
        ]
        columns = ["layer", "batches", "values a channel", "mean moved by", "variance moved by"]
        yield Table(columns, rows)
        yield from (Line(f"{name}: left, {reason}") for name, reason in self.left.items())


def recalibrate(
    model: Module,
    batches: Tensor | Mapping[str, Any] | Iterable[Any],
    *,
    forward: Callable[[Module, Any], object] | None = None,
    process_group: dist.ProcessGroup | str | None = None,
) -> RecalibrationReport:
    """Set running statistics to those of all values in all batches of all ranks: exactly, not by averages.

    For batch norms of leannorm and torch in training mode: running mean and unbiased variance become those of
    all values that the layer got, whatever the batches' sizes, and the counter is the number of batches.
    Frozen layers, layers in evaluation mode, instance and group norms, and everything else in the model stay
    as before, and random numbers continue as if nothing had run. Each batch is normalized by its own
    statistics, as in training. The model runs in its present mode, dropout included, without gradients, and
    compiled code eagerly.

    Args:
        model: for a DistributedDataParallel the module inside is run.
        batches: a list or another iterable, such as a DataLoader, of tensors, tuples that begin with the
            entries that the model's forward requires, mappings of its arguments, or anything that `forward`
            takes. A tensor, a mapping, or a tuple of all arguments is one batch. Ranks may have different
            numbers of them, or none. A terminal shows progress.
        forward: `forward(model, batch)` runs the model on a batch.
        process_group: the ranks whose batches are one set, by default all; each of them calls this.

    Raises: `InputError` if nothing can be recalibrated: no layer in training mode, no batches, an empty one,
    one that is not a tensor, tuple or mapping without `forward`, statistics that are not finite or do not fit
    the buffer's dtype; `SyncError` if another rank failed; what the model raises. The model is unchanged
    then.
    Source: the merge: Chan, Golub and LeVeque, 1983.

    >>> import torch, leannorm
    >>> layer, x = leannorm.nn.BatchNorm1d(4), torch.randn(100, 4)
    >>> print(leannorm.recalibrate(layer, list(x.split(30))).layers[0].batches)
    4
    >>> torch.allclose(layer.running_mean, x.mean(0), atol=1e-6), torch.allclose(layer.running_var, x.var(0))
    (True, True)
    """
    _checks.module(model, "recalibrate")
    if isinstance(model, DistributedDataParallel):
        model = model.module
    group = sharing_group(process_group)
    layers = dict(batch_norms_with_statistics(model))
    named = {name: layer for name, layer in layers.items() if layer.training}
    if not named:
        raise InputError(
            "recalibrate is for batch norms in training mode that have running statistics, there is none; "
            "call model.train() first (frozen layers and those in evaluation mode are left alone)"
        )
    cut = [name for name, layer in named.items() if hasattr(layer.running_mean, "placements")]
    if cut:
        raise InputError(
            f"recalibrate is for statistics that are plain tensors, those of layer {cut[0]!r} are DTensors; "
            "call it before distribute_module, or run the batches within accumulate_stats"
        )
    left = {name: "in evaluation mode" for name in layers if name not in named}
    pools = {layer: _new_pool(layer, of_rank=True) for layer in named.values()}
    with untouched(model):
        failure = _run(model, batches, forward, pools)
    if group is not None:
        call = Call("all layers", "recalibrate", 1, 0.0, False)
        flag = next(iter(pools.values())).mean.new_tensor([float(failure is not None)])
        failed = int(add_up((flag,), 0, group, call)[1])
        if failed and failure is None:
            raise SyncError(f"recalibrate failed on {failed} other ranks; their errors say why")
    if failure is not None:
        raise failure
    statistics = {}
    for name, layer in named.items():
        pool = pools[layer]
        if group is not None:
            _merge_ranks(pool, group, name)
        if pool.counts[0] == 0:
            left[name] = "no batch came to it"
        else:
            statistics[name] = _statistics(name, layer, pool)
    if not statistics:
        raise InputError("recalibrate needs a batch, got none (a generator can be read once only); pass some")
    moved = tuple(_set(name, named[name], *values) for name, values in statistics.items())
    return RecalibrationReport(moved, left)


def _merge_ranks(pool: Pool, group: str, layer: str) -> None:
    batches, count = pool.counts.split(1)
    backend = pick(pool.mean)
    sums = backend.sums_of(Moments(pool.mean, pool.m2, int(count)))
    call = Call(layer, "recalibrate", pool.mean.numel() + 1, 0.0, False)
    total = add_up((sums, batches), int(count), group, call).clone()
    pool.mean, pool.m2, _, values = backend.moments_of(total[:-1], 0.0)
    pool.counts = torch.stack((total[-1], values))


class _Inputs(TorchFunctionMode):
    """The tensors that torch's function normalizes in layers with a forward of their own, which may change
    their input.

    `readers`: by the `id` of a layer's running mean, the function that gets the input.
    """

    def __init__(self, readers: Mapping[int, Callable[..., None]]) -> None:
        super().__init__()
        self._readers = readers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.batch_norm:
            x, mean, *_ = args
            if id(mean) in self._readers:
                self._readers[id(mean)]((x,), {})
        return func(*args, **(kwargs or {}))


def _run(
    model: Module,
    batches: Iterable[Any],
    forward: Callable[[Module, Any], object] | None,
    pools: Mapping[_BatchNorm, Pool],
) -> Exception | None:
    """Run the model on all batches, adding to the pools; the exception that ended it, if one did."""
    collecting, run = _inside_convolutions(model), forward or call_for(batches)
    subclasses = [layer for layer in pools if not type(layer).__module__.startswith(("torch.", "leannorm."))]
    collecting |= {layer for layer in subclasses if isinstance(layer, Layer)}

    def add(layer: _BatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        # if the layer will reject it, its own error is raised
        if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == pools[layer].mean.numel():
            valid = valid_positions(x, kwargs.get("mask"), kwargs.get("lengths"))
            moments = pick(x).channel_moments(x, mask=None if valid is None else valid.mask)
            merge_into(pools[layer], moments)

    seen = _Inputs(
        {id(layer.running_mean): partial(add, layer) for layer in subclasses if layer not in collecting}
    )
    handles = [
        layer.register_forward_pre_hook(add, with_kwargs=True)  # after the layer's own
        for layer in pools
        if not (layer in collecting or layer in subclasses)
    ]
    try:
        with (
            join(model),
            _collecting({layer: pool for layer, pool in pools.items() if layer in collecting}),
            seen,
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            try:
                for i, batch in enumerate(_watched(batches_of(batches))):
                    tensors = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
                    if tensors and not any(t.numel() for t in tensors):
                        raise InputError(f"batches must hold values, batch {i} is empty; leave it out")
                    run(model, batch)
            except Exception as error:  # raised again once the other ranks know
                return error
    finally:
        for handle in handles:
            handle.remove()
    return None


def _watched(batches: Iterable[Any]) -> Iterable[Any]:
    """With a progress bar if somebody can see it and rich is installed, which the command needs."""
    if not sys.stderr.isatty():
        return batches
    try:
        from rich.console import Console
        from rich.progress import track
    except ModuleNotFoundError:
        return batches

    return track(batches, "recalibrate", console=Console(stderr=True), transient=True)


def _statistics(name: str, layer: _BatchNorm, pool: Pool) -> tuple[Tensor, Tensor, int, int]:
    """Mean, unbiased variance, batches and values; raises for values that the layer's buffers cannot
    represent."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    batches, values = (int(v) for v in pool.counts.tolist())
    if values < 2:
        raise InputError(f"layer {name!r} needs more than 1 value a channel, got {values}; pass more batches")
    mean, var = pool.mean, pool.m2 / (values - 1)
    if not (mean.isfinite().all() and var.isfinite().all()):
        raise InputError(
            f"the statistics of layer {name!r} are not finite: a batch holds NaN or infinity, or becomes so "
            "before this layer; leave that batch out"
        )
    if not (
        mean.to(layer.running_mean.dtype).isfinite().all()
        and var.to(layer.running_var.dtype).isfinite().all()
    ):
        raise InputError(
            f"layer {name!r} cannot hold a variance of {float(var.max()):.3g} in {layer.running_var.dtype}; "
            "convert the model with stats_dtype=torch.float32"
        )
    return mean, var, batches, values


@torch.no_grad()
def _set(name: str, layer: _BatchNorm, mean: Tensor, var: Tensor, batches: int, values: int) -> Recalibrated:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    old_mean, old_var = layer.running_mean.to(mean.dtype), layer.running_var.to(var.dtype) + layer.eps
    new_var = var + layer.eps
    ratio = new_var / old_var
    moved = ((mean - old_mean) / new_var.sqrt()).abs().max(), torch.maximum(ratio, 1 / ratio).max()
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(var)
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.fill_(batches)
    return Recalibrated(name, batches, values, *(float(v) for v in moved))
