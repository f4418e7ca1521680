"""The partition of a joint graph: torch's own, around a plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from leannorm.compiled import edited, internals, operators
from leannorm.compiled.joint import Joint, Reader
from leannorm.compiled.report import Planned
from leannorm.planning.goal import Goal
from leannorm.planning.lines import Lines
from leannorm.planning.plan import Plan, plan
from leannorm.saving.rates import rates_for

Modules = tuple[fx.GraphModule, fx.GraphModule]
_NEARLY = 1.02
"""What torch's partition makes of a plan may be that much more without a reason."""
_NEVER_AGAIN = ("reduced", "pass", "product", "once")


def partition(
    module: fx.GraphModule, inputs: Any, arguments: dict[str, Any], goal: Goal
) -> tuple[Modules, Planned]:
    """Forward and backward graph, and what was planned. If planning fails, torch's own partition is used."""
    place = internals.place()
    try:
        internals.simplify(module)
        outputs = arguments["num_fwd_outputs"]
        pinned = edited.readers(module.graph, outputs)
        _mark({n: CheckpointPolicy.MUST_SAVE for n in pinned if "recompute" not in n.meta})
    except Exception as error:
        return internals.partition(module, inputs, arguments), Planned(place, reason=_failed(error))
    stock = internals.partition(internals.copied(module), inputs, dict(arguments))
    try:
        rates, reason = rates_for(goal, _device(module.graph))
        reader = Reader(module.graph, outputs, rates, internals.changes_layout(module))
        joint = reader.joint(pinned)
        lines = Lines(joint.step, joint.saving(_saved(stock[1])))
        chosen = plan(lines, goal, beyond=False)
        if chosen.point is lines.stock:
            return stock, Planned(place, chosen, reason)
        _mark(_policies(joint, chosen))
        with internals.without_bans():
            ours = internals.partition(internals.copied(module), inputs, dict(arguments))
        made = joint.saving(_saved(ours[1]))
        if made.held > lines.stock.held or made.peak > lines.stock.peak:
            reason = (
                "torch's partition, given this plan, would hold more or peak higher than without: it was"
                " left out"
            )
            return stock, Planned(place, chosen._replace(point=lines.stock), reason)
        if made.held > _NEARLY * chosen.point.held or made.peak > _NEARLY * chosen.point.peak:
            reason = (
                f"torch's partition, given this plan, holds {made.held} bytes and peaks at {made.peak}, where"
                f" {chosen.point.held} and {chosen.point.peak} were planned"
            )
        return ours, Planned(place, chosen._replace(point=made), reason)
    except Exception as error:
        return stock, Planned(place, reason=_failed(error))


def _failed(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"compiled as without a plan, since making one failed with {type(error).__name__}: {text}"


def _mark(policies: dict[fx.Node, CheckpointPolicy]) -> None:
    for node, policy in policies.items():
        node.meta["recompute"] = policy


def _device(graph: fx.Graph) -> torch.device:
    """The device that the graph computes on: an accelerator, if any tensor is there."""
    devices = [t.device for node in graph.nodes for t in operators.tensors(node)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _saved(backward: fx.GraphModule) -> list[str]:
    """Names of the inputs of a backward graph."""
    return [n.name for n in backward.graph.find_nodes(op="placeholder")]


def _policies(joint: Joint, chosen: Plan) -> dict[fx.Node, CheckpointPolicy]:
    """Marks nodes for torch's partition. A user's own marks stay."""
    policies: dict[fx.Node, CheckpointPolicy] = {}
    for node, kind in joint.kinds.items():
        if kind in _NEVER_AGAIN and node.op == "call_function" and node in joint.forward:
            policies[node] = CheckpointPolicy.MUST_SAVE
    for i, node in enumerate(joint.nodes):
        if i in chosen.point.again:
            policies[node] = CheckpointPolicy.MUST_RECOMPUTE
        elif i in chosen.point.kept and joint.step.values[i].nbytes:
            policies[node] = CheckpointPolicy.MUST_SAVE
    return {
        n: policy for n, policy in policies.items() if "recompute" not in n.meta and n.op == "call_function"
    }
