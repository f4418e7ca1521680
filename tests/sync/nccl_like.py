"""Real sums of gloo ranks that behave towards the host as NCCL's do on a device, where there is none.

`wait()` returns at once (the device waits, not the host), `wait(timeout)` destroys the communicator when the
time is over, and what a sum leaves is there when the sums before it are.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from leannorm.distributed import communicator, group

_all_reduce = dist.all_reduce


class WorkLikeNCCL:
    def __init__(self, work, tensor):
        self.work, self.tensor, self.aborted = work, tensor, False

    def is_completed(self):
        return self.aborted or self.work.is_completed()

    def wait(self, timeout: timedelta | None = None):
        end = time.monotonic() + (0 if timeout is None else timeout.total_seconds())
        while timeout is not None and not self.is_completed():
            if time.monotonic() > end:
                self.aborted = True
                raise dist.DistBackendError("Work timed out in blocking wait.")
            time.sleep(0.01)
        if self.aborted:
            raise dist.DistBackendError("NCCL communicator was aborted")
        return True


class Device:
    """What was asked of the ranks, one after the other, as on a stream."""

    def __init__(self):
        self.works = []

    def all_reduce(self, tensor, *args, async_op=False, **kwargs):
        if not async_op:
            return _all_reduce(tensor, *args, **kwargs)
        self.works.append(WorkLikeNCCL(_all_reduce(tensor, *args, async_op=True, **kwargs), tensor))
        return self.works[-1]

    def synchronize(self, seconds):
        """The host waits for the device, as in `loss.item()`."""
        end = time.monotonic() + seconds
        while not all(work.is_completed() for work in self.works):
            assert time.monotonic() < end, "the device waits for a sum that nobody takes part in"
            time.sleep(0.01)


class Arriving:
    """A header behind all sums so far."""

    def __init__(self, total, works):
        self.total, self.works, self.device = total, list(works), total.device

    def is_there(self):
        return all(work.is_completed() for work in self.works)

    def values(self):
        while not self.is_there():
            time.sleep(0.01)
        return self.total[: group.HEADER].tolist()


def like_nccl() -> Device:
    """In this process, from now on."""
    device = dist_device = Device()
    dist.all_reduce = dist_device.all_reduce
    for module in (communicator, group):
        module.on_host = lambda *_: False
    group.StatisticsGroup._in_order = lambda self, device: False
    group.StatisticsGroup._send = lambda self, total: Arriving(total, device.works)
    return device
