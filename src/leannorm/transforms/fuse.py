"""Norm, then (a residual, then) activation: where they meet for certain, one layer does both.

Two ways. Where the activation is a module of its own, called once and right behind the norm, the norm
becomes a `BatchNormAct` and the activation an `Identity`; no forward changes. Where the activation is
shared, or a function, or behind an addition, the block gets a forward of its own: its traced text with
these calls replaced, as a subclass of its class, so that `isinstance`, pickle and copies go on working.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch.nn
from torch import Tensor
from torch.fx.graph_module import _format_import_block
from torch.nn import Module
from torch.package.importer import sys_importer

from leannorm.nn.act import BatchNormActBase
from leannorm.ops.activation import ACTIVATIONS
from leannorm.transforms.known import CERTAIN_BLOCKS, WITH_ACT, Entry, activation_of, name_of
from leannorm.transforms.then_act import BatchNorm2dThenAct
from leannorm.transforms.trace import Match, Traced, has_hooks, trace


class Fusion(NamedTuple):
    """What becomes of each module, and the source of a new forward for some blocks."""

    entries: dict[Module, Entry]
    forwards: dict[Module, str]


def find_fusions(model: Module, targets: Mapping[Module, type[Module]], everywhere: bool) -> Fusion:
    """Every fusion that keeps what the model computes; `targets` are the norms and what they become.

    `everywhere` also traces blocks of unknown classes.
    """
    registered = Counter(id(child) for m in model.modules() for child in m._modules.values())
    fusable = {
        norm: WITH_ACT[target]
        for norm, target in targets.items()
        if target in WITH_ACT and registered[id(norm)] == 1 and not has_hooks(norm)
    }
    fusion = Fusion({}, {})

    def alone(act: Module) -> bool:
        return registered[id(act)] == 1 and not has_hooks(act)

    for norm in [norm for norm in fusable if targets[norm] is BatchNorm2dThenAct]:
        target, (drop, act) = fusable.pop(norm), (norm.get_submodule(child) for child in ("drop", "act"))
        name = activation_of(act)
        if name is not None and type(drop) is torch.nn.Identity and alone(drop) and alone(act):
            fusion.entries[norm] = Entry(target, {"activation": name})
    traces = {
        block: traced
        for block in model.modules()
        if everywhere or name_of(type(block)) in CERTAIN_BLOCKS
        if (traced := _traced(block, fusable)) is not None
    }
    calls = Counter(id(m) for traced in traces.values() for m in traced.called)
    for block in model.modules():
        if type(block).forward is torch.nn.Sequential.forward:
            for norm, act, name in _neighbours(block, fusable):
                if alone(act) and not calls[id(norm)] and not calls[id(act)]:
                    _pair(fusion, fusable, norm, act, name)

    def once(path: list[Module]) -> bool:
        return all(alone(m) and calls[id(m)] == (m is path[0]) for m in path)

    for block, traced in traces.items():
        _fuse_block(fusion, fusable, block, traced, once)
    return fusion


def _path(module: Module) -> list[Module]:
    """From a Sequential to its last layer, whose output is the Sequential's; any other module alone."""
    path = [module]
    while type(path[-1]).forward is torch.nn.Sequential.forward and path[-1]._modules:
        path.append(list(path[-1].children())[-1])
    return path


def _traced(block: Module, fusable: Mapping[Module, type[Module]]) -> Traced | None:
    if type(block).forward is torch.nn.Sequential.forward or not _plain(block):
        return None
    norms = {name: m for name, m in block.named_modules() if _path(m)[-1] in fusable}
    return trace(block, norms) if norms else None


def _pair(fusion: Fusion, fusable: dict[Module, type[Module]], norm: Module, act: Module, name: str) -> None:
    fusion.entries[norm] = Entry(fusable.pop(norm), {"activation": name})
    fusion.entries[act] = Entry(torch.nn.Identity)


def _neighbours(
    block: Module, fusable: Mapping[Module, type[Module]]
) -> Iterator[tuple[Module, Module, str]]:
    for norm, act in itertools.pairwise(block._modules.values()):
        if norm is None or act is None:
            continue
        name = activation_of(act)
        if norm in fusable and name not in (None, "identity"):
            yield norm, act, str(name)


def _fuse_block(
    fusion: Fusion,
    fusable: dict[Module, type[Module]],
    block: Module,
    traced: Traced,
    once: Callable[[list[Module]], bool],
) -> None:
    """`once`: is the first of a path called in one place, the rest only within it, and nobody listens?"""
    rewritten: list[Match] = []
    for match in traced.matches:
        path = _path(block.get_submodule(str(match.norm.target)))
        norm = path[-1]
        if norm not in fusable or not once(path) or (match.addition is not None and len(path) > 1):
            continue
        if match.addition is None and match.act.op == "call_module":
            act = block.get_submodule(str(match.act.target))
            if once([act]):
                _pair(fusion, fusable, norm, act, match.name)
                continue
        if traced.lasting:
            rewritten.append(match)
    source = _rewrite(traced, rewritten) if rewritten else None
    if source is not None:
        fusion.forwards[block] = source
        for match in rewritten:
            norm = _path(block.get_submodule(str(match.norm.target)))[-1]
            fusion.entries[norm] = Entry(fusable.pop(norm), {"activation": match.name})


def _plain(block: Module) -> bool:
    """Is the block's forward that of its class, and its pickling that of every object?"""
    cls = type(block)
    return (
        "forward" not in vars(block)
        and not hasattr(cls, "unfused")
        and cls.__reduce__ is object.__reduce__
        and cls.__reduce_ex__ is object.__reduce_ex__
    )


def _rewrite(traced: Traced, matches: list[Match]) -> str | None:
    """The source of the forward with fused calls; None where it refers to what cannot be imported."""
    graph = traced.graph
    for node in graph.nodes:
        node.type = None  # an annotation may be a text, which no import gives
    for match in matches:
        input, norm = match.norm.args[0], str(match.norm.target)
        with graph.inserting_before(match.act):
            if match.addition is None or match.residual is None:
                fused = graph.call_module(norm, (input,))
            else:
                in_place = match.addition.target is operator.iadd
                residual = match.addition.args[match.residual]
                arguments: tuple[Any, ...] = (graph.get_attr(norm), input, residual, in_place)
                fused = graph.call_function(norm_add_act, arguments)
        match.act.replace_all_uses_with(fused)
        chain = {match.norm, match.act, match.addition, *match.between}
        for node in [n for n in reversed(graph.nodes) if n in chain]:
            graph.erase_node(node)
    graph.lint()
    code = graph.python_code("self")
    try:
        return str(_format_import_block(code.globals, sys_importer)) + code.src
    except Exception:  # a lambda or a local function in the block's text
        return None


def norm_add_act(norm: BatchNormActBase, input: Tensor, residual: Any, in_place: bool) -> Tensor:
    """`act(norm(input) + residual)`, in one pass where the residual is like the input."""
    if isinstance(residual, Tensor) and (residual.shape, residual.dtype) == (input.shape, input.dtype):
        fused: Tensor = norm(input, residual)
        return fused
    y = norm._normalize(input)
    if in_place:
        y += residual
    else:
        y = y + residual
    return ACTIVATIONS[norm.activation].forward(y)


_FUSED_CLASSES: dict[tuple[type[Module], str], type[Module]] = {}


def fused_class(cls: type[Module], source: str) -> type[Module]:
    """A subclass of `cls` with the forward in `source`; `unfused` is `cls`."""
    if (cls, source) in _FUSED_CLASSES:
        return _FUSED_CLASSES[cls, source]
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<leannorm: forward of {name_of(cls)}>", "exec"), namespace)
    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": _reduce,
        "forward": namespace["forward"],
        "unfused": cls,
        "source": source,
    }
    fused = _FUSED_CLASSES[cls, source] = type(cls.__name__, (cls,), body)
    return fused


def _reduce(block: Any, protocol: int) -> tuple[Any, ...]:
    parts: Any = object.__reduce_ex__(block, max(protocol, 2))
    return _rebuild, (block.unfused, block.source), *parts[2:]


def _rebuild(cls: type[Module], source: str) -> Module:
    fused = fused_class(cls, source)
    return fused.__new__(fused)
