"""`lean()` where ranks share tensors: DTensors are rebuilt without a message, with the bits of stock.

Rank 0 runs with `lean()`, rank 1 as stock: if a rebuild sent anything, both would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lean_ranks import kept, local, mesh_of_all, searching
from ranks import ranks, torch_merges
from torch import Tensor

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

SETTINGS: list[tuple[dict[str, Any], bool]] = [  # and whether all ranks have them, or rank 0 alone
    ({"recompute": "norm"}, False),
    ({}, False),
    ({"recompute": "conv"}, False),
    ({"budget": 0.3}, True),
    ({"recompute": "conv", "verify": True}, False),
    ({"held": (Tensor.clone, Tensor.clone)}, False),
    ({"recompute": "conv"}, True),
]


# ------------------------------------------------ programs of DTensors


def shard(shape: tuple[int, ...], *placements: Any, seed: int = 0, grad: bool = True) -> Tensor:
    """The same values on every rank, cut."""
    from torch.distributed.tensor import distribute_tensor

    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return distribute_tensor(whole, mesh_of_all(), placements).requires_grad_(grad)


def partial(shape: tuple[int, ...], zero_elsewhere: bool = False) -> Tensor:
    """Each rank has a summand; with `zero_elsewhere` rank 0 has the sum already."""
    from torch.distributed.tensor import DTensor, Partial

    own = torch.randn(shape, generator=torch.Generator().manual_seed(dist.get_rank()))
    own = own * 0 if zero_elsewhere and dist.get_rank() else own
    return DTensor.from_local(own.requires_grad_(), mesh_of_all(), [Partial()])


def _placements() -> tuple[Any, Any]:
    from torch.distributed.tensor import Replicate, Shard

    return Replicate(), Shard


def activations(size: int) -> Tensor:
    _, cut = _placements()
    x = shard((4, size, 64), cut(1))
    y = F.silu(F.gelu(x * 2.0) + x)
    return torch.tanh(torch.sigmoid(y).transpose(0, 1)).sum()


def norms(size: int) -> Tensor:
    whole, cut = _placements()
    x, w, b = shard((8, size, 96), cut(1)), shard((96,), whole, seed=1), shard((96,), whole, seed=2)
    y = F.layer_norm(x, (96,), w, b)
    z = F.relu(F.rms_norm(y, (96,), w))
    return (z * F.softmax(y, -1)).square().sum()


def norm_over_the_cut() -> Tensor:
    """Its sums are of all ranks."""
    whole, cut = _placements()
    x, w = shard((64, 96), cut(1)), shard((96,), whole, seed=1)
    return F.silu(F.layer_norm(F.relu(x), (96,), w)).square().sum()


def softmax_over_the_cut() -> Tensor:
    _, cut = _placements()
    return F.log_softmax(F.relu(shard((64, 96), cut(1))), 1).exp().square().sum()


def of_partial_sums(zero_elsewhere: bool) -> Tensor:
    """A relu of a sum is no sum of relus, also where one rank has all of it."""
    x = partial((64, 64), zero_elsewhere)
    y = torch.relu(x * 3.0)
    return torch.sigmoid(y.square() + y).sum()


def partial_bias() -> Tensor:
    """Torch sends a message to copy partial sums."""
    from torch.distributed.tensor import DTensor, Partial

    whole, _ = _placements()
    x, w = shard((64, 64), whole), shard((64,), whole, seed=1)
    bias = DTensor.from_local(torch.full((64,), 1.0 + dist.get_rank()), mesh_of_all(), [Partial()])
    return F.silu(F.layer_norm(x, (64,), w, bias)).square().sum()


def products(rows: int) -> Tensor:
    """Columns, then rows; the second product is a partial sum."""
    whole, cut = _placements()
    x, a, b = shard((rows, 64), whole), shard((64, 128), cut(1), seed=1), shard((128, 64), cut(0), seed=2)
    y = F.gelu(x @ a) @ b
    return F.silu(y.redistribute(placements=[whole])).square().sum()


def mixed() -> Tensor:
    """One operand is cut where the other is whole: torch cuts it on this rank, and sends nothing."""
    whole, cut = _placements()
    x, y = shard((16, 8, 64), whole), shard((16, 8, 64), cut(1), seed=1)
    z = F.silu(F.relu(x) * F.relu(y))
    return (z + F.relu(x).redistribute(placements=[cut(1)])).square().sum()


def moves() -> Tensor:
    _, cut = _placements()
    x = F.relu(shard((8, 16, 64), cut(1)))
    y = F.silu(x.reshape(8, 16, 4, 16).transpose(1, 2))
    first, second = F.gelu(torch.cat([y, y * 2], 3)).split(16, 3)
    z = F.silu(first) * second
    w = F.silu(z.contiguous().redistribute(placements=[cut(0)]))
    return F.silu(w[:, 1]).sum() + torch.tanh(z.transpose(1, 2).flatten(2)).sum()


def parts_of_the_cut() -> Tensor:
    """A slice along the cut dimension needs all ranks."""
    _, cut = _placements()
    x = F.relu(shard((64, 64), cut(0)))
    first, second = x.split(32, 0)
    return F.silu(x[3:40] * 2).square().sum() + (F.silu(first) * second).sum()


def merged_dims() -> Tensor:
    """A cut dimension becomes the inner part of a merged one."""
    _, cut = _placements()
    x = F.relu(shard((4, 16, 64), cut(1)))
    return torch.tanh(F.silu(x.reshape(64, 64)) * 2).sum()


def local_and_back() -> Tensor:
    from torch.distributed.tensor import DTensor

    whole, cut = _placements()
    x = F.silu(shard((32, 64), cut(0)))
    y = F.gelu(F.relu(x.to_local()) * 2)
    z = DTensor.from_local(y, mesh_of_all(), [cut(0)])
    return F.silu(z * x).square().sum() + F.relu(z.redistribute(placements=[whole])).square().sum()


def edited_in_place() -> Tensor:
    _, cut = _placements()
    x = shard((32, 64), cut(0))
    return F.silu(F.relu((x * 2).add_(1), inplace=True)).mul_(2).square().sum()


PROGRAMS: dict[str, Callable[[], Tensor]] = {
    "activations": lambda: activations(16),
    "uneven": lambda: activations(15),
    "one rank has nothing": lambda: activations(1),
    "norms": lambda: norms(16),
    "norms, uneven": lambda: norms(13),
    "norm over the cut": norm_over_the_cut,
    "softmax over the cut": softmax_over_the_cut,
    "partial": lambda: of_partial_sums(False),
    "partial, of one rank": lambda: of_partial_sums(True),
    "partial bias": partial_bias,
    "products": lambda: products(64),
    "mixed": mixed,
    "moves": moves,
    "parts of the cut": parts_of_the_cut,
    "merged dims": merged_dims,
    "local and back": local_and_back,
    "in place": edited_in_place,
}
# of the bytes, at most so many are held on a rank with `lean("conv")`
AT_MOST = {"activations": 0.55, "uneven": 0.55, "norms": 0.5, "products": 0.55, "local and back": 0.7}


def leaves(loss: Tensor) -> list[Tensor]:
    """The leaves that the loss depends on, in the order of the graph."""
    found, seen, left = list[Tensor](), set[Any](), [loss.grad_fn]
    while left:
        node: Any = left.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad"):
            found.append(node.variable)
        left += [producer for producer, _ in node.next_functions]
    return found


def gradients(name: str, setting: dict[str, Any] | None) -> tuple[list[Tensor], float]:
    with nullcontext() if setting is None else searching(setting) as saved:
        loss = PROGRAMS[name]()
    inputs = leaves(loss)
    loss.backward()
    grads = [local(x.grad).clone() for x in inputs if x.grad is not None]
    return grads, 1.0 if setting is None else kept(saved)


def programs(rank: int, names: list[str]) -> dict[str, float]:
    _, cut = _placements()
    merges = torch_merges(shard((4, 16, 64), cut(1)), lambda x: x.reshape(64, 64))
    held = {}
    for name in names:
        if name == "merged dims" and not merges:
            continue
        stock, _ = gradients(name, None)
        for setting, on_all in SETTINGS:
            ours, share = gradients(name, setting if on_all or not rank else None)
            assert ours, name
            for a, b in zip(ours, stock, strict=True):
                assert torch.equal(a, b), (name, setting, on_all)
        held[name] = share  # of the last setting
    return held


def test_programs_of_dtensors_have_the_bits_of_stock_also_where_one_rank_alone_rebuilds() -> None:
    held = ranks(2, programs, list(PROGRAMS), group_timeout=20.0)
    for name, most in AT_MOST.items():
        assert held[0][name] <= most, (name, held[0])


def elsewhere(rank: int) -> dict[str, tuple[int, int]]:
    """What hooks get of held DTensors: this rank's parts. Their bytes, and those of the largest one held."""
    found = {}
    for name in ("activations", "products", "moves"):
        moved: list[int] = []

        def pack(tensor: Tensor, moved: list[int] = moved) -> Tensor:
            assert type(tensor) is Tensor
            moved.append(tensor.nbytes)
            return tensor.clone()

        with searching({"held": (pack, torch.clone)}) as saved:
            loss = PROGRAMS[name]()
        loss.backward()
        held = [r.bytes for r in saved.records if r.node and not r.rebuilt]
        found[name] = sum(moved), max(held)
    return found


def test_held_dtensors_go_through_other_hooks() -> None:
    for found in ranks(2, elsewhere):
        for name, (moved, largest) in found.items():
            assert moved >= largest > 4096, name


Edited = tuple[str, list[Tensor | None]]


def edited(what: str, setting: dict[str, Any] | None) -> Edited:
    """What the backward pass says where a DTensor that it needs was edited, and the gradients."""
    whole, cut = _placements()
    x, w = shard((64, 64), whole), shard((64, 256), cut(1), seed=1)
    with nullcontext() if setting is None else searching(setting) as saved:
        y = F.silu(x) @ w
        loss = F.silu(y).square().sum()
    of = {"weight": w, "weight.data": w.data, "local weight": local(w), "output": y}
    with torch.no_grad():
        of.get(what, torch.zeros(1)).add_(1)
    said = "none"
    try:
        loss.backward()
    except RuntimeError as raised:
        said = str(raised)
    if saved is not None:
        assert all(record.rebuilt for record in saved.records if record.node)
    return said, [None if t.grad is None else local(t.grad) for t in (x, w)]


def edits(rank: int) -> dict[str, list[Edited]]:
    """Of plain PyTorch, and twice of `lean()`: at first every step is compared, as the leaf is new."""
    names = ("weight", "weight.data", "local weight", "output", "nothing")
    return {
        what: [edited(what, s) for s in (None, {"recompute": "conv"}, {"recompute": "conv"})]
        for what in names
    }


def test_an_edit_of_a_dtensor_that_a_rebuild_needs_is_as_in_plain_pytorch() -> None:
    """An error where autograd sees it; else the node that has saved the weight reads what was written."""
    found = ranks(2, edits)[0]
    for what in ("weight", "output"):
        assert all("at version 1; expected version 0" in said for said, _ in found[what]), what
    for what in ("weight.data", "local weight", "nothing"):
        stock = found[what][0][1]
        for said, ours in found[what]:
            assert said == "none", (what, said)
            assert all(map(torch.equal, ours, stock)), what
        assert torch.equal(stock[0], found["nothing"][0][1][0]) == (what == "nothing")


def second_order(rank: int) -> None:
    whole, cut = _placements()
    found = []
    for setting in (None, {}, {"recompute": "conv"}):
        x, w = shard((32, 64), cut(0)), shard((64, 64), whole, seed=3)
        with nullcontext() if setting is None else searching(setting):
            y = torch.tanh(F.silu(x) @ w).square().sum()
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            z = g.square().sum()
        z.backward()
        found.append([local(t.grad) for t in (x, w) if t.grad is not None])
    for ours in found[1:]:
        assert len(ours) == 2
        assert all(torch.equal(a, b) for a, b in zip(ours, found[0], strict=True))


def test_second_derivatives_of_dtensors() -> None:
    ranks(2, second_order)
