"""The saved-tensor hooks: one saves a tensor as a value of the log, the other reads it back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import _disable_current_modes

from leannorm._torch import left_to_python
from leannorm.saving.evidence import edited, is_parameter
from leannorm.saving.log.log import Alive, Log
from leannorm.saving.log.recorder import COMPILED, FAILED, OWN, THREAD, is_of_checkpoint
from leannorm.saving.log.replay import Replay
from leannorm.saving.log.tensors import (
    Geometry,
    alias_of,
    beside,
    copy_of,
    counter_of,
    geometry_of,
    is_plain,
    matches,
    share,
    shown,
    stream_of,
)
from leannorm.saving.log.values import DROPPED, HELD
from leannorm.saving.log.walk import decide, hold_again
from leannorm.saving.policy import Answer
from leannorm.saving.reasons import NO_CAUSE, Why
from leannorm.saving.shards import PLAIN, local_of, shared_as, spec_of
from leannorm.saving.shards import counter_of as counter_of_shared
from leannorm.saving.small import nodes_made
from leannorm.saving.small import unpack as unpack_others
from leannorm.saving.verify import check_equal


@dataclass(eq=False)
class Other:
    """A tensor that the log keeps but cannot read, such as a sparse one. A node's `Saved` refers to it."""

    sizes: Sequence[int]
    place: int
    nbytes: int
    dtype: torch.dtype


_ALIVE = set[int]()


def alive() -> int:
    """How many saved tensors nodes still have, in all passes."""
    return len(_ALIVE)


@dataclass(slots=True, eq=False)
class Saved:
    """What a node keeps instead of a tensor: a value and how a view shows it, or a tensor that is kept."""

    log: Log | None = None
    value: int = -1
    version: int = 0
    alive: Alive | None = None  # that of the pass
    backward_passes: int = 0  # how many had begun within the pass before
    shape: Geometry | None = None  # None: as the value was made
    counter: Tensor | None = None
    tensor: Tensor | None = None
    original: Tensor | None = None  # with verify, the tensor to compare a rebuild with
    layer: str | None = None  # the layer that saved it
    other: Other | None = None
    spec: Any = None  # how ranks share the DTensor, if the value is its local tensor
    is_leaf: bool = False

    def __post_init__(self) -> None:
        _ALIVE.add(id(self))

    def __del__(self) -> None:
        _ALIVE.discard(id(self))
        log = self.log
        if log is None:
            return
        if self.is_leaf:
            log.leaves[self.value] -= 1
        assert self.alive is not None
        log.gone.append((self.value, self.alive, self.backward_passes))
        if not log._depth:
            with log:
                pass

    def check_version(self) -> None:
        if self.counter is None or self.counter._version == self.version:
            return
        of_value = None if self.log is None else (self.shape or self.log.values[self.value].made).sizes
        shape = (self.counter if self.tensor is None else self.tensor).shape if of_value is None else of_value
        raise edited(f"tensor of shape {list(shape)}", self.counter._version, self.version)


def _is_made_by_checkpoint(tensor: Tensor) -> bool:
    """Whether it is the output of a checkpoint with use_reentrant=True, which is an autograd function."""
    node = tensor.grad_fn
    forward = getattr(node, "_forward_cls", None) if isinstance(node, BackwardCFunction) else None
    return is_of_checkpoint(forward)


def _kept(tensor: Tensor) -> Tensor:
    """The tensor without its graph, which may lead back to the node that saves it."""
    if tensor.grad_fn is None:
        return tensor
    if type(tensor) in PLAIN:
        return alias_of(tensor)
    with _disable_current_modes():
        return tensor.detach()


def record_first(look: Callable[[], bool], most: float) -> None:
    """Set no hook for the first tensor of a pass that is left alone: `FirstTensor` of small.py is for it."""


@left_to_python
def record_pack(tensor: Tensor) -> Saved:
    """The pack hook."""
    log, saved = THREAD.log, Saved()
    if type(tensor) not in PLAIN:
        with torch._C.DisableTorchFunctionSubclass():
            return _pack(log, saved, tensor)
    return _pack(log, saved, tensor)


def _pack(log: Log | None, saved: Saved, tensor: Tensor) -> Saved:
    if log is not None:
        log.packs += 1
    local = tensor
    keeps = log is None or log.busy or log.failed or (tensor.is_leaf and tensor.requires_grad)
    if not keeps and not is_plain(tensor):
        assert log is not None
        own = local_of(tensor) if log.subclasses else None
        if own is not None:
            local, saved.spec = own, spec_of(tensor)
        if not is_plain(local):
            keeps = True
            with log:
                told = log.passes[-1].other(tensor)
                if told is not None:
                    sizes, place, nbytes = told
                    saved.other = Other(sizes, place, nbytes, tensor.dtype)
                    log.others.append(weakref.ref(saved.other))
    if keeps or log is None:
        saved.tensor = _kept(tensor)
        if not tensor.is_inference():
            saved.counter, saved.version = saved.tensor, tensor._version
        return saved
    saved.version = tensor._version
    if saved.spec is None:
        with beside():
            saved.counter = counter_of(tensor)
    else:
        saved.counter = counter_of_shared(tensor)
    with log:
        if log.unsettled:
            log.settle()
        layer = log.passes[-1].layer
        if layer is not None:
            saved.original, saved.layer = alias_of(local), layer()
        log.busy = True
        try:
            _save(log, saved, local, tensor)
        except Exception:  # the node keeps the tensor, as in plain PyTorch
            log.meets(FAILED)
            log.failed, saved.tensor = True, alias_of(local)
        finally:
            log.busy = False
        if saved.tensor is not None and saved.spec is not None:
            saved.tensor = _kept(tensor)
    return saved


def _save(log: Log, saved: Saved, tensor: Tensor, whole: Tensor) -> None:
    """Save the tensor as a value. `whole`: what the node saves, of which `tensor` is this rank's part."""
    if whole.grad_fn is not None and whole.grad_fn.name() == "CompiledFunctionBackward":
        log.meets(COMPILED)
    v = log.value_or_new(tensor)
    x = log.values[v]
    if x.copied:  # the copy is for rebuilds; this node reads the memory itself, as in plain PyTorch
        saved.tensor = tensor if whole.grad_fn is None else alias_of(tensor)
        return
    shape = geometry_of(tensor)
    saved.shape = None if shape == x.made else shape
    by = log.passes[-1]
    saved.log, saved.value, saved.alive = log, v, by.alive
    saved.backward_passes = by.alive.backward_passes
    by.alive.now += 1
    log.saved_by.add((v, len(log.calls)))  # a node saves arguments before their call is seen
    x.saves += 1
    x.refs += 1
    x.left += 1
    log.alive += 1
    if not x.listed and not x.parameter:
        x.parameter = is_parameter(whole)
        if not x.parameter:
            x.listed, x.number = True, len(log.listed)
            log.listed.append(v)
    movable = not x.parameter and by.hold is not None and tensor.numel() >= log.policy.smallest
    movable = movable and (whole.grad_fn is not None or not by.chooses)
    leaf = whole.grad_fn is None and not movable
    if leaf:  # autograd reads the tensor object, even after its data is replaced
        saved.tensor = tensor
        if saved.spec is None:
            saved.is_leaf = True
            log.leaves[v] += 1
    planned = by.has_place(x, whole)
    answer = by.drops(x, tensor) if planned else Answer(True, not by.chooses)
    if log.may_plan:
        _note_save(log, by.place if planned else -1, v, whole)
    if not answer.drops:
        if x.state == DROPPED:
            hold_again(log, v, alias_of(tensor))
        x.why, x.cause = answer.cause.why, answer.cause
    shows_more = saved.shape is not None and saved.shape.extent > x.made.extent
    if x.state == DROPPED:
        if shows_more and not leaf:
            saved.tensor = alias_of(tensor)
        return
    if x.held is None:
        x.held, x.state = alias_of(tensor), HELD
    if shows_more:
        x.call = -1  # it shows memory that its call has not made
    if movable and (answer.moves or not by.chooses):
        log.to_move.append(v)
    if not leaf and answer.drops:
        decide(log, v, answer.takes)
    if x.why == Why.NOT_AT_HAND and _is_made_by_checkpoint(whole):
        x.why, x.cause = Why.CHECKPOINTED, NO_CAUSE


def _note_save(log: Log, place: int, v: int, tensor: Tensor) -> None:
    """Note for a plan what is saved, and by which call's node: one saves arguments before its call is seen,
    and results after it."""
    x, node, last = log.values[v], tensor.grad_fn, len(log.calls) - 1
    x.note_gradient(tensor)
    is_result = x.call == last if node is None else node._sequence_nr() == nodes_made() - 1
    log.saved.append((log.passes[-1].alive, place, v, last if is_result else last + 1))


# ---------------------------------------------------------------- read back


def _read_by_user() -> bool:
    """Whether the node that reads is a user's function, which may write into the tensor that it gets."""
    node: Any = torch._C._current_autograd_node()
    if not isinstance(node, BackwardCFunction):
        return node is not None and "CppNode" in type(node).__name__
    forward = getattr(node, "_forward_cls", None)
    return not getattr(forward, "__module__", "").startswith("leannorm.")


def _is_of_others(log: Log, v: int) -> bool:
    """Whether it is made of a tensor in other memory that a user's hooks have returned."""
    calls = (log.calls[log.values[one].call] for one in log.made_again_for(v))
    brought = (log.values[i].elsewhere for call in calls for i in log.inputs_of(call))
    return any(one is not None and one.is_other for one in brought)


def _rebuilt(saved: Saved, log: Log) -> Tensor:
    x = log.values[saved.value]
    dropped, replay = x.state == DROPPED, Replay(log)
    if x.shown is not None:
        tensor = x.shown
    elif x.elsewhere is not None:
        if x.rebuilt is None:
            x.rebuilt, x.rebuilt_on = x.elsewhere.bring(x), stream_of(x.made.device)
        else:
            share(x.rebuilt, x.rebuilt_on)
        tensor = x.rebuilt
    elif x.held is not None:
        share(x.held, x.on)
        tensor = x.held  # unseen edits of a node's own tensor raise no error, as in plain PyTorch
    else:
        tensor = replay.value(saved.value)
        if saved.original is None and not matches(x.sample, tensor) and not _is_of_others(log, saved.value):
            raise RuntimeError(
                f"leannorm.lean(): an output of {log.calls[x.call].rule.name} of shape {list(tensor.shape)}"
                " was rebuilt, but is not what the forward pass saved: a tensor that it is computed from was"
                " edited outside of torch, for example through NumPy. Edit a copy of it, or leave lean() out"
                " of this part"
            )
    other = dropped or x.elsewhere is not None
    replay.used(saved.value)
    tensor = shown(tensor, saved.shape or x.made)
    if dropped and saved.original is not None:
        check_equal(tensor, saved.original, log.calls[x.call].rule.name, saved.layer or "")
    if not (other and _read_by_user()):
        return tensor
    # a clone() of a part has other strides, for which kernels may compute other bits
    made = tensor.clone()
    return made if made.stride() == tensor.stride() else copy_of(tensor, geometry_of(tensor))


@left_to_python
def record_unpack(saved: Any) -> Tensor:
    """The unpack hook."""
    if type(saved) is not Saved:
        return unpack_others(saved)
    saved.check_version()
    log = saved.log
    if log is not None and not log.closed:
        log.backward_begins()
    if saved.tensor is not None:
        tensor: Tensor = saved.tensor
        return tensor
    assert log is not None
    with log, torch.no_grad(), beside():
        start, dropped = perf_counter(), log.values[saved.value].state == DROPPED
        tensor = _rebuilt(saved, log)
        if dropped and log.spent is not None:
            log.spent.rebuilding += perf_counter() - start
        return tensor if saved.spec is None else shared_as(tensor, saved.spec)


OWN += record_unpack, unpack_others
