"""A communicator for the ranks that share statistics, in addition to their process group.

In the process group itself, a rank that skips a layer would join the others' collective with its own next
one: with gloo a sum of 133 values against one of 261 aborts the process, with NCCL it hangs. Here all
messages have one agreed size, so that ranks in different calls still complete the collective, and read in its
header that they differ. A layer that needs longer messages first requests them, in a message of the present
size. A rank without batches joins any collective with zeros.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from leannorm._errors import InputError, SyncError
from leannorm.distributed import diagnostics
from leannorm.distributed.call import HEADER, UNIT, Call, agree, message_size, readable
from leannorm.distributed.communicator import (
    Gathered,
    beside,
    gathers,
    give_up,
    group_named,
    on_host,
    seconds_allowed,
    wait_once,
)
from leannorm.distributed.headers import Arriving
from leannorm.ops.backends import REFERENCE
from leannorm.ops.modes import capturing
from leannorm.ops.select import first_of_all

_groups: dict[str, StatisticsGroup] = {}
_made: Counter[str] = Counter()
_evaluated: dict[dist.ProcessGroup, int] = {}  # the number of sums at this rank's last note


def statistics_group(name: str, call: Call, device: torch.device | None = None) -> StatisticsGroup:
    """The communicator for statistics of the process group `name`, made on the first call.

    Raises `InputError`, before ranks connect, where the group's backend cannot sum on `device`.
    """
    parent = group_named(name)
    group = _groups.get(name)
    if group is not None and group.parent is not parent:
        group = None
    devices = _devices_of(parent) if group is None else group.devices
    if device is not None and device.type not in devices:
        raise InputError(
            f"the process group's backend ({dist.get_backend(parent)}) must have collectives for the input's "
            f"device {device}; name one for each device: init_process_group('cpu:gloo,cuda:nccl')"
        )
    if group is None:
        group = _groups[name] = StatisticsGroup(parent, call)
    return group


def _devices_of(parent: dist.ProcessGroup) -> set[str]:
    """The device types that its backends support."""
    return {device.type for device in parent._device_types}


def note_evaluation(name: str, layer: str) -> None:
    """Note in the store, once after each sum, that this rank evaluates: the others may be waiting for it."""
    parent = group_named(name)
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
        self.devices, self.timeout = _devices_of(parent), seconds_allowed(parent)
        self.size, self.number, self.own_calls = UNIT, 0, 0
        generation = _made[parent.group_name]
        self.store = diagnostics.store_of(parent, generation)
        _made[parent.group_name] += 1
        self.broken: str | None = None
        self.unfinished: list[Any] = []  # work that may still write to its buffer
        self.unread: list[tuple[int, Call, Arriving]] = []  # headers on their way from the device
        self._asked = 0, False  # whether messages of this size are gathered
        self._first: int | None = None
        # on the host: on a device it might be in a captured graph's memory, which replays overwrite
        self._tokens: dict[Call, tuple[Call, tuple[int, int]]] = {}
        diagnostics.gather(self, call, self._seconds(call))
        ranks, name = dist.get_process_group_ranks(parent), f"{generation}/{parent.group_name}"
        self.communicator = beside(parent, ranks, name)

    def all_reduce(self, sums: Sequence[Tensor], count: int | Tensor, call: Call) -> Tensor:
        """The count followed by the sums, each summed over the ranks; raises if ranks' calls differ."""
        if self.broken is not None:
            raise SyncError(f"this process group no longer shares statistics: {self.broken}")
        device = sums[0].device
        self.own_calls += 1
        room = HEADER + sum(map(Tensor.numel, sums))
        if capturing(sums[0]):
            self._check_capture(call, room)
        else:
            self._read_headers(wait=False)
        if room > self.size:
            size = message_size(call.channels)
            self._exchange((), 0, call, device, size)
            self.size = size
        return self._exchange(sums, count, call, device).narrow(0, HEADER - 1, room - HEADER + 1)

    def shadow(self, device: torch.device) -> None:
        """Join every sum with zeros until all ranks do so, on a rank without batches."""
        call = Call("none", "out of batches", 0, 0.0, True)
        while True:
            total = torch.zeros(self.size, dtype=torch.float64, device=device)
            self._sum(total, call)
            header = total[:HEADER].tolist()
            if header[0] == 0:
                return
            self._inspect(header, call, self.number, device)
            if header[5]:
                self.size = int(header[5] / header[0])

    @torch.no_grad()
    def follow_longest(self, buffers: list[Tensor]) -> None:
        """Set the buffers to those of the rank with the most `all_reduce` calls since the last time."""
        score = torch.tensor([self.own_calls * self.world + self.rank], device=self.device())
        dist.all_reduce(score, dist.ReduceOp.MAX, group=self.communicator)
        self.own_calls = 0
        source = dist.get_global_rank(self.parent, int(score) % self.world)
        for buffer in buffers:
            dist.broadcast(buffer, source, group=self.communicator)

    def device(self) -> torch.device:
        """A device that this group's backend supports, for a call without an input."""
        here = torch.device("cpu")
        if here in self.parent._device_types or (there := torch.accelerator.current_accelerator()) is None:
            return here
        return torch.device(there.type, torch.accelerator.current_device_index())

    def _exchange(
        self, sums: Sequence[Tensor], count: int | Tensor, call: Call, device: torch.device, size: int = 0
    ) -> Tensor:
        call, token = self._known(call)
        if size:
            token = call.token(size)
        backend = first_of_all(*sums) if sums else REFERENCE
        total = backend.message_of(sums, token, size, count, self.size, device)
        self._sum(total, call, wait=size > 0)
        if capturing(total):  # the host does not see the header of a replayed step
            return total
        if self._in_order(device):
            self._inspect(total[:HEADER].tolist(), call, self.number, device)
        else:
            self.unread.append((self.number, call, self._send(total)))
            self._read_headers(wait=call.debug or size > 0)
        return total

    def _check_capture(self, call: Call, room: int) -> None:
        """Raise if this call would wait for the device or connect ranks during a CUDA graph's capture."""
        call = self._identified(call)
        if call.debug:
            raise InputError(
                f"debug_consistency waits for every sum, which cannot be captured in a CUDA graph ({call}): "
                "turn it off for the capture"
            )
        if room > self.size or self.number == 0:
            raise InputError(
                f"{call} needs messages of {room} values, and before this CUDA graph's capture, which "
                f"can neither connect the ranks nor allocate, their group sent {self.number} of {self.size}: "
                "run a training step of this model before it"
            )

    def _in_order(self, device: torch.device) -> bool:
        """Whether the host reads each header before it goes on; a device's headers are read later."""
        return device.type == "cpu"

    def _send(self, total: Tensor) -> Arriving:
        return Arriving(total)

    def _start(self, total: Tensor) -> Any:
        if self._in_order(total.device) and self._gathers(total.numel()):
            return Gathered(total, self.communicator, self.world)
        return dist.all_reduce(total, group=self.communicator, async_op=True)

    def _gathers(self, size: int) -> bool:
        if size != self._asked[0]:
            self._asked = size, gathers(self.communicator, self.world, size)
        return self._asked[1]

    def _sum(self, total: Tensor, call: Call, wait: bool = False) -> None:
        """Sum over the ranks, in place; with `wait` the host also waits for a device's sum."""
        self.number += 1
        try:
            work = self._start(total)
        except RuntimeError as error:
            raise self._break(call, str(error), 0, total.device) from error
        if wait or call.debug or on_host(self.communicator, total.device):
            self._wait(work, call, total.device)
        else:
            work.wait()  # orders the streams without blocking the host

    def _wait(self, work: Any, call: Call, device: torch.device) -> None:
        """Wait for the sum; post where this rank waits, and stop if another rank found an error."""
        timeout = self._seconds(call)
        step = diagnostics.poll_seconds(timeout)
        deadline = time.monotonic() + timeout
        while not self._wait_once(work, call, step, device):
            # every waiting rank has posted by now, except one that arrived in the last moment
            if diagnostics.post_and_check(self, call) or time.monotonic() >= deadline - step:
                self.unfinished.append(work)
                raise self._break(call, f"waited {timeout:g} s", step / 2, device)

    def _wait_once(self, work: Any, call: Call, seconds: float, device: torch.device) -> bool:
        """Wait for at most `seconds`; returns whether the sum is complete."""
        try:
            return wait_once(work, seconds, on_host(self.communicator, device))
        except RuntimeError as error:  # only the first sentence says what happened
            raise self._break(call, str(error).split(". ")[0], 2 * seconds, device) from error

    def _seconds(self, call: Call) -> float:
        return min(call.timeout or self.timeout, self.timeout)

    def _break(self, call: Call, why: str, ask: float, device: torch.device) -> SyncError:
        """Reject all later calls; the error says which ranks are missing, after looking for `ask` seconds."""
        self.broken = diagnostics.who_is_missing(self, call, why, ask)
        give_up(self.communicator, device)
        return SyncError(self.broken)

    def _read_headers(self, wait: bool) -> None:
        """Check the headers that have arrived from the device, or all of them with `wait`."""
        while self.unread and (wait or self.unread[0][2].is_there()):
            number, call, header = self.unread.pop(0)
            self._inspect(header.values(), call, number, header.device)

    def _inspect(self, header: list[float], call: Call, number: int, device: torch.device) -> None:
        if not agree(header):
            raise self._differs(call, number, device)
        if header[6] == 1 and call.what == "training forward":
            raise InputError(
                f"Expected more than 1 value per channel when training, got 1 over all {self.world} ranks in "
                f"{call}; use a larger batch, or evaluation mode"
            )

    def _differs(self, call: Call, number: int, device: torch.device) -> SyncError:
        """The error for ranks in different calls; joins the sums that other ranks' devices wait for."""
        if self._in_order(device):  # all ranks have just read the same header
            return SyncError(diagnostics.what_differs(self, call, number, self._seconds(call)))
        answers: list[Any] = []

        def answer() -> None:
            """Join a sum that another rank's device waits for, with a header that differs from every
            other."""
            if answers and not answers[-1].is_completed():
                return
            refusal = torch.zeros(self.size, dtype=torch.float64, device=device)
            refusal[0] = refusal[2] = 1  # t is 0 and its square 1, which no call has
            with suppress(RuntimeError):  # a dead rank waits for nothing
                answers.append(self._start(refusal))

        self.broken = diagnostics.what_differs(self, call, number, self._seconds(call), answer)
        self.unfinished += answers[-1:]
        give_up(self.communicator, device)
        return SyncError(self.broken)

    def _identified(self, call: Call) -> Call:
        """The call with a name; a layer without a path is numbered by construction, from the first one
        used."""
        if not call.layer.startswith("#"):
            return call
        number = int(call.layer[1:])
        self._first = number if self._first is None else self._first
        return call._replace(layer=f"#{number - self._first + 1}")

    def _known(self, call: Call) -> tuple[Call, tuple[int, int]]:
        """The identified call and its token. Cached, on the host."""
        known = self._tokens.get(call)
        if known is None:
            if len(self._tokens) > 4096:
                self._tokens.clear()
            identified = self._identified(call)
            known = self._tokens[call] = identified, identified.token()
        return known
