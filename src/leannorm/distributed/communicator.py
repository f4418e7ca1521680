"""The communicator for statistics: how it is made, waited for and aborted, for each backend.

Source: torch/distributed/distributed_c10d.py and torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp of 2.13.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName

_POLL = 2e-4  # seconds between two polls of a device's work
_GATHERED = 2**17  # float64 values of all ranks' messages, 1 MiB


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of this name."""
    group: dist.ProcessGroup = torch._C._distributed_c10d._resolve_process_group(GroupName(name))
    return group


def seconds_allowed(group: dist.ProcessGroup) -> float:
    """The timeout of the group's collectives."""
    seconds: float = group._get_backend(next(iter(group._device_types))).options._timeout.total_seconds()
    return seconds


def beside(parent: dist.ProcessGroup, ranks: list[int], name: str) -> dist.ProcessGroup:
    """A group of these global ranks, with the parent's backend and timeout; no other rank takes part.

    Not made by `new_group`, for two reasons. If only members call it, it names the group by how many groups a
    rank is in, which may differ between them: then they wait for one another under two names. And if the
    default group is bound to a device (`init_process_group(device_id=...)`), it splits the default NCCL
    communicator, which waits for all ranks of that, even those that do not know of this group. So the group
    has its own name, and is made while none is bound; it connects at its first sum.
    """
    c10d = dist.distributed_c10d
    world = c10d._get_default_group()
    _, store = c10d._world.pg_map[world]
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            dist.get_backend(parent),
            store,
            c10d.GroupName(f"leannorm/{name}"),
            timeout=timedelta(seconds=seconds_allowed(parent)),
            group_desc="leannorm",
        )
    finally:
        world.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    made: dist.ProcessGroup = group
    return made


def on_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the host runs this device's collectives; otherwise the device does while the host goes on."""
    return device.type == "cpu" or group._get_backend(device).name() == "gloo"


def gathers(group: dist.ProcessGroup, ranks: int, size: int) -> bool:
    """Whether sums of this many float64 values on the host are `Gathered`. The answer is the same on all
    ranks."""
    cpu = torch.device("cpu")
    if ranks == 1 or ranks * size > _GATHERED or cpu not in group._device_types:
        return False
    name: str = group._get_backend(cpu).name()
    return name == "gloo"


class Gathered:
    """A sum over gloo's ranks by gathering their messages, which each rank adds up, in the order of ranks.

    gloo sums around a ring, in 2 (p - 1) steps of p ranks, each of which waits for another process. A gather
    has p - 1 steps. It moves p / 2 times as many bytes, which costs less than the waiting if messages are
    small.
    """

    def __init__(self, total: Tensor, group: dist.ProcessGroup, ranks: int) -> None:
        self._total, self._every = total, total.new_empty(ranks, total.numel()).unbind()
        self._work = group.allgather([list(self._every)], [total])

    def is_completed(self) -> bool:
        done: bool = self._work.is_completed()
        return done

    def wait(self, timeout: timedelta) -> None:
        """Raises `RuntimeError` if the gather failed or has not ended yet."""
        self._work.wait(timeout)
        first, second, *others = self._every
        torch.add(first, second, out=self._total)
        for other in others:
            self._total.add_(other)


def wait_once(work: Any, seconds: float, waits_on_host: bool) -> bool:
    """Wait for a collective for at most `seconds`; returns whether it is complete. Raises `RuntimeError` if
    it failed.

    With NCCL, a `wait` that times out destroys the communicator. So the work is polled there, and `wait`,
    which orders the streams, is called only when it is complete.
    """
    if waits_on_host:
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if work.is_completed():
                raise
            return False
        return True
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL)
    work.wait()
    return True


def give_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """Abort the sums that the device waits for: otherwise torch's watchdog would end the process."""
    if not on_host(group, device):
        with suppress(RuntimeError):
            group._get_backend(device).abort()
