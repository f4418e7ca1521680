"""Finds out, through the group's store, which ranks are missing or differ when a collective fails.

A training step without errors runs none of this.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from leannorm._errors import SyncError
from leannorm.distributed.call import Call

if TYPE_CHECKING:
    from leannorm.distributed.group import StatisticsGroup

_PATIENCE = 10.0  # seconds that ranks in different calls wait for one another's posts
_RULE = "Every rank must use the same layers, in the same order and mode"
_CAUSES = (
    "it skipped the layer, runs it in evaluation mode, has no batch left "
    "(see leannorm.distributed.join), was too slow for the timeout, or died"
)


def store_of(parent: dist.ProcessGroup, generation: int) -> dist.distributed_c10d.Store:
    """The group's store under a prefix; `generation` keeps a new group from reading an old one's keys."""
    return dist.distributed_c10d.PrefixStore(
        f"leannorm/{generation}", dist.distributed_c10d._get_process_group_store(parent)
    )


def poll_seconds(timeout: float) -> float:
    """Seconds between a waiting rank's posts, which is also how long it looks for missing ranks at the
    end."""
    return min(1.0, timeout / 6)


def gather(group: StatisticsGroup, call: Call, timeout: float) -> None:
    """Wait until all ranks are ready to make the communicator."""
    post(group, call)
    if group.store.add("ready", 1) == group.world:
        group.store.set("go", "")
    try:
        group.store.wait(["go"], timedelta(seconds=timeout - poll_seconds(timeout)))
    except RuntimeError as error:
        raise SyncError(
            who_is_missing(group, call, f"waited {timeout:g} s", poll_seconds(timeout))
        ) from error


def post(group: StatisticsGroup, call: Call) -> None:
    """Write to the store which call this rank is waiting in."""
    group.store.set(f"at/{group.rank}", json.dumps([group.number, str(call)]))


def post_and_check(group: StatisticsGroup, call: Call) -> bool:
    """As `post`; returns whether another rank has already found out what is wrong."""
    try:
        post(group, call)
        return bool(group.store.check(["found"]))
    except RuntimeError:
        return True


def who_is_missing(group: StatisticsGroup, call: Call, why: str, seconds: float) -> str:
    """The error text for a collective that cannot complete: which ranks have not posted within `seconds`.

    The first rank to find out writes its text to the store, and all ranks report that text.
    """
    deadline = time.monotonic() + seconds
    try:
        post(group, call)
        while True:
            here = [r for r in range(group.world) if _number(group, r) >= group.number]
            done = len(here) == group.world or group.store.check(["found"])
            if done or time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        missing = [r for r in range(group.world) if r not in here]
        if missing:
            evaluates = [evaluation for r in missing if (evaluation := _evaluation_of(group, r)) is not None]
            causes = "; ".join(evaluates) if len(evaluates) == len(missing) else _CAUSES
            text = f"{call}: {_ranks(group, missing)} did not come ({why}): {causes}"
        else:
            text = f"{call}: all ranks came, but the sum did not complete ({why}); look at the network"
        return _publish(group, text, len(here), seconds)
    except RuntimeError as error:
        return (
            f"{call}: the ranks did not come together ({why}), and the group's store is gone too ({error}); "
            "the rank that served it, often rank 0, has probably died"
        )


def _publish(group: StatisticsGroup, text: str, here: int, seconds: float) -> str:
    """Write the text to the store, unless a rank has written one already; returns the text that is there."""
    text = group.store.compare_set("found", "", text).decode()
    _wait_for_readers(group, "told", here, seconds)
    return text


def _wait_for_readers(group: StatisticsGroup, key: str, ranks: int, seconds: float) -> None:
    """Wait until this many ranks have read the store, which this rank may be hosting and is about to
    leave."""
    deadline = time.monotonic() + seconds
    with suppress(RuntimeError):  # the store is gone: they have read it
        read = group.store.add(key, 1)
        while read < ranks and time.monotonic() < deadline:
            time.sleep(0.02)
            read = group.store.add(key, 0)


def what_differs(
    group: StatisticsGroup, call: Call, number: int, timeout: float, answer: Callable[[], None] = lambda: None
) -> str:
    """The error text for ranks in different calls: which rank is in which call.

    It is the same on every rank that reads it in time. A rank that has not posted its call may be waiting, on
    its device, for sums of those that have. So `answer` is called from time to time, and joins one.
    """
    seconds = min(timeout, _PATIENCE)
    try:
        return _compare(group, call, number, seconds, answer)
    except RuntimeError as error:
        return (
            f"ranks that share statistics are in different calls (number {number} of the group), rank "
            f"{dist.get_rank()} in {call}; what the others call is not known, as the group's store is gone "
            f"({error}). {_RULE}"
        )


def _compare(
    group: StatisticsGroup, call: Call, number: int, seconds: float, answer: Callable[[], None]
) -> str:
    keys = [f"met/{number}/{rank}" for rank in range(group.world)]
    group.store.set(keys[group.rank], json.dumps([str(call), call.settings()]))
    start = time.monotonic()
    while not group.store.check(keys) and time.monotonic() < start + seconds:
        if time.monotonic() > start + poll_seconds(seconds):
            answer()
        time.sleep(max(0.02, 1e-4 * group.world))
    silent = [rank for rank, key in enumerate(keys) if not group.store.check([key])]
    calls: dict[str, list[int]] = defaultdict(list)
    settings: dict[str, list[int]] = defaultdict(list)
    for rank in [rank for rank in range(group.world) if rank not in silent]:
        name, setting = json.loads(group.store.get(keys[rank]))
        calls[name].append(rank)
        settings[setting].append(rank)
    _wait_for_readers(group, f"met/{number}", group.world - len(silent), min(seconds, 1.0))
    if len(calls) == 1 and len(settings) > 1:
        text = "; ".join(f"{_ranks(group, who)} with {what}" for what, who in settings.items())
        return (
            f"ranks that share statistics must have equal eps, momentum and track_running_stats, but are in "
            f"{call}: {text}. Construct the layer with the same arguments on every rank, and change them, if "
            "at all, on every rank in the same step"
        )
    text = "; ".join(f"{_ranks(group, who)} in {what}" for what, who in calls.items())
    if silent:
        text += (
            f"; {_ranks(group, silent)} did not say within {seconds:g} s (busy with something else, waiting "
            "for another collective, or dead)"
        )
    text = (
        f"ranks that share statistics are in different calls (number {number} of the group): {text}. {_RULE}"
    )
    return _publish(group, text, 1, 0.0) if silent else text


def note_evaluation(store: dist.distributed_c10d.Store, rank: int, number: int, layer: str) -> None:
    """Write to the store that this rank evaluates a layer, after `number` sums."""
    with suppress(RuntimeError):  # evaluation does not depend on the store
        store.set(f"evaluates/{rank}", json.dumps([number, layer]))


def _evaluation_of(group: StatisticsGroup, rank: int) -> str | None:
    """What the rank evaluates, for the error text; None if it has not evaluated since its last sum."""
    key = f"evaluates/{rank}"
    if not group.store.check([key]):
        return None
    number, layer = json.loads(group.store.get(key))
    if number < group.number - 1:
        return None
    return f"{_ranks(group, [rank])} runs {layer} in evaluation mode, where the others train"


def _number(group: StatisticsGroup, rank: int) -> int:
    key = f"at/{rank}"
    return json.loads(group.store.get(key))[0] if group.store.check([key]) else -1


def _ranks(group: StatisticsGroup, ranks: list[int]) -> str:
    """The ranks' global numbers, which launchers and logs show, for error texts."""
    names = [str(dist.get_global_rank(group.parent, r)) for r in ranks]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"
