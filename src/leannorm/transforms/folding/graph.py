"""Folding in a graph. Every call gets new variables, so a layer that is called twice can be folded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from leannorm._types import Maybe
from leannorm.functional.graphs import attribute
from leannorm.ops.activation import ACTIVATIONS
from leannorm.transforms.folding.arithmetic import Affine, affine, into_layer_after, into_layer_before
from leannorm.transforms.folding.match import Fold, LinearCall, NormCall, Skip, find


def affine_of(norm: NormCall, variables: Mapping[str, Tensor]) -> Affine:
    """The norm's call as scale and shift, from its variables' values."""
    _, *of_affine, _, mean, var, _, _ = norm.tensors
    values: Any = (None if node is None else variables[str(node.target)] for node in (mean, var, *of_affine))
    mean, var, weight, bias = values
    return affine(mean, var, weight, bias, norm.norm.eps)


def folded(
    match: Fold, layer: LinearCall, variables: Mapping[str, Tensor], weight: Tensor, bias: Maybe
) -> tuple[Tensor, Tensor]:
    """The layer's weight and bias with the norm in them."""
    into = into_layer_before if match.before else into_layer_after
    return into(affine_of(match.norm, variables), layer.kind, weight, bias, layer.groups)


def find_all(graph: fx.Graph, variables: Mapping[str, Tensor]) -> tuple[list[Fold], list[Skip]]:
    """`find` for a graph whose variables have these values."""
    return find(graph, lambda norm: not bool(affine_of(norm, variables).shift.any()))


def fold_graph(module: fx.GraphModule) -> tuple[fx.GraphModule, list[Fold], list[Skip]]:
    """A folded copy of the module, with new variables where something was folded; `module` is unchanged."""
    variables = all_variables(module)
    matches, skips = find_all(module.graph, variables)
    graph, new = _copied(module.graph)
    result = fx.GraphModule(module, graph)
    for number, match in enumerate(matches):
        for layer in match.layers:
            node = new[layer.node]
            arguments: tuple[Any, ...] = node.args
            x, weight, bias, *rest = (*arguments, None)[: max(3, len(arguments))]
            values = all_variables(result)
            own = values[str(weight.target)], None if bias is None else values[str(bias.target)]
            made, nodes = folded(match, layer, variables, *own), []
            with graph.inserting_before(node):
                for what, tensor in zip(("weight", "bias"), made, strict=True):
                    name = f"folded_{number}_{node.name}_{what}"
                    result.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
                    nodes.append(graph.get_attr(name))
            node.args = (x, *nodes, *rest)
        done, norm = new[match.norm.result], new[match.norm.node]
        whole = [new[node] for node in match.norm.nodes]
        source: Any = norm.args[0]
        with graph.inserting_before(norm):
            source = _behind(result, graph, source, match.norm, new)
        done.replace_all_uses_with(source)
        for node in whole:
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return fx.GraphModule(result, graph), matches, skips


def _behind(
    module: fx.GraphModule, graph: fx.Graph, y: fx.Node, norm: NormCall, new: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    """What the norm's operator applies to its normalized output: a sum, an activation."""
    residual, act = norm.tensors.residual, norm.norm.act
    if residual is not None:
        y = graph.call_function(torch.ops.aten.add.Tensor, (y, new[residual]))
    if act != "identity":
        activation, name = ACTIVATIONS[act], f"behind_{new[norm.node].name}"
        module.add_submodule(name, activation.module(**activation.parameters))
        y = graph.call_module(name, (y,))
    return y


def in_float64(module: fx.GraphModule) -> fx.GraphModule:
    """The module with its floating-point variables in float64, and the same operators."""
    paths = [str(n.target) for n in module.graph.nodes if n.op == "get_attr"]
    wide = {path: double(attribute(module, path)) for path in paths}
    return fx.GraphModule(wide, _copied(module.graph)[0])


def double(value: Any) -> Any:
    """A floating-point tensor in float64; anything else unchanged."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    copied, new = fx.Graph(), dict[fx.Node, fx.Node]()
    copied.output(copied.graph_copy(graph, new))
    copied.set_codegen(graph._codegen)
    return copied, new


def all_variables(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a shared tensor is listed under each of its names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
