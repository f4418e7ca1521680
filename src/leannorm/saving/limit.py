"""`limit=`: the memory that the process may have, what it has, and what passes have learned.

C++ decides what is dropped, and when (csrc/nodes/record/limit.h).
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from leannorm._errors import InputError
from leannorm._report import bytes_in_words
from leannorm.autograd.nodes import NODES

_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 2**60  # bytes: without a limit, systems write a larger number
_MAX_PLACES = 256

LEARNED: dict[Hashable, Any] = {}
"""What passes have learned, by the line that opens them."""


class Limit(NamedTuple):
    """The limit of one pass. `learned`: by the passes of its line. `before`: the process's bytes when it
    began."""

    nbytes: int
    learned: Any
    before: int

    @property
    def is_passed(self) -> bool:
        """Whether the process had more than the limit before the pass."""
        return self.before > self.nbytes


def begin(asked: int | str, line: Hashable) -> Limit | None:
    """The limit of a pass that begins now; None on a system that does not say what the process has.

    Raises: `InputError` if the first pass of a line is over the limit before it begins.
    """
    before = 0 if NODES is None else NODES.bytes_in_use()
    if not before:
        return None
    nbytes = device_bytes(before) if isinstance(asked, str) else asked
    if before > nbytes:
        NODES.trim_heap()  # the C library may have kept what others freed
        before = NODES.bytes_in_use()
    learned = LEARNED.get(line)
    if learned is None:
        if before > nbytes:
            raise InputError(
                "limit is the memory of the whole process, weights, optimizer and libraries included; it has"
                f" {bytes_in_words(before)} before the forward pass; got limit={bytes_in_words(nbytes)}"
            )
        if len(LEARNED) >= _MAX_PLACES:
            LEARNED.clear()
        learned = LEARNED[line] = NODES.Learned()
    return Limit(nbytes, learned, before)


def device_bytes(in_use: int) -> int:
    """The most that this process, which has `in_use` bytes, may have here.

    That is what the machine has left, or less if the process's control group or `ulimit` says so. If one
    launcher started several processes on this machine, each may have an equal share.
    """
    found = [*_of_machine(in_use), *_of_groups(), *_of_process(in_use)]
    if not found:
        raise InputError(
            'limit="device" needs a system that says how much memory there is, as Linux does; write the bytes'
            ' instead, as limit="8GiB"'
        )
    return min(found)


def _of_machine(in_use: int) -> Iterator[int]:
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    figures = dict(_lines("/proc/meminfo"))
    if "MemTotal" in figures:
        yield min(figures["MemTotal"] // ranks, in_use + figures.get("MemAvailable", figures["MemTotal"]))


def _of_groups() -> Iterator[int]:
    """The limits of the control groups that this process is in, of version 1 and 2."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, name = (_CGROUPS, "memory.max") if not controllers else (_CGROUPS / "memory", _LIMIT_OF_V1)
        group = root / path.lstrip("/")
        for at in (group, *group.parents):
            if at == root.parent:
                break
            try:
                limit = (at / name).read_text().strip()
            except OSError:
                continue
            if limit.isdigit() and int(limit) < _UNLIMITED:
                yield int(limit)


_LIMIT_OF_V1 = "memory.limit_in_bytes"


def _of_process(in_use: int) -> Iterator[int]:
    """What `ulimit -v` and `ulimit -d` leave."""
    try:
        import resource
    except ImportError:  # Windows
        return
    figures = dict(_lines("/proc/self/status"))
    for kind, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY and name in figures:
            yield max(in_use + soft - figures[name], 0)


def _lines(path: str) -> Iterator[tuple[str, int]]:
    """The names and bytes in a file of lines such as `Name:   123 kB`."""
    try:
        text = Path(path).read_text()
    except OSError:
        return
    for line in text.splitlines():
        name, _, figure = line.partition(":")
        parts = figure.split()
        if len(parts) == 2 and parts[1] == "kB":
            yield name, int(parts[0]) * 1024
