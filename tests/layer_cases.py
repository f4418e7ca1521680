"""The table of layers: how each is made, torch's of the same state, an input, and what it does not promise.

`layers/test_contract.py` asks all of it of every row, so that a new layer is one row here.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import nn as stock
from torch.nn.modules.batchnorm import _BatchNorm

from leannorm import nn
from leannorm.ops.activation import ACTIVATIONS


class Layer(NamedTuple):
    """A layer of `leannorm.nn`, and inputs that it takes.

    `twin` makes torch's layer of the same state, words and answers; `kind` is what `isinstance` finds.
    `options` are tried each, the first with every clause. `residual` is a second input of the same shape,
    `others` are the shapes of those behind it. `empty` are the axes that may have no entries.
    `without` gives the page and its words that say why a clause is not promised, or not in training.
    """

    name: str
    given: tuple[Any, ...]
    shape: tuple[int, ...]
    twin: Callable[..., stock.Module]
    kind: type[stock.Module]
    options: tuple[dict[str, Any], ...] = ({},)
    residual: bool = False
    empty: tuple[int, ...] = (0, -1)
    without: Mapping[str, tuple[str, str]] = MappingProxyType({})
    others: tuple[tuple[int, ...], ...] = ()


class Case(NamedTuple):
    """A layer with one of its options."""

    layer: Layer
    option: dict[str, Any]

    def __str__(self) -> str:
        shape = "x".join(map(str, self.layer.shape)) + "+residual" * self.layer.residual
        shape += "".join("+" + "x".join(map(str, other)) for other in self.layer.others)
        return "-".join([self.layer.name, shape, *(f"{k}={v}" for k, v in self.option.items())])

    def make(self, **place: Any) -> stock.Module:
        return getattr(nn, self.layer.name)(*self.layer.given, **self.option, **place)

    def torchs(self, **place: Any) -> stock.Module:
        return self.layer.twin(*self.layer.given, **self.option, **place)

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """The input, the residual where the layer is given one, and what else it is given."""
        shapes = [self.layer.shape] * (1 + self.layer.residual)
        return [(torch.randn(s) * 2 + 1).to(dtype) for s in (*shapes, *self.layer.others)]


class _ThenAct:
    """torch's norm, its residual and its activation, one after the other."""

    def __init__(self, *given: Any, act: str = "relu", **options: Any) -> None:
        super().__init__(*given, **options)
        self.act = act

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        y = super().forward(input)  # type: ignore[misc]
        return ACTIVATIONS[self.act].forward(y if residual is None else y + residual)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, act={self.act}"  # type: ignore[misc]


def then_act(norm: type[stock.Module]) -> type[stock.Module]:
    return type(norm.__name__.replace("Norm", "NormAct"), (_ThenAct, norm), {})


class SyncBatchNorm(stock.BatchNorm2d):
    """What torch's layer is with one rank; on a CPU its own refuses to run."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


def pair(conv: type[stock.Module], norm: type[stock.Module]) -> Callable[..., stock.Module]:
    """torch's convolution and norm, one after the other."""
    norms = {"eps", "momentum", "affine", "track_running_stats"}

    class ConvBatchNorm(stock.Sequential):
        eps_mode = "inside"

        def forward(self, input: Tensor) -> Tensor:
            if self.eps_mode == "inside":
                return super().forward(input)
            z, bn = self.conv(input), self.bn
            axes, along = (0, *range(2, z.dim())), (-1, *(1,) * (z.dim() - 2))
            mean, var = (z.mean(axes), z.var(axes)) if self.training else (bn.running_mean, bn.running_var)
            if self.training:
                bn(z.detach())  # moves the statistics
            rstd = 1 / (var.sqrt() + bn.eps)
            return (z - mean.view(along)) * (rstd * bn.weight).view(along) + bn.bias.view(along)

        def extra_repr(self) -> str:
            return f"eps_mode={self.eps_mode}"

    ConvBatchNorm.__name__ = conv.__name__.replace("Conv", "ConvBatchNorm")

    def make(
        *given: int, device: Any = None, dtype: Any = None, eps_mode: str = "inside", **options: Any
    ) -> stock.Module:
        place = {"device": device, "dtype": dtype}
        of_norm = {k: v for k, v in options.items() if k in norms}
        of_conv = {"bias": False} | {k: v for k, v in options.items() if k not in norms}
        parts = conv(*given, **of_conv, **place), norm(given[1], **of_norm, **place)
        made = ConvBatchNorm(OrderedDict(zip(("conv", "bn"), parts, strict=True)))
        made.eps_mode = eps_mode
        return made

    return make


class BatchNormOp(stock.Module):
    """docs/operator.md in torch's words."""

    def __init__(self, channels: int, data_layout: str = "NCHW", use_global_est: bool = False, **place: Any):
        super().__init__()
        self.last, self.use_global_est = data_layout == "NHWC", use_global_est
        for name, make in (("scale", torch.ones), ("bias", torch.zeros)):
            self.register_parameter(name, stock.Parameter(make(channels, **place)))
        for name, make in (("estimated_mean", torch.zeros), ("estimated_var", torch.ones)):
            self.register_buffer(name, make(channels, **place))
        self.register_buffer("batch_id", torch.zeros((), dtype=torch.int64, device=place.get("device")))

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(-1, 1) if self.last else x
        estimates = self.estimated_mean, self.estimated_var
        axes = (0, *range(2, x.dim()))
        statistics = x.mean(axes), x.var(axes, correction=0)
        if self.training:
            for estimate, found in zip(estimates, statistics, strict=True):
                new = estimate * 0.99 + found.detach() * 0.01
                estimate.copy_(found.detach() if self.batch_id == 0 else new)
            self.batch_id += 1
        if not self.training or self.use_global_est:
            statistics = tuple(e.clone() for e in estimates)
        mean, var = (s.reshape(-1, *(1,) * (x.dim() - 2)) for s in statistics)
        scale, bias = (p.reshape(mean.shape) for p in (self.scale, self.bias))
        y = (x - mean) / (var + 1e-6).sqrt() * scale + bias
        return y.movedim(1, -1) if self.last else y

    def extra_repr(self) -> str:
        layout = "NHWC" if self.last else "NCHW"
        return (
            f"4, use_global_est={self.use_global_est}, epsilon=1e-06, momentum=0.99, data_layout={layout!r}"
        )


def along(norm: type[stock.Module]) -> Callable[..., stock.Module]:
    """torch's norm of the last axis on any one axis."""

    class Along(norm):  # type: ignore[misc, valid-type]
        def __init__(self, *given: Any, dim: int, **options: Any) -> None:
            super().__init__(*given, **options)
            self.dim = dim

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.movedim(self.dim, -1)).movedim(-1, self.dim)

        def extra_repr(self) -> str:
            return f"{super().extra_repr()}, dim={self.dim}"

    Along.__name__ = norm.__name__
    return Along


class RMSNorm(stock.RMSNorm):
    """The RMS norms of transformers: Gemma's weight, Llama's order of rounding."""

    def __init__(
        self,
        *given: Any,
        weight_offset: float = 0.0,
        cast: str = "after",
        device: Any = None,
        dtype: Any = None,
        **of: Any,
    ) -> None:
        self.weight_offset, self.cast = weight_offset, cast
        super().__init__(*given, device=device, dtype=dtype, **of)

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            stock.init.constant_(self.weight, 1 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        axes = tuple(range(-len(self.normalized_shape), 0))
        eps = torch.finfo(wide.dtype).eps if self.eps is None else self.eps
        y = wide * torch.rsqrt(wide.pow(2).mean(axes, keepdim=True) + eps)
        if self.weight is None:
            return y.to(x.dtype)
        weight = self.weight + self.weight_offset
        return y.to(x.dtype) * weight if self.cast == "before" else (y * weight).to(x.dtype)

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return super().extra_repr() + offset + (f", cast={self.cast!r}" if self.cast != "after" else "")


class AdaLayerNorm(stock.LayerNorm):
    """DiT's `modulate` behind torch's norm."""

    def __init__(self, *given: Any, elementwise_affine: bool = False, **options: Any) -> None:
        super().__init__(*given, elementwise_affine=elementwise_affine, **options)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        behind = (1,) * (x.dim() - scale.dim())
        scale, shift = (v.reshape(*v.shape[:-1], *behind, v.shape[-1]) for v in (scale, shift))
        return super().forward(x) * (1 + scale) + shift


class AdaRMSNorm(RMSNorm):
    """The same behind torch's RMS norm."""

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x) * (1 + scale) + shift


class RMSNormGated(RMSNorm):
    """The gated norms of transformers."""

    def __init__(
        self, *given: Any, act: str = "silu", norm_before_gate: bool = True, cast: str = "after", **of: Any
    ) -> None:
        self.act, self.norm_before_gate = act, norm_before_gate
        super().__init__(*given, cast=cast, **of)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        opened = ACTIVATIONS[self.act].forward(gate)
        return super().forward(x) * opened if self.norm_before_gate else super().forward(x * opened)

    def extra_repr(self) -> str:
        behind = "" if self.norm_before_gate else ", norm_before_gate=False"
        return f"{super().extra_repr()}, act={self.act}{behind}"


def _has_bias(norm: type[stock.Module]) -> bool:
    """Does this release of torch know `bias=False` here?"""
    return "bias" in inspect.signature(norm).parameters


BATCH = (
    {},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": 0.7, "eps": 1e-2},
    {"affine": False, "track_running_stats": False},
    *([{"bias": False}] if _has_bias(stock.BatchNorm2d) else []),
)
ACT = (
    {},
    {"act": "gelu", "momentum": None},
    {"act": "silu", "affine": False},
    *([{"act": "identity", "bias": False}] if _has_bias(stock.BatchNorm2d) else []),
)
ADD_ACT = ({}, {"act": "silu"})
INSTANCE = (
    {"affine": True, "track_running_stats": True},
    {},
    {"affine": True},
    {"track_running_stats": True},
    *([{"affine": True, "bias": False}] if _has_bias(stock.InstanceNorm2d) else []),
)
CONV = (
    {},
    {"padding": 1, "padding_mode": "circular", "bias": True},
    {"groups": 2, "momentum": None},
    {"affine": False, "track_running_stats": False},
    {"eps_mode": "outside", "eps": 1e-2},
)
GROUP = ({}, {"affine": False}, {"eps": 1e-3}, *([{"bias": False}] if _has_bias(stock.GroupNorm) else []))
LAYER = ({}, {"eps": 1e-3, "bias": False}, {"elementwise_affine": False})
RMS = (
    {},
    {"eps": 1e-3},
    {"elementwise_affine": False},
    {"weight_offset": 1.0},
    {"weight_offset": 0.5, "cast": "before"},
)
GROUP_ACT = ({"act": "silu"}, {"act": "gelu", "affine": False}, {"act": "relu", "eps": 1e-3})
ADA_LAYER = ({}, {"eps": 1e-3, "elementwise_affine": True}, {"elementwise_affine": True, "bias": False})
GATED = (
    {},
    {"act": "gelu", "eps": 1e-3, "norm_before_gate": False},
    {"cast": "before"},
    {"cast": "before", "norm_before_gate": False, "elementwise_affine": False},
)
SHAPES = {1: (6, 4, 5), 2: (6, 4, 3, 5), 3: (6, 4, 2, 3, 2)}


ONE_DTYPE = {"mixed dtypes": ("conv_batch_norm.md", "must have the same dtype")}
NO_FX = {"fx in training": ("sync.md", "`torch.fx.symbolic_trace` does not trace it in training")}
OPERATOR = {
    "resets": ("operator.md", "has no `reset_parameters`"),
    "fx": ("operator.md", "`torch.fx.symbolic_trace` does not trace it"),
    "func in training": ("operator.md", "`torch.func` rejects the training operator"),
}
CONSTANTS = {"double backward in training": ("operator.md", "gradients treat them as constants")}


def _of_rank(rank: int) -> list[Layer]:
    """The layers whose names end in a number of axes."""
    batch, instance, conv = (getattr(stock, f"{n}{rank}d") for n in ("BatchNorm", "InstanceNorm", "Conv"))
    act, shape, none = then_act(batch), SHAPES[rank], stock.Module
    pairs = pair(conv, batch)
    return [
        Layer(f"BatchNorm{rank}d", (4,), shape, batch, batch, BATCH),
        Layer(f"BatchNormAct{rank}d", (4,), shape, act, batch, ACT),
        Layer(f"BatchNormAct{rank}d", (4,), shape, act, batch, ADD_ACT, residual=True),
        Layer(f"InstanceNorm{rank}d", (4,), shape, instance, instance, INSTANCE),
        Layer(f"ConvBatchNorm{rank}d", (4, 6, 2), shape, pairs, none, CONV, empty=(0,), without=ONE_DTYPE),
    ]


def _op(shape: tuple[int, ...], without: dict[str, tuple[str, str]], **option: Any) -> Layer:
    empty = (0, 1) if option.get("data_layout") == "NHWC" else (0, -1)
    return Layer("BatchNormOp", (4,), shape, BatchNormOp, stock.Module, (option,), False, empty, without)


def _sync(shape: tuple[int, ...], options: tuple[dict[str, Any], ...], empty: tuple[int, ...]) -> Layer:
    return Layer("SyncBatchNorm", (4,), shape, SyncBatchNorm, _BatchNorm, options, False, empty, NO_FX)


def _rows(name: str, options: tuple[dict[str, Any], ...]) -> list[Layer]:
    norm, empty = getattr(stock, name), (0,)
    twin = RMSNorm if norm is stock.RMSNorm else norm
    return [
        Layer(name, (6,), (4, 3, 6), twin, norm, options, empty=empty),
        Layer(name, ([4, 6],), (3, 4, 6), norm, norm, empty=empty),
        Layer(name, (6,), (2, 6, 3, 4), along(norm), norm, ({"dim": 1},)),
    ]


def _given(
    name: str,
    twin: type[stock.Module],
    others: tuple[tuple[int, ...], ...],
    options: tuple[dict[str, Any], ...],
) -> Layer:
    """Row norms that are given more than an input."""
    kind = getattr(stock, "LayerNorm" if "Layer" in name else "RMSNorm")
    return Layer(name, (6,), (4, 3, 6), twin, kind, options, others=others, empty=(0,))


_1D = stock.BatchNorm1d
UNBATCHED = [(n, getattr(stock, f"InstanceNorm{n}d")) for n in SHAPES]
LAYERS = [
    *_of_rank(1),
    *_of_rank(2),
    *_of_rank(3),
    Layer("BatchNorm1d", (4,), (6, 4), _1D, _1D, BATCH, empty=(0,)),
    Layer("BatchNormAct1d", (4,), (6, 4), then_act(_1D), _1D, ACT[:1], empty=(0,)),
    *(Layer(f"InstanceNorm{n}d", (4,), SHAPES[n][1:], i, i, INSTANCE[:2], empty=(-1,)) for n, i in UNBATCHED),
    _sync(SHAPES[2], BATCH, (0, -1)),
    _sync((6, 4), BATCH[:1], (0,)),
    _op(SHAPES[2], OPERATOR),
    _op((6, 5, 4), OPERATOR, data_layout="NHWC"),
    _op(SHAPES[2], OPERATOR | CONSTANTS, use_global_est=True),
    Layer("GroupNorm", (2, 4), SHAPES[2], stock.GroupNorm, stock.GroupNorm, GROUP),
    Layer("GroupNorm", (2, 4), (6, 4), stock.GroupNorm, stock.GroupNorm, empty=(0,)),
    *_rows("LayerNorm", LAYER),
    *_rows("RMSNorm", RMS),
    Layer("GroupNormAct", (2, 4), SHAPES[2], then_act(stock.GroupNorm), stock.GroupNorm, GROUP_ACT),
    _given("AdaLayerNorm", AdaLayerNorm, ((4, 6), (4, 6)), ADA_LAYER),
    _given("AdaLayerNorm", AdaLayerNorm, ((4, 3, 6), (4, 3, 6)), ADA_LAYER[:1]),
    _given("AdaRMSNorm", AdaRMSNorm, ((4, 1, 6), (4, 1, 6)), RMS[:3]),
    _given("RMSNormGated", RMSNormGated, ((4, 3, 6),), GATED),
]
