"""`lean()` on models that torch's own plans cut over two ranks: stock's bits, and what each rank holds."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lean_ranks import Decoder, cut, kept, local, mesh_of_all, searching
from ranks import ranks
from torch import Tensor, nn

from leannorm.saving import reasons

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")


def trained(plan: str, setting: dict[str, Any] | None) -> tuple[list[Tensor], Any]:
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import loss_parallel

    torch.manual_seed(0)
    model, mesh = Decoder(), mesh_of_all()
    if plan != "one rank":
        cut(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        words = torch.randint(0, 128, (8, 32), generator=torch.Generator().manual_seed(step))
        target = words.flatten()
        with loss_parallel() if plan == "loss" else nullcontext():
            with nullcontext() if setting is None else searching(setting) as saved:
                scores = model(words).flatten(0, 1)
                if plan == "loss":
                    target = DTensor.from_local(target, mesh, [Replicate()])
                loss = F.cross_entropy(scores, target)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [local(p).detach().clone() for p in (*model.parameters(), loss)], saved


def decoders(rank: int, plan: str) -> tuple[float, list[str]]:
    stock, _ = trained(plan, None)
    for setting in ({}, {"budget": 0.4}, {"recompute": "conv"}):
        ours, saved = trained(plan, setting)
        assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True)), setting
    return kept(saved), [r.why for r in saved.records if r.why and r.bytes > 1024]


@pytest.mark.parametrize(
    ("plan", "most"), [("one rank", 0.12), ("columns", 0.22), ("sequence", 0.34), ("loss", 0.32)]
)
@pytest.mark.sampled(of=2)
def test_a_decoder_cut_by_torchs_plans_holds_what_would_need_a_message_and_little_else(
    plan: str, most: float
) -> None:
    for share, why in ranks(2, decoders, plan, group_timeout=30.0):
        assert share <= most + 0.01  # the log copies weights of up to 16 KiB, which are 1 % here
        needs = sum(reason == reasons.Why.COLLECTIVE.sentence for reason in why)
        assert needs >= 4 if plan != "one rank" else not needs, why


def norm_of_a_sum_under_way(rank: int) -> tuple[list[str], list[str]]:
    """A product by rows gives a tensor of another class, whose sum over the ranks may be under way."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    block = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.SiLU())
    parallelize_module(block, mesh_of_all(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with searching({"recompute": "conv"}) as saved:
        loss = block(torch.ones(64, 64)).square().sum()
    loss.backward()
    return saved.reasons, [r.why for r in saved.records if r.why]


def test_what_a_collective_gave_is_told_as_that() -> None:
    for of_pass, why in ranks(2, norm_of_a_sum_under_way):
        assert reasons.Why.COLLECTIVE.sentence in why
        assert reasons.SUBCLASSES not in of_pass
        assert any(reasons.Why.COLLECTIVE.sentence in sentence for sentence in of_pass)


# ------------------------------------------------ experts, each on a rank


class Experts(nn.Module):
    """One on each rank: tokens are sent to the one that is best for them, unevenly, and back."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, 2, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed._functional_collectives import all_to_all_single_autograd as exchange

        h = self.norm(x)
        scores = self.router(h).softmax(-1)
        best = scores.argmax(-1)
        order, counts = best.argsort(stable=True), best.bincount(minlength=2)
        of_all = [torch.empty_like(counts) for _ in range(2)]
        dist.all_gather(of_all, counts)
        sent, received = counts.tolist(), [int(c[dist.get_rank()]) for c in of_all]
        assert sent[0] != sent[1]
        assert received[0] != received[1]
        y = exchange(h[order], received, sent, dist.group.WORLD)
        y = exchange(self.down(F.silu(self.up(y))), sent, received, dist.group.WORLD)
        z: Tensor = x + torch.empty_like(x).index_copy(0, order, y) * scores.gather(1, best[:, None])
        return z


def of_experts(setting: dict[str, Any] | None) -> tuple[list[Tensor], float]:
    rank, found, most = dist.get_rank(), list[Tensor](), 0.0
    torch.manual_seed(rank)
    model = nn.Sequential(Experts(), Experts(), Experts())
    for step in range(3):
        x = torch.randn(3000 + 1000 * rank, 32, generator=torch.Generator().manual_seed(2 * step + rank))
        with nullcontext() if setting is None else searching(setting) as saved:
            loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        most = max(most, 0.0 if setting is None else kept(saved))
    assert len(found) == 3 * (1 + 3 * 7)
    return found, most


EXPERTS: list[tuple[dict[str, Any], tuple[int, ...], float]] = [  # ranks that are lean, the most that is held
    ({}, (0, 1), 0.62),
    ({"budget": 0.4}, (0, 1), 0.42),
    ({"recompute": "conv"}, (0, 1), 0.34),
    ({"recompute": "conv"}, (0,), 0.34),
    ({"recompute": "conv"}, (1,), 0.34),
]


def experts(rank: int) -> None:
    stock, _ = of_experts(None)
    for setting, lean_ranks, most in EXPERTS:
        ours, share = of_experts(setting if rank in lean_ranks else None)
        assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True)), (setting, lean_ranks)
        assert share <= most + 0.04, (setting, lean_ranks, share)


def test_experts_on_two_ranks_where_both_are_lean_or_one() -> None:
    ranks(2, experts, group_timeout=20.0)
