"""`lean(head=True)` and a vocabulary that is split over two gloo ranks: by torch's plans, or by a program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lean_ranks import Decoder, cut, local
from ranks import ranks
from torch import Tensor, nn

from leannorm.saving import lean

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")
H, V = 16, 320


def tensor_parallel(rank: int, plan: str, head: bool) -> tuple[list[Tensor], list[str]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "parts"))
    torch.manual_seed(0)
    model = Decoder(H, 1, V)
    cut(model, mesh["parts"], plan.split(", ")[0])
    if plan.endswith("sharded"):
        fully_shard(model, mesh=mesh["data"])
    words = torch.randint(V, (2, 16), generator=torch.Generator().manual_seed(1))
    target: Any = words.flatten()
    if plan == "loss":
        target = DTensor.from_local(target, mesh["parts"], [Replicate()])
    with loss_parallel() if plan == "loss" else nullcontext():
        with lean("conv", head=True) if head else nullcontext() as saved:
            loss = F.cross_entropy(model(words).flatten(0, 1), target)
        loss.backward()
    made = [local(t).clone() for t in (loss.detach(), *(p.grad for p in model.parameters()))]
    return made, [] if saved is None else [r for r in saved.reasons if r.startswith("head=True")]


def of_plan(rank: int, plan: str) -> list[str]:
    (plain, _), (ours, reasons) = (tensor_parallel(rank, plan, head) for head in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    return reasons


@pytest.mark.parametrize("plan", ["columns", "sequence", "loss", "columns, sharded"])
def test_a_vocabulary_split_over_ranks_is_computed_as_without_it(plan: str) -> None:
    for reasons in ranks(2, of_plan, plan):
        assert len(reasons) == 1
        assert f"a weight of {V} rows is a DTensor, sharded" in reasons[0]


class _Sum(torch.autograd.Function):
    """Megatron's: the sum over ranks, whose gradient each rank has already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        made = x.clone()
        dist.all_reduce(made)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _CrossEntropy(torch.autograd.Function):
    """Megatron's, of this rank's part of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        top = logits.max(-1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        e = (logits - top.unsqueeze(-1)).exp()
        sums = e.sum(-1)
        dist.all_reduce(sums)
        at, here = within_part(target)
        picked = logits.gather(-1, at.unsqueeze(-1)).squeeze(-1).where(here, 0)
        dist.all_reduce(picked)
        ctx.save_for_backward(e / sums.unsqueeze(-1), at, here)
        return sums.log() + top - picked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        shares, at, here = ctx.saved_tensors
        one = torch.zeros_like(shares).scatter_(-1, at.unsqueeze(-1), here.unsqueeze(-1).to(shares.dtype))
        return (shares - one) * grad.unsqueeze(-1), None


def within_part(target: Tensor) -> tuple[Tensor, Tensor]:
    at = target - dist.get_rank() * V
    return at.clamp(0, V - 1), (at >= 0) & (at < V)


def by_functions(logits: Tensor, target: Tensor) -> Tensor:
    top = logits.detach().max(-1).values
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    sums = _Sum.apply((logits - top.unsqueeze(-1)).exp().sum(-1))
    at, here = within_part(target)
    picked = _Sum.apply(logits.gather(-1, at.unsqueeze(-1)).squeeze(-1).where(here, 0))
    return (sums.log() + top - picked).mean()


def by_parts(logits: Tensor, target: Tensor) -> Tensor:
    """Without the logits of this rank's part: logsumexp and gather read them by columns."""
    at, here = within_part(target)
    lse = logits.logsumexp(-1)
    sums = _Sum.apply(lse.exp())
    picked = _Sum.apply(logits.gather(-1, at.unsqueeze(-1)).squeeze(-1).where(here, 0))
    return (sums.log() - picked).mean()


def gathered(logits: Tensor, target: Tensor) -> Tensor:
    from torch.distributed.nn.functional import all_gather

    return F.cross_entropy(torch.cat(all_gather(logits), -1), target)


def gathered_in_place(logits: Tensor, target: Tensor) -> Tensor:
    parts = [torch.empty_like(logits.detach()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits.detach())
    parts[dist.get_rank()] = logits
    return F.cross_entropy(torch.cat(parts, -1), target)


def summed_in_place(logits: Tensor, target: Tensor) -> Tensor:
    whole = logits.detach()
    dist.all_reduce(whole)
    return F.cross_entropy(logits, target % V) + whole.mean()


# a rank's part of the logits, and what needs it as a tensor
PARTS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "functions": (by_functions, ["max"]),
    "parts": (by_parts, []),
    "a function of the program": (lambda y, t: _CrossEntropy.apply(y, t).mean(), ["max"]),
    "gathered": (gathered, ["empty_like"]),
    "gathered in place": (gathered_in_place, ["empty_like"]),
    "summed in place": (summed_in_place, ["all_reduce"]),
}


def of_parts(rank: int, name: str) -> list[str]:
    made = []
    for head in (False, True):
        torch.manual_seed(rank)
        weight, x = nn.Parameter(torch.randn(V, H).double()), torch.ones(6, H).double().cumsum(0) / 9
        x.requires_grad_()
        target = torch.randint(2 * V, (6,), generator=torch.Generator().manual_seed(1))
        with lean("conv", head=True) if head else nullcontext() as saved:
            loss = PARTS[name][0](F.linear(x, weight), target)
        loss.backward()
        made.append([loss.detach(), x.grad, weight.grad])
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    return [r for r in saved.reasons if r.startswith("head=True")]


@pytest.mark.filterwarnings("ignore:leannorm")
@pytest.mark.parametrize("name", PARTS)
def test_a_program_that_splits_the_vocabulary_itself(name: str) -> None:
    for reasons in ranks(2, of_parts, name):
        assert len(reasons) == len(PARTS[name][1]), reasons
        assert all(f"since {n}" in r for n, r in zip(PARTS[name][1], reasons, strict=True)), reasons
