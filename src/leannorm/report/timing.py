"""Measures time: a training step by wall-clock time, a single call by device events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

RATIOS = (
    "Times are medians; a ratio of times is the median of the turns' own ratios, which other work on the "
    "machine moves less than the times themselves."
)
_HEAD_START = 30_000_000  # cycles, about 15 ms: longer than the host needs to launch one group of calls
_GROUP = 8


def is_another_ratio(ratio: float, seconds: float, base: float) -> bool:
    """Whether the two times, as printed, have another ratio than the one printed next to them.

    >>> is_another_ratio(0.96, 4.872, 4.250), is_another_ratio(1.146, 4.872, 4.250)
    (True, False)
    """
    return base > 0 and f"{seconds / base:.2f}" != f"{ratio:.2f}"


def time_step(step: Callable[[], object], device: torch.device | str = "cpu") -> float:
    """Seconds that one call of `step` takes; the device is synchronized before and after."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def device_seconds(
    calls: Sequence[Callable[[], object]], device: torch.device | str, turns: int, head_start: bool = True
) -> list[float]:
    """Seconds of each of `turns` calls. They cycle through `calls`: the same work on different tensors.

    On CUDA the time is taken between two events on the stream. With `head_start` the device is kept busy
    until the host has launched a group of calls, so the device's work is timed without its wait for the host.
    Without it, slow launches count as they would in training. Results live for one round, so that outputs go
    to memory that is not in the cache. On the CPU the time is wall-clock time.

    >>> [seconds > 0 for seconds in device_seconds([lambda: sum(range(1000))], "cpu", 2)]
    [True, True]
    """
    device = torch.device(device)
    order = [calls[turn % len(calls)] for turn in range(turns)]
    if device.type != "cuda":
        return [time_step(call, device) for call in order]
    seconds = []
    # if they were freed at once, all outputs would be in one cached block
    alive: deque[object] = deque(maxlen=len(calls))
    with torch.cuda.device(device):
        for first in range(0, turns, _GROUP):
            part = order[first : first + _GROUP]
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(part) + 1)]
            torch.cuda.synchronize()
            if head_start:
                torch.cuda._sleep(_HEAD_START)
            events[0].record()
            for call, event in zip(part, events[1:], strict=True):
                alive.append(call())
                event.record()
            torch.cuda.synchronize()
            seconds += [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
    return seconds


def sets_past_the_cache(nbytes: int, device: torch.device | str) -> int:
    """How many sets of `nbytes` to cycle through, so that the L2 cache contains nothing of the next set."""
    device = torch.device(device)
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(max(2, -(-4 * cache // max(nbytes, 1))), 64)
