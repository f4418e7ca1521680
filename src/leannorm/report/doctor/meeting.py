"""Ranks exchange what they have through the store of their group: no collective, so no hang.

Each rank posts what it has, the group's first rank decides, all read the answer. Over p ranks that is p posts
and one answer. A rank that raised posts its error, and a rank that waits too long ends the meeting for all.
"""

from __future__ import annotations

import json
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from leannorm._errors import InputError, SyncError
from leannorm.distributed.communicator import seconds_allowed

_POLL = 0.01
_READING = 10.0  # seconds for which the store's host may wait for ranks that read the answer
_PATIENCE = 20.0  # seconds after which a rank prints that it waits
_NAMED = 8  # ranks that a message names


class Meeting:
    """The ranks of a group in one call of `doctor`; `ranks` are their global numbers.

    Calls are counted in the store, which may outlive a group. Ranks that come later skip a call that others
    gave up. If the `with` statement of a rank ends with an error, all ranks raise one.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._told = False  # whether an error has been raised that all ranks raise
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.place = dist.get_rank(group)
        self._seconds = seconds_allowed(group)
        c10d = dist.distributed_c10d
        whose = f"leannorm/doctor/{word_of(self.ranks)}"
        root = c10d.PrefixStore(whose, c10d._get_process_group_store(group))
        calls = f"calls/{self.place}"
        with self._named_errors():
            number = root.add(calls, 1)
            while root.check([key := f"{number}/1/answer"]) and "late" in json.loads(root.get(key)):
                number = root.add(calls, 1)
        self._store = c10d.PrefixStore(str(number), root)
        self._step = 0

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        said = None if error is None or self._told else self._fail(error)
        if said is not None:
            raise SyncError(said) from error

    def decide(self, post: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """The result of `decide`, on the first rank, for the posts of all ranks, in their order.

        Raises: `SyncError`, with one text on all ranks, for a rank that failed or did not arrive in time.
        """
        with self._named_errors():
            store = self._begin()
            store.set(f"of/{self.place}", json.dumps(post))
            if self.place == 0:
                answer = self._answer(store, self._presided(store, decide))
            else:
                try:
                    self._wait(store)
                except RuntimeError:
                    self._answer(store, self._late(self._missing(store, range(len(self.ranks)))))
                answer = self._answer(store)
        if "error" in answer:
            self._told = True
            raise SyncError(answer["error"])
        return answer["decided"]

    def _wait(self, store: Any) -> None:
        """Wait until there is an answer; raises torch's error if none arrives in time."""
        left = self._seconds
        if left > _PATIENCE:
            with suppress(RuntimeError):
                store.wait(["answer"], timedelta(seconds=_PATIENCE))
                return
            self._say_that_it_waits("the others")
            left -= _PATIENCE
        store.wait(["answer"], timedelta(seconds=left))

    def _say_that_it_waits(self, whom: str) -> None:
        warnings.warn(
            f"doctor on rank {self.ranks[self.place]} has waited {_PATIENCE:g} s for {whom}, and will for up"
            f" to {self._seconds:g} s: it is called on every rank, or with group= of those that call it",
            stacklevel=2,
        )

    def _fail(self, error: BaseException) -> str | None:
        """Report to the others that this rank failed; returns the first failure, if it was another rank's."""
        text = f"{type(error).__name__}: {error}".split("\n")[0]
        mine = {"error": f"doctor failed on {ranks_in_words([self.ranks[self.place]])} ({text})"}
        with self._named_errors():
            answer = self._answer(self._begin(), mine)
        return None if answer == mine else answer.get("error")

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """If the store fails, its host has ended."""
        try:
            yield
        except RuntimeError as error:
            self._told = True
            raise SyncError(
                f"the ranks that doctor compares have lost their store ({error}); the rank that served it, "
                "often rank 0, has probably died"
            ) from error

    def _begin(self) -> Any:
        self._step += 1
        return dist.distributed_c10d.PrefixStore(str(self._step), self._store)

    def _answer(self, store: Any, mine: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer of this step: the first that a rank gave. The store's host stays until all have it."""
        if mine is not None:
            store.compare_set("answer", "", json.dumps(mine))
        answer: dict[str, Any] = json.loads(store.get("answer"))
        store.add("read", 1)
        readers = len(self.ranks) - answer.get("late", 0)
        deadline = time.monotonic() + min(_READING, self._seconds)
        with suppress(RuntimeError):
            while self.place == 0 and store.add("read", 0) < readers and time.monotonic() < deadline:
                time.sleep(_POLL)
        return answer

    def _presided(self, store: Any, decide: Callable[[list[Any]], Any]) -> dict[str, Any]:
        start = time.monotonic()
        deadline, patient = start + self._seconds, True
        missing = self._missing(store, range(len(self.ranks)))
        while missing and not store.check(["answer"]) and time.monotonic() < deadline:
            time.sleep(_POLL)
            missing = self._missing(store, missing)
            if missing and patient and time.monotonic() > start + _PATIENCE:
                patient = False
                self._say_that_it_waits(ranks_in_words([self.ranks[place] for place in missing]))
        if missing:
            return self._late(missing)  # once a rank has answered, its answer counts
        posts = [json.loads(store.get(f"of/{place}")) for place in range(len(self.ranks))]
        for place in range(len(self.ranks)):
            store.delete_key(f"of/{place}")
        try:
            return {"decided": decide(posts)}
        except SyncError as error:
            return {"error": str(error)}

    def _missing(self, store: Any, places: Iterable[int]) -> list[int]:
        return [place for place in places if not store.check([f"of/{place}"])]

    def _late(self, missing: list[int]) -> dict[str, Any]:
        who = ranks_in_words([self.ranks[place] for place in missing])
        text = (
            f"doctor is called on every rank of a job, but {who} did not come within {self._seconds:g} s: "
            "not called there, busy in a collective of the model, or dead. Call it on every rank, or pass "
            "group= of those that do"
        )
        return {"error": text, "late": len(missing)}


def meeting_of(group: dist.ProcessGroup | None) -> Meeting | None:
    """The meeting of a group, by default of all ranks; None unless there are several processes.

    Raises: `InputError` for a group that this rank is not in, or without torch.distributed.
    """
    if not dist.is_available() or not dist.is_initialized():
        if group is None:
            return None
        raise InputError(
            "group must be of torch.distributed, which is not initialized; call init_process_group first"
        )
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise InputError(
            f"group must be a process group with this rank, got {group!r} on rank {dist.get_rank()}; every "
            "rank passes the group of the ranks that have its model"
        )
    pretended = dist.get_backend(group) == "fake"  # torch's group for one process that plans for many
    return None if pretended or dist.get_world_size(group) == 1 else Meeting(group)


def word_of(numbers: list[Any]) -> str:
    """A short word for a list of ranks, or of lists of them; the same on all ranks."""
    return f"{zlib.crc32(repr(numbers).encode()):x}"


def ranks_in_words(ranks: list[int]) -> str:
    """
    >>> ranks_in_words([2]), ranks_in_words([0, 3])
    ('rank 2', 'ranks 0, 3')
    >>> ranks_in_words([*range(16)])
    'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 8 more'
    """
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks[:_NAMED]))}{more}"
