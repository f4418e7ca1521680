"""Train the digit network on several ranks, and compare with one process on the whole batch.

    torchrun --nproc-per-node 2 -m leannorm.demo.train --sync

Every rank gets its share of each batch; DistributedDataParallel averages the gradients. With `--sync` the
batch norms share their statistics, and the losses equal those of one process on the whole batch. Without it
each rank normalizes by the statistics of its share, and the losses differ.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from leannorm.demo.digits import load
from leannorm.demo.network import DigitNetwork, loss_of, stock_pair
from leannorm.transforms import convert

SAME = 1e-9  # relative, in float64: rounding stays under 1e-12, another batch's statistics show at 1e-3


class ShareOfDropout(nn.Dropout):
    """This rank's rows of the dropout mask that one process would draw for the whole batch."""

    def __init__(self, p: float, rank: int, ranks: int) -> None:
        super().__init__(p)
        self.rank, self.ranks = rank, ranks

    def forward(self, input: Tensor) -> Tensor:
        mask = F.dropout(input.new_ones(self.ranks * len(input), *input.shape[1:]), self.p, self.training)
        return input * mask.chunk(self.ranks)[self.rank]


def train(epochs: int, batch_size: int, sync: bool, seed: int = 0) -> list[tuple[float, float]]:
    """The mean losses of every epoch: over the ranks, and of one process, which every rank runs as well."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    digits = load()
    torch.manual_seed(seed)
    alone = DigitNetwork(stock_pair).double()
    network = copy.deepcopy(alone)
    network.dropout = ShareOfDropout(network.dropout.p, rank, ranks)
    together = DistributedDataParallel(convert(network, to="sync") if sync else network)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.02, momentum=0.9) for n in (alone, together)]
    found: list[tuple[float, float]] = []
    images, step = digits.images.double(), 0
    for _ in range(epochs):
        losses = []
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed + len(found)))
        for batch in (b for b in order.split(batch_size) if len(b) == batch_size):
            pair = []
            for net, optimizer, rows in zip(
                (alone, together), optimizers, (batch, batch.chunk(ranks)[rank]), strict=True
            ):
                optimizer.zero_grad()
                loss = loss_of(net, images[rows], digits.labels[rows], seed + step)
                loss.backward()
                optimizer.step()
                pair.append(loss.detach())
            dist.all_reduce(pair[1])
            losses.append((float(pair[1]) / ranks, float(pair[0])))
            step += 1
        shared, single = zip(*losses, strict=True)
        found.append((sum(shared) / len(losses), sum(single) / len(losses)))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 if the ranks' losses equal one process's, 1 if not, 2 for bad usage."""
    parser = argparse.ArgumentParser(
        prog="leannorm.demo.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sync", action="store_true", help="share the batch norms' statistics")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=256, help="of all ranks together")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not dist.is_torchelastic_launched():
        parser.error("start it with torchrun --nproc-per-node 2 -m leannorm.demo.train --sync")
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    ranks = dist.get_world_size()
    if options.epochs < 1 or options.batch_size < 2 * ranks or options.batch_size % ranks:
        parser.error(f"--batch-size must be a multiple of {ranks}, at least {2 * ranks}; --epochs at least 1")
    found = train(options.epochs, options.batch_size, options.sync)
    same = all(abs(shared - single) <= SAME * abs(single) for shared, single in found)
    if dist.get_rank() == 0:
        print(f"epoch   {ranks} ranks         one process     difference")
        for epoch, (shared, single) in enumerate(found, 1):
            print(f"{epoch:5d}   {shared:.12f}  {single:.12f}  {abs(shared - single):.1e}")
        print("the same training" if same else "not the same training: statistics are each rank's own")
        if options.json is not None:
            options.json.write_text(json.dumps({"ranks": ranks, "losses": found, "same": same}))
    dist.barrier()
    dist.destroy_process_group()
    return 0 if same else 1
