"""What a rank reports to the others about its model: its layers, their settings, and digests of its tensors.

`Rank` is what one rank posts. Tensors are compared between ranks that have the same part: all that have the
model, the ranks of a `DistributedDataParallel`, or those of a DTensor's mesh with the same shard.
"""

from __future__ import annotations

import math
import socket
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from leannorm._catalog import Norm
from leannorm._errors import InputError
from leannorm.distributed.membership import group_in_words
from leannorm.nn.sync import Synchronized
from leannorm.report.doctor.meeting import word_of
from leannorm.report.doctor.subject import Subject, values_of
from leannorm.report.doctor.values import watched

SYNCHRONIZED = (Synchronized, torch.nn.SyncBatchNorm)
_STEPS = (0, 997, 1913, 2731)
_BLOCK = 2**21  # bytes, and elements


class Held(NamedTuple):
    """A tensor on one rank: which copies should be equal (ranks with one `part`), its digest and its norm.

    `known`: whether a wrapper or a DTensor shows that these are copies.
    """

    part: str
    digest: int
    norm: float
    known: bool


class Rank(NamedTuple):
    """What one rank has. `layers` and `modes` are by the model's order, `held` by name.

    `sharing` has the ranks of each synchronized norm: "all", "node" (those of the host), "0,2", or "" if this
    rank is not in it. `wrapped` has those of DistributedDataParallel, `batch` is the digest of the first
    batch, `batches` their number. `steps`: whether the caller gave a step of its own.
    """

    number: int
    host: str
    layers: list[list[str]]
    modes: str
    settings: dict[str, str]
    held: dict[str, Held]
    sharing: dict[str, str]
    wrapped: list[int] | None
    batch: int | None
    batches: int | None
    steps: bool

    @classmethod
    def posted(cls, post: list[Any]) -> Rank:
        """The record, from JSON."""
        rank = cls(*post)
        return rank._replace(held={name: Held(*held) for name, held in rank.held.items()})


def described(subject: Subject, batches: list[Any] | None, steps: bool) -> Rank:
    """What this rank posts."""
    model = subject.model
    wrapper = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
    return Rank(
        dist.get_rank(),
        socket.gethostname(),
        [[norm.name, f"{norm.kind} of {_size(norm)}"] for norm in subject.norms],
        "".join("ft"[module.training] for module in model.modules()),
        {norm.name: _settings(norm) for norm in subject.norms},
        dict(_held(subject)),
        {n.name: _sharing(n.module) for n in subject.norms if isinstance(n.module, SYNCHRONIZED)},
        None if wrapper is None else dist.get_process_group_ranks(wrapper.process_group),
        None if not batches else digest_of(batches[0]),
        None if batches is None else len(batches),
        steps,
    )


def shown_by(subject: Subject) -> dict[str, list[float]]:
    """Mean and standard deviation of the inputs of synchronized norms on this rank, in numbers."""
    told = {}
    for norm, seen in subject.observed():
        if isinstance(norm.module, SYNCHRONIZED) and seen.mean is not None and seen.std is not None:
            told[norm.name] = in_numbers(torch.cat([seen.mean, seen.std]))
    return told


def part_of(tensor: Tensor) -> str:
    """Which part of a tensor this rank has: "" for all of it, otherwise the mesh and where it is sharded."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None or mesh.get_coordinate() is None:
        return ""
    cut = [not p.is_replicate() for p in tensor.placements]  # type: ignore[attr-defined]
    places = [c if along else "*" for c, along in zip(mesh.get_coordinate(), cut, strict=True)]
    return f"{word_of(mesh.mesh.tolist())}|{places}"


def _held(subject: Subject) -> Iterator[tuple[str, Held]]:
    """The tensors that another rank may have too, without those that a wrapper shards or sends."""
    statistics = {id(n.module): n for n in subject.norms if n.mean is not None}
    seen: set[Module] = set()
    ignored: set[str] = set()

    def of(path: str, module: Module, group: str, sent: bool, own: bool) -> Iterator[tuple[str, Held]]:
        if module in seen or type(module).__name__ == "FullyShardedDataParallel":
            return
        seen.add(module)
        if isinstance(module, DistributedDataParallel):
            group = word_of(dist.get_process_group_ranks(module.process_group))
            sent, own = module.broadcast_buffers, True
            ignored.update(f"{path}module.{name}" for name in module.parameters_to_ignore)
        norm = statistics.get(id(module))
        told = norm is not None and own and not isinstance(module, SYNCHRONIZED)  # unsynchronized_buffers
        tables: list[Mapping[str, Any]] = [module._parameters]
        tables += [] if sent or told else [module._buffers]
        for name, tensor in ((name, t) for table in tables for name, t in table.items()):
            if isinstance(tensor, Tensor) and not _cut_by_hand(tensor) and path + name not in ignored:
                values, digest = values_of(tensor), digest_of(tensor)
                if values is not None and digest is not None:
                    part = f"{group} {part_of(tensor)}"
                    yield path + name, Held(part, digest, _norm(values), part != " ")
        for name, child in module._modules.items():
            if child is not None:
                yield from of(f"{path}{name}.", child, group, sent, own)

    yield from of("", subject.model, "", False, False)


def _cut_by_hand(tensor: Tensor) -> bool:
    """Whether Megatron-LM or DeepSpeed has marked a weight as sharded over ranks, or as an expert's."""
    return getattr(tensor, "tensor_model_parallel", False) or not getattr(tensor, "allreduce", True)


def _size(norm: Norm) -> str:
    """Its channels, or the shape of a row."""
    if norm.channels:
        return str(norm.channels)
    shape = getattr(norm.module, "normalized_shape", () if norm.weight is None else norm.weight.shape)
    return "x".join(map(str, shape if isinstance(shape, (tuple, list)) else [shape]))


def _settings(norm: Norm) -> str:
    """Its class, its settings, and those that it prints, including those of a layer that computes it."""
    module = norm.module
    names = ("track_running_stats", "num_groups", "group_size", "elementwise_affine", "affine")
    parts = [f"eps={norm.eps}", f"momentum={norm.momentum}"]
    parts += [f"{name}={getattr(module, name)}" for name in names if hasattr(module, name)]
    for shown in dict.fromkeys([module, *watched(norm)]):
        parts += shown.extra_repr().split(", ")
    parts += [f"{name}={p.dtype}{'' if p.requires_grad else ' frozen'}" for name, p in norm.affine]
    return ", ".join(dict.fromkeys([f"{type(module).__module__}.{type(module).__name__}", *parts]))


def _sharing(module: Any) -> str:
    try:
        return group_in_words(module.process_group)
    except InputError:  # a group that this rank is not in
        return ""


def _norm(values: Tensor) -> float:
    flat = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
    return math.hypot(*(float(torch.linalg.vector_norm(block.float())) for block in flat.split(_BLOCK)))


def in_numbers(values: Tensor) -> list[float]:
    """A tensor as a few numbers, whose length is about its own; those of a sum are the sums."""
    flat = values.double().flatten()
    places = torch.arange(flat.numel(), device=flat.device, dtype=torch.float64)
    sums = (float(flat @ ((places * step).remainder(4096) / 651.9).cos()) for step in _STEPS)
    return [value / 2**0.5 for value in sums]


def digest_of(value: Any) -> int | None:
    """A number of 64 bits, computed on the tensors' device: equal tensors, or batches of them, have equal
    ones.

    None if it cannot be computed: for objects that are not examined, and if nothing has a value.
    """
    total, told = 0, False
    for tensor in _leaves(value):
        if tensor is None:
            return None
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        total, told = total * 31 + raw.numel(), True
        places = torch.arange(1, _BLOCK // 4, 2, device=raw.device)
        for block in raw.split(_BLOCK):
            words = pad(block, (0, -len(block) % 8)) if len(block) % 8 else block
            words = (words.clone() if words.storage_offset() % 8 else words).view(torch.int64)
            mixed = (words + 0x9E3779B9).mul_(places[: len(words)])
            total = total * 31 + int(mixed.bitwise_xor_(mixed >> 29).mul_(0x2545F4914F6CDD1D).sum())
    return total & (2**64 - 1) if told else None


def _leaves(value: Any) -> Iterator[Tensor | None]:
    """The tensors of a batch, and what can be converted to one; None for anything else."""
    if isinstance(value, Tensor) and value.is_nested:
        value = value.values() if value.layout == torch.jagged else object()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(value)
    if isinstance(value, Tensor) and value.layout == torch.strided:
        local = values_of(value)
        if local is not None:
            yield local
    elif isinstance(value, (Mapping, tuple, list)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(part)
    elif isinstance(value, (str, bytes, int, float)):
        yield torch.tensor(zlib.crc32(repr(value).encode()))
    elif value is not None:
        yield None
