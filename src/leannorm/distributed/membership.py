"""Which ranks share statistics: those of the requested group, or none."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from leannorm._errors import InputError
from leannorm.distributed.communicator import beside, group_named

_local = False
_nodes: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
_meshes: dict[tuple[dist.ProcessGroup, tuple[int, ...]], dist.ProcessGroup] = {}


class SharesStatistics:
    """Mixed into layers whose statistics are those of all ranks in `process_group`."""

    process_group: dist.ProcessGroup | str | None = None


@contextmanager
def no_sync() -> Iterator[None]:
    """Within the context, synchronized layers use this rank's own statistics and do not communicate.

    Every rank enters it for the same calls. A layer's backward pass communicates if its forward pass did.
    The setting is process-wide, as torch's own flags are.

    Raises: nothing.

    >>> import torch
    >>> from leannorm import distributed, nn
    >>> with distributed.no_sync():
    ...     nn.SyncBatchNorm(4)(torch.randn(8, 4)).shape
    torch.Size([8, 4])
    """
    global _local
    before, _local = _local, True
    try:
        yield
    finally:
        _local = before


def sharing_group(process_group: dist.ProcessGroup | str | None) -> str | None:
    """The name of the group whose ranks share statistics; None if this rank is on its own.

    `process_group` is a group of torch.distributed, a `DeviceMesh` (`mesh["dp"]`: the ranks along that
    dimension), "node" (the ranks on this rank's host) or None (all).
    Raises: `InputError` for a group that this rank is not in, or that torch.distributed does not have.
    """
    if isinstance(process_group, str) and process_group != "node":
        raise InputError(
            f"process_group must be a process group, a DeviceMesh, 'node' or None, got {process_group!r}; of "
            f"a dimension of a mesh pass mesh[{process_group!r}], of some ranks "
            "torch.distributed.new_group(ranks)"
        )
    if _local or not dist.is_available():
        return None
    if not dist.is_initialized():
        if process_group is None or process_group == "node":
            return None
        raise InputError(
            "process_group is given, but torch.distributed is not initialized (or has been destroyed); "
            "call torch.distributed.init_process_group first, or pass process_group=None"
        )
    group = _resolved(process_group)
    return group.group_name if dist.get_world_size(group) > 1 else None


def connected_group(process_group: dist.ProcessGroup | str | None) -> str | None:
    """`sharing_group` for a call that must not connect ranks: returns None, or raises, if it would have
    to."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if process_group == "node" and _world() not in _nodes:
        return None
    mesh: Any = process_group
    is_mesh = hasattr(mesh, "get_coordinate") and mesh.get_coordinate() is not None
    if is_mesh and mesh.ndim > 1 and _ranks_along(mesh, range(mesh.ndim)) not in _meshes:
        return None
    try:
        return sharing_group(process_group)
    except InputError:
        return None


def group_in_words(process_group: dist.ProcessGroup | str | None) -> str:
    """A `process_group` as text for a file: "all", "node", or the ranks, as "0,2". Errors as
    `sharing_group`."""
    if process_group == "node":
        return "node"  # resolved where the program runs
    sharing_group(process_group)
    if process_group is None or isinstance(process_group, str):
        return "all"
    ranks: list[int] = dist.get_process_group_ranks(_resolved(process_group))
    return ",".join(map(str, ranks))


def group_of_words(words: str) -> dist.ProcessGroup | str | None:
    """The inverse of `group_in_words`, in this process; ranks mean the first group of exactly these."""
    if words in ("all", "node"):
        return None if words == "all" else words
    ranks = [int(rank) for rank in words.split(",")]
    if dist.is_available() and dist.is_initialized():
        for group in dist.distributed_c10d._world.pg_map:
            if dist.get_process_group_ranks(group) == ranks:
                same: dist.ProcessGroup = group
                return same
    raise InputError(
        f"statistics are shared by the ranks {words}, and this process has no group of just those; call "
        f"torch.distributed.init_process_group, and new_group([{words}]) on every rank, before it runs"
    )


def _resolved(process_group: dist.ProcessGroup | str | None) -> dist.ProcessGroup:
    if process_group is None:
        return _world()
    if isinstance(process_group, str):
        return _node_group()
    mesh: Any = process_group
    if hasattr(mesh, "get_coordinate") and mesh.get_coordinate() is not None:
        return group_named(mesh_group(mesh, range(mesh.ndim)))
    # a non-member gets a sentinel instead of its group, or an object that does not know its rank
    if not isinstance(process_group, dist.ProcessGroup) or dist.get_rank(process_group) < 0:
        raise InputError(
            f"process_group must contain this rank, but rank {dist.get_rank()} is not in it; "
            "every rank passes the group that it belongs to"
        )
    return process_group


def _world() -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
    return group


def _node_group() -> dist.ProcessGroup:
    """The group of the ranks on this host, made on first use, by all ranks together."""
    world = _world()
    if world not in _nodes:
        hosts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        mine = [rank for rank, host in enumerate(hosts) if host == hosts[dist.get_rank()]]
        _nodes[world] = beside(world, mine, f"node/{mine[0]}")
    return _nodes[world]


def ranks_of(group: str) -> list[int]:
    """The ranks of the group of this name."""
    ranks: list[int] = dist.get_process_group_ranks(group_named(group))
    return ranks


def mesh_group(mesh: Any, dims: Sequence[int]) -> str:
    """The name of the group of this rank along these dimensions of a DeviceMesh."""
    if len(dims) == 1:
        group: dist.ProcessGroup = mesh.get_group(dims[0])
        return group.group_name
    key = world, ranks = _ranks_along(mesh, dims)
    if key not in _meshes:
        _meshes[key] = beside(world, list(ranks), f"mesh/{'-'.join(map(str, ranks))}")
    return _meshes[key].group_name


def _ranks_along(mesh: Any, dims: Sequence[int]) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    """The ranks with this one along these dimensions of a mesh, and the group of all."""
    across = tuple(slice(None) if i in dims else at for i, at in enumerate(mesh.get_coordinate()))
    return _world(), tuple(mesh.mesh[across].flatten().tolist())


mesh_group._dynamo_marked_constant = True  # type: ignore[attr-defined]

# what torch.compiler.assume_constant_result does, without importing the whole compiler
_node_group._dynamo_marked_constant = True  # type: ignore[attr-defined]
