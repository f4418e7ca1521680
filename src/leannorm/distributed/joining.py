"""Training while some ranks have no batches left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from leannorm.distributed.call import Call
from leannorm.distributed.group import StatisticsGroup, statistics_group
from leannorm.distributed.membership import SharesStatistics, sharing_group


@contextmanager
def join(model: nn.Module) -> Iterator[None]:
    """Around a training loop whose number of batches differs between ranks.

    A rank that leaves the loop continues to add zeros to the other ranks' sums until all have left it, so no
    rank waits for it and the statistics are those of the existing samples. Then the buffers of the
    synchronized layers are set, on every rank, to those of the rank that trained longest. If `model` is a
    DistributedDataParallel, its own `join` is entered too, for the gradients. Every rank enters the context.

    Raises: `SyncError` if ranks disagree in the meantime.
    Source: the design of torch.distributed.algorithms.Join.

    >>> import torch
    >>> from leannorm import distributed, nn
    >>> layer, batches = nn.SyncBatchNorm(4), [torch.randn(8, 4)]
    >>> with distributed.join(layer):
    ...     for batch in batches:
    ...         _ = layer(batch)
    """
    buffers: dict[str, list[Tensor]] = {}
    devices: dict[str, torch.device] = {}  # the device of the layers' sums
    for layer in model.modules():
        if isinstance(layer, SharesStatistics) and (name := sharing_group(layer.process_group)) is not None:
            buffers.setdefault(name, []).extend(layer.buffers())
            for tensor in (*layer.buffers(), *layer.parameters()):
                devices.setdefault(name, tensor.device)
    call = Call("join", "joining", 0, 0.0, True)
    groups = [statistics_group(name, call) for name in sorted(buffers)]
    gradients = model.join() if isinstance(model, DistributedDataParallel) else nullcontext()
    failures: list[BaseException] = []

    def add_zeros(group: StatisticsGroup) -> None:
        device = devices.get(group.parent.group_name)
        try:
            group.shadow(device if device is not None and device.type in group.devices else group.device())
        except BaseException as error:
            failures.append(error)

    with gradients:
        yield
        # in threads, because DDP's join runs meanwhile: other ranks reach its all_reduces only past these
        # sums
        threads = [threading.Thread(target=add_zeros, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    for group in groups:
        group.follow_longest(buffers[group.parent.group_name])
