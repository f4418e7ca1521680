"""Fused blocks and norms of unlisted classes beside FSDP2, which subclasses each class that it shards."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn as stock

from leannorm import convert

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")


class RMS(stock.Module):
    """Known by its formula."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.eps = stock.Parameter(torch.ones(size)), 1e-6

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x


@pytest.fixture
def shard(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda module: fully_shard(module, mesh=mesh)
    dist.destroy_process_group()


def block():
    return stock.Sequential(stock.Conv2d(3, 4, 3), stock.BatchNorm2d(4), stock.ReLU())


def test_convert_back_keeps_what_fsdp_made_of_a_layer(shard):
    from torch.distributed.fsdp import FSDPModule

    model = stock.Sequential(block(), RMS(8))
    plain, x = copy.deepcopy(model).eval(), torch.randn(2, 3, 10, 10)
    convert(model)
    assert [type(m) for m in model] != [stock.Sequential, RMS]
    for part in (*model, model):
        shard(part)
    convert(model, to="torch")
    for part, kind in zip(model, (stock.Sequential, RMS), strict=True):
        assert isinstance(part, FSDPModule)
        assert type(part).__mro__[2] is kind
        part.unshard()
        part.reshard()
    model.set_requires_gradient_sync(False)
    torch.testing.assert_close(model.eval()(x), plain(x))


def test_a_fused_block_that_is_sharded_can_be_sliced(shard):
    model = block()
    shard(model)
    convert(model)
    assert hasattr(type(model), "unfused")
    part = model[:2]
    assert type(part) is stock.Sequential
    assert list(part) == list(model)[:2]
