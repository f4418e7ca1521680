"""`lean()` under DDP and FSDP2 on two gloo ranks: the bits of the same training without it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import lean_cases
import pytest
import torch
import torch.distributed as dist
from lean_ranks import kept, no_pass_is_small
from ranks import ranks
from torch import nn

from leannorm.saving import make_lean
from leannorm.saving.models import last_pass

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")


def block(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.GroupNorm(4, 16)
    )


NETWORKS = {
    "convolutions": (lambda: nn.Sequential(block(3), block(16), nn.Conv2d(16, 4, 1)), (4, 3, 12, 12)),
    "transformer": (lean_cases.SEQUENCES["transformer"], lean_cases.TOKENS),
}


SETTINGS: list[dict[str, Any]] = [{"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.5}]
# of the bytes, at most so many are held in each step; the first one of a budget holds as little as it can
MOST = {"convolutions": (0.28, 0.28, 0.42), "transformer": (0.64, 0.16, 0.5)}


class Unused(nn.Sequential):
    """With a layer that has no part in the loss."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.unused = nn.Linear(2, 2)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for part in list(self)[:-1]:
            input = part(input)
        return input


# the arguments of DistributedDataParallel
DDP: dict[str, dict[str, bool]] = {
    "ddp": {},
    "ddp, static graph": {"static_graph": True},
    "ddp, no_sync": {},
    "ddp, unused": {"find_unused_parameters": True},
}


def trained(network: str, wrap: str, setting: dict[str, Any] | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    make, shape = NETWORKS[network]
    model = make()
    if wrap == "ddp, unused":
        model = Unused(*model)
    if setting is not None:
        make_lean(model, **setting)
    inner = model
    if wrap in DDP:
        model = nn.parallel.DistributedDataParallel(model, **DDP[wrap])
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in model:
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(4):
        sends = wrap != "ddp, no_sync" or step % 2
        with nullcontext() if sends else model.no_sync():  # type: ignore[operator]
            loss = model(torch.randn(shape, generator=generator)).square().mean()
            if setting is not None:
                share = kept(last_pass(inner))
                assert share <= MOST[network][SETTINGS.index(setting)], (wrap, setting, step, share)
            loss.backward()
        if sends:
            optimizer.step()
            optimizer.zero_grad()
    return [getattr(v, "_local_tensor", v).detach().clone() for v in model.state_dict().values()]


def work(rank: int, network: str, wraps: list[str]) -> None:
    no_pass_is_small()
    for wrap in wraps:
        stock = trained(network, wrap, None)
        for setting in SETTINGS:
            ours = trained(network, wrap, setting)
            assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True)), (wrap, setting)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.sampled(of=2)
def test_two_ranks_train_to_the_same_bits(network: str) -> None:
    ranks(2, work, network, [*DDP, "fsdp"])
