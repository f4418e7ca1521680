"""Real processes, each a rank of a gloo group, for tests of what ranks do together."""

from __future__ import annotations

import io
import multiprocessing
import multiprocessing.forkserver
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # of the children: what they raise is looked at

# a server that has imported once what the ranks need, and whose children are forked from it: 0.1 s a rank
_CONTEXT = multiprocessing.get_context("forkserver")
_TESTS = Path(__file__).parent
_SYNC = _TESTS / "sync"
_CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "ranks", "faults.scenarios", *sorted(p.stem for p in _SYNC.glob("test_sync_*.py"))]
)


def _start_server() -> None:
    """The server does not take over sys.path in all versions of Python: tell it where the tests are."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_TESTS), str(_SYNC), *([before] if before else [])])
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class Outcome:
    """What became of a rank: `value` it returned, `error` it raised ("Name: message"), its `exitcode`."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: str | None = None
        self.seconds = 0.0
        self.exitcode: int | None = None


def outcomes(
    world: int, function: Callable[..., Any], *args: Any, group_timeout: float = 60.0, deadline: float = 120.0
) -> list[Outcome]:
    """Run `function(rank, *args)` on `world` ranks; a rank alive at the deadline is killed, exitcode None."""
    _start_server()
    # here, and not on rank 0: a rank that ends first would take the store from those that still connect
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = [_CONTEXT.Pipe(duplex=False) for _ in range(world)]
    processes = [
        _CONTEXT.Process(target=_rank, args=(rank, world, store.port, group_timeout, end, function, args))
        for rank, (_, end) in enumerate(ends)
    ]
    results = [Outcome() for _ in range(world)]
    for process in processes:
        process.start()
    stop = time.monotonic() + deadline
    for (receiver, sender), process, result in zip(ends, processes, results, strict=True):
        sender.close()
        try:
            if receiver.poll(max(0.0, stop - time.monotonic())):
                result.value, result.error, result.seconds = torch.load(
                    io.BytesIO(receiver.recv_bytes()), weights_only=False
                )
        except EOFError:
            pass
        process.join(max(0.1, stop - time.monotonic()))
        result.exitcode = process.exitcode
        if process.is_alive():
            process.kill()
    return results


def ranks(world: int, function: Callable[..., Any], *args: Any, **limits: float) -> list[Any]:
    """The values that `function(rank, *args)` returned on each rank; fails if a rank failed."""
    results = outcomes(world, function, *args, **limits)
    for rank, result in enumerate(results):
        assert result.error is None, f"rank {rank}: {result.error}"
        assert result.exitcode == 0, f"rank {rank} ended with {result.exitcode}"
    return [result.value for result in results]


def torch_merges(x: Any, merge: Callable[[Any], Any]) -> bool:
    """Can torch merge a cut dimension of this DTensor into the one before it? Older releases refuse."""
    try:
        merge(x.detach())
    except RuntimeError as error:
        if "Attempted to flatten multiple dimensions" not in str(error):
            raise
        return False
    return True


def _rank(
    rank: int,
    world: int,
    port: int,
    group_timeout: float,
    end: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    value = error = None
    limit = timedelta(seconds=group_timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    dist.barrier()  # all are connected before any of them may end
    start = time.monotonic()
    try:
        value = function(rank, *args)
    except Exception as exception:
        error = f"{type(exception).__name__}: {exception}\n{traceback.format_exc()}"
    # as bytes: tensors sent as they are would be shared with a process that has ended
    answer = io.BytesIO()
    torch.save((value, error, time.monotonic() - start), answer)
    end.send_bytes(answer.getvalue())
    if error is None:
        dist.destroy_process_group()
