"""The first saved-tensor hook: pack turns a saved tensor into a `Value`."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Hashable
from threading import get_ident
from types import FrameType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import Node

from leannorm.autograd.nodes import NODES
from leannorm.saving import calls, graph, memo, reasons
from leannorm.saving.calls import COPIED, CallArguments, is_compiled, logits_of, name_of, written_by
from leannorm.saving.evidence import EditedError, FreedError, is_parameter, matches, sample_of, version_of
from leannorm.saving.graph import Packed, find, kind_of, register
from leannorm.saving.ledger import Ledger, held_by
from leannorm.saving.moved import Hooks, move
from leannorm.saving.narrowed import (
    POOLS,
    WIDENS,
    CountingHook,
    copy_that,
    is_alone,
    narrow_bytes,
    narrow_source,
    narrowed,
    narrowed_positions,
)
from leannorm.saving.plan import Call, Pass, pass_of
from leannorm.saving.plans import Following
from leannorm.saving.policy import Policy
from leannorm.saving.provenance import Edits, sequence_number
from leannorm.saving.rates import rates_for
from leannorm.saving.recipes import RECIPES
from leannorm.saving.recipes.views import find_parts_in, laid_out_as
from leannorm.saving.rows import SOFTMAX, in_rows
from leannorm.saving.search import Missing, Search, Visit, as_made, is_copied_to_edit, is_view_of_held
from leannorm.saving.shards import PLAIN, as_plain, local_of, spec_of
from leannorm.saving.small import Kept, kept_of
from leannorm.saving.steps import Step
from leannorm.saving.timeline import Reads
from leannorm.saving.trial import layout, seconds
from leannorm.saving.units import Units, wrap_of
from leannorm.saving.vain import Vain
from leannorm.saving.values import Value, held, size_of
from leannorm.saving.verify import Layers

SMALLEST = 1024  # elements; for a smaller tensor the recipe takes as much memory as the tensor
_PLAIN = (*PLAIN, FakeTensor)


class Packing(CountingHook):
    """The packing of one forward pass, by one policy and, if there is one, a plan."""

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        following: Following | None,
        around: frozenset[int],
        layers: Layers | None = None,
        hooks: Hooks | None = None,
        from_here: bool = False,
        place: Hashable = None,
    ) -> None:
        self.policy, self.ledger, self.following = policy, ledger, following
        self.layers, self.hooks, self.units, self._freed = layers, hooks, Units(), ""
        self.calls, self.kept, self.reads = list[Call](), list[Kept](), Reads(around, SMALLEST)
        self.recent = deque[Tensor](maxlen=0)  # has room once a step of this pass must be compared
        self.device, self.reasons, self.vain = torch.device("cpu"), Counter[str](), Vain(place, policy)
        self.search = Search(policy, self._narrow_positions, self.reasons, from_here)
        self.edits, self._largest, self.seen = Edits(), 0, 0
        self.last: tuple[int, Node | None] = -1, None  # who made what was packed last, and the number then
        self._sharded, self._thread = self.units.exist, get_ident()
        self._call: tuple[int, CallArguments | None] = -1, None
        self.memo = None if layers or hooks or self._sharded else memo.memo_of(policy)

    def packed(self, tensor: Tensor, references: int, frame: FrameType) -> Value | Kept:
        """The pack hook. If anything in it fails, the tensor is held as in stock autograd."""
        self.seen = self.search.provenance.order = self.seen + 1
        if type(tensor) is Tensor and tensor.is_nested:  # it shows no sizes
            self.kept.append(kept_of(tensor))
            return self.kept[-1]
        with as_plain(tensor):
            try:
                if get_ident() != self._thread:  # whose nodes have numbers of their own
                    value = self._hold(tensor, "" if tensor.grad_fn is None else tensor.grad_fn.name())
                    value.why = reasons.OTHER_THREAD
                    return self._of_this_pass(value)
                value = self._of_this_pass(self._pack(tensor, references, frame))
                if self._makes_a_plan:
                    self.reads.note(tensor, value, references, frame)
                return value
            except EditedError:  # a tensor that the step would read was edited after its node read it
                value = self._hold(tensor)
            except FreedError:
                value = self._hold(tensor, "" if tensor.grad_fn is None else kind_of(tensor.grad_fn))
                value.why = reasons.SHARDED
            except Exception as error:
                self.reasons[reasons.failed(tensor, error)] += 1
                value = self._hold(tensor)
            return self._of_this_pass(value)

    def _of_this_pass(self, value: Value) -> Value:
        if value.provenance is None:
            value.provenance, value.order = self.search.provenance, self.seen
        return value.used()

    def _pack(self, tensor: Tensor, references: int, frame: FrameType) -> Value:
        node, number = tensor.grad_fn, sequence_number()
        self.search.flags.record(number)
        if NODES is None:
            self.search.leaves.read_in_call(number, calls.biases_at_hand(frame))
        if node is None:
            return self._without_node(tensor, references, frame, number)
        node, output = graph.made_by(node, tensor.output_nr)
        kind = kind_of(node)
        local = tensor if type(tensor) in _PLAIN else local_of(tensor)  # the tensor, or that of this rank
        if local is None:
            value = self._hold(tensor, kind or node.name())
            value.call, value.why = self._call_of(frame, number), reasons.of_collective(tensor)
            if tensor.numel() >= SMALLEST and not value.why:
                self.reasons[reasons.SUBCLASSES] = 1
            return value
        if kind == "AsStridedBackward0":
            graph.note_in_view(tensor, node, written_by(frame, tensor))
        version, seen_as = tensor._version, layout(local)
        spec = None if local is tensor else spec_of(tensor)
        if spec is not None:
            seen_as, self.search.of_ranks = (*seen_as, spec), True
        known = lookup() if (lookup := graph.registered(node, output)) else None
        saved_too = self.last[1] if self.last[0] == number else None  # by the same node
        self.last = number, node
        size, place, may, worth = local.numel(), -1, False, False
        if size >= SMALLEST and self.following is not None:
            place = len(self.calls)
            self.calls.append((kind, *seen_as[:3], self.seen))
            self.device = tensor.device
        if known is not None and known.layout == seen_as and known.version == version and known.current:
            if known.call is not None and known.call is not self._call_of(frame, number):
                known.call = None  # two calls save it: neither speaks for the other
            return self._again(known, local)
        before = lookup.sample if known is None and type(lookup) is Packed else None
        unedited = matches(before, local) and as_made(node, output, version)
        if size >= SMALLEST:
            self._largest = max(self._largest, size)
            worth = self.policy.is_worth(held_by(local), self._largest) and unedited is not False
            planned = self.following is None or self.following.rebuilds(self.calls)
            may = worth and (planned or self.search.views_rebuilt(node, kind))
        may_narrow = self.following is None or self.following.may_narrow(place)
        told = self.vain.told(self.seen, (kind, seen_as)) if may else None
        outcome: Step | Missing = Missing()
        visits: list[Visit] | None = None  # what the search looked at, where there was one
        self._freed = ""
        if may and known is not None and known.layout is not None and known.version == version:
            outcome = laid_out_as(known, local) or outcome
        elif may and self.following is not None and self.following.narrows(place):
            pass  # a step may be found now that the plan holds what it reads; longer chains would follow
        elif self.following is not None and may_narrow and not may and kind in POOLS:
            self._narrow_positions(node)  # as the search did in the pass that the plan was made of
        elif may and told is None and self.search.considers(kind):
            outcome = self.search.step(node, output, tensor, visits := [], saved_too)
            if unedited is None and isinstance(outcome, Step):  # compared with what these may be made of
                outcome, self.recent = outcome._replace(proved=False), deque(self.recent, maxlen=2)
                self.edits.watch()
            if isinstance(outcome, Missing) and not self.reasons:
                self.reasons.update(reasons.of_hooks_within(node))
        spent = self._accepts(outcome, local, seen_as) if isinstance(outcome, Step) else None
        from_narrow = None
        if may_narrow and spent is None and worth and kind in WIDENS and spec is None:
            from_narrow = narrow_source(node, tensor, logits_of(frame))
            spent = None if from_narrow is None else self._accepts(from_narrow, tensor, seen_as)
        if isinstance(step := from_narrow or outcome, Step) and spent is not None:
            value = Value(None, version, step, name=kind)
            value.watch, value.sample, value.spec = version_of(tensor), sample_of(local), spec
            value.shape, value.dtype, value.seconds = local.shape, tensor.dtype, spent
            if self._makes_a_plan and spec is None:
                value.if_held = narrow_bytes(node, tensor, logits_of(frame))
            if from_narrow is None:
                self.ledger.rebuilds(value, local)
            else:
                value.from_narrow = True
                self._narrow(value, from_narrow, tensor)
                self.vain.note(self.seen, (kind, seen_as), value, told, outcome, visits)
        else:
            value = self._hold(tensor, kind or node.name())
            value.sample = sample_of(local)  # it may be edited through .data before a step reads it
            if worth or unedited is False:
                told = told if may or self.following is None else self.following.why(place)
                value.why = reasons.EDITED if unedited is False else told or self._why(node, outcome)
                self.vain.note(self.seen, (kind, seen_as), value, told, outcome, visits)
            elif size >= SMALLEST:
                value.why = reasons.SMALLER
        value.layout, value.place, value.seen_at = seen_as, place, number
        value.as_made = unedited is True  # else only compared: what read it before may have read other bits
        unedited = value.as_made or (unedited is None and isinstance(outcome, Step) and spent is not None)
        value.copied_to_edit = kind == "CloneBackward0" and is_copied_to_edit(node, number)
        value.call = self._call_of(frame, number)
        self._mark(value, local)
        self._remember(value, tensor)
        if known is not None and known.step is not None and known.layout is None:
            known.packed = value
        graph.register_packed(node, output, value)
        if self.memo is not None and visits and known is None and spec is None:
            memo.learn(self.memo, self.search, visits, tensor, number, value, outcome)
        if unedited and size >= SMALLEST and value.is_held:
            self._offers(value, tensor, node, kind)
        return value

    @property
    def _makes_a_plan(self) -> bool:
        """Will a plan be made of this pass? A pass that follows one needs no prices."""
        return self.following is not None and self.following.whole

    def _again(self, known: Value, tensor: Tensor) -> Value:
        """A tensor that was packed before. It is held from now on if it was edited through .data since, or if
        this reader needs it when weights that a rebuild reads are freed: each gets what stock would give."""
        if known.step is None or known.memory is not None:
            return known
        edited = not matches(known.sample, tensor)
        self._remember(known, tensor)
        if edited or (self._sharded and self.units.freed(known.step) is not None):
            known.memory = tensor.detach()
        return known

    def _mark(self, value: Value, tensor: Tensor) -> None:
        """What the backward pass must know; under `verify` the running layer and the original tensor."""
        if value.name == SOFTMAX and in_rows(value, tensor):
            value.in_rows, value.device = True, tensor.device
        if self.layers is not None:
            value.where = self.layers.at_work()
            if value.step is not None:
                value.original = tensor.detach()

    def _remember(self, value: Value, tensor: Tensor) -> None:
        """Where a step that reads this value must be compared, it finds the tensor, if that is alive."""
        if self.following is not None and value.step is not None and value.spec is None:
            value.seen = weakref.ref(tensor)
            self.recent.append(tensor)

    def _call_of(self, frame: FrameType, number: int) -> CallArguments | None:
        """The call that saves this tensor. One node saves all its tensors under one sequence number."""
        if self._call[0] != number:
            self._call = number, calls.call_of(frame)
            if is_compiled(frame):
                self.reasons[reasons.COMPILED_WITHIN] = 1
        return self._call[1]

    def _why(self, node: Node, outcome: Step | Missing) -> str:
        """Why an output of the node is held."""
        if isinstance(outcome, Step):
            if is_view_of_held(outcome):
                return reasons.VIEW
            if self._freed:
                return self._freed
            return reasons.OTHER_BITS if self.policy.allows(outcome) else reasons.NOT_REPEATED
        if outcome.communicates or outcome.too_deep:
            return reasons.COLLECTIVE if outcome.communicates else reasons.TOO_DEEP
        if outcome.elsewhere:
            return reasons.ELSEWHERE
        at_fault = outcome.outputs[0][0] if outcome.outputs else node
        if any(map(reasons.is_checkpointed, (node, *(missing for missing, _ in outcome.outputs)))):
            return reasons.CHECKPOINTED
        why = reasons.NOT_REPEATED if kind_of(at_fault) in RECIPES else reasons.NO_RECIPE
        if self.search.considers(kind_of(at_fault)) and not outcome.ruled_out:
            why = reasons.BEFORE if self.search.from_here else reasons.NOT_AT_HAND
        return why if at_fault is node else f"{why}: {at_fault.name()}"

    def _accepts(self, step: Step, tensor: Tensor, seen_as: Hashable) -> float | None:
        """The seconds of one rebuild; None if the policy rules it out or its bits differ."""
        if is_view_of_held(step) or not self.policy.allows(step):
            return None
        if self._sharded:
            self._freed = reasons.sharded(*wrap_of(unit)) if (unit := self.units.freed(step)) else ""
            if self._freed:
                return None
        return seconds(step, tensor, seen_as)

    def passed(self) -> Pass:
        """What this pass saved, from which plans are made."""
        assert self.following is not None
        rates, why = rates_for(goal := self.following.goal, self.device)
        if why is not None:
            self.reasons[why] = 1
        return pass_of(self.calls, self.reads.made, self.ledger, rates, goal.promises_time)

    def _without_node(self, tensor: Tensor, references: int, frame: FrameType, number: int) -> Value:
        """Parameters, inputs, statistics, pooling indices: held, since no node made them."""
        if tensor.requires_grad:  # mostly a parameter: not counted
            value = Value(tensor, tensor._version)
            # a leaf that is no parameter may be in this pass for the first time
            plain = type(tensor) is Tensor or value.spec is not None
            if tensor.dim() == 1 or self.policy.reads_weights or plain or frame.f_code in COPIED:
                value.pin(tensor)  # an edit through .data may come before a step reads it
            if self._sharded and tensor.dim() == 1 and value.tensor is not None:
                value.copied = value.tensor.detach().clone() if self.units.owns(value.tensor) else None
            return value
        # if the caller holds the tensor too, a narrow copy would add memory
        alone, large = is_alone(tensor, references), tensor.numel() >= SMALLEST
        step = narrowed(tensor) if alone and large and type(tensor) in _PLAIN else None
        if step is not None:
            value = Value(None, tensor._version, step)
            value.shape, value.dtype, value.watch = tensor.shape, tensor.dtype, version_of(tensor)
            self._narrow(value, step, tensor)
            return value
        if tensor.dtype != torch.int64 or type(tensor) not in _PLAIN:
            # rrelu fills its noise only after it was saved
            value = self._hold(tensor, movable=tensor._version > 0)
            if alone and large:
                value.name, value.why = name_of(frame), reasons.KEPT
            call = value.call = self._call_of(frame, number)
            if call is None or call.reads_buffers or large:
                value.sample = sample_of(tensor)  # what a norm in training keeps, nobody else has
                if not alone and value.tensor is tensor and type(tensor) in PLAIN:
                    value.pinned = tensor.detach()  # frozen, and perhaps to get other data; as Value.pin
            return value
        value = self._hold(tensor)
        value.alone = alone
        return value

    def _hold(self, tensor: Tensor, kind: str = "", movable: bool = True) -> Value:
        value = held(tensor, kind)
        large = (type(tensor) in _PLAIN or value.spec is not None) and size_of(value) >= SMALLEST
        # the caller holds parameters and their views anyway, and may edit them
        movable = movable and tensor.layout == torch.strided  # a sparse one, say, stays
        if self.hooks is not None and movable and large and not is_parameter(tensor):
            move(value, tensor, self.hooks)
        self.ledger.holds(value, tensor)
        return value

    def _narrow(self, value: Value, step: Step, tensor: Tensor) -> None:
        narrow = copy_that(step)
        assert narrow.tensor is not None
        self.ledger.holds(narrow, narrow.tensor)
        self.ledger.rebuilds(value, tensor, tensor.nbytes - narrow.tensor.nbytes)
        self._mark(value, tensor)

    def _narrow_positions(self, node: Node) -> None:
        """Hold a max pooling node's indices in the narrowest dtype that can index its input."""
        value = graph.saved(node, "result1")
        if value is None or not value.alone or value.tensor is None or value.tensor.numel() < SMALLEST:
            return
        tensor = value.tensor
        step = narrowed_positions(tensor, node, POOLS[kind_of(node)])
        if step is not None:
            value.becomes(step, tensor)
            self._narrow(value, step, tensor)

    def _offers(self, value: Value, tensor: Tensor, node: Node, kind: str) -> None:
        """Register what a held tensor gives access to: parts of a `cat`, a view's base. C++ calls it, too."""
        if kind == "CatBackward0":
            find_parts_in(value, node)
        base = tensor._base if value.tensor is not None else None
        if base is None or base.grad_fn is None or base.grad_fn is node:
            return
        if find(base.grad_fn, base.output_nr) is None:
            value.whole = whole = held(base, kind_of(base.grad_fn))
            whole.as_made = as_made(base.grad_fn, base.output_nr, base._version) is True
            whole.provenance, whole.order = self.search.provenance, self.seen
            whole.seen_at, whole.sample = value.seen_at, sample_of(base)
            register(base.grad_fn, base.output_nr, weakref.ref(whole))
