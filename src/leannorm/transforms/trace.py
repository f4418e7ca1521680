"""One block's forward as a graph of calls of its children: where a norm meets an activation.

Children are leaves, so that a graph is as small as the text of `forward`. Tracing runs that text once
with stand-ins for tensors, so whatever it decides without a tensor is decided for good: a block whose
decision may fall otherwise on another call is told apart here, and its forward is not replaced.
"""

from __future__ import annotations

import inspect
import operator
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import Module
from torch.nn.modules.conv import _ConvNd

from leannorm.transforms.known import activation_called, activation_of

_ADDITIONS = (operator.add, operator.iadd, torch.add)
# calls whose answer depends on the moment or on the arguments' kind
_TELLTALES = (isinstance, torch.is_grad_enabled, torch.is_autocast_enabled, torch.is_inference_mode_enabled)

_TRACERS_OWN = sys.stdlib_module_names | {"torch"}


class Match(NamedTuple):
    """A norm's call, perhaps an addition, an activation: each used by the next one alone.

    `residual` is the place among the addition's arguments of what is added.
    """

    norm: fx.Node
    act: fx.Node
    name: str
    addition: fx.Node | None
    residual: int | None
    between: tuple[fx.Node, ...]


class Traced(NamedTuple):
    """A block's graph, the matches in it, the modules it calls, and whether it holds for every call."""

    graph: fx.Graph
    matches: list[Match]
    called: list[Module]
    lasting: bool


class _Proxy(fx.Proxy):
    """torch.fx's stand-in, which also knows `x += y` from `x = x + y`."""


def _in_place(name: str) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    def call(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return call


for _name in (
    "iadd",
    "isub",
    "imul",
    "imatmul",
    "itruediv",
    "ifloordiv",
    "imod",
    "ipow",
    "iand",
    "ior",
    "ixor",
):
    setattr(_Proxy, f"__{_name}__", _in_place(_name))


class _Shallow(fx.Tracer):
    proxy_buffer_attributes = True  # what is done to a buffer is part of the text

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


@contextmanager
def _watched(block: Module, seen: list[object]) -> Iterator[None]:
    """Note in `seen` telltale calls from outside of torch, random numbers drawn, attributes written."""

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call" or called not in _TELLTALES:
            return
        if frame.f_globals.get("__name__", "").split(".")[0] not in _TRACERS_OWN:
            seen.append(called)

    profiler, states = sys.getprofile(), (random.getstate(), torch.get_rng_state())
    attributes = [(module, dict(vars(module))) for module in block.modules()]
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(profiler)
        if random.getstate() != states[0] or not torch.equal(torch.get_rng_state(), states[1]):
            seen.append(random)
            random.setstate(states[0])
            torch.set_rng_state(states[1])
        for module, before in attributes:
            if {k: id(v) for k, v in vars(module).items()} != {k: id(v) for k, v in before.items()}:
                seen.append(module)
                vars(module).clear()
                vars(module).update(before)


def trace(block: Module, norms: Mapping[str, Module]) -> Traced | None:
    """The block's graph, traced as in training; None where `forward` decides by a tensor's value.

    Only blocks of one input are traced: another may be None, and a stand-in never is.
    """
    inputs = list(inspect.signature(type(block).forward).parameters.values())[1:]
    if [(p.kind, p.default) for p in inputs] != [
        (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty)
    ]:
        return None
    before, seen, graphs = block.training, list[object](), []
    try:
        for block.training in (False, True):
            with _watched(block, seen):
                graphs.append(_Shallow().trace(block))
    except Exception:  # the block's own code, run on stand-ins, may raise anything
        return None
    finally:
        block.training = before
    codes = {graph.python_code("self").src for graph in graphs}
    constants = any(n.op == "get_attr" and "_tensor_constant" in str(n.target) for n in graphs[1].nodes)
    found = [list(_matches(graph, block, norms)) for graph in graphs]
    if len(codes) > 1:  # keep what both ways have in common
        in_evaluation = {(m.norm.target, m.act.target) for m in found[0]}
        found[1] = [m for m in found[1] if (m.norm.target, m.act.target) in in_evaluation]
    called = [block.get_submodule(str(n.target)) for n in graphs[1].nodes if n.op == "call_module"]
    return Traced(graphs[1], found[1], called, len(codes) == 1 and not seen and not constants)


def _matches(graph: fx.Graph, block: Module, norms: Mapping[str, Module]) -> Iterator[Match]:
    calls = [n.target for n in graph.nodes if n.op == "call_module"]
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op != "call_module" or node.target not in norms or calls.count(node.target) > 1:
            continue
        if len(node.args) != 1 or node.kwargs:
            continue
        last, passed = _through_identities(node, block)
        user = _only_user(last)
        if user is None:
            continue
        name = _activation(user, last, block)
        if name is not None:
            yield Match(node, user, name, None, None, tuple(passed))
            continue
        residual = _added(user, last)
        if residual is None:
            continue
        end, more = _through_identities(user, block)
        act = _only_user(end)
        name = None if act is None else _activation(act, end, block)
        if act is None or name is None:
            continue
        match = Match(node, act, name, user, residual, (*passed, *more))
        if order[act] - order[user] == len(more) + 1 and _may_wait(match, order, block):
            yield match


def _may_wait(match: Match, order: Mapping[fx.Node, int], block: Module) -> bool:
    """May the norm run as late as its activation? Its input must stay as it is until then."""
    if order[match.act] - order[match.norm] == len(match.between) + 2:
        return True
    source = match.norm.args[0]
    return (
        isinstance(source, fx.Node)
        and source.op == "call_module"
        and isinstance(block.get_submodule(str(source.target)), (_ConvNd, torch.nn.Linear))
        and len(source.users) == 1
    )


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _through_identities(node: fx.Node, block: Module) -> tuple[fx.Node, list[fx.Node]]:
    passed: list[fx.Node] = []
    while (user := _only_user(node)) is not None and user.op == "call_module":
        module = block.get_submodule(str(user.target))
        if type(module) is not torch.nn.Identity or has_hooks(module):
            break
        passed.append(user)
        node = user
    return node, passed


def _activation(node: fx.Node, of: fx.Node, block: Module) -> str | None:
    """The name of the activation that this node applies to `of` with default parameters."""
    if node.args != (of,):
        return None
    if node.op == "call_module":
        module = block.get_submodule(str(node.target))
        return None if has_hooks(module) or node.kwargs else activation_of(module)
    if node.op not in ("call_function", "call_method"):
        return None
    return activation_called(node.target, node.kwargs)


def _added(node: fx.Node, to: fx.Node) -> int | None:
    """The place among the arguments of what this node adds to `to`; None where it does something else."""
    if node.op != "call_function" or node.target not in _ADDITIONS or node.kwargs or len(node.args) != 2:
        return None
    first, second = node.args
    if first is to and second is not to and isinstance(second, fx.Node):
        return 1
    if second is to and isinstance(first, fx.Node) and first is not to and node.target is not operator.iadd:
        return 0
    return None


def has_hooks(module: Module) -> bool:
    """Does anybody listen to this module's own calls?"""
    return any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )
