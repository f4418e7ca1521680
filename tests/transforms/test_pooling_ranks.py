"""`recalibrate` and `accumulate_stats` of layers that share over ranks, or whose tensors are DTensors."""

import pytest
import torch
from ranks import ranks
from torch import nn as stock

import leannorm
from leannorm import nn

F64 = torch.float64


class Doubled(stock.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) * 2


class SharedDoubled(nn.SyncBatchNorm):
    def forward(self, x):
        return super().forward(x) * 2


class FirstTwo(nn.SyncBatchNorm):
    """Counts the first two samples only."""

    def forward(self, x):
        return super().forward(x, mask=(torch.arange(len(x)) < 2)[:, None])


SUBCLASSES = {
    "converted": (lambda: leannorm.convert(stock.Sequential(Doubled(3, dtype=F64)), to="sync"), 4),
    "shared": (lambda: stock.Sequential(SharedDoubled(3, dtype=F64)), 4),
    "groups of samples": (lambda: stock.Sequential(SharedDoubled(3, dtype=F64, group_size=2)), 4),
    "mask": (lambda: stock.Sequential(FirstTwo(3, dtype=F64)), 2),
}


def recalibrated_subclass(rank, name):
    """Rank 0 has two batches, the other one."""
    make, counted = SUBCLASSES[name]
    xs = [torch.randn(4, 3, dtype=F64) * (i + 1) + 5 * i for i in range(3)]
    everything = torch.cat([x[:counted] for x in xs])
    model = make()
    report = leannorm.recalibrate(model, (xs[:2], xs[2:])[rank])
    torch.testing.assert_close(model[0].running_mean, everything.mean(0), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(model[0].running_var, everything.var(0), rtol=1e-13, atol=0)
    assert (report.layers[0].batches, report.layers[0].values) == (3, len(everything))


@pytest.mark.parametrize("name", SUBCLASSES)
def test_each_value_of_a_synchronized_subclass_counts_once(name):
    ranks(2, recalibrated_subclass, name)


def distributed_layer(make):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    return distribute_module(make(), mesh), lambda x: distribute_tensor(x, mesh, [Shard(0)])


def accumulated_in_shards(rank, momentum):
    def make():
        return nn.BatchNorm1d(3, momentum=momentum, dtype=F64)

    x, plain = torch.randn(8, 3, dtype=F64) + 2, make()
    layer, spread = distributed_layer(make)
    for one, given in ((plain, lambda x: x), (layer, spread)):
        with leannorm.accumulate_stats(one):
            for part in x.split(4):
                one(given(part))
    for ours, whole in zip(layer.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), whole, rtol=1e-13, atol=0)
    assert plain.num_batches_tracked == 1


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_of_sharded_batches_accumulate(momentum):
    ranks(2, accumulated_in_shards, momentum)


def recalibrated_in_shards(rank):
    layer, spread = distributed_layer(lambda: nn.BatchNorm1d(3))
    before = [b.full_tensor().clone() for b in layer.buffers()]
    with pytest.raises(leannorm.InputError, match="those of layer '0' are DTensors"):
        leannorm.recalibrate(stock.Sequential(layer), [spread(torch.randn(4, 3))])
    assert all(torch.equal(b.full_tensor(), was) for b, was in zip(layer.buffers(), before, strict=True))


def test_recalibrate_refuses_statistics_that_are_dtensors():
    ranks(2, recalibrated_in_shards)
