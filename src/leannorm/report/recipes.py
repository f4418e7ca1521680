"""Which recipes of lean() work with this torch: each is tried on a program of one line.

Recipes are for autograd's nodes; where operators are recorded, as on CPU tensors, none is needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leannorm import functional
from leannorm.autograd.nodes import NODES
from leannorm.saving import lean
from leannorm.saving.evidence import RebuildError
from leannorm.saving.graph import kind_of
from leannorm.saving.recipes import RECIPES
from leannorm.saving.recorded import searching
from leannorm.saving.small import NEVER_SMALL

ATEN = torch.ops.aten
Program = Callable[[Tensor, Tensor], Tensor]
"""Makes a node of a kind from a SiLU's output, which is rebuilt itself, and from a leaf."""
ALIVE, RESTING, WRONG, NOT_TRIED = "alive", "resting", "WRONG", "not tried"


class RecipeState(NamedTuple):
    """What happened to the output of one kind of node: `state` is one of those above, `why` gives details.

    alive: it is rebuilt, and gradients equal plain PyTorch's bit for bit. resting: it is kept as in plain
    PyTorch, since this torch makes other nodes or saves other values in them. not tried: one process on a CPU
    makes no such node. WRONG: it is rebuilt, and gradients differ.
    """

    kind: str
    state: str
    why: str = ""


def _affine(leaf: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias per channel, which are leaves, as a layer's are."""
    weight, bias = leaf[0, :, 0, 0].detach().clone(), leaf[0, :, 0, 1].detach().clone()
    return weight.requires_grad_(), bias.requires_grad_()


def _our_running_norm(x: Tensor, leaf: Tensor) -> Tensor:
    zeros = torch.zeros(x.shape[1])
    state = zeros, zeros + 1, *_affine(leaf)
    return functional.batch_norm_act(x, *state, act="identity", residual=leaf)


def _written_in_a_view(x: Tensor, leaf: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor and a view of it, through which it was written in place: a sum, a copy, an activation."""
    base = x * 2
    view, other = base.view(x.shape[1], -1), leaf.view(x.shape[1], -1)
    view[2:] += other[2:]
    view[:, 4:].copy_(other[:, 4:])
    return base, F.leaky_relu(view, inplace=True)


def _experts(x: Tensor, leaf: Tensor) -> Tensor:
    return torch._grouped_mm(x, leaf.expand(3, 64, 64), offs=torch.tensor([16, 16, 64], dtype=torch.int32))


def _rows(x: Tensor) -> Tensor:
    return torch.arange(len(x)).flip(0)


def _nearest_exact(x: Tensor, leaf: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="nearest-exact")


def _kernel() -> Tensor:
    return torch.ones(16, 16, 1, 1, requires_grad=True)


# by the shape of x and of the leaf: the program that makes a node of each kind
_BY_SHAPE: dict[tuple[int, ...], dict[str, Program]] = {
    (1, 16, 32, 32): {
        "SiluBackward0": lambda x, leaf: F.silu(x),
        "MishBackward0": lambda x, leaf: F.mish(x),
        "HardswishBackward0": lambda x, leaf: F.hardswish(x),
        "HardsigmoidBackward0": lambda x, leaf: F.hardsigmoid(x),
        "GeluBackward0": lambda x, leaf: F.gelu(x),
        "HardtanhBackward0": lambda x, leaf: F.hardtanh(x),
        "LeakyReluBackward0": lambda x, leaf: F.leaky_relu(x),
        "EluBackward0": lambda x, leaf: F.elu(x),
        "CeluBackward0": lambda x, leaf: F.celu(x),
        "SoftplusBackward0": lambda x, leaf: F.softplus(x),
        "GluBackward0": lambda x, leaf: F.glu(x, 1),
        "LogSigmoidBackward0": lambda x, leaf: F.logsigmoid(x),
        "AbsBackward0": lambda x, leaf: x.abs(),
        "LogBackward0": lambda x, leaf: (x * x).log(),
        "ClampBackward1": lambda x, leaf: x.clamp(-0.1, 0.5),
        "ReluBackward0": lambda x, leaf: F.relu(x),
        "SigmoidBackward0": lambda x, leaf: x.sigmoid(),
        "TanhBackward0": lambda x, leaf: x.tanh(),
        "LeakyReluBackward1": lambda x, leaf: F.leaky_relu(x, inplace=True),
        "EluBackward1": lambda x, leaf: F.elu(x, inplace=True),
        "CeluBackward1": lambda x, leaf: F.celu(x, inplace=True),
        "ExpBackward0": lambda x, leaf: x.exp(),
        "SqrtBackward0": lambda x, leaf: (x * x).sqrt(),
        "SoftmaxBackward0": lambda x, leaf: x.softmax(1),
        "LogSoftmaxBackward0": lambda x, leaf: x.log_softmax(1),
        "SafeSoftmaxBackward0": lambda x, leaf: ATEN._safe_softmax(x, 1),
        "NegBackward0": lambda x, leaf: -x,
        "PowBackward0": lambda x, leaf: x.pow(2),
        "SubBackward0": lambda x, leaf: leaf - leaf,
        "WhereBackward0": lambda x, leaf: torch.where(x > 0, x, leaf),
        "RsqrtBackward0": lambda x, leaf: (x * x).rsqrt(),
        "DivBackward0": lambda x, leaf: x / leaf,
        "CopySlices": lambda x, leaf: _written_in_a_view(x, leaf)[0],
        "AsStridedBackward0": lambda x, leaf: _written_in_a_view(x, leaf)[1],
        "PreluKernelBackward0": lambda x, leaf: F.prelu(x, _affine(leaf)[0]),
        "MulBackward0": lambda x, leaf: x * leaf,
        "MulBackward1": lambda x, leaf: ATEN.mul.Scalar(x, 0.5),
        "NativeDropoutBackward0": lambda x, leaf: torch.native_dropout(x, 0.5, True)[0],
        "AddBackward0": lambda x, leaf: leaf + leaf,
        "NativeBatchNormBackward0": lambda x, leaf: F.batch_norm(
            x, None, None, *_affine(leaf), training=True
        ),
        "NativeGroupNormBackward0": lambda x, leaf: F.group_norm(x, 4, *_affine(leaf)),
        "NativeLayerNormBackward0": lambda x, leaf: F.layer_norm(x, x.shape[3:]),
        "leannorm.ChannelNorm": lambda x, leaf: functional.batch_norm(
            x, None, None, *_affine(leaf), training=True
        ),
        "leannorm.ChannelAffine": _our_running_norm,
        "leannorm.RowNorm": lambda x, leaf: functional.layer_norm(x, x.shape[3:], dim=3),
        "leannorm.GatedNorm": lambda x, leaf: functional.gated_rms_norm(x, leaf, x.shape[3:]),
        "leannorm.ConvNorm": lambda x, leaf: functional.conv_batch_norm(
            leaf, _kernel(), None, None, None, *_affine(leaf), training=True
        ),
        "ScaledDotProductFlashAttentionForCpuBackward0": lambda x, leaf: F.scaled_dot_product_attention(
            x, leaf, leaf
        ),
        "ConvolutionBackward0": lambda x, leaf: F.conv2d(leaf, _kernel()),
        "ViewBackward0": lambda x, leaf: x.view(16, 1024),
        "UnsafeViewBackward0": lambda x, leaf: ATEN._unsafe_view(x, [16, 1024]),
        "ReshapeAliasBackward0": lambda x, leaf: ATEN._reshape_alias(x, [16, 1024], [1024, 1]),
        "UnsqueezeBackward0": lambda x, leaf: x.unsqueeze(0),
        "SqueezeBackward0": lambda x, leaf: x.squeeze(),
        "SqueezeBackward1": lambda x, leaf: x.squeeze(0),
        "SqueezeBackward2": lambda x, leaf: x.squeeze((0,)),
        "ExpandBackward0": lambda x, leaf: x.expand(2, 16, 32, 32),
        "AliasBackward0": lambda x, leaf: ATEN.alias(x),
        "TransposeBackward0": lambda x, leaf: x.transpose(1, 2),
        "PermuteBackward0": lambda x, leaf: x.permute(0, 2, 3, 1),
        "SelectBackward0": lambda x, leaf: x.select(1, -1),
        "SliceBackward0": lambda x, leaf: x[:, 4:],
        "UnbindBackward0": lambda x, leaf: x.unbind(1)[-1],
        "SplitBackward0": lambda x, leaf: x.split(4, 1)[-1],
        "SplitWithSizesBackward0": lambda x, leaf: x.split([4, 12], 1)[-1],
        "RollBackward0": lambda x, leaf: x.roll((1, -2), (2, 3)),
        "FlipBackward0": lambda x, leaf: x.flip(2),
        "PixelShuffleBackward0": lambda x, leaf: F.pixel_shuffle(x, 2),
        "PixelUnshuffleBackward0": lambda x, leaf: F.pixel_unshuffle(x, 2),
        "IndexBackward0": lambda x, leaf: x[:, torch.arange(4, 12)],
        "UpsampleNearest2DBackward0": lambda x, leaf: F.interpolate(x, scale_factor=2),
        "UpsampleNearestExact2DBackward0": _nearest_exact,
        "UpsampleBilinear2DBackward0": lambda x, leaf: F.interpolate(x, scale_factor=2, mode="bilinear"),
        "UpsampleBicubic2DBackward0": lambda x, leaf: F.interpolate(x, scale_factor=2, mode="bicubic"),
        "MaxPool2DWithIndicesBackward0": lambda x, leaf: F.max_pool2d(x, 2),
        "AvgPool2DBackward0": lambda x, leaf: F.avg_pool2d(x, 2),
        "ConstantPadNdBackward0": lambda x, leaf: ATEN.constant_pad_nd(x, [0, 0]),
        "RepeatBackward0": lambda x, leaf: x.repeat(2, 1, 1, 1),
        "CloneBackward0": lambda x, leaf: x.clone(),
        "ToCopyBackward0": lambda x, leaf: x.double(),
        "CatBackward0": lambda x, leaf: torch.cat((leaf, x), 1),
        "StackBackward0": lambda x, leaf: torch.stack((leaf, x), 1),
    },
    (4, 16, 32, 32): {
        "MeanBackward1": lambda x, leaf: x.mean(0),
        "SumBackward1": lambda x, leaf: x.sum(0),
    },
    (64, 64): {
        "MmBackward0": lambda x, leaf: x.mm(leaf),
        "AddmmBackward0": lambda x, leaf: torch.addmm(leaf, x, leaf),
        "GroupedMmBackward0": _experts,
        "TBackward0": lambda x, leaf: x.t(),
        "IndexSelectBackward0": lambda x, leaf: x.index_select(0, _rows(x)),
        "GatherBackward0": lambda x, leaf: x.gather(1, _rows(x).expand(64, 64)),
        "TopkBackward0": lambda x, leaf: x.topk(32).values,
        "SortBackward0": lambda x, leaf: x.sort(1).values,
    },
    (4, 32, 32): {
        "BmmBackward0": lambda x, leaf: x.bmm(leaf),
        "BaddbmmBackward0": lambda x, leaf: torch.baddbmm(leaf, x, leaf),
        "UpsampleNearest1DBackward0": lambda x, leaf: F.interpolate(x, scale_factor=2),
        "UpsampleNearestExact1DBackward0": _nearest_exact,
        "UpsampleLinear1DBackward0": lambda x, leaf: F.interpolate(x, scale_factor=2, mode="linear"),
    },
    (2, 4, 8, 16, 16): {
        "UpsampleNearest3DBackward0": lambda x, leaf: F.interpolate(x, scale_factor=2),
        "UpsampleNearestExact3DBackward0": _nearest_exact,
        "UpsampleTrilinear3DBackward0": lambda x, leaf: F.interpolate(x, scale_factor=2, mode="trilinear"),
        "MaxPool3DWithIndicesBackward0": lambda x, leaf: F.max_pool3d(x, 2),
        "AvgPool3DBackward0": lambda x, leaf: F.avg_pool3d(x, 2),
    },
}
PROGRAMS = {kind: (run, shape) for shape, several in _BY_SHAPE.items() for kind, run in several.items()}
_ELSEWHERE = {
    "CudnnBatchNormBackward0": "made on CUDA devices, by cuDNN",
    "MiopenBatchNormBackward0": "made on ROCm devices, by MIOpen",
    "FusedRmsNormBackward0": "made on CUDA devices",
    "ScaledDotProductFlashAttentionBackward0": "made on CUDA devices",
    "ScaledDotProductEfficientAttentionBackward0": "made on CUDA devices",
    "ScaledDotProductCudnnAttentionBackward0": "made on CUDA devices, by cuDNN",
    "leannorm._ToTorchTensor": "made of DTensors, which several ranks share",
    "leannorm._FromTorchTensor": "made of DTensors, which several ranks share",
    "leannorm.Redistribute": "made of DTensors, which several ranks share",
}
_HELD = {"MaxPool2DWithIndicesBackward0", "MaxPool3DWithIndicesBackward0"}  # by the fixed settings
_BY_NODES = {"CopySlices", "AsStridedBackward0"}  # Python cannot read what was written through a view


def recipe_states() -> Iterator[RecipeState]:
    """Try every recipe: if a release of torch renames or drops something, its tensors are kept, not wrong.

    >>> {state.state for state in recipe_states()} <= {"alive", "resting", "not tried"}
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for kind in RECIPES:
            if NODES is None and kind in _BY_NODES:
                yield RecipeState(kind, NOT_TRIED, "read by the C++ nodes, which a wheel has not")
            elif kind in PROGRAMS:
                yield _tried(kind, *PROGRAMS[kind])
            else:
                yield RecipeState(kind, NOT_TRIED, _ELSEWHERE.get(kind, ""))


def _tried(kind: str, program: Program, shape: tuple[int, ...]) -> RecipeState:
    leaf = torch.randn(shape)
    try:
        stock, _ = _gradient(program, leaf, nullcontext())
        saved = lean(overhead=9.0) if kind in _HELD else lean("conv")
        saved.place = NEVER_SMALL
        with searching(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what is kept, which is reported here
            ours, made = _gradient(program, leaf, saved)
    except RebuildError:
        return RecipeState(kind, WRONG, "it is not what the forward pass saved")
    except Exception as error:  # this torch has no such function
        return RecipeState(kind, RESTING, f"{type(error).__name__}: {' '.join(str(error).split())}")
    if made != kind:
        return RecipeState(kind, RESTING, f"this torch makes {made or 'a node of another kind'} in its place")
    if not any(record.rebuilt for record in saved.records if record.node == kind):
        return RecipeState(kind, RESTING, "; ".join(saved.reasons) or "its output is kept")
    if not torch.equal(ours, stock):
        return RecipeState(kind, WRONG, "gradients differ")
    return RecipeState(kind, ALIVE)


def _gradient(program: Program, leaf: Tensor, context: AbstractContextManager[object]) -> tuple[Tensor, str]:
    """The leaf's gradient, and the kind of node that the program made."""
    leaf = leaf.clone().requires_grad_()
    with torch.random.fork_rng(devices=[]), context:
        y = program(F.silu(leaf), leaf)
        kind = kind_of(y.grad_fn)
        loss = y.square().sum()
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad, kind
