"""The conventions of each framework in one table: momentum, eps, running variance, names, order of axes."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from leannorm import _checks

# torch's name of a tensor → the framework's names; saving writes the first, loading accepts any
Names = Mapping[str, tuple[str, ...]]

# o: output features, i: input features (of one group), *: the spatial axes, ~: the spatial axes reversed
TORCH_AXES = {"linear": "oi", "conv": "oi*", "conv_transpose": "io*"}


@dataclass(frozen=True)
class Convention:
    """One framework's conventions for norm layers; `momentum` and each eps are its own defaults.

    >>> from leannorm import interop
    >>> keras = interop.CONVENTIONS["keras"]
    >>> keras.eps, keras.momentum_weighs_old
    (0.001, True)
    """

    framework: str
    momentum: float
    eps: float
    layer_eps: float
    names: Mapping[str, Names]
    rms_eps: float | None = None
    momentum_weighs_old: bool = True
    biased_running_var: bool = True
    float32_attributes: bool = False
    axes: Mapping[str, str] = field(default_factory=lambda: TORCH_AXES)

    def attribute(self, value: float) -> float:
        """The value that the framework computes with if its layer is made with `value`."""
        return float(struct.unpack("f", struct.pack("f", value))[0]) if self.float32_attributes else value

    def torch_momentum(self, momentum: float) -> float:
        """The weight of the new value, from the framework's momentum.

        >>> from leannorm import interop
        >>> interop.CONVENTIONS["keras"].torch_momentum(0.99)
        0.01
        """
        momentum = self.attribute(momentum)
        # 1 - 0.99 is 0.010000000000000009: digits after the fifteenth are rounding errors of the subtraction
        return round(1 - momentum, 15) if self.momentum_weighs_old else momentum


def _norm(weight: tuple[str, ...], bias: tuple[str, ...], mean: str, var: str) -> dict[str, Names]:
    affine = {"weight": weight, "bias": bias}
    statistics: dict[str, tuple[str, ...]] = {"running_mean": (mean,), "running_var": (var,)}
    return {"batch_norm": affine | statistics, "norm": affine}


def _layers(weight: str, bias: str, embedding: str) -> dict[str, Names]:
    kernel: Names = {"weight": (weight,), "bias": (bias,)}
    return {"linear": kernel, "conv": kernel, "conv_transpose": kernel, "embedding": {"weight": (embedding,)}}


CONVENTIONS: dict[str, Convention] = {
    c.framework: c
    for c in (
        Convention(  # torch/nn/modules/batchnorm.py
            "torch",
            momentum=0.1,
            eps=1e-5,
            layer_eps=1e-5,
            momentum_weighs_old=False,
            biased_running_var=False,
            names={
                **_norm(("weight",), ("bias",), "running_mean", "running_var"),
                **_layers("weight", "bias", "weight"),
                "rms_norm": {"weight": ("weight",)},
            },
        ),
        Convention(  # paddle/phi/kernels/cpu/batch_norm_kernel.cc
            "paddle",
            momentum=0.9,
            eps=1e-5,
            layer_eps=1e-5,
            float32_attributes=True,
            names={
                **_norm(("weight", "scale"), ("bias",), "_mean", "_variance"),
                **_layers("weight", "bias", "weight"),
                "rms_norm": {"weight": ("weight",)},
            },
            axes=TORCH_AXES | {"linear": "io"},
        ),
        Convention(  # keras/src/layers/normalization/batch_normalization.py (TensorFlow's, too)
            "keras",
            momentum=0.99,
            eps=1e-3,
            layer_eps=1e-3,
            rms_eps=1e-6,
            names={
                **_norm(("gamma",), ("beta",), "moving_mean", "moving_variance"),
                **_layers("kernel", "bias", "embeddings"),
                "conv": {"weight": ("kernel", "depthwise_kernel"), "bias": ("bias",)},
                "rms_norm": {"weight": ("scale",)},
            },
            axes={"linear": "io", "conv": "*io", "conv_transpose": "*oi"},
        ),
        Convention(  # flax/linen/normalization.py and flax/nnx/nn/normalization.py
            "flax",
            momentum=0.99,
            eps=1e-5,
            layer_eps=1e-6,
            rms_eps=1e-6,
            names={
                **_norm(("scale",), ("bias",), "mean", "var"),
                **_layers("kernel", "bias", "embedding"),
                "rms_norm": {"weight": ("scale",)},
            },
            # its transposed convolution is a convolution over a dilated input: the kernel is not flipped
            axes={"linear": "io", "conv": "*io", "conv_transpose": "~io"},
        ),
        Convention(  # onnx.ai/onnx/operators: BatchNormalization-15, LayerNormalization-17
            "onnx",
            momentum=0.9,
            eps=1e-5,
            layer_eps=1e-5,
            rms_eps=1e-5,
            float32_attributes=True,
            names={
                **_norm(("scale",), ("B",), "input_mean", "input_var"),
                "norm": {"weight": ("Scale", "scale"), "bias": ("B", "bias")},
                "linear": {"weight": ("B",), "bias": ("C",)},
                "conv": {"weight": ("W",), "bias": ("B",)},
                "conv_transpose": {"weight": ("W",), "bias": ("B",)},
                "rms_norm": {"weight": ("scale",)},
            },
            axes=TORCH_AXES | {"linear": "io"},
        ),
        Convention(  # caffe/src/caffe/layers/batch_norm_layer.cpp: blobs by number, gamma and beta in Scale
            "caffe",
            momentum=0.999,
            eps=1e-5,
            layer_eps=1e-5,
            biased_running_var=False,
            names={**_norm(("0",), ("1",), "mean", "variance"), **_layers("0", "1", "0")},
        ),
    )
}
CONVENTIONS["tensorflow"] = CONVENTIONS["keras"]


ALIASES = {"pytorch": "torch"}


def convention(name: str, argument: str) -> Convention:
    name = ALIASES.get(name, name)
    _checks.one_of(argument, name, list(CONVENTIONS))
    return CONVENTIONS[name]


def permuted(tensor: Tensor, axes: str, wanted: str) -> Tensor:
    """The kernel with its axes in the requested order; both orders are written as in `TORCH_AXES`.

    >>> import torch
    >>> permuted(torch.zeros(5, 7, 3, 8), "*io", "oi*").shape
    torch.Size([8, 3, 5, 7])
    """
    flipped = ("~" in axes) != ("~" in wanted)
    axes, wanted = axes.replace("~", "*"), wanted.replace("~", "*")
    spatial = "".join(chr(ord("A") + axis) for axis in range(tensor.dim() - 2))
    axes, wanted = axes.replace("*", spatial), wanted.replace("*", spatial)
    tensor = tensor.permute([axes.index(axis) for axis in wanted])
    return tensor.flip([wanted.index(axis) for axis in spatial]) if flipped else tensor
