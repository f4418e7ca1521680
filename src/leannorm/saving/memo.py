"""What a search finds for one tensor becomes a kind of save, which the C++ hook (csrc/nodes/memo.h) looks up.

A pass that asks for something else (other hooks, `verify`, sharded weights) is Python's, as is every tensor
that is none of torch's two classes, on a device that is neither a CPU nor CUDA, or saved under a mode or in
another thread.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from leannorm.autograd.nodes import NODES
from leannorm.saving import calls, reasons, sorts
from leannorm.saving.calls import CallArguments
from leannorm.saving.graph import ACCUMULATES, FUNCTIONS, OURS, PASSES_ON, kind_of, saved_names
from leannorm.saving.kinds import Learned, UnlikeError, is_settled
from leannorm.saving.narrowed import POOLS, WIDENS, references_when_alone
from leannorm.saving.policy import Policy
from leannorm.saving.recipes import RECIPES
from leannorm.saving.recipes.views import ALIASES
from leannorm.saving.rows import SOFTMAX
from leannorm.saving.search import MAY_BE_IN_PLACE, MOST_IN_A_ROW, MOST_RUNS, Missing, Search, Visit
from leannorm.saving.shards import PLAIN
from leannorm.saving.steps import Step
from leannorm.saving.values import MUCH_LARGER, Value

_UNUSUAL = {SOFTMAX, "AsStridedBackward0", "CopySlices", "GroupedMmBackward0", ACCUMULATES, PASSES_ON, *POOLS}

_MEMOS: dict[Policy, _Memo] = {}
on = True  # for tests


class _Memo:
    """The kinds of one policy; of saves that become none, how often that was found out."""

    def __init__(self) -> None:
        assert NODES is not None
        self.kinds = NODES.Memo()
        self.attempts: dict[Hashable, int] = {}


def forget() -> None:
    """Drop all kinds."""
    sorts.clear()
    for memo in _MEMOS.values():
        memo.kinds.clear()
        memo.attempts.clear()


def memo_of(policy: Policy) -> _Memo | None:
    """The memo of this policy; None without the C++ nodes."""
    if NODES is None or not on:
        return None
    if policy not in _MEMOS:
        _MEMOS[policy] = _Memo()
    return _MEMOS[policy]


_MOST_ATTEMPTS = 12  # for one chain of nodes and layout: what is not found again is not worth more


def learn(
    memo: _Memo,
    search: Search,
    visits: list[Visit],
    tensor: Tensor,
    number: int,
    value: Value,
    outcome: Step | Missing,
) -> None:
    """Make a kind of what `search` has just found for `tensor`, which is packed as `value`."""
    if sorts.are_too_many():
        forget()
    node: Any = tensor.grad_fn
    if search.flags.only is None or visits[0].node is not node or type(tensor) not in PLAIN:
        return
    chain = tuple(type(visit.node) for visit in visits)
    place = chain, tensor.output_nr, value.layout, value.version
    if memo.attempts.get(place, 0) >= _MOST_ATTEMPTS:
        return
    if not (is_settled(value, outcome, tensor) and _knows_leaves(search, visits)):
        return
    memo.attempts[place] = memo.attempts.get(place, 0) + 1
    try:
        kind = Learned(search, visits, tensor, number, value, outcome).kind
    except UnlikeError:
        return
    memo.kinds.learn(tensor, number, kind)


def _knows_leaves(search: Search, visits: list[Visit]) -> bool:
    """Is every leaf that was asked for proved? It is from the next pass on; no kind is found again before."""
    producers = (visit.node.next_functions[i][0] for visit in visits for i in visit.inputs)
    leaves = (p.variable for p in producers if p is not None and kind_of(p) == ACCUMULATES)
    return all(id(leaf) in search.leaves.before for leaf in leaves)


class NodeClass(NamedTuple):
    """What the C++ hook must know of a class of nodes, in the order in which it reads it."""

    name: str
    why: str  # its outputs are held
    usual: bool
    searched: bool
    alias: bool  # is its output an alias of its input?
    clone: bool
    widens: bool  # may its output be held in a narrower dtype?
    joins: bool
    may_edit: bool  # may it have worked in place, and saves nothing that would tell?


def told_of(policy: Policy, node: Any) -> NodeClass:
    """What the C++ hook must know of the node's class."""
    kind, of = kind_of(node), cast("Any", type(node))
    return NodeClass(
        name=kind or node.name(),
        why=reasons.NOT_REPEATED if kind in RECIPES else reasons.NO_RECIPE,
        usual=kind in OURS or not (isinstance(node, BackwardCFunction) or kind in _UNUSUAL),
        searched=(kind in RECIPES and policy.considers(kind)) or kind in WIDENS,
        alias=kind in ALIASES,
        clone=kind == "CloneBackward0",
        widens=kind in WIDENS,
        joins=kind == "CatBackward0",
        may_edit=kind in MAY_BE_IN_PLACE and not saved_names(of),
    )


def hook_of(packing: Any, smallest: int, from_here: bool) -> Any:
    """The object whose `pack` is the first hook of this pass: `packing`, or one in C++ that makes usual
    values by itself and gives the rest to `packing`."""
    memo, search, policy = packing.memo, packing.search, packing.policy
    if memo is None:
        return packing
    has = {
        "packing": packing,
        "pack": packing.pack,
        "flags": search.flags.only,
        "before": search.leaves.before,
        "provenance": search.provenance,
        "ledger": packing.ledger,
        "values": packing.ledger.references,
        "sorter": sorts.sort_of,
        "told_of": partial(told_of, policy),
        "ours": FUNCTIONS,
        "read": calls.READ,
        "norms": calls.NORMS,
        "row_norms": calls.ROW_NORMS,
        "copied": calls.COPIED,
        "convolutions": calls.CONVOLUTIONS,
        "linear": calls.LINEAR,
        "arguments": CallArguments,
        "apply": calls.APPLY,
        "seen": packing.seen,
        "smallest": smallest,
        "alone": references_when_alone(NODES.references),
        "much_larger": MUCH_LARGER,
        "most_in_a_row": MOST_IN_A_ROW,
        "most_runs": MOST_RUNS,
        "smaller": reasons.SMALLER,
        "edited": reasons.EDITED,
        "kept": reasons.KEPT,
        "planned": reasons.PLANNED,
        "following": packing.following,
        "calls": packing.calls,
        "vain": packing.vain,
        "everything": policy.everything,
        "reads_weights": policy.reads_weights,
        "from_here": from_here,
    }
    return NODES.begin(memo.kinds, has)
