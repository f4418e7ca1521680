"""`lean()` on a Llama of transformers, cut by torch's own plans: stock's bits, and what each rank holds."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lean_ranks import kept, local, searching
from ranks import ranks
from torch import Tensor

from benchmarks import lean_ranks as benchmark

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
]

SETTINGS: list[dict[str, Any]] = [{"recompute": "norm"}, {"recompute": "conv"}]
# of the bytes, what a rank holds at most with each of the settings; the whole logits are a large part
MOST = {
    2: {"columns": (0.55, 0.34), "sequence": (0.73, 0.48), "loss": (0.71, 0.45)},
    4: {"columns": (0.52, 0.38), "sequence": (0.8, 0.6), "loss": (0.76, 0.54)},
}
LENGTHS = 64, 48  # of the sequences, in each group of ranks that has its own


def trained(mesh: Any, plan: str, setting: dict[str, Any] | None) -> tuple[list[Tensor], float]:
    """Gradients of every step, and the largest share that one held; "data" x "parts" are the dimensions."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import loss_parallel

    torch.manual_seed(0)
    model, parts = benchmark._llama(), mesh["parts"]
    benchmark._cut_llama(model, parts, plan)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    group = mesh.get_local_rank("data")
    length, found, most = LENGTHS[group], list[Tensor](), 0.0
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + group)
        words = torch.randint(0, benchmark.WORDS, (8, length), generator=generator)
        target = words.flatten()
        if plan == "loss":
            target = DTensor.from_local(target, parts, [Replicate()])
        with loss_parallel() if plan == "loss" else nullcontext():
            with nullcontext() if setting is None else searching(setting) as saved:
                scores = model(input_ids=words, position_ids=torch.arange(length)[None]).logits
                loss = F.cross_entropy(scores.flatten(0, 1), target)
            loss.backward()
        gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
        if mesh.size(0) > 1:
            for gradient in gradients:
                dist.all_reduce(gradient, group=mesh.get_group("data"))
        found += [loss.detach(), *(gradient.clone() for gradient in gradients)]
        optimizer.step()
        optimizer.zero_grad()
        most = max(most, 0.0 if setting is None else kept(saved))
    return [local(t) for t in found], most


def llamas(rank: int, groups: int) -> dict[str, list[float]]:
    from torch.distributed.device_mesh import init_device_mesh

    sizes = groups, dist.get_world_size() // groups
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "parts"))
    held = {}
    for plan in MOST[sizes[1]]:
        stock, _ = trained(mesh, plan, None)
        assert len(stock) > 2 * 9 * 3  # weights of three layers
        shares = []
        for setting in SETTINGS:
            ours, share = trained(mesh, plan, setting)
            assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True)), (plan, setting)
            shares.append(share)
        held[plan] = shares
    return held


def compared(world: int, groups: int) -> None:
    for held in ranks(world, llamas, groups, group_timeout=60.0):
        for plan, most in MOST[world // groups].items():
            assert all(a <= b for a, b in zip(held[plan], most, strict=True)), (plan, held[plan])


def test_a_llama_cut_over_two_ranks() -> None:
    compared(2, 1)


@pytest.mark.conformance
def test_a_llama_cut_over_four_ranks() -> None:
    compared(4, 1)


@pytest.mark.conformance
def test_groups_of_two_ranks_with_sequences_of_other_lengths() -> None:
    compared(4, 2)
