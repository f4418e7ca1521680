"""`lean()` on models that torch's own plans cut over two ranks: stock's bits, and what each rank holds."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lean_ranks import kept, local, mesh_of_all, searching
from ranks import ranks
from torch import Tensor, nn

from leannorm.saving import reasons

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")


class Attention(nn.Module):
    """Of the heads that this rank has."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out, self.size = nn.Linear(width, width, bias=False), width // heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False)
            for sizes in ((width, 3 * width), (width, 3 * width), (3 * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), Gated(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        y: Tensor = x + self.mlp(self.second(x))
        return y


class Decoder(nn.Module):
    """A small decoder of the usual kind, with a loss over its vocabulary."""

    def __init__(self, width: int = 64, layers: int = 3, words: int = 128) -> None:
        super().__init__()
        self.embed, self.blocks = (
            nn.Embedding(words, width),
            nn.ModuleList(Block(width, 4) for _ in range(layers)),
        )
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x))
        return y


def cut(model: Decoder, mesh: Any, plan: str) -> None:
    """By columns and rows; "sequence": norms and residual sums along the sequence; "loss": the loss, too."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    along, heads = plan != "columns", ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    for block in model.blocks:
        by: dict[str, Any] = {name: ColwiseParallel() for name in heads}
        back = {"output_layouts": Shard(1), "use_local_output": False} if along else {}
        by |= {name: RowwiseParallel(**back) for name in ("attention.out", "mlp.down")}
        if along:
            gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
            by |= {name: SequenceParallel() for name in ("first", "second")}
            by |= {name: PrepareModuleInput(**gather) for name in ("attention", "mlp")}
        parallelize_module(block, mesh, by)
    top: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    if along:
        of_words = {"input_layouts": Replicate(), "output_layouts": Shard(1), "use_local_output": False}
        out = Shard(-1) if plan == "loss" else Replicate()
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=out, use_local_output=plan != "loss")
        top = {"embed": RowwiseParallel(**of_words), "norm": SequenceParallel(), "head": head}
    parallelize_module(model, mesh, top)


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
        assert share <= most
        needs = sum(reason == reasons.COLLECTIVE for reason in why)
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
        assert reasons.COLLECTIVE in why
        assert reasons.SUBCLASSES not in of_pass
        assert any(reasons.COLLECTIVE in sentence for sentence in of_pass)
