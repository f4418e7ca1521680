"""Two exported graphs of one model, joined into one that forks where their operators differ.

A node of the inference graph is shared with the training graph if it is the same operator on the same shared
arguments. Three rules keep each graph's results: nodes that draw random numbers or write in place are shared
only while both graphs have them in the same order; a node is not shared if an unshared node of either graph
writes to its memory; a node that depends on an unshared one is not shared, so the branches never merge.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from leannorm.program.memory import GraphMemory, asserts, random

SHARED, TRAIN, INFER = "shared", "train", "infer"


class Joined(NamedTuple):
    """The joined graph, its variables by name, and each branch's results (nodes and constants)."""

    root: torch.nn.Module
    graph: fx.Graph
    variables: dict[str, Tensor]
    results: dict[str, list[Any]]
    kinds: dict[str, str]


class _Copied(NamedTuple):
    """A node as an argument, with the number of earlier writes to its memory; its repr is part of a key."""

    node: fx.Node
    epoch: int

    def __repr__(self) -> str:
        return f"%{self.node.name}@{self.epoch}"


def join(train: ExportedProgram, infer: ExportedProgram, variables: dict[str, Tensor]) -> Joined:
    """Join both graphs; `variables` are the model's tensors by name, which replace the exports' copies."""
    joiner = _Joiner(train, infer, variables)
    forbidden: set[fx.Node] = set()
    while True:
        pairs = joiner.match(forbidden)
        more = joiner.unsafe(pairs)
        if not more:
            return joiner.build(pairs)
        forbidden |= more


class _Side:
    """One exported program: its nodes in order, its inputs and variables by name, what each node writes."""

    def __init__(self, program: ExportedProgram, variables: dict[str, Tensor]) -> None:
        self.program = program
        self.variables: dict[str, tuple[str, Tensor]] = {}
        self.inputs: list[str] = []
        for spec in program.graph_signature.input_specs:
            name = spec.arg.name
            if spec.kind == InputKind.USER_INPUT:
                self.inputs.append(name)
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                target = str(spec.target)
                known = {**program.constants, **program.state_dict}
                self.variables[name] = target, variables.get(target, known[target])
            else:
                raise NotImplementedError(f"an input of kind {spec.kind.name}")
        self.nodes = [
            n
            for n in program.graph.nodes
            if n.op not in ("placeholder", "output") and "_assert_tensor_metadata" not in str(n.target)
        ]
        self.placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
        first: dict[int, fx.Node] = {}  # a tensor with two names is one variable
        self.canonical = {
            node: first.setdefault(id(self.variables[name][1]), node) if name in self.variables else node
            for name, node in self.placeholders.items()
        }
        self.results = list(program.graph.output_node().args[0])
        self.memory = GraphMemory(program.graph)
        self.writes = {n: self.memory.written(n) for n in self.nodes}
        self.epochs = self._epochs()

    def _epochs(self) -> dict[tuple[fx.Node, fx.Node], int]:
        """For each (reader, argument): how many nodes before the reader wrote to the argument's memory."""
        count: dict[int, int] = {}
        epochs = {}
        for node in self.nodes:
            for argument in node.all_input_nodes:
                epochs[node, argument] = sum(count.get(s, 0) for s in self.memory.of(argument))
            for storage in self.writes[node]:
                count[storage] = count.get(storage, 0) + 1
        return epochs

    def is_impure(self, node: fx.Node) -> bool:
        """Whether it writes in place, draws random numbers, or checks a condition."""
        return bool(self.writes[node]) or random(node) or asserts(node)


class _Joiner:
    def __init__(self, train: ExportedProgram, infer: ExportedProgram, variables: dict[str, Tensor]) -> None:
        self.train, self.infer = _Side(train, variables), _Side(infer, variables)
        if self.train.inputs != self.infer.inputs:
            raise ValueError(f"inputs {self.train.inputs} in training and {self.infer.inputs} in inference")
        # inputs and variables of infer -> those of train
        self.same = {
            node: self.train.canonical[self.train.placeholders[other]]
            for name, node in self.infer.placeholders.items()
            if (other := self._counterpart(name)) is not None
        }

    def _counterpart(self, name: str) -> str | None:
        """The training graph's input of the same name, or its variable that is the same tensor."""
        if name not in self.infer.variables:
            return name
        target, tensor = self.infer.variables[name]
        for other, (other_target, other_tensor) in self.train.variables.items():
            if other_tensor is tensor or (other_target == target and _same_constant(other_tensor, tensor)):
                return other
        return None

    def _key(self, side: _Side, node: fx.Node, same: dict[fx.Node, fx.Node] | None) -> str | None:
        """The operator and its arguments as text, in train's nodes; None if an argument is not shared."""
        if node.op == "get_attr":
            return f"graph {side.program.graph_module.get_submodule(str(node.target)).graph}"
        if same is not None and any(n not in same for n in node.all_input_nodes):
            return None

        def copied(n: fx.Node) -> Any:
            return _Copied(side.canonical.get(n, n) if same is None else same[n], side.epochs[node, n])

        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), copied)
        return f"{node.target} {args!r} {kwargs!r}"

    def match(self, forbidden: set[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Maps nodes of infer to the nodes of train with which they are shared; `forbidden` ones are not."""
        free: dict[str, list[fx.Node]] = {}
        for node in reversed(self.train.nodes):
            free.setdefault(self._key(self.train, node, None) or "", []).append(node)
        order = [n for n in self.train.nodes if self.train.is_impure(n)]
        position, in_step = 0, True
        same = dict(self.same)
        for node in self.infer.nodes:
            impure = self.infer.is_impure(node)
            key = None if node in forbidden else self._key(self.infer, node, same)
            candidates = free.get(key, []) if key is not None else []
            match = candidates[-1] if candidates else None
            if impure:
                in_step = in_step and position < len(order) and match is order[position]
                position += 1
                match = match if in_step else None
            elif match is not None and self.train.is_impure(match):
                match = None
            if match is not None:
                same[node] = candidates.pop()
        return same

    def unsafe(self, pairs: dict[fx.Node, fx.Node]) -> set[fx.Node]:
        """The shared nodes that use memory to which an unshared node of either graph writes."""
        shared = set(pairs.values())
        train = set().union(*(s for n, s in self.train.writes.items() if n not in shared))
        infer = set().union(*(s for n, s in self.infer.writes.items() if n not in pairs))

        return {
            i
            for i, t in pairs.items()
            if i.op != "placeholder"
            and (
                self.infer.memory.of(i, *i.all_input_nodes) & infer
                or self.train.memory.of(t, *t.all_input_nodes) & train
            )
        }

    def build(self, pairs: dict[fx.Node, fx.Node]) -> Joined:
        """The joined graph: variables, inputs, the training graph's nodes, the unshared inference nodes."""
        root, graph = torch.nn.Module(), fx.Graph()
        variables: dict[str, Tensor] = {}
        kinds: dict[str, str] = {}
        new: dict[fx.Node, fx.Node] = {}
        shared = set(pairs.values())

        for side in (self.train, self.infer):
            for name, old in side.placeholders.items():
                first = pairs.get(old, side.canonical[old])
                if first in new:
                    new[old] = new[first]
                elif name in side.variables:
                    target, tensor = side.variables[name]
                    while target in variables and variables[target] is not tensor:
                        target += "_infer"
                    variables[target] = tensor
                    new[old] = graph.create_node("get_attr", target, name=name)
                else:
                    new[old] = graph.placeholder(name)
                new[old].meta = {"branch": SHARED, "scopes": []}
        for target, tensor in {
            t: v for side in (self.train, self.infer) for t, v in side.variables.values()
        }.items():
            variables.setdefault(target, tensor)

        for side, branch in ((self.train, TRAIN), (self.infer, INFER)):
            for old in side.nodes:
                if branch == INFER and old in pairs:
                    new[old] = new[pairs[old]]
                    continue
                node = graph.node_copy(old, lambda n: new[n])
                if old.op == "get_attr":
                    node.target = name = f"{branch}_{str(old.target).replace('.', '_')}"
                    setattr(root, name, side.program.graph_module.get_submodule(str(old.target)))
                node.meta = {"branch": SHARED if old in shared else branch, "scopes": _scopes(old, kinds)}
                new[old] = node
        self._record_memory(new)
        results = {
            branch: [new[r] if isinstance(r, fx.Node) else r for r in side.results]
            for side, branch in ((self.train, TRAIN), (self.infer, INFER))
        }
        return Joined(root, graph, variables, results, kinds)

    def _record_memory(self, new: dict[fx.Node, fx.Node]) -> None:
        """Set `meta["writes"]` of every node that writes: the names of all nodes whose memory it changes."""
        for side in (self.train, self.infer):
            at: dict[int, set[str]] = {}
            for old in (*side.placeholders.values(), *side.nodes):
                for storage in side.memory.of(old):
                    at.setdefault(storage, set()).add(new[old].name)
            for old, written_to in side.writes.items():
                names = {name for s in written_to for name in at[s]}
                if names:
                    new[old].meta["writes"] = sorted(names | set(new[old].meta.get("writes", ())))


def _same_constant(a: Tensor, b: Tensor) -> bool:
    """Whether these are two copies of one constant, made by the two exports."""
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def _scopes(node: fx.Node, kinds: dict[str, str]) -> list[str]:
    """The module calls in which a node was traced, outermost first; adds the modules' types to `kinds`.

    A call's name is the module's path, with @1, @2, ... from the second call on, as torch.export writes it.
    """
    scopes = []
    for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
        if key.startswith("_empty_nn_module_stack"):  # what torch records for a node without one
            continue
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        _, at, number = key.rpartition("@")
        scope = f"{path}@{number}" if at else path
        kinds.setdefault(scope, name.rpartition(".")[2])
        scopes.append(scope)
    return scopes
