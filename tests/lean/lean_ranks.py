"""What tests of `lean()` on several ranks share."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from leannorm.saving import lean, small


def mesh_of_all() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def searching(setting: dict[str, Any]) -> lean:
    """`lean()` that searches small passes, too."""
    saved = lean(**setting)
    saved.place = small.NEVER_SMALL
    return saved


def no_pass_is_small() -> None:
    """As the fixture of that name does, which does not reach a rank: for what opens its passes elsewhere."""
    os.environ["LEANNORM_SMALL_BYTES"] = "-1"


def kept(saved: Any) -> float:
    return saved.kept_bytes / max(saved.kept_bytes + saved.rebuilt_bytes, 1)


# ------------------------------------------------ a model, and torch's plans for it


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
