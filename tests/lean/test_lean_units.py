"""`lean()` under FSDP2: weights that are freed between the passes, several passes at once."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lean_ranks import searching
from ranks import ranks
from torch import Tensor, nn

from leannorm.saving.reasons import Why

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

SHARDED = Why.FREED.sentence
SETTINGS: list[dict[str, Any]] = [{"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.3}]


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.act, self.down = nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return y


class Twice(nn.Module):
    """One layer runs twice, and an inner output is read outside, too."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layer, self.pair = nn.Linear(width, width), Pair(width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        x = torch.sigmoid(self.layer(x))
        inner, outer = self.pair(x)
        y: Tensor = torch.tanh(inner) + outer
        return y


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, nn.functional.silu(y)


def model_of(units: str, **keywords: Any) -> nn.Module:
    """`units`: "blocks", "layers", or "" for a model that is not cut."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), Block(), Twice(), Block(), nn.Linear(32, 16))
    if not units:
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    keywords["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    if keywords.pop("offloaded", False):
        keywords["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if keywords.pop("narrow", False):
        keywords["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.LayerNorm, Pair))]
    for part in list(model) if units == "blocks" else layers[::-1]:
        fully_shard(part, **keywords)
    fully_shard(model, **keywords)
    return model


def trained(
    units: str, setting: dict[str, Any] | None, passes: int = 1, accumulate: bool = False, **keywords: Any
) -> tuple[list[Tensor], Any]:
    model = model_of(units, **keywords)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    saved = None
    for step in range(3):
        losses = []
        for _ in range(passes):
            saved = None if setting is None else searching(setting)
            with nullcontext() if saved is None else saved:
                losses.append(model(torch.randn(16, 32, 16, generator=generator)).float().square().mean())
        if accumulate:
            model.set_requires_gradient_sync(step == 2)  # type: ignore[operator]
        for loss in losses:
            loss.backward()
        if not accumulate or step == 2:
            optimizer.step()
            optimizer.zero_grad()
    return [getattr(v, "_local_tensor", v).detach().clone() for v in model.state_dict().values()], saved


CUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks": ("blocks", {"reshard_after_forward": True}),
    "blocks, not resharded": ("blocks", {"reshard_after_forward": False, "passes": 2}),
    "blocks, narrow": ("blocks", {"reshard_after_forward": True, "narrow": True}),
    "blocks, offloaded": ("blocks", {"reshard_after_forward": True, "offloaded": True}),
    "layers": ("layers", {"reshard_after_forward": True}),
    "layers, not resharded, two passes": ("layers", {"reshard_after_forward": False, "passes": 2}),
    "layers, narrow": ("layers", {"reshard_after_forward": True, "narrow": True, "accumulate": True}),
}


def cut(rank: int, names: list[str]) -> dict[str, tuple[list[float], list[str]]]:
    found = {}
    trained("", {"recompute": "conv"})  # these steps are known as exact, before weights are cut
    for name in names:
        units, keywords = CUTS[name]
        stock, _ = trained(units, None, **keywords)
        held = []
        for setting in SETTINGS:
            ours, saved = trained(units, setting, **keywords)
            assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True)), (name, setting)
            held.append(saved.kept_bytes / (saved.kept_bytes + saved.rebuilt_bytes))
            if setting == {"recompute": "conv"}:
                told = saved.reasons
        found[name] = held, told
    return found


@pytest.mark.parametrize("units", ["blocks", "layers"])
@pytest.mark.sampled(of=2)
def test_what_reads_weights_that_are_freed_by_then_is_held_and_said_with_the_wrap(units: str) -> None:
    names = [name for name, (of, _) in CUTS.items() if of == units]
    for found in ranks(2, cut, names, group_timeout=30.0):
        for name, (held, told) in found.items():
            norm, conv, _ = held
            if units == "blocks":
                assert conv < 0.3 < norm, (name, held)
                assert not any(SHARDED in reason for reason in told), told
            else:
                assert conv < 0.66, (name, held)
                assert any(SHARDED in reason and "on each Block" in reason for reason in told), told


class Scores(nn.Module):
    """With its loss inside, or outside."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside, self.body, self.head = (
            inside,
            Block(),
            nn.Linear(32, 256),
        )  # a smaller weight would be copied

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.body(x))
        return torch.log_softmax(y, -1) if self.inside else y


def scored(rank: int, inside: bool) -> tuple[int, list[str]]:
    """Two passes under way: the first backward pass frees what the second one's loss would read."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found = []
    for setting in (None, {"recompute": "conv"}):
        torch.manual_seed(0)
        model, mesh = Scores(inside), init_device_mesh("cpu", (2,))
        fully_shard(model.body, mesh=mesh)
        fully_shard(model, mesh=mesh)
        losses = []
        for seed in range(2):
            x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
            saved = nullcontext() if setting is None else searching(setting)
            with saved:
                y = model(x) if inside else torch.log_softmax(model(x), -1)
                losses.append(y.select(1, 0).mean())
        for loss in losses:
            loss.backward()
        found.append([p.grad.to_local() for p in model.parameters() if p.grad is not None])  # type: ignore[attr-defined]
    assert found[0]
    assert all(map(torch.equal, *found))
    return saved.kept_bytes, saved.reasons  # type: ignore[union-attr]


def test_a_loss_within_the_model_is_rebuilt_and_one_outside_is_held() -> None:
    within, told = ranks(2, scored, True)[0]
    assert not told
    outside, told = ranks(2, scored, False)[0]
    assert outside >= within + 64 * 256 * 4
    assert any(SHARDED in reason and "within" in reason for reason in told), told
