"""Why `lean()` saved no memory, or less than asked: `saved.reasons`, and one warning per cause."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from torch import Size, Tensor

from leannorm._report import bytes_in_words
from leannorm.planning.goal import HALF, Goal
from leannorm.planning.plan import Plan
from leannorm.saving.ledger import Record

if TYPE_CHECKING:
    from leannorm.saving.limit import Limit
    from leannorm.saving.plan import RebuildPlan

COMPILED = (
    "lean() was entered inside compiled code, where autograd saves what the compiler chooses: nothing was"
    " done; type torch.compile(model, options=leannorm.compile_options()), without lean()"
)
TRANSFORMED = (
    "lean() was entered under a torch.func transform, which admits no saved-tensor hooks: nothing was done;"
    " use torch.autograd, or leave lean() out"
)
TRACED = (
    "lean() was entered while torch writes a graph (make_fx, AOTAutograd), which saves nothing yet: nothing"
    " was done; enter it where the graph is called"
)
TRANSFORMED_WITHIN = (
    "torch admitted no saved-tensor hooks in a part of this pass (a torch.func transform within it): tensors"
    " saved there are kept as without lean(), and not counted"
)
HOOKS_AROUND = (
    "saved-tensor hooks were there first (offloading or a checkpoint around lean()): nothing was done, and"
    " they work as without lean(); open lean() outside of them, or pass them to it: lean(held=save_on_cpu())"
)
HOOKS_WITHIN = (
    "other saved-tensor hooks (such as save_on_cpu) were opened within lean(): what was saved there is"
    " theirs, and lean() neither saw nor rebuilt it; pass them to lean() instead: lean(held=save_on_cpu())"
)
COMPILED_WITHIN = (
    "compiled code ran within lean(): what it saves is the compiler's choice and was kept; type"
    " torch.compile(model, options=leannorm.compile_options()), since lean() rebuilds what eager code saves"
)
NOTHING = (
    "lean() saw no tensor being saved: nothing needed a gradient, or all of the forward pass ran inside"
    " compiled code, a replayed CUDA graph or other saved-tensor hooks"
)
FREED_WITHIN = (
    "most of what this pass saved was freed before lean() closed, since its result was dropped: bytes count"
    " only what was left; keep the result until backward() has run"
)
FREED_BEFORE_PLAN = FREED_WITHIN.replace("left;", "left, and no plan could be made;")
BENCHMARK = (
    "torch.backends.cudnn.benchmark is on: cuDNN times a convolution's algorithms in each thread separately,"
    " so the backward pass may choose another one with other bits, and convolutions are kept; turn it off"
)
SMALL = (
    "what this pass saves is kept as it is: a rebuild would free less than 4 MiB, as the last recorded pass"
    " at this line showed, and the bytes are that pass's; a budget applies to passes of any size, and the"
    " environment variable LEANNORM_SMALL_BYTES sets another limit than 4 MiB"
)
COMPARED = (
    "this pass keeps everything, as plain PyTorch does, so that a step with the plan can be compared with it"
    " in time: bytes are those of the pass from which the plan was made"
)
FAILED = (
    "lean() met an error of its own, out of memory perhaps: what it could not record is kept, as in plain"
    " PyTorch"
)
LIMIT_UNSEEN = (
    "limit was not watched: that needs CPU tensors, the C++ library of autograd nodes and a system that"
    " reports a process's memory; as little was kept as possible; ask for a peak instead, as peak=0.8"
)
SUBCLASSES = (
    "tensors of a subclass were saved (such as jagged tensors): they are kept, as lean() only rebuilds plain"
    " tensors and DTensors; checkpoint the blocks that save most of them"
)
NOT_MOVED = (
    "nothing is moved to the host that is on a CPU already, on a device without streams, or in a CUDA graph"
    " that is captured: it is kept where it is"
)
HEAD_IN_HOOKS = (
    "head=True: logits were computed as without it, since a checkpoint or other saved-tensor hooks are around"
    " the layer, which may run it again outside of lean()"
)
HEAD_OF_FLAT = (
    "head=True: logits were computed as without it, since their layer's weight is a part of a flat parameter"
    " of FullyShardedDataParallel (FSDP1), which may be freed before they are read"
)
HEAD_OF_UNITS = (
    "head=True: logits were computed as without it, since their layer was called from outside of the module"
    " that FSDP2 gathers its weight for, and the weight may be freed before they are read"
)


class Why(IntEnum):
    """Why an operation's output is kept, as `records` give it. In the order of `Why` in values.h."""

    sentence: str

    def __new__(cls, sentence: str) -> Why:
        """Number the sentences."""
        made = int.__new__(cls, len(cls.__members__))
        made._value_, made.sentence = len(cls.__members__), sentence
        return made

    NONE = ""
    NEVER = "lean() does not call it again, as it draws random numbers, sends, or writes into its arguments"
    NOT_REPEATED = "this setting does not repeat it"
    NOT_AT_HAND = "what it was made of is not at hand"
    TOO_DEEP = "too many steps in a row lead to it from what is kept"
    OTHER_BITS = "a rebuild had other bits"
    SMALLER = "each is much smaller than the largest tensor of the pass, and a rebuild takes as many calls"
    UNKNOWN = "lean() did not see the operator that made it, as in compiled code or a kernel of your own"
    FLAGS = "its operator ran on tensors that lean() does not rebuild"
    PLANNED = "the plan keeps it"
    COLLECTIVE = "a rebuild would need a collective, and other ranks may not rebuild it"
    FREED = "a rebuild would read weights that were freed by then, as sharding does"
    CHECKPOINTED = "a checkpoint made it, inside which lean() does nothing; use one of the two there"
    ALONE = "no node made it and autograd alone has it, such as the workspace of a recurrent layer"
    MODE = "a mode (TorchDispatchMode) returned it, not an operator that the mode called"
    UNTRIED = "its operator was not tried before a CUDA graph's capture, or on values that tell nothing"
    TIMED = (
        "cuDNN times a convolution's algorithms (torch.backends.cudnn.benchmark) and may choose another one"
    )


class Cause(NamedTuple):
    """Why a tensor is kept, and the operator to which that applies if it is not the one that made it."""

    why: Why = Why.NONE
    of: str = ""

    def in_words(self) -> str:
        """The sentence, with the operator."""
        return f"{self.why.sentence}: {self.of}" if self.why and self.of else self.why.sentence


NO_CAUSE = Cause()
_SAID_IF_NOTHING_IS_REBUILT = Why.NOT_REPEATED, Why.PLANNED, Why.TIMED
_ALWAYS_SAID = tuple(why.sentence for why in Why if why and why not in _SAID_IF_NOTHING_IS_REBUILT)

STRAYED = (
    "no plan fits this pass, whose tensors or sizes differ from those of passes before; a later pass may make"
    " one for passes like this"
)

BEGAN_AS_ANOTHER = (
    "more is kept than planned, since the pass began like another one, and followed that one's plan until the"
    " two differed"
)

OF_THE_PASS = {
    BENCHMARK,
    COMPILED,
    FAILED,
    TRANSFORMED,
    TRACED,
    TRANSFORMED_WITHIN,
    HOOKS_AROUND,
    HOOKS_WITHIN,
    COMPILED_WITHIN,
    SUBCLASSES,
    NOT_MOVED,
}


_LEAST = 0.05  # of all bytes
_FEWER, _LOWER = 0.8, 0.95  # shares of plain PyTorch's bytes and peak that count as fewer and as lower


def by_bytes(records: Iterable[Record]) -> Iterator[str]:
    """A sentence for each pair of node and reason that keeps a twentieth or more of all bytes."""
    groups, stock, rebuilt = Counter[tuple[str, str]](), 1, 0
    for record in records:
        stock += record.bytes
        rebuilt += record.bytes * record.rebuilt
        if record.why:
            groups[record.node, record.why] += record.bytes
    for (node, why), nbytes in groups.most_common():
        share = nbytes / stock
        if share >= _LEAST and (why.startswith(_ALWAYS_SAID) or rebuilt < _LEAST * stock):
            reason, _, at_fault = why.partition(": ")
            made_of = f", made of outputs of {at_fault}" if at_fault else ""
            whose = "what was saved within" if why == Why.ALONE.sentence else "outputs of"
            yield f"{share:.2f} of the bytes are {whose} {node}{made_of}, and kept: {reason}"


def sharded(unit: str, around: str) -> str:
    """A rebuild would read weights that sharding has freed by then; and the `fully_shard` that keeps them."""
    wrap = (
        f"call fully_shard() on each {around} as a whole"
        if around
        else "compute it, such as the loss, within"
    )
    return f"{Why.FREED.sentence} (of a {unit}); {wrap}"


def dear(hooks: float, overhead: float) -> str:
    """The hooks alone take more than the overhead that is allowed."""
    return (
        f"overhead={overhead:g} is out of reach: the hooks for what the pass saves take {hooks:.2f} of a"
        " plain PyTorch step; all is kept"
    )


def of_recording(goal: Goal, plan: RebuildPlan) -> str | None:
    """The reason that plain `lean()` takes more than it may spend, if recording alone takes that."""
    taken = plan.made_for.recording
    if goal.free is None or goal.overhead is None or taken <= goal.overhead:
        return None
    return (
        f"plain lean() spends more than {goal.overhead:g} of a plain PyTorch step: recording alone takes"
        f" {taken:.2f}, as measured, since the pass has many small operators; larger batches have no more"
    )


def off(asked: float, measured: float | None) -> str:
    """The smallest rebuild takes more than the overhead that was asked for, as measured."""
    taken = (
        "there is nothing to rebuild" if measured is None else f"the least takes {measured:.2f}, as measured"
    )
    return (
        f"overhead={asked:g} is out of reach: of a plain PyTorch step {taken}; all is kept, and measured"
        " again after 1,000 passes; ask for more, or for a budget or a peak"
    )


def unmeasured(more: int, free: int) -> str:
    """No step without a plan is run for comparison, since memory might not be enough."""
    return (
        "the time of a step is planned by prices and not measured: a step that keeps everything would take"
        f" {bytes_in_words(more)} more, and {bytes_in_words(free)} are free, which is less than twice as much"
    )


def failed(tensor: Tensor, error: Exception) -> str:
    """The user's hooks raised an error: the tensor is kept."""
    made_by = "a leaf" if tensor.grad_fn is None else tensor.grad_fn.name()
    text = " ".join(str(error).split())
    return f"an output of {made_by} is kept, since rebuilding it failed with {type(error).__name__}: {text}"


def not_moved(tensor: Tensor, error: Exception) -> str:
    """A copy to the host raised an error, out of pinned memory perhaps."""
    text = " ".join(str(error).split())
    size = f"{bytes_in_words(tensor.nbytes)} stay on {tensor.device}"
    return f"a tensor could not be moved to the host: {size}, since {type(error).__name__}: {text}"


def no_plan(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"no plan could be made of this pass, since it failed with {type(error).__name__}: {text}"


def out_of_reach(goal: Goal, plan: Plan, compiled: bool = False) -> str:
    """No plan can keep to the budget or the peak; names the least that is possible."""
    if goal.peak is not None:
        share = plan.least / max(plan.stock.peak, 1)
        asked = f"{goal.peak:g}" if isinstance(goal.peak, float) else bytes_in_words(goal.peak)
        return (
            f"peak={asked} is out of reach: {bytes_in_words(plan.least)} ({share:.2f} of plain PyTorch's) is"
            " the least, as gradients, what a single operation needs and what cannot be computed again take"
            " that much"
        )
    least = plan.least / max(plan.stock.held, 1)
    if goal.overhead is not None and least <= (goal.budget or 0.0):
        return (
            f"plain lean() spends {goal.overhead:g} of a plain PyTorch step at most, by prices, which leaves"
            f" {plan.ratio:.2f} of the bytes; to keep {goal.budget:g} at any price write"
            f" budget={goal.budget:g}"
        )
    return budget_out_of_reach(goal, least, compiled)


def of_peak(goal: Goal, plan: Plan | RebuildPlan) -> str | None:
    """The reason that a budget or an overhead keeps fewer bytes but lowers no peak, if that is so."""
    asked = "budget" if goal.budget is not None else "overhead"
    asked = "plain lean()" if goal._replace(moves=False) == HALF else f"this {asked}"
    if goal.peak is not None or goal.worth is not None or plan.ratio > _FEWER or plan.peak_ratio < _LOWER:
        return None
    return (
        f"{asked} frees memory between forward and backward and lowers no peak: {plan.ratio:.2f} of the"
        f" bytes are kept, the peak of a step is {plan.peak_ratio:.2f} of plain PyTorch's, and a step takes"
        f" {plan.overhead:.0%} more time; if memory runs out, ask for the peak instead, as peak=0.8 or"
        ' peak="8GiB"'
    )


def of_limit(limit: Limit | None, least: int, kept: list[tuple[int, str, Size]]) -> str | None:
    """The reason that a limit is exceeded, if it is. `least`: bytes that the process needs at least, or 0.
    `kept`: bytes, operators and shapes of what takes the most of what is kept."""
    if limit is None:
        return LIMIT_UNSEEN
    asked = f"limit={bytes_in_words(limit.nbytes)}"
    if limit.is_passed:
        return (
            f"limit was passed before the pass began: the process had {bytes_in_words(limit.before)}, where"
            f" {asked}; as little was kept as possible, and the rest of the memory is not this pass's"
        )
    if least:
        return (
            f"limit is out of reach: with the backward pass, the process takes about {bytes_in_words(least)}"
            f" at least, where {asked}; that is for weights, gradients, what a single operation needs, and"
            f" what cannot be computed again{_largest(kept)}"
        )
    return None


def _largest(kept: list[tuple[int, str, Size]]) -> str:
    of = (f"{bytes_in_words(nbytes)} of {node or 'tensors'} {tuple(shape)}" for nbytes, node, shape in kept)
    return f", most of all {', '.join(of)}" if kept else ""


def missed(share: float, planned: float, another: bool) -> str:
    """The pass kept more than the plan that it followed."""
    then = "another plan is made" if another else "plans that were made since did no better"
    return (
        f"more is kept than the plan says: {share:.2f} of the bytes for {planned:.2f}, as more could be"
        f" rebuilt in the pass from which it was made; {then}"
    )


def budget_out_of_reach(goal: Goal, ratio: float, compiled: bool = False) -> str:
    by_name = "" if compiled else " (each by name: saved.records of lean())"
    asked = f"budget={goal.budget:g}" if goal.overhead is None else "half of the bytes, as lean() aims at,"
    return (
        f"{asked} is out of reach: all that can be rebuilt leaves {ratio:.2f} of the bytes, as"
        f" the rest cannot be computed again{by_name}, are inputs or statistics, or would raise the peak"
    )


WARNED: set[str] = set()
"""The causes that this process was warned of."""

_IN_ORDER = {SMALL, COMPARED, STRAYED, BEGAN_AS_ANOTHER, FREED_WITHIN}  # nobody needs to act on these
_UNASKED = "overhead=", "plain lean()", "half of the bytes"  # nor on these: as much as possible was done


def warn_once(reason: str) -> None:
    """Warn once per cause in this process, at the line that opened `lean()`."""
    if reason in _IN_ORDER or reason.startswith(_UNASKED):
        return
    cause = reason.split(":")[0]
    if cause not in WARNED:
        WARNED.add(cause)
        warnings.warn(f"leannorm: {reason}", UserWarning, stacklevel=4)


def warn_compiled() -> None:
    warn_once(COMPILED)


warn_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]  # runs once, during tracing
