"""Two processes: DistributedDataParallel over gloo, batch norms that share their statistics, and `lean()`.

    torchrun --standalone --nproc-per-node 2 examples/two_ranks.py

Needs scikit-learn, but no GPU. The ranks get unequal shares of every batch, 150 and 100 digits, and
statistics are exact all the same. The ranks train in float64, and so does a model that sees the whole batch:
its losses are the same up to rounding. Each rank runs its forward pass in `lean()`.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import data, network
from measure import held
from torch.nn.parallel import DistributedDataParallel

import leannorm


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    (images, labels), _ = data()
    images = images.double()

    torch.manual_seed(0)
    alone = network().double()
    shared = DistributedDataParallel(leannorm.convert(copy.deepcopy(alone), to="sync"))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (alone, shared)]
    differences = []
    for batch in torch.arange(len(images)).split(250)[:2]:
        rows = batch.split(150)[rank] if ranks == 2 else batch.chunk(ranks)[rank]
        with leannorm.lean():
            # DDP averages the ranks' gradients, so each rank's sum is scaled to a share of the batch's mean
            total = F.cross_entropy(shared(images[rows]), labels[rows], reduction="sum")
            loss = total * (ranks / len(batch))
        whole = F.cross_entropy(alone(images[batch]), labels[batch])
        for optimizer, value in zip(optimizers, (whole, loss), strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        total = total.detach()
        dist.all_reduce(total)
        differences.append(abs(total.item() / len(batch) / whole.item() - 1))
    if rank == 0:
        same = max(differences) < 1e-12
        print(f"{ranks} ranks and one process: {'the same losses' if same else 'different losses'}")
        rows = slice(0, 150)
        held(alone, lambda: F.cross_entropy(alone(images[rows]), labels[rows]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
