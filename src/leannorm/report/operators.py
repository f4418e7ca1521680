"""Which operators does this torch repeat bit for bit? Each is tried on a program of one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leannorm import functional
from leannorm.saving import lean
from leannorm.saving.small import NEVER_SMALL

ATEN = torch.ops.aten
Program = Callable[[Tensor, Tensor], Tensor]
"""Calls an operator on a SiLU's output, which is rebuilt itself, and on a leaf."""
REPEATED, KEPT, WRONG, NOT_TRIED = "repeated", "kept", "WRONG", "not tried"


class OperatorState(NamedTuple):
    """What happened to the output of one operator: `state` is one of those above, `why` gives details.

    repeated: it is rebuilt, and gradients equal plain PyTorch's bit for bit. kept: it is kept as in plain
    PyTorch, since this torch calls other operators, or a second call had other bits. not tried: a CPU does
    not call it. WRONG: it is rebuilt, and gradients differ, or it raised.
    """

    name: str
    state: str
    why: str = ""


def _affine(leaf: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias per channel, which are leaves, as a layer's are."""
    weight, bias = leaf[0, :, 0, 0].detach().clone(), leaf[0, :, 0, 1].detach().clone()
    return weight.requires_grad_(), bias.requires_grad_()


def _running(x: Tensor) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros(x.shape[1])
    return zeros, zeros + 1


def _experts(x: Tensor, leaf: Tensor) -> Tensor:
    return torch._grouped_mm(x, leaf.expand(3, 64, 64), offs=torch.tensor([16, 16, 64], dtype=torch.int32))


def _rows(x: Tensor) -> Tensor:
    return torch.arange(len(x)).flip(0)


def _kernel() -> Tensor:
    return torch.ones(16, 16, 1, 1, requires_grad=True)


# by the shape of x and of the leaf
_BY_SHAPE: dict[tuple[int, ...], dict[str, Program]] = {
    (1, 16, 32, 32): {
        "silu": lambda x, leaf: F.silu(x),
        "mish": lambda x, leaf: F.mish(x),
        "hardswish": lambda x, leaf: F.hardswish(x),
        "hardsigmoid": lambda x, leaf: F.hardsigmoid(x),
        "gelu": lambda x, leaf: F.gelu(x),
        "hardtanh": lambda x, leaf: F.hardtanh(x),
        "leaky_relu": lambda x, leaf: F.leaky_relu(x),
        "aten::elu": lambda x, leaf: F.elu(x),
        "celu": lambda x, leaf: F.celu(x),
        "softplus": lambda x, leaf: F.softplus(x),
        "glu": lambda x, leaf: F.glu(x, 1),
        "log_sigmoid_forward": lambda x, leaf: F.logsigmoid(x),
        "abs": lambda x, leaf: x.abs(),
        "log": lambda x, leaf: (x * x).log(),
        "clamp": lambda x, leaf: x.clamp(-0.1, 0.5),
        "relu": lambda x, leaf: F.relu(x),
        "relu_": lambda x, leaf: F.relu(x, inplace=True),
        "sigmoid": lambda x, leaf: x.sigmoid(),
        "tanh": lambda x, leaf: x.tanh(),
        "leaky_relu_": lambda x, leaf: F.leaky_relu(x, inplace=True),
        "exp": lambda x, leaf: x.exp(),
        "sqrt": lambda x, leaf: (x * x).sqrt(),
        "_softmax": lambda x, leaf: x.softmax(1),
        "_log_softmax": lambda x, leaf: x.log_softmax(1),
        "neg": lambda x, leaf: -x,
        "pow": lambda x, leaf: x.pow(2),
        "where": lambda x, leaf: torch.where(x > 0, x, leaf),
        "masked_fill": lambda x, leaf: x.masked_fill(leaf > 0, 0.5),
        "rsqrt": lambda x, leaf: (x * x).rsqrt(),
        "div": lambda x, leaf: x / leaf,
        "mul": lambda x, leaf: x * leaf,
        "add": lambda x, leaf: leaf + leaf,
        "sub": lambda x, leaf: leaf - leaf,
        "add_": lambda x, leaf: x.clone().add_(leaf),
        "sub_": lambda x, leaf: x.clone().sub_(leaf),
        "copy_": lambda x, leaf: torch.empty_like(x).copy_(leaf),
        "_prelu_kernel": lambda x, leaf: F.prelu(x, _affine(leaf)[0]),
        "native_batch_norm": lambda x, leaf: F.batch_norm(x, None, None, *_affine(leaf), training=True),
        "native_group_norm": lambda x, leaf: F.group_norm(x, 4, *_affine(leaf)),
        "native_layer_norm": lambda x, leaf: F.layer_norm(x, x.shape[3:]),
        "leannorm::channel_forward": lambda x, leaf: functional.batch_norm(
            x, None, None, *_affine(leaf), training=True
        ),
        "leannorm::channel_forward_tracked_": lambda x, leaf: functional.batch_norm(
            x, *_running(x), *_affine(leaf), training=True
        ),
        "leannorm::channel_normalize": lambda x, leaf: functional.batch_norm(x, *_running(x), *_affine(leaf)),
        "leannorm::row_forward": lambda x, leaf: functional.layer_norm(x, x.shape[3:], dim=3),
        "leannorm::row_gated_forward": lambda x, leaf: functional.gated_rms_norm(x, leaf, x.shape[3:]),
        "_scaled_dot_product_flash_attention_for_cpu": lambda x, leaf: F.scaled_dot_product_attention(
            x, leaf, leaf
        ),
        "convolution": lambda x, leaf: F.conv2d(leaf, _kernel()),
        "roll": lambda x, leaf: x.roll((1, -2), (2, 3)),
        "flip": lambda x, leaf: x.flip(2),
        "pixel_shuffle": lambda x, leaf: F.pixel_shuffle(x, 2),
        "pixel_unshuffle": lambda x, leaf: F.pixel_unshuffle(x, 2),
        "index": lambda x, leaf: x[:, torch.arange(4, 12)],
        "triu": lambda x, leaf: x.triu(),
        "tril": lambda x, leaf: x.tril(),
        "upsample_nearest2d": lambda x, leaf: F.interpolate(x, scale_factor=2),
        "upsample_bilinear2d": lambda x, leaf: F.interpolate(x, scale_factor=2, mode="bilinear"),
        "upsample_bicubic2d": lambda x, leaf: F.interpolate(x, scale_factor=2, mode="bicubic"),
        "max_pool2d_with_indices": lambda x, leaf: F.max_pool2d(x, 2),
        "avg_pool2d": lambda x, leaf: F.avg_pool2d(x, 2),
        "_adaptive_avg_pool2d": lambda x, leaf: F.adaptive_avg_pool2d(x, 9),
        "constant_pad_nd": lambda x, leaf: F.pad(x, (1, 0)),
        "repeat": lambda x, leaf: x.repeat(2, 1, 1, 1),
        "clone": lambda x, leaf: x.clone(),
        "_to_copy": lambda x, leaf: x.double(),
        "cat": lambda x, leaf: torch.cat((leaf, x), 1),
        "stack": lambda x, leaf: torch.stack((leaf, x), 1),
    },
    (4, 16, 32, 32): {
        "mean": lambda x, leaf: x.mean(0),
        "sum": lambda x, leaf: x.sum(0),
        "amax": lambda x, leaf: x.amax(0),
        "amin": lambda x, leaf: x.amin(0),
        "max": lambda x, leaf: x.max(0).values,
        "min": lambda x, leaf: x.min(0).values,
        "prod": lambda x, leaf: x.prod(0),
        "logsumexp": lambda x, leaf: x.logsumexp(0),
        "norm": lambda x, leaf: ATEN.norm.ScalarOpt_dim(x, 2, [0]),
        "var": lambda x, leaf: x.var(0),
        "std": lambda x, leaf: x.std(0),
        "var_mean": lambda x, leaf: torch.var_mean(x, 0)[0],
    },
    (64, 64): {
        "mm": lambda x, leaf: x.mm(leaf),
        "addmm": lambda x, leaf: torch.addmm(leaf, x, leaf),
        "_grouped_mm": _experts,
        "embedding": lambda x, leaf: F.embedding(_rows(x), leaf),
        "index_select": lambda x, leaf: x.index_select(0, _rows(x)),
        "gather": lambda x, leaf: x.gather(1, _rows(x).expand(64, 64)),
        "topk": lambda x, leaf: x.topk(32).values,
        "sort": lambda x, leaf: x.sort(1).values,
    },
    (4, 32, 32): {
        "bmm": lambda x, leaf: x.bmm(leaf),
        "baddbmm": lambda x, leaf: torch.baddbmm(leaf, x, leaf),
        "upsample_nearest1d": lambda x, leaf: F.interpolate(x, scale_factor=2),
        "upsample_linear1d": lambda x, leaf: F.interpolate(x, scale_factor=2, mode="linear"),
    },
    (2, 4, 8, 16, 16): {
        "upsample_nearest3d": lambda x, leaf: F.interpolate(x, scale_factor=2),
        "upsample_trilinear3d": lambda x, leaf: F.interpolate(x, scale_factor=2, mode="trilinear"),
        "max_pool3d_with_indices": lambda x, leaf: F.max_pool3d(x, 2),
        "avg_pool3d": lambda x, leaf: F.avg_pool3d(x, 2),
        "_adaptive_avg_pool3d": lambda x, leaf: F.adaptive_avg_pool3d(x, 7),
    },
}
PROGRAMS = {
    name if "::" in name else f"aten::{name}": (run, shape)
    for shape, several in _BY_SHAPE.items()
    for name, run in several.items()
}
ON_GPUS = tuple(
    f"aten::{name}"
    for name in (
        "_scaled_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "cudnn_batch_norm",
        "miopen_batch_norm",
    )
)


def operator_states() -> Iterator[OperatorState]:
    """Try the operators that training calls: what a release of torch computes otherwise is kept, not wrong.

    >>> {state.state for state in operator_states()} <= {"repeated", "kept", "not tried"}
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name in PROGRAMS:
            yield _tried(name, *PROGRAMS[name])
    yield from (OperatorState(name, NOT_TRIED, "called on GPUs") for name in ON_GPUS)


def _tried(name: str, program: Program, shape: tuple[int, ...]) -> OperatorState:
    leaf = torch.randn(shape)
    try:
        stock = _gradient(program, leaf, nullcontext())
    except Exception as error:  # this torch has no such function
        return OperatorState(name, KEPT, _in_words(error))
    saved = lean(budget=0.01)
    saved.place = NEVER_SMALL
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what is kept, which is reported here
            ours = _gradient(program, leaf, saved)
    except Exception as error:
        return OperatorState(name, WRONG, _in_words(error))
    made = [record for record in saved.records if record.node == name]
    if not made:
        return OperatorState(name, KEPT, "this torch calls another operator in its place")
    if not any(record.rebuilt for record in made):
        return OperatorState(name, KEPT, made[0].why or "; ".join(saved.reasons))
    if not torch.equal(ours, stock):
        return OperatorState(name, WRONG, "gradients differ")
    return OperatorState(name, REPEATED)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _gradient(program: Program, leaf: Tensor, context: AbstractContextManager[object]) -> Tensor:
    """The leaf's gradient."""
    leaf = leaf.clone().requires_grad_()
    with torch.random.fork_rng(devices=[]), context:
        loss = program(F.silu(leaf), leaf).square().sum()
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad
