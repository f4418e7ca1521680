"""The parts of torch's compiler that we use and torch does not promise, looked up in one place, with a reason
if one is gone."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx

_PARTITIONERS = "torch._functorch.partitioners"
_PASSES = "torch._inductor.custom_graph_pass"
_INDUCTOR = "torch._inductor.config"
_NEEDED = (
    (_PARTITIONERS, "min_cut_rematerialization_partition"),
    (_PASSES, "CustomPartitionerFn"),
    (_INDUCTOR, "custom_partitioner_fn"),
)
_BANS = (
    "ban_recompute_used_far_apart",
    "ban_recompute_long_fusible_chains",
    "ban_recompute_materialized_backward",
    "ban_recompute_not_in_allowlist",
    "ban_recompute_reductions",
)


def missing() -> str | None:
    """Why this torch's compiler cannot be used; None if nothing is missing."""
    for module, name in _NEEDED:
        if not hasattr(_imported(module), name):
            return (
                f"torch {torch.__version__} has no {module}.{name}, which compile_options() uses: the model"
                " is compiled as without it"
            )
    return None


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def partitioner_class() -> type[Any]:
    """The class that inductor requires of a partition function."""
    cls: type[Any] = _imported(_PASSES).CustomPartitionerFn
    return cls


def partition(
    module: fx.GraphModule, inputs: Any, arguments: dict[str, Any]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Torch's own partition."""
    parts: tuple[fx.GraphModule, fx.GraphModule] = _imported(
        _PARTITIONERS
    ).min_cut_rematerialization_partition(module, inputs, **arguments)
    return parts


def without_bans() -> AbstractContextManager[Any]:
    """Let torch's partition run everything again that is not marked to be saved."""
    config = _imported("torch._functorch.config")
    known = {name: False for name in _BANS if hasattr(config, name)}
    patched: AbstractContextManager[Any] = config.patch(**known) if known else nullcontext()
    return patched


def simplify(module: fx.GraphModule) -> None:
    """Remove dead nodes and merge equal ones, as torch's partition does first, so that the plan is made for
    the graph it sees."""
    module.graph.eliminate_dead_code()
    join: Callable[[fx.Graph], fx.Graph] | None = getattr(
        _imported("torch._functorch.compile_utils"), "fx_graph_cse", None
    )
    if join is not None and getattr(_imported("torch._functorch.config"), "cse", False):
        module.graph = join(module.graph)
    module.recompile()


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph, for a partition that edits it; nodes keep their names."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    return fx.GraphModule(module, graph)


def mode_options(mode: str) -> dict[str, Any]:
    """Inductor's options for a mode of `torch.compile`. Raises RuntimeError for an unknown mode."""
    options: dict[str, Any] = dict(torch._inductor.list_mode_options(mode))
    return options


def changes_layout(module: fx.GraphModule) -> bool:
    """Whether inductor lays out this graph's convolutions channels_last."""
    lowering = getattr(_imported("torch._inductor.graph"), "GraphLowering", None)
    decide = getattr(lowering, "decide_layout_opt", None)
    try:
        return decide is not None and bool(decide(module, is_inference=False))
    except (AttributeError, IndexError, KeyError, TypeError):
        return False


def place() -> str:
    """Which of the compiled pieces this is: torch's number of the frame and the compilation, as in its
    logs."""
    try:
        compile_id = torch._guards.CompileContext.current_compile_id()
    except AttributeError:
        compile_id = None
    return "?" if compile_id is None else str(compile_id)
