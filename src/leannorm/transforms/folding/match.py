"""Which batch norms of an evaluation graph can be folded into a neighbouring layer, by the flow of data.

In evaluation a batch norm is y = s * x + t for each channel. It can be folded into the layer before it if
nothing else reads that layer's output. It can be folded into the layers after it if nothing else reads the
norm's output, and if they do not pad with zeros (a padded zero is not shifted by t).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from leannorm.functional.declare import NORMS
from leannorm.program.memory import arguments

# operator -> its kind, and the number of dims of an input whose features are on dim 1
_LAYERS = {
    **{f"aten::conv{n}d": ("conv", n + 2) for n in (1, 2, 3)},
    **{f"aten::conv_transpose{n}d": ("transposed", n + 2) for n in (1, 2, 3)},
    "aten::linear": ("linear", 2),
}


class LinearCall(NamedTuple):
    """A call of a convolution, a transposed convolution or a linear layer."""

    node: fx.Node
    kind: str
    axes: int
    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    padded: bool
    groups: int


class NormCall(NamedTuple):
    """A call of a batch norm whose statistics are constants; `result` is its output.

    One that also adds or activates returns act(norm(input) + residual).
    """

    node: fx.Node
    result: fx.Node
    input: fx.Node
    mean: fx.Node
    var: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    eps: float
    act: str = "identity"
    residual: fx.Node | None = None

    @property
    def only_normalizes(self) -> bool:
        return self.act == "identity" and self.residual is None


class Fold(NamedTuple):
    """A norm's call and the calls into which it is folded: the one before it, or all that follow."""

    norm: NormCall
    layers: tuple[LinearCall, ...]
    before: bool


class Skip(NamedTuple):
    """A norm's call that stays, and why."""

    norm: fx.Node
    reason: str


def find(graph: fx.Graph, only_scales: Callable[[NormCall], bool]) -> tuple[list[Fold], list[Skip]]:
    """Every batch norm of the graph, matched or skipped with the reason.

    A norm that `only_scales` (its shift is 0) may also be folded into layers that pad.
    """
    matches: list[Fold] = []
    skips: list[Skip] = []
    for node in graph.nodes:
        norm = norm_of(node)
        if norm is None:
            continue
        if isinstance(norm, str):
            skips.append(Skip(node, norm))
            continue
        before = _layer_before(norm)
        if isinstance(before, LinearCall):
            matches.append(Fold(norm, (before,), True))
            continue
        after = _layers_after(norm, only_scales) if norm.only_normalizes else "it also adds or activates"
        if isinstance(after, tuple):
            matches.append(Fold(norm, after, False))
        else:
            skips.append(Skip(node, f"{before}; {after}"))
    return matches, skips


def norm_of(node: fx.Node) -> NormCall | str | None:
    """The node as a norm's call, or the reason why it cannot be folded; None if it is no batch norm."""
    operator = NORMS.get(_name(node))
    if operator is None:
        return None
    if isinstance(operator.folds, str):
        return operator.folds or None
    a = arguments(node)
    if operator.by_batch(a) or a[operator.folds.mean] is None:
        return "it uses the batch's own statistics"
    x, mean, var, weight, bias, eps = (a[name] for name in operator.folds)
    for what, value in (("statistics", mean), ("statistics", var), ("weight", weight), ("bias", bias)):
        if value is not None and value.op != "get_attr":
            return f"its {what} is computed, not a variable"
    result = node
    if len(node.target._schema.returns) > 1:  # type: ignore[union-attr]
        results = [u for u in node.users if u.args[1] == 0]
        if len(results) != 1 or len(node.users) != 1:
            return "its statistics are used as well"
        result = results[0]
    behind = a.get("act", "identity"), a.get("residual")
    return NormCall(node, result, x, mean, var, weight, bias, eps, *behind)


def _layer_before(norm: NormCall) -> LinearCall | str:
    layer = _layer_of(norm.input)
    if isinstance(layer, str):
        return f"before it comes {layer}"
    if len(layer.node.users) > 1:
        return f"the result of the {layer.kind} layer before it is used elsewhere too"
    if norm.input.meta["val"].dim() != layer.axes:
        return f"it normalizes axis 1, but the {layer.kind} layer before it has its features on another axis"
    return layer


def _layers_after(norm: NormCall, only_scales: Callable[[NormCall], bool]) -> tuple[LinearCall, ...] | str:
    if not norm.result.users:
        return "nothing follows it"
    layers = []
    for user in norm.result.users:
        layer = _layer_of(user)
        if isinstance(layer, str) or layer.input is not norm.result:
            return f"after it comes {layer if isinstance(layer, str) else 'a use as a weight'}"
        if norm.input.meta["val"].dim() != layer.axes:
            return f"the {layer.kind} layer after it works on another axis"
        if (layer.padded or layer.kind == "transposed") and not only_scales(norm):
            return f"the {layer.kind} layer after it has zeros at its border, which the norm would shift"
        layers.append(layer)
    return tuple(layers)


def _layer_of(node: fx.Node) -> LinearCall | str:
    if _name(node) not in _LAYERS:
        kinds = {"call_function": str(node.target), "placeholder": "an input", "output": "an output"}
        return kinds.get(node.op, node.op)
    (kind, axes), a = _LAYERS[_name(node)], arguments(node)
    if a["weight"].op != "get_attr" or (a["bias"] is not None and a["bias"].op != "get_attr"):
        return f"a {kind} layer whose weight is computed (a parametrization)"
    padding = a.get("padding", 0)
    padded = padding != "valid" if isinstance(padding, str) else any(_each(padding))
    return LinearCall(node, kind, axes, a["input"], a["weight"], a["bias"], padded, a.get("groups", 1))


def _name(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def _each(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [value]
