"""What a kind of save is made of: all that a search has found for one tensor, and all that it depends on.

A kind is learned where the same search must come to the same end: every node that it looked at tells the
same (`graph.identity`), leads to the same places and has saved values of the same sort, every value is proved
to hold what its node read, and the step's kind was tried on as many tensors as it takes (trial.py).
`csrc/nodes/kinds.h` asks for all of it again at a later save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from leannorm.autograd.nodes import NODES
from leannorm.saving import sorts, trial
from leannorm.saving.calls import CallArguments
from leannorm.saving.graph import (
    ACCUMULATES,
    OURS,
    PASSES_ON,
    constants_of,
    find,
    is_lost,
    kind_of,
    saved,
    saved_by_function,
)
from leannorm.saving.recipes import norms_on_gpu
from leannorm.saving.recipes.functions import norm_then
from leannorm.saving.recipes.fused_norm_act import scale_shift_act
from leannorm.saving.search import Missing, Search, Visit, is_view_of_held
from leannorm.saving.steps import Step
from leannorm.saving.values import COPIED_PART, Value

# recipes that ask for no more than what kinds are made of: fields of the C++ table, edges, constants
_KNOWN = {
    *("SiluBackward0", "HardswishBackward0", "HardsigmoidBackward0", "GeluBackward0", "HardtanhBackward0"),
    *("LeakyReluBackward0", "MulBackward0", "ConvolutionBackward0", "MmBackward0", "AddmmBackward0"),
    *("NativeBatchNormBackward0", "NativeLayerNormBackward0", "NativeGroupNormBackward0"),
    *("CudnnBatchNormBackward0", "FusedRmsNormBackward0", "ScaledDotProductFlashAttentionForCpuBackward0"),
    *("ScaledDotProductFlashAttentionBackward0", "ScaledDotProductEfficientAttentionBackward0"),
    "ScaledDotProductCudnnAttentionBackward0",
    *("ReluBackward0", "SigmoidBackward0", "TanhBackward0", "AddBackward0", "SubBackward0", "NegBackward0"),
    *("MulBackward1", "PowBackward0", "RsqrtBackward0", "MeanBackward1", "SumBackward1", "RepeatBackward0"),
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0", "CloneBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "ExpandBackward0", "TBackward0", "TransposeBackward0"),
    *("PermuteBackward0", "SelectBackward0", "SliceBackward0", "UnsqueezeBackward0", "ToCopyBackward0"),
    *("UnbindBackward0", "SplitBackward0", "SplitWithSizesBackward0"),
}
# norms that are run again: what each captures (copies of fields, the call's bias, what a field has itself,
# or nothing), and which field has the call
_BIAS, _NOTHING_AT_ALL = "the call's bias", ""
_PARTS: dict[str | Callable[..., Tensor], tuple[tuple[str, ...], str]] = {
    "NativeLayerNormBackward0": (("weight", "bias"), "result2"),
    "NativeGroupNormBackward0": (("weight", _BIAS), "result1"),
    "FusedRmsNormBackward0": (("weight",), "result1"),
    "CudnnBatchNormBackward0": (("weight", _BIAS, _NOTHING_AT_ALL, _NOTHING_AT_ALL), "result1"),
    norms_on_gpu.batch_norm: (("weight", _BIAS, "result1", "result2"), "result1"),  # of native nodes
    norms_on_gpu.layer_norm: (("weight", "bias", "result1", "result2"), "result2"),
    # leannorm's own tell their call themselves; a bias that they did not save is a leaf behind an edge
    "leannorm.ChannelNorm": (("mask", "mean", "rstd", "weight", _BIAS), ""),
    "leannorm.ChannelAffine": (("mask", "mean", "rstd", "weight", _BIAS), ""),
    "leannorm.RowNorm": (("weight", _BIAS, "valid"), ""),
}
_ITSELF = {"result1", "result2", "mean", "rstd"}
_ABSENT, _OF_CALL, _ABSENT_IN_CALL, _COPY, _OWN, _COPY_OF_LEAF = range(6)  # how a part is found
_MAY_HOLD = {"ConvolutionBackward0", "MmBackward0", "AddmmBackward0"}  # their inputs alone decide
_JOINED = {scale_shift_act, norm_then, norms_on_gpu.norm_act, norms_on_gpu.layer_norm_cast}
_LAID_OUT = {"CloneBackward0", "ToCopyBackward0"}
_NOT_ASKED = -2

_NONE, _ANY, _LEAF, _VALUE, _MADE = range(5)  # where an edge leads to
_FROM_FIELD, _FROM_EDGE, _FROM_LEAF, _FROM_MADE = range(4)  # where a step's input is found
_NOTHING, _BATCH_NORM, _BATCH_NORM_WITH_BIAS, _OF_NORM, _OF_PARTS = range(5)  # what a step captures


class UnlikeError(Exception):
    """The save depends on something that no kind has."""


def is_settled(value: Value, outcome: Step | Missing, tensor: Tensor) -> bool:
    """Would a later save like this one be rebuilt, or held, without another trial?"""
    if value.step is None:
        return True
    as_searched = value.step is outcome and outcome.proved and not value.from_narrow and not value.in_rows
    return as_searched and trial.is_settled(value.step, tensor, value.layout)


def _named(node: Any) -> dict[str, Value | None]:
    """The saved tensors that kinds can ask for, in the order in which C++ finds them."""
    if kind_of(node) not in OURS:
        return {name: saved(node, name) for name in NODES.fields(node)}
    packed = saved_by_function(node)
    if packed is None:
        raise UnlikeError  # it is saving, or others' hooks have them
    names = packed if isinstance(node, BackwardCFunction) else NODES.fields(node)
    return {name: packed[name] for name in names}


def _fields(node: Any) -> list[Value | None]:
    return list(_named(node).values())


def _leaf_edge(visit: Visit, step: Step) -> int:
    """Of what the recipe asked for and no input is: its bias, where that is a leaf."""
    edges = [i for i, value in visit.inputs.items() if value is not None and value not in step.inputs]
    if len(edges) != 1 or kind_of(visit.node.next_functions[edges[0]][0]) != ACCUMULATES:
        raise UnlikeError
    return edges[0]


class Learned:
    """Where everything is that one save depends on."""

    def __init__(
        self,
        search: Search,
        visits: list[Visit],
        tensor: Tensor,
        number: int,
        value: Value,
        outcome: Step | Missing,
    ) -> None:
        self._visits, self._number = visits, number
        self._policy, self._flags = search.policy, search.flags.only
        self._templates: list[dict[str, Any] | None] = []
        self._made: dict[int, int] = {}  # templates, by the check of the node that made the value
        kinds = [kind_of(visit.node) for visit in self._visits]
        if value.step is not None:
            self._template(value, 0)
        elif not self._is_held_for_good(value, outcome):
            raise UnlikeError
        checks = [self._check(visit) for visit in self._visits]
        self.kind = {
            "flags": self._flags,
            "checks": checks,
            "same": self._same(checks),
            "base": self._base(tensor) if _LAID_OUT.intersection(kinds[1:]) else _NOT_ASKED,
            "templates": self._templates,
            "why": value.why,
            "seconds": value.seconds,
            "is_view": value.step is not None and value.step.kind == "view",
        }

    def _is_held_for_good(self, value: Value, outcome: Step | Missing) -> bool:
        if kind_of(self._visits[0].node) not in _MAY_HOLD:
            return False
        if isinstance(outcome, Step):
            return not is_view_of_held(outcome) and not self._policy.allows(outcome)
        nothing_missed = not (outcome.outputs or outcome.communicates or outcome.too_deep)
        return nothing_missed and all(v is not None for visit in self._visits for v in visit.inputs.values())

    def _check(self, visit: Visit) -> dict[str, Any]:
        node = visit.node
        kind = kind_of(node)
        if kind not in _KNOWN and kind not in OURS:
            raise UnlikeError
        fields = _fields(node)
        if kind not in OURS and is_lost(node, *NODES.fields(node)):
            raise UnlikeError  # saved as it is, or by others' hooks
        edges = [self._edge(visit, i, *edge) for i, edge in enumerate(node.next_functions)]
        return {
            "node": node,
            "output": visit.output,
            "constants": dict(node.__dict__) if isinstance(node, BackwardCFunction) else constants_of(node),
            "newest": node._sequence_nr() + 1 == self._number,
            "fields": [-1 if field is None else sorts.sort_of(field) for field in fields],
            "edges": edges,
        }

    def _same(self, checks: list[dict[str, Any]]) -> list[int]:
        """Of each field and edge, the first that has the same value."""
        seen = list[object]()
        for visit, check in zip(self._visits, checks, strict=True):
            seen += _fields(visit.node)
            for i, (end, _) in enumerate(check["edges"]):
                leaf = visit.node.next_functions[i][0].variable if end == _LEAF else None
                seen.append(visit.inputs[i] if end == _VALUE else leaf)
        at = list(map(id, seen))
        return [i if one is None else at.index(id(one)) for i, one in enumerate(seen)]

    def _base(self, tensor: Tensor) -> int:
        """Which of the nodes made the base of the view: a copy is laid out as that; -1 if none did."""
        made_by = None if tensor._base is None else tensor._base.grad_fn
        return next((i for i, visit in enumerate(self._visits) if visit.node is made_by), -1)

    def _edge(self, visit: Visit, i: int, producer: Any, output: int) -> tuple[int, int]:
        if i not in visit.inputs:
            return _ANY, 0
        value = visit.inputs[i]
        if producer is None:
            return _NONE, 0
        if value is None or kind_of(producer) == PASSES_ON:
            raise UnlikeError
        if kind_of(producer) == ACCUMULATES:
            return _LEAF, 0
        made = self._check_of(producer, output)
        if made is not None:
            return _MADE, made
        if find(producer, output) is not value or not value.as_made or value.memory is not None:
            raise UnlikeError
        return _VALUE, sorts.sort_of(value)

    def _check_of(self, producer: Any, output: int) -> int | None:
        for i, visit in enumerate(self._visits):
            if i and visit.node is producer and visit.output == output:
                return i
        return None

    def _source(self, value: Value) -> tuple[int, int, int]:
        """Where the value is found."""
        for c, visit in enumerate(self._visits):
            for i, field in enumerate(_fields(visit.node)):
                if field is value:
                    return _FROM_FIELD, c, i
            for i, read in visit.inputs.items():
                if read is value:
                    end, made = self._edge(visit, i, *visit.node.next_functions[i])
                    if end != _MADE:
                        return {_LEAF: _FROM_LEAF, _VALUE: _FROM_EDGE}[end], c, i
                    if made not in self._made:
                        self._template(value, made)
                    return _FROM_MADE, c, self._made[made]
        raise UnlikeError

    def _template(self, value: Value, check: int) -> None:
        step = value.step
        if step is None or step.spec is not None or step.flags not in (None, self._flags):
            raise UnlikeError
        kind = kind_of(self._visits[check].node)
        if kind == "MulBackward0" and len(step.inputs) < 2:
            raise UnlikeError  # a number that the node keeps as a tensor
        place = self._made[check] = len(self._templates)
        self._templates.append(None)
        captured, inputs, copies = _NOTHING, step.inputs, 0
        parts, told_by = list[tuple[int, int]](), 0
        made_of = _PARTS.get(step.function) or _PARTS.get(kind)
        if made_of is not None and step.captured:
            captured = _OF_PARTS
            parts, told_by = self._parts(step, self._visits[check], *made_of)
        elif step.captured:
            captured, inputs, copies = self._captured(step, self._visits[check])
        if any(value.name == COPIED_PART for value in inputs):
            raise UnlikeError
        self._templates[place] = {
            "check": check,
            "step": step._replace(inputs=(), captured=()),
            "name": value.name,
            "shape": torch.Size(value.shape),
            "dtype": value.dtype,
            "products": value.products,
            "inputs": [self._source(value) for value in inputs],
            "captured": captured,
            "copies": copies,
            "parts": parts,
            "told_by": told_by,
        }

    @staticmethod
    def _parts(
        step: Step, visit: Visit, names: tuple[str, ...], told_by: str
    ) -> tuple[list[tuple[int, int]], int]:
        """How each captured tensor is found, and which field has the call that told eps; -1 for none."""
        fields = _named(visit.node)
        teller = fields[told_by] if told_by else None
        call = teller.call if teller is not None and isinstance(teller.call, CallArguments) else None
        if told_by and (call is None or call.moves_affine or call.eps != step.constants[-1]):
            raise UnlikeError
        if len(names) != len(step.captured):
            raise UnlikeError
        parts, at = list[tuple[int, int]](), list(fields)
        for name, captured in zip(names, step.captured, strict=True):
            value = fields.get("bias" if name == _BIAS and call is None else name)
            if name == _BIAS and call is not None:
                if captured is not call.bias:
                    raise UnlikeError
                parts.append((_ABSENT_IN_CALL, 0) if captured is None else (_OF_CALL, len(captured)))
            elif captured is None:
                parts.append((_ABSENT, 0))
            elif name in _ITSELF:
                if value is None or captured is not value.tensor:
                    raise UnlikeError
                parts.append((_OWN, at.index(name)))
            elif value is not None:
                parts.append((_COPY, at.index("bias" if name == _BIAS else name)))
            elif name == _BIAS:
                parts.append((_COPY_OF_LEAF, _leaf_edge(visit, step)))
            else:
                raise UnlikeError
        return parts, at.index(told_by) if told_by else -1

    def _captured(self, step: Step, visit: Visit) -> tuple[int, tuple[Value, ...], int]:
        """How what the step captures is made: by a batch norm, or it is that of a norm before."""
        if step.function not in _JOINED:
            raise UnlikeError
        node = visit.node
        if kind_of(node) == "NativeBatchNormBackward0":
            mean, rstd = saved(node, "result1"), saved(node, "result2")
            if mean is None or rstd is None or not isinstance(mean.call, CallArguments) or 2 in visit.inputs:
                raise UnlikeError
            bias = mean.call.bias
            if not node._saved_training or (bias is not None and len(bias) != len(rstd.look())):
                raise UnlikeError
            return _BATCH_NORM if bias is None else _BATCH_NORM_WITH_BIAS, step.inputs, 0
        saves_input = "self" in NODES.fields(node)
        read = [saved(node, "self")] if saves_input else [visit.inputs.get(i) for i in (0, 1)]
        for x in filter(None, read):
            norm, copies = x.step, 0
            while norm is not None and norm.kind == "copy":
                norm, copies = norm.inputs[0].step, copies + 1
            if norm is not None and norm.captured is step.captured:
                own, added = step.inputs[: len(norm.inputs)], step.inputs[len(norm.inputs) :]
                if own == norm.inputs:
                    return _OF_NORM, (x, *added), copies
        raise UnlikeError
