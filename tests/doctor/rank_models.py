"""Models of tests over ranks: convolutions, blocks, and Megatron-LM's sequence parallelism by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import leannorm


def images(seed: int = 0) -> Tensor:
    return torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed))


def convolutions(sync: Any = None, stepped: bool = True) -> nn.Module:
    """Two layers, in the middle of training: the statistics of all norms have moved."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.Dropout(),
    )
    for norm in (model[1], model[4]):
        norm.momentum = None
    for seed in range(4):
        model(images(seed))
    for norm in (model[1], model[4]):
        norm.momentum = 0.1
        with torch.no_grad():
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.uniform_(-0.1, 0.1)
    if sync is not None:
        leannorm.convert(model, to="sync", process_group=None if sync == "all" else sync)
    return model


class Block(nn.Module):
    """A norm and an MLP beside a residual."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


def blocks() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.LayerNorm(16))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.5, 1.5)
                module.bias.uniform_(-0.1, 0.1)
    return model


# ------------------------------------------------ sequence parallelism written by hand, as in Megatron-LM


class _Split(torch.autograd.Function):
    """The rank's part of the sequence; the parts of the gradient are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _part(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _gathered(dy, ctx.group), None


class _Gather(torch.autograd.Function):
    """The whole sequence; of its gradient, a sum over ranks, each has its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, partial: bool, group: Any) -> Tensor:
        ctx.partial, ctx.group = partial, group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        dy = dy.clone()
        if ctx.partial:
            dist.all_reduce(dy, group=ctx.group)
        return _part(dy, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    """The rank's part of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return _part(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _gathered(dy, ctx.group), None


def _part(x: Tensor, group: Any) -> Tensor:
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


def _gathered(x: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)


class MegatronBlock(Block):
    """Its norm sees the rank's part of the sequence, its MLP is cut in columns and rows."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        with torch.no_grad():
            self.up.weight = nn.Parameter(self.up.weight.chunk(ranks)[rank].clone())
            self.up.bias = nn.Parameter(self.up.bias.chunk(ranks)[rank].clone())
            self.down.weight = nn.Parameter(self.down.weight.chunk(ranks, 1)[rank].clone())
            self.down.bias = None
        for cut in (self.up.weight, self.up.bias, self.down.weight):
            cut.tensor_model_parallel = True

    def forward(self, x: Tensor) -> Tensor:
        inner = self.down(torch.relu(self.up(_Gather.apply(self.norm(x), True, self.group))))
        y: Tensor = x + _Scatter.apply(inner, self.group)
        return y


class Megatron(nn.Module):
    """Two blocks and a norm; `group` cuts them, by default all ranks."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group = group
        self.layers = nn.Sequential(MegatronBlock(group), MegatronBlock(group))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Gather.apply(self.norm(self.layers(_Split.apply(x, self.group))), False, self.group)
        return y


def finalized(model: nn.Module, batch: Tensor) -> None:
    """A step of Megatron-LM: the norms' gradients are summed over tensor-parallel ranks after the pass."""
    (model(batch) * torch.linspace(0, 9, 16).cos()).sum().backward()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            for parameter in module.parameters():
                dist.all_reduce(parameter.grad)


def summed_by_hooks(model: Megatron) -> Megatron:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda p: dist.all_reduce(p.grad, group=model.group)
                )
    return model
