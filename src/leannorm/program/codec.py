"""Graphs as JSON and back: only numbers, text and names from fixed lists, so that a file cannot run code."""

from __future__ import annotations

import collections
import keyword
import math
import operator
import re
import unicodedata
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from leannorm._errors import InputError
from leannorm.functional.graphs import attribute

LIBRARIES = ("aten", "prims", "leannorm", "torchvision")
_REFUSED = ("aten::from_file",)  # opens a file by name
_OPERATOR = "add sub mul truediv floordiv mod neg pow getitem eq ne lt le gt ge and_ or_ not_"
_BUILTINS: dict[str, Callable[..., Any]] = {
    **{f"operator::{n}": getattr(operator, n) for n in _OPERATOR.split()},
    **{f"math::{n}": getattr(math, n) for n in ("ceil", "floor", "trunc", "sqrt")},
    **{f"torch::{n}": getattr(torch, n) for n in ("sym_int", "sym_float", "sym_max", "sym_min", "sym_not")},
    **{
        f"higher_order::{n}": getattr(torch.ops.higher_order, n)
        for n in ("wrap_with_set_grad_enabled", "wrap_with_autocast", "cond")
    },
}
_BUILTIN_NAMES = {function: name for name, function in _BUILTINS.items()}
_CONSTANTS = {
    str(c): c for c in vars(torch).values() if isinstance(c, torch.dtype | torch.layout | torch.memory_format)
}
_PATHS = ("placeholder", "get_attr")  # nodes whose target is a dotted name
_META = ("branch", "scopes", "writes")


class RefusedError(Exception):
    """The file is not of this format, or it contains a name that a program may not use."""


def encode_graph(graph: fx.Graph, root: torch.nn.Module) -> dict[str, Any]:
    """A graph as data, including the graphs that it calls."""
    nodes = []
    for n in graph.nodes:
        entry: dict[str, Any] = {"op": n.op, "name": n.name, "target": n.target}
        if n.op in _PATHS:
            _path(n.op, str(n.target))
        if n.op == "call_function":
            entry["target"] = _encode_target(n.target)
        if n.op == "get_attr" and isinstance(module := attribute(root, str(n.target)), fx.GraphModule):
            entry["graph"] = encode_graph(module.graph, module)
        entry["args"] = encode(n.args)
        if n.kwargs:
            entry["kwargs"] = {k: encode(v) for k, v in n.kwargs.items()}
        entry.update((k, n.meta[k]) for k in _META if n.meta.get(k))
        nodes.append(entry)
    return {"nodes": nodes}


def decode_graph(data: Any, root: torch.nn.Module) -> fx.Graph:
    """The graph that was encoded; the graphs that it calls are added to `root`."""
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}
    for entry in data["nodes"]:
        op, name, target = entry["op"], _name(entry["name"]), entry["target"]
        if op == "call_function":
            target = _decode_target(target)
        elif op == "output":
            target = "output"
        elif op in _PATHS:
            target = _path(op, target)
        else:
            raise RefusedError(f"a node of kind {op!r}")
        if "graph" in entry:
            inner = torch.nn.Module()
            root.add_module(_name(target), fx.GraphModule(inner, decode_graph(entry["graph"], inner)))
        args = decode(entry["args"], known)
        kwargs = {_name(k): decode(v, known) for k, v in entry.get("kwargs", {}).items()}
        node = graph.create_node(op, target, args, kwargs, name)
        if node.name != name or name in known:
            raise RefusedError(f"the name {name!r} twice")
        known[name] = node
        node.meta = {k: entry[k] for k in _META if k in entry}
        node.meta.setdefault("scopes", [])
    return graph


def encode(value: Any) -> Any:
    """An argument as data."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, list):
        return [encode(v) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(v) for v in value]}
    if isinstance(value, slice):
        return {"slice": [encode(v) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(value)}
    raise InputError(
        f"the program holds a {type(value).__name__}, which a program's file cannot; keep the program in "
        "memory, or save one branch with torch.export.save(program.to_exported(...), path)"
    )


def decode(data: Any, known: dict[str, fx.Node]) -> Any:
    """The argument that was encoded; nodes are looked up by name."""
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if isinstance(data, list):
        return [decode(v, known) for v in data]
    ((kind, content),) = data.items()
    if kind == "node":
        return known[content]
    if kind == "tuple":
        return tuple(decode(v, known) for v in content)
    if kind == "float":
        return float(content)
    if kind == "slice":
        return slice(*(decode(v, known) for v in content))
    if kind == "device":
        return torch.device(content)
    if kind == "torch":
        return _CONSTANTS[content]
    raise RefusedError(f"an argument of kind {kind!r}")


def encode_structure(spec: pytree.TreeSpec) -> Any:
    """The nesting of inputs or results as data: tuples, named tuples, lists and dictionaries."""
    if spec.is_leaf():
        return None
    children = [encode_structure(c) for c in spec.children()]
    if spec.type in (tuple, list):
        return {spec.type.__name__: children}
    if spec.type in (dict, collections.OrderedDict):
        return {"dict": children, "keys": [encode(k) for k in spec.context]}
    if spec.type is collections.namedtuple:
        kind = spec.context
        return {"namedtuple": children, "name": kind.__name__, "fields": list(kind._fields)}
    raise InputError(
        f"the model takes or returns a {spec.type.__name__}, which a program's file cannot describe; "
        "return a dict, a tuple or a named tuple to save the program"
    )


def decode_structure(data: Any) -> pytree.TreeSpec:
    """The structure that was encoded; a named tuple becomes a new type of the same name and fields."""

    def build(data: Any) -> Any:
        if data is None:
            return 0
        for kind in (tuple, list):
            if kind.__name__ in data:
                return kind(build(c) for c in data[kind.__name__])
        if "dict" in data:
            return {decode(k, {}): build(c) for k, c in zip(data["keys"], data["dict"], strict=True)}
        fields = [_name(f) for f in data["fields"]]
        return collections.namedtuple(_name(data["name"]), fields)(*map(build, data["namedtuple"]))

    return pytree.tree_structure(build(data))


def _encode_target(target: Any) -> str:
    if target in _BUILTIN_NAMES:
        return _BUILTIN_NAMES[target]
    if isinstance(target, torch._ops.OpOverload) and target.namespace in LIBRARIES:
        return f"{target._schema.name}.{target._overloadname}"
    raise InputError(
        f"the program runs {target}, and its file may only name operators of {', '.join(LIBRARIES)}; keep it "
        "in memory, or save one branch with torch.export.save(program.to_exported(...), path)"
    )


def _decode_target(name: str) -> Any:
    if name in _BUILTINS:
        return _BUILTINS[name]
    match = re.fullmatch(r"(\w+)::(\w+)\.(\w+)", name)
    if match is None or match[1] not in LIBRARIES or name.split(".")[0] in _REFUSED:
        raise RefusedError(f"the operator {name!r}")
    overload = getattr(getattr(getattr(torch.ops, match[1]), match[2], None), match[3], None)
    if not isinstance(overload, torch._ops.OpOverload):
        raise RefusedError(f"the operator {name!r}, which this installation lacks (import its library first)")
    return overload


def _path(op: str, target: str) -> str:
    return ".".join(_name(part, attribute=op == "get_attr") for part in target.split("."))


def _name(text: str, attribute: bool = False) -> str:
    """The text, if it is a plain identifier: names become part of generated code."""
    plain = isinstance(text, str) and unicodedata.is_normalized("NFKC", text)  # as Python reads names
    if not plain or not (re.fullmatch(r"[\w :/,+-]+", text) if attribute else text.isidentifier()):
        raise RefusedError(f"the name {text!r}")
    if text.startswith("__") or (keyword.iskeyword(text) and not attribute):
        raise RefusedError(f"the name {text!r}")
    return text
