"""`Program`: one graph with two branches and one set of variables; the targets decide what runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from leannorm._errors import InputError
from leannorm.program.deploy import export
from leannorm.program.draw import describe, draw
from leannorm.program.file import read, write
from leannorm.program.join import INFER, SHARED, TRAIN, Joined
from leannorm.program.memory import place
from leannorm.program.prune import Dependencies, subgraph
from leannorm.program.signature import Signature

if TYPE_CHECKING:
    from typing_extensions import Self


class Program:
    """A network with a training and an inference branch, which share every variable; made by `fork`.

    `train(*x)` and `infer(*x)` run one branch each, `run(targets, feeds)` whatever the targets need: "train",
    "infer", and any intermediate value by the path of the module that computes it ("layer1.0.bn1", or
    "train:layer1.0.bn1" after the fork; "bn@1" is the second call of bn) or by its name in the graph.
    Anything that no target needs is not executed and changes nothing. The part to run is found once for each
    set of targets.

    Variables are the model's own tensors: an optimizer over `parameters()` trains the program and the model
    alike. The branches fix the modes; `model.train()` and `model.eval()` change nothing here.

    Raises: `InputError` for inputs that do not fit the exported shapes, and as its methods say.

    >>> import torch
    >>> from leannorm import nn, program
    >>> net = torch.nn.Sequential(nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
    >>> forked = program.fork(net, (torch.randn(8, 3),))
    >>> y = forked.train(torch.randn(8, 3))
    >>> int(net[0].num_batches_tracked)
    1
    """

    def __init__(
        self, joined: Joined, signature: Signature, structures: Mapping[str, pytree.TreeSpec]
    ) -> None:
        self.graph = joined.graph
        self.signature = signature
        self._joined = joined
        self._root = joined.root
        self._results = joined.results
        self._structures = dict(structures)
        self._dependencies = Dependencies(joined.graph)
        self._named = _named_values(joined)
        self._parts: dict[tuple[str, ...], fx.GraphModule] = {}
        for name, tensor in joined.variables.items():
            place(self._root, name, tensor)

    def __repr__(self) -> str:
        return f"Program({self.signature.describe()})"

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns in training mode, with gradients; statistics and counters are updated."""
        return self._call(TRAIN, args, kwargs)

    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns in evaluation mode; nothing changes."""
        return self._call(INFER, args, kwargs)

    def run(self, targets: str | Sequence[str], feeds: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        """The value of each target, executing only what they need.

        `feeds` are all the inputs in order, or those that the targets need, by name. If both branches are
        targets, the shared part runs once, then the training branch, then the inference branch, which uses
        the statistics that training has just updated. An intermediate value is returned as it was when
        computed.

        Raises: `InputError` for an unknown target and for feeds that do not fit.
        """
        targets = (targets,) if isinstance(targets, str) else tuple(dict.fromkeys(targets))
        names = [i.name for i in self.signature.inputs]
        if not isinstance(feeds, Mapping):
            feeds = dict(zip(names, self.signature.flatten(tuple(feeds), {}), strict=True))
        unknown = sorted(set(feeds) - set(names))
        if unknown:
            raise InputError(
                f"the program has no input {', '.join(unknown)}; it takes {self.signature.describe()}"
            )
        return self._run(targets, feeds)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The trainable variables: the model's own parameters, each once."""
        return self._root.parameters()

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters with their names in the model."""
        return self._root.named_parameters()

    def state_dict(self) -> dict[str, Tensor]:
        """Every variable by its name in the model: parameters, buffers, constants; no copies."""
        return {name: tensor.detach() for name, tensor in self._joined.variables.items()}

    def names(self) -> list[str]:
        """All intermediate values that can be a target by module path."""
        in_graph = {n.name for n in self.graph.nodes}
        return [name for name in self._named if name not in in_graph]

    def describe(self) -> str:
        """The fork in text: the shared part, then both branches, one line for each module."""
        return describe(self.graph, self._joined.kinds, self.signature.describe())

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write the fork as a picture (SVG): the shared part above, the branches next to each other."""
        draw(self.graph, self._joined.kinds, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program to one file: graph, both branches, every variable once. See `load`."""
        write(path, self._joined, self.signature, self._structures)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a program written by `save`, without the model's code; new tensors, on the CPU.

        The file contains only text and raw numbers, and nothing in it is executed before the program is run;
        operators outside torch's, torchvision's and leannorm's libraries are rejected.

        Raises: `InputError` for a file that is not a program or is damaged.
        """
        return cls(*read(path))

    def to_exported(
        self, branch: str = INFER, rewrite: Callable[[fx.GraphModule], torch.nn.Module] | None = None
    ) -> torch.export.ExportedProgram:
        """One branch alone as a plain `torch.export.ExportedProgram`, on the same variables.

        `rewrite` may return a changed module for the branch; `leannorm.fold(program)` passes its own.
        """
        if branch not in (TRAIN, INFER):
            raise InputError(f"a branch is {TRAIN!r} or {INFER!r}, got {branch!r}")
        return export(self._part((branch,)), self.signature, self._structures[branch], rewrite)

    def _call(self, branch: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        leaves = self.signature.flatten(args, kwargs)
        feeds = {i.name: leaf for i, leaf in zip(self.signature.inputs, leaves, strict=True)}
        return self._run((branch,), feeds)[branch]

    def _run(self, targets: tuple[str, ...], feeds: Mapping[str, Any]) -> dict[str, Any]:
        part = self._part(targets)
        self.signature.check(feeds)
        inputs = {str(n.target): n for n in part.graph.nodes if n.op == "placeholder"}
        missing = [name for name, node in inputs.items() if node.users and name not in feeds]
        if missing:
            raise InputError(
                f"the targets {', '.join(targets)} need the input {', '.join(missing)}; feed it too"
            )
        values = iter(part(*map(feeds.get, inputs)))
        branches = {
            t: pytree.tree_unflatten([next(values) for _ in self._results[t]], self._structures[t])
            for t in targets
            if t in self._results
        }
        return {t: branches[t] if t in branches else next(values) for t in targets}

    def _part(self, targets: tuple[str, ...]) -> fx.GraphModule:
        if targets not in self._parts:
            branches = [t for t in targets if t in self._results]
            intermediates = [self._value(t) for t in targets if t not in self._results]
            results = [v for branch in branches for v in self._results[branch]]
            values = [v for v in results if isinstance(v, fx.Node)]
            nodes = self._dependencies.of([*values, *intermediates], branches)
            inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
            self._parts[targets] = subgraph(self._root, nodes, inputs, results, intermediates)
        return self._parts[targets]

    def _value(self, target: str) -> fx.Node:
        if target not in self._named:
            raise InputError(
                f"unknown target {target!r}; a target is {TRAIN!r}, {INFER!r}, or one of names(), for "
                f"example {', '.join(self.names()[:4])}"
            )
        return self._named[target]


def _named_values(joined: Joined) -> dict[str, fx.Node]:
    """Every value by its name in the graph, and each module call's result by the module's path.

    A module's result is the only value computed in it that is used outside; after the fork, the branch is
    put before the path. Modules that return several values have no entry.
    """
    state = {n.name for n in joined.graph.nodes if n.op == "get_attr"}
    returned = {v for values in joined.results.values() for v in values if isinstance(v, fx.Node)}
    results: dict[str, list[fx.Node]] = {}
    for node in joined.graph.nodes:
        if state & set(node.meta.get("writes", ())) and node.name in node.meta["writes"]:
            continue  # a variable written in place, not a value of the module
        for path in {p for p in node.meta["scopes"] if p}:
            if node in returned or any(path not in user.meta["scopes"] for user in node.users):
                branch = node.meta["branch"]
                results.setdefault(path if branch == SHARED else f"{branch}:{path}", []).append(node)
    nodes = {n.name: n for n in joined.graph.nodes if n.op in ("call_function", "placeholder")}
    return nodes | {path: values[0] for path, values in results.items() if len(values) == 1}
