"""Checks of how norms are placed in a model, without data: what they read, who shares them, who synchronizes.

The calls that a module makes are read from a trace of its `forward` alone: its children are leaves, nothing
is computed. If `forward` cannot be traced, only batches show them.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Linear, Module, ModuleDict, ModuleList
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel

from leannorm._catalog import OURS, Norm
from leannorm._report import grouped
from leannorm._untouched import untouched
from leannorm.ops.running import frozen as no_update
from leannorm.report.doctor.observe import obeys
from leannorm.report.doctor.ranks import SYNCHRONIZED
from leannorm.report.doctor.remedy import MEAN, added_to, attribute, remeasured
from leannorm.report.doctor.subject import Call, Found, Subject, check, layer

_TORCHS = "torch's own layers move their statistics within no_stats_update(), too"


@check("note", "A bias that the norm removes", "values")
def removed_bias(subject: Subject) -> Iterator[Found]:
    """A bias of a convolution or linear layer whose output only a norm over each channel reads."""
    names = {module: name for name, module in subject.model.named_modules()}
    reads = dict.fromkeys((norm, call.source) for calls in _calls(subject) for norm, call in calls)
    for norm, seen in subject.observed():  # if there is no trace, a pass shows it
        if all(_traced(subject, parent) is None for parent, _, _ in norm.parents):
            reads[norm, seen.source] = None
    for source, norms in grouped((source, norm) for norm, source in reads).items():
        if not isinstance(source, (_ConvNd, Linear)) or source._parameters.get("bias") is None:
            continue
        channels = getattr(source, "out_channels", getattr(source, "out_features", 0))
        if all(norm.channels == channels and subject.by_batch(norm) for norm in norms):
            bias = f"{layer(names[source])}.bias"
            moved = [norm for norm in norms if norm.mean is not None and norm.name not in subject.untouched]
            lines = [f'{attribute(norm, MEAN)} -= getattr({bias}, "data", 0)' for norm in moved]
            yield Found(
                names[source],
                channels,
                f"the norm {' and '.join(norm.name for norm in norms)} subtracts it with the mean: it has no "
                "effect and no gradient, and costs memory and a pass",
                "\n".join([*lines, f"{bias} = None  # before DistributedDataParallel is made"]),
            )


@check("warning", "One batch norm in several places", "places")
def shared_norm(subject: Subject) -> Iterator[Found]:
    """One batch norm that is in several places and is called in more than one of them."""
    for norm in subject.norms:
        places = [f"{path}.{child}" if path else child for _, path, child in norm.parents]
        if len(places) < 2 or not norm.tracks:
            continue
        calls = 0
        for parent in dict.fromkeys(parent for parent, _, _ in norm.parents):
            traced = _traced(subject, parent)
            held = sum(other is parent for other, _, _ in norm.parents)
            calls += held if traced is None else sum(call.module is norm.module for call in traced)
        if calls > 1 and subject.reached(norm):
            yield Found(
                norm.name,
                len(places),
                f"it is the same layer as {', '.join(p for p in places if p != norm.name)}: its running "
                "statistics are a mixture that fits none of its inputs",
                _apart(subject, norm),
            )


def _apart(subject: Subject, norm: Norm) -> str:
    """The lines that give each place except the first a norm of its own."""
    lines = ["import copy"]
    for _, path, child in norm.parents[1:]:
        lines.append(f'setattr({layer(path)}, "{child}", copy.deepcopy({layer(norm.name)}))')
        lines.append(added_to(subject, [norm.module], layer(f"{path}.{child}" if path else child)))
    if norm.name not in subject.untouched:
        lines.append(remeasured(subject, norm))
    return "\n".join(filter(None, lines))


@check("warning", "Called more than once a step", "calls")
def repeated_call(subject: Subject) -> Iterator[Found]:
    """A batch norm that one step calls more than once, in a loop or for several inputs.

    Calls in `no_stats_update`, where leannorm's layers do not update their statistics, do not count.
    """
    traced: Counter[str] = Counter()
    for calls in _calls(subject):
        traced |= Counter(norm.name for norm, call in calls if call.moves)
    for norm in subject.norms:
        seen = subject.seen.get(norm.name)
        times = seen.moves if seen else traced[norm.name]
        if times > 1 and len(norm.parents) == 1 and subject.moves(norm) and norm.module.training:
            yield Found(
                norm.name,
                times,
                f"its statistics move {times} times a step, and are a mixture of all its inputs, of which "
                "the last weighs most",
                _once(norm),
            )


def _once(norm: Norm) -> str:
    """What makes its statistics update once per step; `no_stats_update` does not know foreign classes."""
    apart = "# in the forward that calls it: a norm of its own for each call"
    still = f"{apart}, or all calls but one within leannorm.no_stats_update()"
    if obeys(norm.module):
        return still
    return f"leannorm.convert(model)  # {_TORCHS}\n{still}" if type(norm.module) in OURS else apart


@check("warning", "Ranks have statistics of their own", "layers")
def unsynchronized_buffers(subject: Subject) -> Iterator[Found]:
    """DistributedDataParallel with `broadcast_buffers=False` around batch norms of each rank's own."""
    for name, module in subject.model.named_modules():
        if not isinstance(module, DistributedDataParallel) or module.broadcast_buffers:
            continue
        ranks = module.process_group.size()
        inside = set(module.modules())
        alone = [n for n in subject.norms if n.module in inside and subject.moves(n) and n.kind == "batch"]
        alone = [norm for norm in alone if not isinstance(norm.module, SYNCHRONIZED)]
        if alone and ranks > 1:
            yield Found(
                name or "(model)",
                len(alone),
                f"each of the {ranks} ranks has running statistics of its own: evaluation differs from rank "
                "to rank, and a checkpoint holds those of one",
                f"{layer(name)}.broadcast_buffers = True  # evaluation is that of its first rank then\n"
                f"# or {_shared(layer(name), dist.get_process_group_ranks(module.process_group)[0])}",
            )


def _shared(wrapped: str, first: int) -> str:
    """The line that sets its statistics on all ranks to those of the first."""
    group = f"{wrapped}.process_group"
    sent = f"[torch.distributed.broadcast(b, {first}, {group}) for b in {wrapped}.buffers()]"
    return f'leannorm.convert({wrapped}, to="sync", process_group={group}); {sent}'


def _calls(subject: Subject) -> list[list[tuple[Norm, Call]]]:
    """For every module that contains a norm over channels: its calls of such norms."""
    by_module = {norm.module: norm for norm in subject.norms if norm.channels is not None}
    modules = dict(subject.model.named_modules())
    holders: dict[Module, None] = {}
    for norm in by_module.values():
        for parent, path, _ in norm.parents:
            while isinstance(parent, (ModuleList, ModuleDict)) and path:
                path = path.rpartition(".")[0]
                parent = modules[path]
            holders[parent] = None
    return [
        [
            (by_module[call.module], call)
            for call in _traced(subject, holder) or ()
            if call.module in by_module
        ]
        for holder in holders
    ]


class _OneLevel(torch.fx.Tracer):
    """Traces one `forward`; every child is a leaf, so that none of them and none of their hooks run."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        return True

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["stays"] = no_update()
        return node


def _traced(subject: Subject, parent: Module) -> list[Call] | None:
    if parent not in subject.traces:
        subject.traces[parent] = _trace(parent)
    return subject.traces[parent]


def _trace(parent: Module) -> list[Call] | None:
    """The calls of children in one `forward`, with what each alone reads; None where it cannot be traced."""
    if isinstance(parent, (ModuleList, ModuleDict)):
        return None
    try:
        signature = inspect.signature(type(parent).forward)
        defaults = {
            name: parameter.default
            for name, parameter in signature.parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }
        with warnings.catch_warnings(), untouched(parent, _without_memory), torch.no_grad():
            warnings.simplefilter("ignore")
            nodes = _OneLevel().trace(parent, concrete_args=defaults).nodes
            calls = [node for node in nodes if node.op == "call_module"]
            modules = [parent.get_submodule(str(node.target)) for node in calls]
            return [
                Call(module, _source(parent, node), not (node.meta["stays"] and obeys(module)))
                for module, node in zip(modules, calls, strict=True)
            ]
    except Exception:  # a stranger's forward may do anything with a proxy
        return None


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _source(parent: Module, node: torch.fx.Node) -> Module | None:
    read = node.args[0] if node.args else None
    if not isinstance(read, torch.fx.Node) or read.op != "call_module" or len(read.users) != 1:
        return None
    return parent.get_submodule(str(read.target))
