"""Folding in a model of modules: the layers get new parameters, and `Identity` replaces the norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn.modules.conv import _ConvNd

from leannorm._catalog import name_of
from leannorm._report import grouped
from leannorm.nn._layer import HOOKS
from leannorm.nn.act import BatchNormActBase
from leannorm.ops.activation import ACTIVATIONS
from leannorm.transforms.converting.norm_act import BatchNorm2dThenAct
from leannorm.transforms.folding.graph import all_variables, folded
from leannorm.transforms.folding.match import Fold, LinearCall, Skip, layer_of, owner, path_of, scopes_of


def fold_modules(
    model: torch.nn.Module, graph: fx.Graph, matches: list[Fold], skips: list[Skip]
) -> tuple[list[Fold], list[Skip]]:
    """Fold, in place, every norm module all of whose calls match; returns the folded and the skipped."""
    calls = grouped((path_of(match.norm.node), match) for match in matches)
    unmatched = {path_of(s.norm): f"{s.reason} (in one of its calls)" for s in skips}
    # all are checked before one is folded, because a layer between two norms gets a bias from the first
    reasons = {path: unmatched.get(path) or _why_not(model, graph, path, own) for path, own in calls.items()}
    done: list[Fold] = []
    for path, own in calls.items():
        if (reason := reasons[path]) is not None:
            skips = [*skips, *(Skip(m.norm.node, reason) for m in own)]
            continue
        variables = all_variables(model)
        layers = {str(layer.weight.target): layer for match in own for layer in match.layers}
        for layer in layers.values():
            module: Any = model.get_submodule(owner(layer.weight))
            made = folded(own[0], layer, variables, module.weight, module.bias)
            trained = module.weight.requires_grad
            module.weight, module.bias = (torch.nn.Parameter(v, trained) for v in made)
        _replace(model, model.get_submodule(path), _remainder(model.get_submodule(path)))
        done += own
    return done, skips


def _why_not(model: torch.nn.Module, graph: fx.Graph, path: str, own: list[Fold]) -> str | None:
    """Why the norm at `path`, whose calls are `own`, cannot be replaced; None if it can."""
    if len({match.before for match in own}) > 1:
        return "some of its calls come before a layer and some after one"
    norm = model.get_submodule(path)
    paths = {name for name, module in model.named_modules(remove_duplicate=False) if module is norm}
    inside = {node for match in own for node in (match.norm.result, *match.norm.nodes)}
    if not all(paths.intersection(scopes_of(match.norm.node)) for match in own):
        return "its tensors are read by another module's forward"
    its_own = (n for n in graph.nodes if n.op == "get_attr" and owner(n) in paths)
    if any(user not in inside for n in its_own for user in n.users):
        return "its tensors are also read without it"
    traced = (n for n in graph.nodes if n.op == "call_function" and paths.intersection(scopes_of(n)))
    more = any(n not in inside for n in traced) or not all(match.norm.only_normalizes for match in own)
    if (more and _remainder(norm) is None) or not path:
        return f"{type(norm).__name__} does more than normalize"
    if any(match.norm.tensors.residual is not None for match in own):
        return "it also adds in the same call"
    layers = [layer for match in own for layer in match.layers]
    modules = {path: norm} | {
        owner(layer.weight): model.get_submodule(owner(layer.weight)) for layer in layers
    }
    owners: dict[int, set[int]] = {}
    for _, module in model.named_modules():
        for tensor in module._parameters.values():
            owners.setdefault(id(tensor), set()).add(id(module))
    for where, module in modules.items():
        if any(getattr(module, hooks) for hooks in HOOKS):
            return f"{where} has hooks, which may see other values"
        if torch.nn.utils.parametrize.is_parametrized(module):
            return f"{where} is parametrized"
        if any(len(owners[id(p)]) > 1 for p in module._parameters.values() if p is not None):
            return f"{where} shares its parameters with another module"
        if module is not norm and not isinstance(module, _ConvNd | torch.nn.Linear):
            return f"{where or 'the model'} ({type(module).__name__}) is no layer of torch.nn that fold knows"
    calls = {layer.node for layer in layers}
    return next((reason for layer in layers if (reason := _why_not_layer(model, layer, calls))), None)


def _why_not_layer(model: torch.nn.Module, layer: LinearCall, calls: set[fx.Node]) -> str | None:
    """Why the module of a layer's call cannot get other parameters; `calls` are all calls of the norm."""
    where = owner(layer.weight)
    module: Any = model.get_submodule(where)
    if layer.bias is None and module.bias is not None:
        return f"{where} is called without its bias"
    tensors = {"weight": layer.weight} | ({} if layer.bias is None else {"bias": layer.bias})
    for name, tensor in tensors.items():
        if str(tensor.target) != (f"{where}.{name}" if where else name):
            return f"{where} is called with another {name} than its own, {tensor.target}"
    others = {user for tensor in tensors.values() for user in tensor.users} - calls
    if others and all(isinstance(layer_of(user), LinearCall) for user in others):
        return f"{where} is also called without this norm"
    return f"the parameters of {where} are also read without it" if others else None


def _remainder(norm: Any) -> torch.nn.Module | None:
    """The rest of a norm module without its normalization; None if it is not known."""
    name = name_of(type(norm))
    if name == "timm.layers.norm_act.BatchNormAct2d" or isinstance(norm, BatchNorm2dThenAct):
        return torch.nn.Sequential(norm.drop, norm.act)
    if isinstance(norm, BatchNormActBase):
        activation = ACTIVATIONS[norm.activation]
        return activation.module(**activation.parameters)
    plain = ("torch.nn.modules.batchnorm.", "leannorm.nn.batch.", "leannorm.nn.sync.")
    return torch.nn.Identity() if name.startswith(plain) else None


def _replace(model: torch.nn.Module, old: torch.nn.Module, new: torch.nn.Module | None) -> None:
    """Put `new`, or an Identity, into every place of `old`."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = (new or torch.nn.Identity()).train(old.training)
