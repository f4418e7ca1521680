"""How the output of each autograd node is rebuilt: one decorated function per kind of node.

A recipe receives the node, the number of its output, `given(node, i)` (the value that stands for the
node's input i, if one is at hand) and the output itself where it is there to look at. It answers with a
step, or None: then the tensor is held, as in stock autograd. Steps close over no tensor of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from leannorm.saving.one_pass import exact, in_one_pass
from leannorm.saving.values import Step, Value, saved

Given = Callable[[Any, int], Value | None]
Recipe = Callable[[Any, int, Given, Tensor | None], Step | None]
RECIPES: dict[str, Recipe] = {}


def recipe(*nodes: str) -> Callable[[Recipe], Recipe]:
    """Register the decorated function for nodes of these names."""

    def register(build: Recipe) -> Recipe:
        RECIPES.update(dict.fromkeys(nodes, build))
        return build

    return register


# ---------------------------------------------------------------- norms


def _bias(node: Any, i: int, given: Given) -> tuple[bool, Tensor | None]:
    """Is the bias (input i, which norms do not save) known, and its value now.

    It is read now, and the scale with it, so that an optimizer step or a resharding of the parameters
    before the backward pass changes nothing.
    """
    value = given(node, i)
    if value is not None:
        return True, value.look()
    # no bias, or one that is frozen and out of reach
    return node.next_functions[i][0] is None and saved(node, "weight") is None, None


_AGAIN: dict[str, Callable[..., Any]] = {
    "NativeBatchNormBackward0": torch.native_batch_norm,
    "CudnnBatchNormBackward0": torch.cudnn_batch_norm,
    "MiopenBatchNormBackward0": torch.miopen_batch_norm,
}


def _copy(value: Value | None) -> Tensor | None:
    return None if value is None else value.look().detach().clone()


@recipe(*_AGAIN)
def batch_norm(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    x, weight = saved(node, "input"), saved(node, "weight")
    known, bias = _bias(node, 2, given)
    if output or x is None or not known:
        return None
    eps = node._saved_eps if hasattr(node, "_saved_eps") else node._saved_epsilon
    again = _AGAIN[node.name()]
    if not node._saved_training:
        mean, var = _copy(saved(node, "running_mean")), _copy(saved(node, "running_var"))
        w, b = _copy(weight), None if bias is None else bias.clone()
        key = "eval", node.name()
        return Step(lambda x: again(x, w, b, mean, var, False, 0.0, eps)[0], (x,), key)
    w = None if weight is None else weight.look()
    mean_value, rstd_value = saved(node, "result1"), saved(node, "result2")
    if node.name() == "NativeBatchNormBackward0" and mean_value is not None and rstd_value is not None:
        mean, rstd = mean_value.look(), rstd_value.look()
        if mean.device.type == "cpu" and mean.dtype in (torch.float32, torch.float64):
            return _scale_and_shift(x, mean, rstd, w, bias)
        if mean.is_cuda and not isinstance(mean, FakeTensor):  # fakes have no such kernel
            w, b = (None if v is None else v.detach().clone() for v in (w, bias))
            # the second half of native_batch_norm: one pass, by the statistics that it kept
            return Step(lambda x: torch.batch_norm_elemt(x, w, b, mean, rstd, eps), (x,), "elementwise")
    w, b = (None if v is None else v.detach().clone() for v in (w, bias))
    return Step(lambda x: again(x, w, b, None, None, True, 0.0, eps)[0], (x,), (node.name(), eps))


def _scale_and_shift(
    x: Value, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Step:
    """torch's CPU kernel computes fma(x, scale, fma(-mean, scale, bias)): repeat it with its own means."""
    scale = rstd if weight is None else rstd * weight
    shift = torch.addcmul(torch.zeros_like(mean) if bias is None else bias, mean, scale, value=-1)

    def with_act(act: str) -> Callable[[Tensor], Tensor] | None:
        return in_one_pass(scale, shift, act) if exact(act, scale.dtype) else None

    return Step(in_one_pass(scale, shift), (x,), "scale and shift", with_act=with_act)


@recipe("NativeGroupNormBackward0")
def group_norm(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    x, weight = saved(node, "input"), saved(node, "weight")
    known, bias = _bias(node, 2, given)
    if output or x is None or not known:
        return None
    w, b = _copy(weight), None if bias is None else bias.clone()
    sizes = (node._saved_N, node._saved_C, node._saved_HxW, node._saved_group, node._saved_eps)
    return Step(lambda x: torch.native_group_norm(x, w, b, *sizes)[0], (x,), sizes)


@recipe("NativeLayerNormBackward0")
def layer_norm(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    """The node does not keep eps; the call that made it said it (`eps_of_call`)."""
    x, rstd = saved(node, "input"), saved(node, "result2")
    if output or x is None or rstd is None or rstd.eps is None:
        return None
    shape, (eps,) = tuple(node._saved_normalized_shape), rstd.eps
    w, b = _copy(saved(node, "weight")), _copy(saved(node, "bias"))
    return Step(lambda x: torch.native_layer_norm(x, shape, w, b, eps or 0.0)[0], (x,), ("layer", shape, eps))


@recipe("FusedRmsNormBackward0")
def rms_norm(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    x, rstd = saved(node, "input"), saved(node, "result1")
    if output or x is None or rstd is None or rstd.eps is None:
        return None
    shape, (eps,), w = tuple(node._saved_normalized_shape), rstd.eps, _copy(saved(node, "weight"))
    fused = torch.ops.aten._fused_rms_norm
    return Step(lambda x: fused(x, shape, w, eps)[0], (x,), ("rms", shape, eps))


_LAYER_NORM, _RMS_NORM = F.layer_norm.__code__, F.rms_norm.__code__


def eps_of_call(frame: FrameType) -> tuple[float | None] | None:
    """The eps that torch's function was called with, where `frame`, which saves tensors, is its frame."""
    code = frame.f_code
    return (frame.f_locals["eps"],) if code is _LAYER_NORM or code is _RMS_NORM else None


# ---------------------------------------------------------------- activations

Elementwise = Callable[..., Tensor]
_FROM_SAVED_INPUT: dict[str, tuple[Elementwise, tuple[str, ...]]] = {
    "SiluBackward0": (F.silu, ()),
    "MishBackward0": (F.mish, ()),
    "HardswishBackward0": (F.hardswish, ()),
    "HardsigmoidBackward0": (F.hardsigmoid, ()),
    "GeluBackward0": (lambda x, approximate: F.gelu(x, approximate=approximate), ("approximate",)),
    "HardtanhBackward0": (F.hardtanh, ("min_val", "max_val")),
    "LeakyReluBackward0": (F.leaky_relu, ("negative_slope",)),
    "EluBackward0": (torch.ops.aten.elu, ("alpha", "scale", "input_scale")),
    "CeluBackward0": (F.celu, ("alpha",)),
    "SoftplusBackward0": (F.softplus, ("beta", "threshold")),
    "GluBackward0": (F.glu, ("dim",)),
    "LogSigmoidBackward0": (F.logsigmoid, ()),
}
_FROM_PRODUCER: dict[str, tuple[Elementwise, Elementwise, tuple[str, ...]]] = {
    "ReluBackward0": (torch.relu, torch.relu_, ()),
    "SigmoidBackward0": (torch.sigmoid, torch.sigmoid_, ()),
    "TanhBackward0": (torch.tanh, torch.tanh_, ()),
    "LeakyReluBackward1": (F.leaky_relu, torch.ops.aten.leaky_relu_, ("negative_slope",)),
    "EluBackward1": (torch.ops.aten.elu, torch.ops.aten.elu_, ("alpha", "scale", "input_scale")),
    "CeluBackward1": (F.celu, torch.celu_, ("alpha",)),
    "SoftmaxBackward0": (torch.softmax, torch.softmax, ("dim",)),  # there is none in place
}


SAVE_THEIR_OUTPUT = set(_FROM_PRODUCER)


@recipe(*_FROM_SAVED_INPUT)
def activation_of_saved_input(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    function, names = _FROM_SAVED_INPUT[node.name()]
    x, constants = saved(node, "self"), tuple(_constant(node, name) for name in names)
    if x is None:
        return None
    key = (node.name(), *constants)
    return _with_norm(x, key) or Step(lambda x: function(x, *constants), (x,), key)


@recipe(*_FROM_PRODUCER)
def activation_of_producer(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    """These save their output, so their input must be at hand; the step must not hold the node itself."""
    function, in_place, names = _FROM_PRODUCER[node.name()]
    name, constants = node.name(), tuple(_constant(node, name) for name in names)
    x = given(node, 0)
    if x is None:
        return None
    key = (name, *constants)
    return _with_norm(x, key) or Step(
        lambda x: function(x, *constants), (x,), key, overwrite=lambda x: in_place(x, *constants)
    )


_IN_ONE_PASS: dict[Hashable, str] = {
    ("ReluBackward0",): "relu",
    ("HardswishBackward0",): "hardswish",
    ("HardtanhBackward0", 0.0, 6.0): "relu6",
}


def _with_norm(x: Value, key: Hashable) -> Step | None:
    """Norm and activation from the norm's input, in the time of the norm alone."""
    act, step = _IN_ONE_PASS.get(key), x.step
    while step is not None and step.copies:  # works in place, and saved a copy of what it read
        step = step.inputs[0].step
    rebuild = step.with_act(act) if act and step is not None and step.with_act else None
    return Step(rebuild, step.inputs, (key, step.constants)) if step is not None and rebuild else None


@recipe("PreluKernelBackward0")
def prelu(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    x, weight = saved(node, "self"), saved(node, "weight")
    return None if x is None or weight is None else Step(torch._prelu_kernel, (x, weight), "prelu")


# Outputs that take a pass of arithmetic, as views, casts, products and sums of held tensors do not.
MADE_ANEW = {
    *_AGAIN,
    *_FROM_SAVED_INPUT,
    *_FROM_PRODUCER,
    "NativeGroupNormBackward0",
    "NativeLayerNormBackward0",
}


# ---------------------------------------------------------------- products: scale, gate, dropout's mask


@recipe("MulBackward0")
def mul(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    """LayerScale, squeeze-and-excite, dropout (input times mask): whichever factor is not saved is sought."""
    a = saved(node, "self") or given(node, 0)
    b = saved(node, "other") or given(node, 1)
    return None if a is None or b is None else Step(torch.mul, (a, b), "mul", kind="scale")


@recipe("MulBackward1")
def mul_by_number(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    x, number = given(node, 0), node._saved_other
    return None if x is None else Step(lambda x: x * number, (x,), ("mul", number), kind="scale")


@recipe("NativeDropoutBackward0")
def dropout(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    x, mask, p = given(node, 0), saved(node, "result1"), node._saved_p
    if output or x is None or mask is None or not 0 < p < 1:
        return None
    return Step(lambda x, mask: x * mask * (1 / (1 - p)), (x, mask), ("dropout", p))


@recipe("AddBackward0")
def add(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    a, b = given(node, 0), given(node, 1)
    if a is None or b is None or node._saved_alpha != 1:
        return None
    return Step(torch.add, (a, b), "add", overwrite=_add_to, kind="sum")


def _add_to(a: Tensor, b: Tensor) -> Tensor:
    return a.add_(b) if a.shape == b.shape and a.dtype == b.dtype else a + b


def _constant(node: Any, name: str) -> Any:
    """A number or a list of numbers that the node saved; C++ hands negative ones over as unsigned."""
    value = getattr(node, f"_saved_{name}")
    if isinstance(value, (list, tuple)):
        return tuple(_signed(v) for v in value)
    return _signed(value)


def _signed(value: Any) -> Any:
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value
