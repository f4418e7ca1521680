"""`lean()` under DDP and FSDP2 on two gloo ranks: the bits of the same training without it."""

from __future__ import annotations

import lean_cases
import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch import nn

from leannorm.saving import make_lean

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")


def block(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.GroupNorm(4, 16)
    )


NETWORKS = {
    "convolutions": (lambda: nn.Sequential(block(3), block(16), nn.Conv2d(16, 4, 1)), (4, 3, 12, 12)),
    "transformer": (lean_cases.SEQUENCES["transformer"], lean_cases.TOKENS),
}


def trained(network: str, wrap: str, setting: dict[str, object] | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    make, shape = NETWORKS[network]
    model = make()
    if setting is not None:
        make_lean(model, **setting)
    if wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in model:
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        x = torch.randn(shape, generator=generator)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [getattr(v, "_local_tensor", v).detach().clone() for v in model.state_dict().values()]


def work(rank: int, network: str, wrap: str) -> None:
    stock = trained(network, wrap, None)
    for setting in ({"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.5}):
        ours = trained(network, wrap, setting)
        assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True)), setting


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_two_ranks_train_to_the_same_bits(network: str, wrap: str) -> None:
    ranks(2, work, network, wrap)
