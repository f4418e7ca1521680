"""`lean()` on meshes of two dimensions: FSDP2 of what is cut by columns, and FSDP2 in replicas."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lean_ranks import Decoder, cut, kept, local, searching
from ranks import ranks
from torch import Tensor

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

SETTINGS: list[dict[str, Any]] = [{"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.4}]
# the plan of what is cut, or none; more of it; of the bytes, what a rank holds at most with each setting
WAYS: dict[str, tuple[str, dict[str, bool], tuple[float, ...]]] = {
    "columns": ("columns", {}, (0.58, 0.24, 0.42)),
    "replicas": ("", {}, (0.61, 0.17, 0.42)),
    "sequence": ("sequence", {}, (0.75, 0.36, 0.42)),
    "columns, narrow, not resharded": ("columns", {"narrow": True, "resharded": False}, (0.48, 0.2, 0.42)),
    "sequence, accumulated": ("sequence", {"accumulated": True}, (0.75, 0.36, 0.42)),
    "replicas, offloaded, accumulated": ("", {"offloaded": True, "accumulated": True}, (0.61, 0.17, 0.42)),
}


def trained(mesh: Any, name: str, setting: dict[str, Any] | None) -> tuple[list[Tensor], float]:
    """Weights after the steps, and the largest share that was held, without the first, which has no plan."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    plan, more, _ = WAYS[name]
    torch.manual_seed(0)
    model = Decoder()
    of_units: dict[str, Any] = {"mesh": mesh["data"] if plan else mesh}
    of_units["reshard_after_forward"] = more.get("resharded", True)
    if plan:
        cut(model, mesh["parts"], plan)
    if "narrow" in more:
        of_units["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if "offloaded" in more:
        of_units["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        fully_shard(block, **of_units)
    fully_shard(model, **of_units)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    group, most = mesh.get_local_rank("data"), 0.0
    data = group if plan else dist.get_rank()
    for step in range(4 if "accumulated" in more else 2):
        generator = torch.Generator().manual_seed(10 * step + data)
        words = torch.randint(0, 128, (8, (32, 24)[group]), generator=generator)
        last = "accumulated" not in more or step % 2 == 1
        model.set_requires_gradient_sync(last)
        with nullcontext() if setting is None else searching(setting) as saved:
            loss = F.cross_entropy(model(words).flatten(0, 1).float(), words.flatten())
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        if step and setting is not None:
            most = max(most, kept(saved))
    return [local(t).detach().clone() for t in (*model.parameters(), loss)], most


def meshes(rank: int, names: list[str]) -> dict[str, list[float]]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "parts"))
    held = {}
    for name in names:
        stock, _ = trained(mesh, name, None)
        held[name] = []
        for setting in SETTINGS:
            ours, share = trained(mesh, name, setting)
            assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True)), (name, setting)
            held[name].append(share)
    return held


def compared(names: list[str]) -> None:
    for held in ranks(4, meshes, names, group_timeout=60.0):
        for name in names:
            assert all(a <= b for a, b in zip(held[name], WAYS[name][2], strict=True)), (name, held[name])


@pytest.mark.parametrize("name", ["columns", "replicas"])
def test_meshes_of_two_dimensions_train_to_the_bits_of_stock(name: str) -> None:
    compared([name])


@pytest.mark.conformance
def test_more_meshes_of_two_dimensions() -> None:
    compared(list(WAYS)[2:])
