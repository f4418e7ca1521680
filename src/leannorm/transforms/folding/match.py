"""Which batch norms of an evaluation graph can be folded into a neighbouring layer, by the flow of data.

In evaluation a batch norm is y = s * x + t for each channel. It can be folded into the layer before it if
nothing else reads that layer's output. It can be folded into the layers after it if nothing else reads the
norm's output, and if they do not pad with zeros (a padded zero is not shifted by t).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from leannorm._types import Channels, ChannelTensors
from leannorm.functional.declare import NORMS, AffineNames
from leannorm.functional.graphs import arguments

# operator -> its kind, and the number of dims of an input whose features are on dim 1
_LAYERS = {
    **{f"aten::conv{n}d": ("conv", n + 2) for n in (1, 2, 3)},
    **{f"aten::conv_transpose{n}d": ("transposed", n + 2) for n in (1, 2, 3)},
    "aten::linear": ("linear", 2),
}


class LinearCall(NamedTuple):
    """A call of a convolution, a transposed convolution or a linear layer.

    `border`: where it reads zeros that are not values of its input; "" if it reads none.
    """

    node: fx.Node
    kind: str
    axes: int
    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    border: str
    groups: int


class NormCall(NamedTuple):
    """A call of a batch norm whose statistics are constants: a record whose `tensors` are nodes; `result` is
    its output."""

    node: fx.Node
    result: fx.Node
    tensors: Any  # ChannelTensors
    norm: Channels

    @property
    def only_normalizes(self) -> bool:
        return self.norm.act == "identity" and self.tensors.residual is None

    @property
    def nodes(self) -> list[fx.Node]:
        """The call, preceded by the results of an operator that has several, even unused ones."""
        return [self.node] if self.result is self.node else [*self.node.users, self.node]


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
    """The node as a norm's call, or the reason why it cannot be folded; None if it is not a batch norm."""
    norm = NORMS.get(_name(node))
    if norm is None or norm.folds is None:
        return None
    a = arguments(node)
    if not isinstance(norm.folds, AffineNames):
        return norm.folds(a)
    if norm.by_batch(a) or a[norm.folds.mean] is None:
        return "it uses the batch's own statistics"
    x, mean, var, weight, bias, eps = (a[name] for name in norm.folds)
    tensors = ChannelTensors(x, weight, bias, a.get("residual"), mean, var)
    read = ("statistics are", mean), ("statistics are", var), ("weight is", weight), ("bias is", bias)
    for what, value in read:
        if value is not None and value.op != "get_attr":
            return f"its {what} computed, not a variable"
    result = node
    if len(node.target._schema.returns) > 1:  # type: ignore[union-attr]
        results = {user.args[1]: user for user in node.users}
        if any(user.users for which, user in results.items() if which != 0):
            return "its statistics are used as well"
        if 0 not in results:
            return "nothing follows it"
        result = results[0]
    return NormCall(node, result, tensors, Channels(0, eps, a.get("act", "identity"), by_batch=False))


def _layer_before(norm: NormCall) -> LinearCall | str:
    layer = layer_of(norm.tensors.x)
    if isinstance(layer, str):
        return f"before it comes {layer}"
    if len(layer.node.users) > 1 or norm.tensors.residual is layer.node:
        return f"the result of the {layer.kind} layer before it is used elsewhere too"
    if norm.tensors.x.meta["val"].dim() != layer.axes:
        return f"it normalizes axis 1, but the {layer.kind} layer before it has its features on another axis"
    return layer


def _layers_after(norm: NormCall, only_scales: Callable[[NormCall], bool]) -> tuple[LinearCall, ...] | str:
    if not norm.result.users:
        return "nothing follows it"
    layers = []
    for user in norm.result.users:
        layer = layer_of(user)
        if isinstance(layer, str):
            return f"after it comes {layer}"
        if norm.tensors.x.meta["val"].dim() != layer.axes:
            return f"the {layer.kind} layer after it works on another axis"
        if layer.border and not only_scales(norm):
            return f"the {layer.kind} layer after it has zeros {layer.border}, which the norm does not shift"
        layers.append(layer)
    return tuple(layers)


def layer_of(node: fx.Node) -> LinearCall | str:
    if _name(node) not in _LAYERS:
        kinds = {"placeholder": "an input", "output": "an output", "get_attr": "a parameter or buffer"}
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            return f"one of the results of {node.args[0].target}"
        return kinds.get(node.op, str(node.target))
    (kind, axes), a = _LAYERS[_name(node)], arguments(node)
    for what in ("weight", "bias"):
        if a[what] is not None and a[what].op != "get_attr":
            return f"a {kind} layer whose {what} is computed"
    x, weight, bias, groups = a["input"], a["weight"], a["bias"], a.get("groups", 1)
    return LinearCall(node, kind, axes, x, weight, bias, _border(kind, a), groups)


def _border(kind: str, call: Mapping[str, Any]) -> str:
    wide = any(size > 1 for size in call["weight"].meta["val"].shape[2:])
    if kind == "transposed":
        between = any(step > 1 for step in _each(call["stride"])) or any(_each(call["output_padding"]))
        return "at its border or between its inputs" if wide or between else ""
    padding = call.get("padding", 0)
    padded = wide and padding == "same" if isinstance(padding, str) else any(_each(padding))
    return "at its border" if padded else ""


def path_of(node: fx.Node) -> str:
    """The path of the norm's module: the one with its statistics, or else the one whose forward calls it."""
    norm = NORMS[_name(node)]
    mean = arguments(node)[norm.folds.mean] if isinstance(norm.folds, AffineNames) else None
    if isinstance(mean, fx.Node) and mean.op == "get_attr":
        return owner(mean)
    scopes = scopes_of(node)
    return scopes[-1] if scopes and scopes[-1] else node.name


def owner(variable: fx.Node) -> str:
    """The path of the module that has this variable."""
    return str(variable.target).rpartition(".")[0]


def scopes_of(node: fx.Node) -> list[str]:
    """The paths of the modules in whose forward the node was traced."""
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _name(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def _each(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [value]
