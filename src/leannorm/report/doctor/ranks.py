"""What a rank tells the others of its model: its layers, their settings, and what its tensors hold, in digests.

`Rank` is what one rank posts. Tensors are compared between ranks that hold the same part: all that have the
model, the ranks of a `DistributedDataParallel`, or of a DTensor's mesh those with the same shard.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from leannorm._catalog import Norm
from leannorm.nn.sync import Synchronized
from leannorm.report.doctor.subject import Subject, values_of

SYNCHRONIZED = (Synchronized, torch.nn.SyncBatchNorm)
_BLOCK = 2**20


class Held(NamedTuple):
    """A tensor on one rank: whose copies are to be equal (ranks with one `part`), its digest and its norm."""

    part: str
    digest: int
    norm: float


class Rank(NamedTuple):
    """What one rank has. `layers` and `modes` are by the model's order, `held` by name.

    `sharing` has the ranks of each synchronized norm ("node" for those of the host), `wrapped` the ranks of
    DistributedDataParallel. `batch` is the first one's digest, `batches` their number.
    """

    number: int
    host: str
    layers: list[list[str]]
    modes: str
    settings: dict[str, str]
    held: dict[str, Held]
    sharing: dict[str, Any]
    wrapped: list[int] | None
    batch: int | None
    batches: int | None

    @classmethod
    def posted(cls, post: list[Any]) -> Rank:
        """As it was, from JSON."""
        rank = cls(*post)
        return rank._replace(held={name: Held(*held) for name, held in rank.held.items()})


def described(subject: Subject, batches: list[Any] | None) -> Rank:
    """What this rank posts."""
    model = subject.model
    wrapper = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
    return Rank(
        dist.get_rank(),
        socket.gethostname(),
        [[norm.name, f"{norm.kind} of {norm.channels or _shape(norm.weight)}"] for norm in subject.norms],
        "".join("ft"[module.training] for module in model.modules()),
        {norm.name: _settings(norm) for norm in subject.norms},
        dict(_held(subject)),
        {n.name: _sharing(n.module) for n in subject.norms if isinstance(n.module, SYNCHRONIZED)},
        None if wrapper is None else dist.get_process_group_ranks(wrapper.process_group),
        None if not batches else digest_of(batches[0]),
        None if batches is None else len(batches),
    )


def part_of(tensor: Tensor) -> str:
    """Which part of a tensor this rank has: "" for all of it, else of which mesh, and where it is cut."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return ""
    cut = [p.is_shard() or p.is_partial() for p in tensor.placements]  # type: ignore[attr-defined]
    places = [c if along else "*" for c, along in zip(mesh.get_coordinate(), cut, strict=True)]
    return f"{zlib.crc32(str(mesh.mesh.tolist()).encode()):x}|{places}"


def _held(subject: Subject) -> Iterator[tuple[str, Held]]:
    """The tensors that another rank may have, too: those whose wrapper cuts or sends them are left out."""
    statistics = {id(n.module): n for n in subject.norms if n.mean is not None}
    seen: set[Module] = set()

    def of(path: str, module: Module, group: str, sent: bool, own: bool) -> Iterator[tuple[str, Held]]:
        if module in seen or type(module).__name__ == "FullyShardedDataParallel":
            return
        seen.add(module)
        if isinstance(module, DistributedDataParallel):
            group = str(dist.get_process_group_ranks(module.process_group))
            sent, own = module.broadcast_buffers, True
        norm = statistics.get(id(module))
        told = norm is not None and own and not isinstance(module, SYNCHRONIZED)  # unsynchronized_buffers
        tables: list[Mapping[str, Any]] = [module._parameters]
        tables += [] if sent or told else [module._buffers]
        for name, tensor in ((name, t) for table in tables for name, t in table.items()):
            if isinstance(tensor, Tensor) and not _cut_by_hand(tensor):
                values = values_of(tensor)
                if values is not None:
                    part = f"{group} {part_of(tensor)}"
                    yield path + name, Held(part, digest_of(values), _norm(values))
        for name, child in module._modules.items():
            if child is not None:
                yield from of(f"{path}{name}.", child, group, sent, own)

    yield from of("", subject.model, "", False, False)


def _cut_by_hand(tensor: Tensor) -> bool:
    """Megatron-LM marks weights that are cut over tensor-parallel ranks, and those of experts."""
    return getattr(tensor, "tensor_model_parallel", False) or not getattr(tensor, "allreduce", True)


def _shape(tensor: Tensor | None) -> str:
    return "x".join(map(str, () if tensor is None else tensor.shape))


def _settings(norm: Norm) -> str:
    module = norm.module
    names = ("track_running_stats", "num_groups", "group_size", "elementwise_affine", "affine")
    parts = [f"eps={norm.eps}", f"momentum={norm.momentum}"]
    parts += [f"{name}={getattr(module, name)}" for name in names if hasattr(module, name)]
    dtypes = [f"{name}={p.dtype}" for name, p in norm.affine]
    return ", ".join([f"{type(module).__module__}.{type(module).__name__}", *parts, *dtypes])


def _sharing(module: Any) -> Any:
    group = module.process_group
    if isinstance(group, str):
        return group
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return []  # of a group that this rank is not in
    return dist.get_process_group_ranks(group or dist.distributed_c10d._get_default_group())


def _norm(values: Tensor) -> float:
    if not (values.is_floating_point() or values.is_complex()):
        values = values.double()
    return float(torch.linalg.vector_norm(values, dtype=None if values.is_complex() else torch.float64))


def digest_of(value: Any) -> int:
    """A number of 64 bits, made where the tensors are: equal tensors, or batches of them, have equal ones."""
    total = 0
    for tensor in _tensors(value):
        flat = tensor.detach().contiguous().view(-1)
        raw = flat.view(torch.uint8) if flat.element_size() % 4 else flat.view(torch.int32)
        total = total * 31 + raw.numel()
        for block in raw.split(_BLOCK):
            places = torch.arange(1, 2 * block.numel(), 2, device=block.device)
            mixed = (block.long() + 0x9E3779B9) * places
            total = total * 31 + int((mixed ^ (mixed >> 29)).mul(0x2545F4914F6CDD1D).sum())
    return total & (2**64 - 1)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        local = values_of(value)
        return [] if local is None else [local]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for part in value for t in _tensors(part)] if isinstance(value, (tuple, list)) else []
