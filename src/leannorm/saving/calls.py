"""The arguments of a call that its node does not keep: a norm's eps and bias, a frozen bias of a product.

The pack hook runs inside the call. The frame above it is the Python function that made the call; where that
is a function of `torch.nn.functional`, its local variables are the arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leannorm.saving.shards import PLAIN, copied
from leannorm.saving.steps import share_memory


def _codes(*functions: object) -> set[CodeType]:
    """By which frames are known; of what others have put in a function's place, perhaps none."""
    return {function.__code__ for function in functions if hasattr(function, "__code__")}


class CallArguments(NamedTuple):
    """The arguments; `bias` is a copy, since the parameter may change before the backward pass."""

    eps: float | None
    bias: Tensor | None
    reads_buffers: bool  # or has frozen parameters: what it saves, others have too and may edit
    moves_affine: bool = False  # the call writes running statistics into its own weight or bias
    causal: bool = False  # attention whose mask is the causal one


_SOFTMAXES = _codes(F.cross_entropy, F.log_softmax, F.softmax)


def logits_of(frame: FrameType) -> Tensor | None:
    """The input of the softmax call in `frame`, the caller of the pack hook; None if it is no such call."""
    return frame.f_locals.get("input") if frame.f_code in _SOFTMAXES else None


# `Function.apply` is written in Python; from torch 2.15 on in C, and then the frame is its caller's
APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)


def is_compiled(frame: FrameType) -> bool:
    """Is `frame`, the caller of the pack hook, code that torch.compile generated?"""
    if APPLY is None:
        return str(frame.f_globals.get("__name__")).startswith("torch._functorch.")
    if frame.f_code is not APPLY:
        return False
    return str(frame.f_locals["cls"].__module__).startswith("torch._functorch.")


# what saves its output where it works in place, by the arguments that it takes
_IN_PLACE = {
    **dict.fromkeys(_codes(F.relu), ("ReluBackward0", ())),
    **dict.fromkeys(_codes(F.leaky_relu), ("LeakyReluBackward1", ("negative_slope",))),
    **dict.fromkeys(_codes(F.celu), ("CeluBackward1", ("alpha",))),
}


def written_by(frame: FrameType, tensor: Tensor) -> tuple[str, tuple[Any, ...]] | None:
    """The kind and constants of the activation that the call in `frame` has just written over `tensor`."""
    kind, names = _IN_PLACE.get(frame.f_code, ("", ()))
    if not kind or frame.f_locals.get("input") is not tensor or not frame.f_locals.get("inplace"):
        return None
    return kind, tuple(frame.f_locals[name] for name in names)


def name_of(frame: FrameType) -> str:
    """The function that made the call in `frame`."""
    code = frame.f_code
    return str(getattr(code, "co_qualname", code.co_name))  # the class's name too, from Python 3.11 on


def call_of(frame: FrameType) -> CallArguments | None:
    """The arguments of the call in `frame`, the caller of the pack hook; None if nothing is missing."""
    read = READ.get(frame.f_code)
    return _of_frozen_norm(frame) if read is None else read(frame.f_locals)


def biases_at_hand(frame: FrameType) -> list[Tensor]:
    """The vectors that are trained and that the function in `frame` knows, its node perhaps not."""
    known = frame.f_locals
    given, layer = [*known.values(), *known.get("args", ())], known.get("self")
    if isinstance(layer, torch.nn.Module):
        given += layer._parameters.values()
    tensors = [one for one in given if type(one) in PLAIN]
    return [one for one in tensors if one.requires_grad and one.is_leaf and one.dim() == 1]


def _of_linear(arguments: dict[str, Any]) -> CallArguments | None:
    return _with_frozen_bias(arguments["self"]._parameters.get("bias"))


def _of_convolution(arguments: dict[str, Any]) -> CallArguments | None:
    return _with_frozen_bias(arguments["bias"])


def _of_row_norm(arguments: dict[str, Any]) -> CallArguments:
    frozen = _frozen(arguments["weight"]) or _frozen(arguments.get("bias"))
    return CallArguments(arguments["eps"], None, frozen)  # the node saves the bias itself


def _of_norm(arguments: dict[str, Any]) -> CallArguments:
    weight, bias = arguments["weight"], arguments["bias"]
    training = arguments.get("training", arguments.get("use_input_stats", True))
    reads_buffers = not training or _frozen(weight) or _frozen(bias)
    moved = (arguments.get("running_mean"), arguments.get("running_var")) if training else ()
    moves_affine = False
    for statistic in moved:
        moves_affine = moves_affine or share_memory(statistic, weight) or share_memory(statistic, bias)
    copy = None if bias is None else copied(bias)
    return CallArguments(arguments["eps"], copy, reads_buffers, moves_affine)


def _of_attention(arguments: dict[str, Any]) -> CallArguments | None:
    causal = arguments.get("is_causal") is True and arguments.get("attention_mask", False) is None
    return CallArguments(None, None, False, causal=True) if causal else None


def know_attention() -> None:
    """Read the calls of transformers' attention from now on, if that is imported."""
    module = sys.modules.get("transformers.integrations.sdpa_attention")
    forward = getattr(module, "sdpa_attention_forward", None)
    if getattr(forward, "__globals__", None) is getattr(module, "__dict__", False):  # by nobody else's
        READ.update(dict.fromkeys(_codes(forward), _of_attention))


NORMS = _codes(F.batch_norm, F.instance_norm, F.group_norm)
ROW_NORMS = _codes(F.layer_norm, F.rms_norm)
COPIED = NORMS | ROW_NORMS  # of which a rebuild copies the weight
LINEAR = _codes(torch.nn.Linear.forward)
CONVOLUTIONS = _codes(*(getattr(torch.nn, f"Conv{n}d")._conv_forward for n in (1, 2, 3)))
READ: dict[CodeType, Callable[[dict[str, Any]], CallArguments | None]] = {
    **dict.fromkeys(LINEAR, _of_linear),
    **dict.fromkeys(CONVOLUTIONS, _of_convolution),
    **dict.fromkeys(ROW_NORMS, _of_row_norm),
    **dict.fromkeys(NORMS, _of_norm),
}


_WITH_FROZEN_NORMS = "torchvision.", "timm.", "transformers."


def _of_frozen_norm(frame: FrameType) -> CallArguments | None:
    """What a frozen batch norm of these packages, `x * scale + bias`, is about to add."""
    if frame.f_code.co_name != "forward":
        return None
    if not str(frame.f_globals.get("__name__")).startswith(_WITH_FROZEN_NORMS):
        return None
    arguments = frame.f_locals
    known = "FrozenBatchNorm" in type(arguments.get("self")).__name__ and "scale" in arguments
    bias = arguments.get("bias") if known else None
    return _with_frozen_bias(bias) if isinstance(bias, Tensor) else None


def _with_frozen_bias(bias: Tensor | None) -> CallArguments | None:
    return CallArguments(None, copied(bias), True) if bias is not None and _frozen(bias) else None


def _frozen(parameter: Tensor | None) -> bool:
    return parameter is not None and not parameter.requires_grad
