"""A communicator for the ranks that share statistics, beside their process group.

In the process group itself, a rank that skips a layer would join the others' collective with its next one:
with gloo a sum of 133 values matched with one of 261 aborts the process, with NCCL it hangs. Here all
messages have one agreed size, so that ranks in different calls still complete the collective, and read in its
header that they differ. A layer that needs longer messages first asks for them, in a message of the present
size. A rank without batches joins any collective with zeros.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName

from leannorm._errors import InputError, SyncError
from leannorm.distributed import diagnostics
from leannorm.distributed.call import HEADER, UNIT, Call, agree, message_size, readable
from leannorm.ops.modes import capturing

_Key = tuple[Call, int, int, torch.device]  # the call, its count, the size asked for

_groups: dict[str, StatisticsGroup] = {}
_made: Counter[str] = Counter()
_evaluated: dict[dist.ProcessGroup, int] = {}  # the number of sums at this rank's last note


def statistics_group(name: str, call: Call) -> StatisticsGroup:
    """The communicator for statistics beside the process group `name`, made on the first call."""
    parent = torch._C._distributed_c10d._resolve_process_group(GroupName(name))
    group = _groups.get(name)
    if group is None or group.parent is not parent:
        group = _groups[name] = StatisticsGroup(parent, call)
    return group


def note_evaluation(name: str, layer: str) -> None:
    """Note in the store, once after each sum, that this rank evaluates: the others may be waiting for it."""
    parent = torch._C._distributed_c10d._resolve_process_group(GroupName(name))
    group = _groups.get(name)
    if group is not None and group.parent is not parent:
        group = None
    number = 0 if group is None else group.number
    if _evaluated.get(parent) != number:
        _evaluated[parent] = number
        store = diagnostics.store_of(parent, _made[name]) if group is None else group.store
        call = Call(layer, "evaluation", 0, 0.0, False)
        call = call if group is None else group._identified(call)
        diagnostics.note_evaluation(store, dist.get_rank(parent), number, readable(call.layer))


class StatisticsGroup:
    """One sum over the ranks per call, in messages of `size` float64 values; `number` counts them."""

    def __init__(self, parent: dist.ProcessGroup, call: Call) -> None:
        self.parent = parent
        self.rank, self.world = dist.get_rank(parent), dist.get_world_size(parent)
        self.backend = dist.get_backend(parent)
        self.devices = {device.type for device in parent._device_types}
        device = next(iter(parent._device_types))
        self.timeout = parent._get_backend(device).options._timeout.total_seconds()
        self.size, self.number, self.own_calls = UNIT, 0, 0
        self.store = diagnostics.store_of(parent, _made[parent.group_name])
        _made[parent.group_name] += 1
        self.broken: str | None = None
        self.unfinished: list[Any] = []  # work that may still write to its buffer
        self.unread: list[tuple[int, Call, Tensor, Any]] = []  # headers on their way from the device
        self._first: int | None = None
        self._zeros: dict[torch.device, Tensor] = {}
        self._headers: dict[_Key, tuple[Call, Tensor]] = {}
        diagnostics.gather(self, call, self._seconds(call))
        self.communicator = dist.new_group(
            dist.get_process_group_ranks(parent), use_local_synchronization=True, group_desc="leannorm"
        )

    def all_reduce(self, sums: Sequence[Tensor], count: int, call: Call) -> Tensor:
        """The count followed by the sums, each summed over the ranks; raises where ranks' calls differ."""
        device = sums[0].device
        if self.broken is not None:
            raise SyncError(f"this process group no longer shares statistics: {self.broken}")
        if device.type not in self.devices:
            raise InputError(
                f"the process group's backend ({self.backend}) must have collectives for the input's device "
                f"{device}; name one for each device: init_process_group('cpu:gloo,cuda:nccl')"
            )
        self.own_calls += 1
        room = HEADER + sum(s.numel() for s in sums)
        if capturing(sums[0]):
            self._check_capture((call, count, 0, device), room)
        else:
            self._read_headers(wait=False)
        if room > self.size:
            size = message_size(call.channels)
            self._exchange((), HEADER, 0, call, device, size)
            self.size = size
        return self._exchange(sums, room, count, call, device)[HEADER - 1 : room]

    def shadow(self, device: torch.device) -> None:
        """Join every sum with zeros until all ranks do so: for a rank without batches."""
        call = Call("none", "out of batches", 0, 0.0, True)
        while True:
            total = torch.zeros(self.size, dtype=torch.float64, device=device)
            self._sum(total, call)
            header = total[:HEADER].tolist()
            if header[0] == 0:
                return
            self._inspect(header, call, self.number)
            if header[5]:
                self.size = int(header[5] / header[0])

    @torch.no_grad()
    def follow_longest(self, buffers: list[Tensor]) -> None:
        """Set the buffers to those of the rank with the most `all_reduce` calls since the last time."""
        score = torch.tensor([self.own_calls * self.world + self.rank], device=self.device())
        dist.all_reduce(score, dist.ReduceOp.MAX, group=self.communicator)
        self.own_calls = 0
        source = dist.get_global_rank(self.communicator, int(score) % self.world)
        for buffer in buffers:
            dist.broadcast(buffer, source, group=self.communicator)

    def device(self) -> torch.device:
        """A device that this group's backend serves, where there is no input whose device to take."""
        here = torch.device("cpu")
        if here in self.parent._device_types or (there := torch.accelerator.current_accelerator()) is None:
            return here
        return torch.device(there.type, torch.accelerator.current_device_index())

    def _exchange(
        self, sums: Sequence[Tensor], room: int, count: int, call: Call, device: torch.device, size: int = 0
    ) -> Tensor:
        call, header = self._header(call, count, size, device)
        total = torch.cat((header, *sums, self._zeros_on(device)[room:]))
        self._sum(total, call)
        if capturing(total):  # the host sees no header of a replayed step
            return total
        if total.device.type == "cpu":
            self._inspect(total[:HEADER].tolist(), call, self.number)
        else:
            arrived = torch.empty(HEADER, dtype=total.dtype, pin_memory=True)
            arrived.copy_(total[:HEADER], non_blocking=True)
            event = torch.Event(device=total.device)
            event.record()
            self.unread.append((self.number, call, arrived, event))
            self._read_headers(wait=call.debug or size > 0)
        return total

    def _check_capture(self, key: _Key, room: int) -> None:
        """Raise where this call would wait for the device or copy to it during a CUDA graph's capture."""
        call, count, *_ = key
        call = self._identified(call)
        if call.debug:
            raise InputError(
                f"debug_consistency waits for every sum, which cannot be captured in a CUDA graph ({call}): "
                "turn it off for the capture"
            )
        if room > self.size or key not in self._headers:
            raise InputError(
                f"{call} with {count} values a channel was not called before this CUDA graph's capture, "
                "which cannot make room or send what is new: run a training step of these shapes before it"
            )

    def _sum(self, total: Tensor, call: Call) -> None:
        self.number += 1
        try:
            work = dist.all_reduce(total, group=self.communicator, async_op=True)
        except RuntimeError as error:
            raise self._break(call, str(error), ask=0) from error
        if total.device.type != "cpu" and self.backend != "gloo" and not call.debug:
            work.wait()  # orders the streams without blocking the host
            return
        self._wait(work, call)

    def _wait(self, work: Any, call: Call) -> None:
        """Wait for the sum; post where this rank waits, and stop if another rank found an error."""
        timeout = self._seconds(call)
        step = diagnostics.poll_seconds(timeout)
        deadline = time.monotonic() + timeout
        while not self._wait_once(work, call, step):
            # every waiting rank has posted by now, but for one that came in the last moment
            if diagnostics.post_and_check(self, call) or time.monotonic() >= deadline - step:
                self.unfinished.append(work)
                raise self._break(call, f"waited {timeout:g} s", ask=step / 2)

    def _wait_once(self, work: Any, call: Call, seconds: float) -> bool:
        """Wait for at most `seconds`; is the sum complete?"""
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            if work.is_completed():  # only the first sentence says what happened
                raise self._break(call, str(error).split(". ")[0], ask=2 * seconds) from error
            return False
        return True

    def _seconds(self, call: Call) -> float:
        return min(call.timeout or self.timeout, self.timeout)

    def _break(self, call: Call, why: str, ask: float) -> SyncError:
        """Refuse all later calls; the error says which ranks are missing, after looking for `ask` seconds."""
        self.broken = diagnostics.who_is_missing(self, call, why, ask)
        return SyncError(self.broken)

    def _read_headers(self, wait: bool) -> None:
        """Check the headers that have arrived from the device; with `wait` all of them."""
        while self.unread and (wait or self.unread[0][3].query()):
            number, call, header, event = self.unread.pop(0)
            event.synchronize()
            self._inspect(header.tolist(), call, number)

    def _inspect(self, header: list[float], call: Call, number: int) -> None:
        if not agree(header):
            raise SyncError(diagnostics.what_differs(self, call, number, self._seconds(call)))
        if header[6] == 1 and call.what == "training forward":
            raise InputError(
                f"Expected more than 1 value per channel when training, got 1 over all {self.world} ranks in "
                f"{call}; use a larger batch, or evaluation mode"
            )

    def _identified(self, call: Call) -> Call:
        """The call; a layer without a path is numbered by construction, from the first one used."""
        if not call.layer.startswith("#"):
            return call
        number = int(call.layer[1:])
        self._first = number if self._first is None else self._first
        return call._replace(layer=f"#{number - self._first + 1}")

    def _header(self, call: Call, count: int, size: int, device: torch.device) -> tuple[Call, Tensor]:
        """The identified call and its header on the device.

        Cached, since copying it to the device would make the host wait.
        """
        key = call, count, size, device
        if key not in self._headers:
            if len(self._headers) > 4096:
                self._headers.clear()
            call = self._identified(call)
            header = torch.tensor(call.header(count, size), dtype=torch.float64, device=device)
            self._headers[key] = call, header
        return self._headers[key]

    def _zeros_on(self, device: torch.device) -> Tensor:
        """Zeros that fill a message up to its size."""
        zeros = self._zeros.get(device)
        if zeros is None or zeros.numel() != self.size:
            zeros = self._zeros[device] = torch.zeros(self.size, dtype=torch.float64, device=device)
        return zeros
