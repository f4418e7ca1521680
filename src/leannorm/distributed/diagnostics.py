"""What ranks tell one another through the group's store, when a collective could not tell it.

Nothing here runs in a step in which all goes well.
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

_PATIENCE = 10.0  # seconds that ranks which disagree wait for one another's words
_RULE = "Every rank must use the same layers, in the same order and mode"
_CAUSES = (
    "it skipped the layer, runs it in evaluation mode, has no batch left "
    "(see leannorm.distributed.join), was too slow for the timeout, or died"
)


def store_of(parent: dist.ProcessGroup, generation: int) -> dist.distributed_c10d.Store:
    """A corner of the group's store; `generation` keeps a group made anew from reading an old one's keys."""
    return dist.distributed_c10d.PrefixStore(
        f"leannorm/{generation}", dist.distributed_c10d._get_process_group_store(parent)
    )


def poll_seconds(timeout: float) -> float:
    """How often, in seconds, a rank that waits says so, and how long it asks who is missing at the end."""
    return min(1.0, timeout / 6)


def gather(group: StatisticsGroup, call: Call, timeout: float) -> None:
    """Wait until all ranks are about to make the communicator."""
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
    """Say where this rank is waiting."""
    group.store.set(f"at/{group.rank}", json.dumps([group.number, str(call)]))


def post_and_check(group: StatisticsGroup, call: Call) -> bool:
    """Say where this rank is waiting; has another rank already found out what is wrong?"""
    try:
        post(group, call)
        return bool(group.store.check(["found"]))
    except RuntimeError:
        return True


def who_is_missing(group: StatisticsGroup, call: Call, why: str, seconds: float) -> str:
    """Which ranks do not wait in this collective, though it cannot complete; asked for `seconds`.

    The rank that finds out first tells the others, so that all say the same.
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
            evaluates = [found for r in missing if (found := _evaluates(group, r)) is not None]
            causes = "; ".join(evaluates) if len(evaluates) == len(missing) else _CAUSES
            text = f"{call}: {_ranks(group, missing)} did not come ({why}): {causes}"
        else:
            text = f"{call}: all ranks came, but the sum did not complete ({why}); look at the network"
        return _told(group, text, len(here), seconds)
    except RuntimeError as error:
        return (
            f"{call}: the ranks did not come together ({why}), and the group's store is gone too ({error}); "
            "the rank that served it, often rank 0, has probably died"
        )


def _told(group: StatisticsGroup, text: str, here: int, seconds: float) -> str:
    """Tell the others, unless one has told already."""
    text = group.store.compare_set("found", "", text).decode()
    _stay(group, "told", here, seconds)
    return text


def _stay(group: StatisticsGroup, key: str, ranks: int, seconds: float) -> None:
    """Wait until as many ranks have read what they came for, as one that leaves may be serving the store."""
    deadline = time.monotonic() + seconds
    with suppress(RuntimeError):  # the store is gone: they have read it
        read = group.store.add(key, 1)
        while read < ranks and time.monotonic() < deadline:
            time.sleep(0.02)
            read = group.store.add(key, 0)


def what_differs(
    group: StatisticsGroup,
    call: Call,
    number: int,
    timeout: float,
    answer: Callable[[], None] = lambda: None,
) -> str:
    """What each rank was calling when they met and disagreed; the same text on every rank that is told.

    A rank that does not say so soon may wait, on its device, for sums of those that do: `answer` is called
    now and then, and gives it one.
    """
    seconds = min(timeout, _PATIENCE)
    try:
        return _compared(group, call, number, seconds, answer)
    except RuntimeError as error:
        return (
            f"ranks that share statistics are in different calls (number {number} of the group), rank "
            f"{dist.get_rank()} in {call}; what the others call is not known, as the group's store is gone "
            f"({error}). {_RULE}"
        )


def _compared(
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
    _stay(group, f"met/{number}", group.world - len(silent), min(seconds, 1.0))
    if len(calls) == 1 and len(settings) > 1:
        said = "; ".join(f"{_ranks(group, who)} with {what}" for what, who in settings.items())
        return (
            f"ranks that share statistics must have equal eps, momentum and track_running_stats, but are in "
            f"{call}: {said}. Construct the layer with the same arguments on every rank, and change them, if "
            "at all, on every rank in the same step"
        )
    said = "; ".join(f"{_ranks(group, who)} in {what}" for what, who in calls.items())
    if silent:
        said += (
            f"; {_ranks(group, silent)} did not say within {seconds:g} s (busy with something else, waiting "
            "for another collective, or dead)"
        )
    text = (
        f"ranks that share statistics are in different calls (number {number} of the group): {said}. {_RULE}"
    )
    return _told(group, text, 1, 0.0) if silent else text


def note_evaluation(store: dist.distributed_c10d.Store, rank: int, number: int, layer: str) -> None:
    """Say that this rank evaluates a layer, having taken part in `number` sums."""
    with suppress(RuntimeError):  # a store that is gone is no matter of evaluation's
        store.set(f"evaluates/{rank}", json.dumps([number, layer]))


def _evaluates(group: StatisticsGroup, rank: int) -> str | None:
    """In words, if the rank has evaluated since the last sum that it took part in."""
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
    """Global ranks, which are what launchers and logs show."""
    names = [str(dist.get_global_rank(group.parent, r)) for r in ranks]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"
