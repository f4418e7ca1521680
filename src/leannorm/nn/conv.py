"""Convolution and batch norm as one trainable layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from leannorm import _checks
from leannorm._errors import InputError
from leannorm.functional.conv import EPS_MODES, conv_batch_norm
from leannorm.nn._base import BatchNormBase
from leannorm.nn._layer import HOOKS, Layer, quantizing
from leannorm.nn._statistics import HasStatistics
from leannorm.nn.batch import BatchNorm1d, BatchNorm2d, BatchNorm3d

if TYPE_CHECKING:
    from typing_extensions import Self


def _check_norm(bn: torch.nn.Module, bn_type: type[_BatchNorm]) -> None:
    if type(bn) is not bn_type and type(bn) is not bn_type.__bases__[-1]:
        raise InputError(
            f"the norm must be a {bn_type.__name__} of torch.nn or leannorm.nn, got {type(bn).__name__}, "
            "which may compute something else; run that pair as two layers"
        )
    if getattr(bn, "group_size", None) is not None:
        raise InputError(f"the norm must be of the whole batch, got {bn}; run that pair as two layers")


def _check_conv(conv: torch.nn.Module, conv_type: type[_ConvNd]) -> None:
    own = type(conv).forward, getattr(type(conv), "_conv_forward", None)
    if own != (conv_type.forward, conv_type._conv_forward) or "forward" in vars(conv):
        raise InputError(
            f"the convolution must be a torch.nn.{conv_type.__name__} with its own forward, got"
            f" {type(conv).__name__}, which may compute something else; run that pair as two layers"
        )


def _check_hooks(*modules: torch.nn.Module) -> None:
    for module in modules:
        if any(getattr(module, hooks) for hooks in HOOKS):
            raise InputError(
                f"hooks on {type(module).__name__} would not run, as its forward is not called; put them on "
                "the joined layer, use torch.nn.utils.parametrizations, or run the pair as two layers"
            )


class _ConvBatchNorm(Layer, torch.nn.Module):
    conv_type: type[_ConvNd]
    bn_type: type[BatchNormBase]
    conv: _ConvNd
    bn: _BatchNorm
    eps_mode: str

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: str = "zeros",
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        eps_mode: str = "inside",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        stats_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _checks.stats_dtype(stats_dtype)
        _checks.one_of("eps_mode", eps_mode, EPS_MODES)
        _checks.positive_eps(eps)
        _checks.momentum(momentum)
        # torch's type hints differ between 1d and 3d, our signature does not
        convolution: Any = self.conv_type
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        sizes = in_channels, out_channels, kernel_size, stride, padding, dilation, groups
        self.conv = convolution(*sizes, bias, padding_mode, **place)
        self.bn = self.bn_type(
            out_channels, eps, momentum, affine, track_running_stats, **place, stats_dtype=stats_dtype
        )
        self.eps_mode = eps_mode

    @classmethod
    def from_pair(cls, conv: _ConvNd, bn: _BatchNorm, eps_mode: str = "inside") -> Self:
        """Join a trained convolution and the batch norm after it; both become the layer's children."""
        _checks.one_of("eps_mode", eps_mode, EPS_MODES)
        own_class = type(conv).__bases__[0] if is_parametrized(conv) else type(conv)
        if own_class is not cls.conv_type:
            raise InputError(
                f"{cls.__name__} joins a torch.nn.{cls.conv_type.__name__}, got {type(conv).__name__}"
            )
        _check_norm(bn, cls.bn_type)
        if bn.num_features != conv.out_channels:
            raise InputError(
                f"the norm must be of the convolution's {conv.out_channels} output channels, got {bn}; "
                "join the pair in which one follows the other"
            )
        layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        layer.conv, layer.bn, layer.eps_mode = conv, bn, eps_mode
        layer.training = bn.training
        return layer

    def to_pair(self) -> tuple[_ConvNd, _BatchNorm]:
        """The convolution and the batch norm, to be run one after the other (for `eps_mode="inside"`)."""
        if self.eps_mode != "inside":
            raise InputError(
                f"a pair of layers adds eps inside the root, this layer has eps_mode={self.eps_mode!r}; "
                "no pair computes the same"
            )
        return self.conv, self.bn

    def forward(self, input: Tensor) -> Tensor:
        """The convolution of `input` (N, C_in, ...), normalized: with batch statistics in training."""
        conv, bn = self.conv, self.bn
        _check_conv(conv, self.conv_type)
        _check_norm(bn, self.bn_type)
        _check_hooks(conv, bn)
        if quantizing(input) and self.eps_mode == "inside":
            return bn(conv(input))  # type: ignore[no-any-return]
        if isinstance(bn, HasStatistics) and bn.stats_dtype is not None:
            bn._cast_back()
        updates = bn.training and bn.track_running_stats
        reads = updates or not bn.training
        return conv_batch_norm(
            input,
            conv.weight,
            conv.bias,
            bn.running_mean if reads else None,
            bn.running_var if reads else None,
            bn.weight,
            bn.bias,
            stride=conv.stride,
            padding=conv.padding,
            dilation=conv.dilation,
            groups=conv.groups,
            padding_mode=conv.padding_mode,
            training=bn.training or bn.running_mean is None,
            # without a counter a cumulative average stays as it is, as in torch
            momentum=0.0 if bn.momentum is None and bn.num_batches_tracked is None else bn.momentum,
            eps=bn.eps,
            eps_mode=self.eps_mode,
            num_batches_tracked=bn.num_batches_tracked if updates else None,
            pool=getattr(bn, "_pool", None),
        )

    def extra_repr(self) -> str:
        return f"eps_mode={self.eps_mode}"


class ConvBatchNorm1d(_ConvBatchNorm):
    """Convolution and batch norm over (N, C, L) as one layer that keeps only the convolution's input.

        y = (conv(x) - E[conv(x)]) / sqrt(Var[conv(x)] + eps) * bn.weight + bn.bias

    Arguments, children and `eps_mode` are those of `ConvBatchNorm2d`.

    Shapes: input (N, C, L); the output has the convolution's shape.
    Dtypes: as `functional.conv_batch_norm`.
    Kept, Raises, Source: as `ConvBatchNorm2d`.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.ConvBatchNorm1d(3, 8, 3, padding=1)(torch.randn(4, 3, 16)).shape
    torch.Size([4, 8, 16])
    """

    conv_type = torch.nn.Conv1d
    bn_type = BatchNorm1d


class ConvBatchNorm2d(_ConvBatchNorm):
    """Convolution and batch norm as one layer that keeps only the convolution's input.

        z = conv(x)
        y = (z - E[z]) / sqrt(Var[z] + eps) * bn.weight + bn.bias      for eps_mode="inside", as torch.nn
        y = (z - E[z]) / (sqrt(Var[z]) + eps) * bn.weight + bn.bias    for eps_mode="outside", Var unbiased

    Arguments before the star are those of `torch.nn.Conv2d` (but `bias=False` by default: the norm subtracts
    any bias), those after it are those of `torch.nn.BatchNorm2d`. The children `conv` and `bn` have all
    parameters and buffers, so state_dict keys are `conv.weight`, `bn.running_mean` and so on;
    `from_pair(conv, bn)` joins two existing layers and `to_pair()` returns them. The backward pass runs
    the convolution a second time. Gradients equal those of `torch.nn.Conv2d` and `leannorm.nn.BatchNorm2d`
    run one after the other, bit for bit. Double backward works.

    Shapes: input (N, C, H, W); the output has the convolution's shape.
    Dtypes: as `functional.conv_batch_norm`.
    Kept: the input (4 bytes per element in float32) and 16 bytes per output channel.
    Raises: as `functional.batch_norm`; `InputError` for a pair that cannot be joined, and if a child has a
    hook.
    Source: "Fusing Convolution and Batch Norm using Custom Function", PyTorch tutorials.

    >>> import torch
    >>> from leannorm import nn
    >>> layer = nn.ConvBatchNorm2d(3, 8, 3, padding=1)
    >>> layer(torch.randn(2, 3, 16, 16)).shape
    torch.Size([2, 8, 16, 16])
    >>> sorted(layer.state_dict())[:3]
    ['bn.bias', 'bn.num_batches_tracked', 'bn.running_mean']
    """

    conv_type = torch.nn.Conv2d
    bn_type = BatchNorm2d


class ConvBatchNorm3d(_ConvBatchNorm):
    """Convolution and batch norm over (N, C, D, H, W) as one layer that keeps only the convolution's input.

        y = (conv(x) - E[conv(x)]) / sqrt(Var[conv(x)] + eps) * bn.weight + bn.bias

    Arguments, children and `eps_mode` are those of `ConvBatchNorm2d`.

    Shapes: input (N, C, D, H, W); the output has the convolution's shape.
    Dtypes: as `functional.conv_batch_norm`.
    Kept, Raises, Source: as `ConvBatchNorm2d`.

    >>> import torch
    >>> from leannorm import nn
    >>> nn.ConvBatchNorm3d(3, 8, 3)(torch.randn(2, 3, 6, 6, 6)).shape
    torch.Size([2, 8, 4, 4, 4])
    """

    conv_type = torch.nn.Conv3d
    bn_type = BatchNorm3d
