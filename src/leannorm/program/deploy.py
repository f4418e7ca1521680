"""One branch of a program as a plain exported program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export import Dim, ExportedProgram
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from leannorm.program.signature import Input, Signature


def export(
    part: fx.GraphModule,
    signature: Signature,
    returned: pytree.TreeSpec,
    rewrite: Callable[[fx.GraphModule], torch.nn.Module] | None = None,
) -> ExportedProgram:
    """Export the part of the graph that runs one branch, with the model's input and output structure."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(part.graph, {}))
    args, kwargs = example(signature)
    names = [f"arg{i}" for i in range(len(args))]
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo([*names, *kwargs], signature.structure, returned)))
    module = fx.GraphModule(part, graph)
    varying = _varying(signature)
    shapes = dict(zip([*names, *kwargs], [*varying[0], *varying[1].values()], strict=True))
    program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
    if rewrite is None:
        return program
    changed = rewrite(program.module(check_guards=False))
    return torch.export.export(changed, args, kwargs, dynamic_shapes=shapes)


def example(signature: Signature) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Zeros of the right shapes and dtypes; for a size that may vary, a value in its range."""

    def value(input: Input) -> Any:
        if input.dtype is None:
            return input.value
        sizes = []
        for size in input.sizes:
            low, high = (size, size) if isinstance(size, int) else signature.ranges.get(size, (2, None))
            sizes.append(max(low, 3) if high is None else min(max(low, 3), high))
        return torch.zeros(sizes, dtype=input.dtype)

    args, kwargs = pytree.tree_unflatten([value(i) for i in signature.inputs], signature.structure)
    return args, kwargs


def _varying(signature: Signature) -> Any:
    """The argument `dynamic_shapes` of torch.export, in the structure of the inputs."""
    dims = {name: Dim(name, min=low, max=high) for name, (low, high) in signature.ranges.items()}
    specs = [
        None
        if i.dtype is None
        else {d: dims.get(s, Dim.AUTO) for d, s in enumerate(i.sizes) if isinstance(s, str)}
        for i in signature.inputs
    ]
    return pytree.tree_unflatten(specs, signature.structure)
