"""`lean()` around a forward pass."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Hashable
from functools import partial, wraps
from html import escape
from threading import get_ident
from types import TracebackType
from typing import Any, Literal, TypeVar

from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_dynamo_compiling

from leannorm._errors import InputError
from leannorm._report import bytes_in_words
from leannorm._torch import left_to_python
from leannorm.head import Told
from leannorm.ops.modes import exporting, traced
from leannorm.planning.goal import goal
from leannorm.saving import reasons
from leannorm.saving.forward_pass import ForwardPass, Settings
from leannorm.saving.ledger import Ledger, Record
from leannorm.saving.moved import hooks_of
from leannorm.saving.plan import RebuildPlan
from leannorm.saving.policy import CONV, LEANEST, NORM
from leannorm.saving.small import place_of

_Function = TypeVar("_Function", bound=Callable[..., Any])


class lean:  # noqa: N801  (a context manager named as a verb, as torch.no_grad is)
    """Keep fewer tensors for the backward pass, which rebuilds the others from those that are kept.

        lean()              keeps at most half of plain PyTorch's bytes, for the least time
        lean("norm")        rebuilds outputs of norms, activations, casts and views
        lean("conv")        also of linear layers, attention and cheap convolutions
        lean(budget=0.3)    keeps at most 0.3 of plain PyTorch's bytes
        lean(overhead=0.1)  keeps as few bytes as a tenth more time allows
        lean(peak=0.6)      lowers the peak of a step to 0.6 of plain PyTorch's, or to "8GiB"
        lean(limit="8GiB")  keeps everything until the process comes near this memory

    Use it in a `with` statement around the forward pass of any eager model, or as a decorator,
    `@leannorm.lean()`, of a function that runs one. The model is not changed. Call `backward()` after it.

    Args:
        recompute: "norm" rebuilds outputs of norms, activations, elementwise products, casts and views.
            "conv" also rebuilds outputs of convolutions, linear layers and attention that take few operations
            per byte. Without it, and without a goal, at most half of the bytes are kept, at the least cost in
            time and at no higher peak than plain PyTorch's; what costs under 0.01 of a step more is rebuilt
            too. If half of the bytes would cost over 0.1 of a step, that much time is spent, and `reasons`
            says so. Plans are made as for a budget.
        budget: instead of `recompute`, the share of the bytes to keep, in (0, 1]. The first forward pass
            keeps as little as it can. Later ones rebuild the cheapest tensors that are enough for the budget,
            or nearly all that can be rebuilt if none are enough. Costs follow from shapes, by a table, so
            equal passes have equal plans.
        overhead: instead of `budget`, the share of a step's time that `lean` may cost, 0 or more, its hooks
            included. As few bytes are kept as that time allows, provided that the peak rises by no more bytes
            than are no longer kept. The first plan uses the speed of this device. Then steps are timed,
            alternating with plain ones, and the plan is corrected.
        peak: instead of these, the most bytes that may be alive at one moment of a step: a share of plain
            PyTorch's, in (0, 1], or bytes, as `8 * 2**30` or "8GiB". This counts what the step allocates:
            saved tensors, gradients (of weights too) and what operations need. It does not count what was
            there before, such as weights, the optimizer's state or gradients that are added to. The first
            pass records when each tensor is made, last read and freed. Later ones take the least time that
            fits.
        limit: instead of these, the memory that the whole process may have: bytes, as `8 * 2**30` or
            "8GiB", or "device" for what the machine, the control group and `ulimit` leave. Everything is kept
            until memory runs short. Then saved tensors are dropped during the forward pass, those that are
            cheapest to rebuild first. Sizes may vary from pass to pass. What a backward pass takes is learned
            for each line that opens a pass. Needs CPU tensors, Linux and the C++ nodes; elsewhere `reasons`
            says so, and as little is kept as possible.
        held: where the tensors wait that must be kept. "host" moves them to pinned memory of the host, next
            to the computation, and gets them back before they are read. With a goal, or without arguments,
            the plan chooses for each tensor whether it is kept, rebuilt or moved. Or other saved-tensor
            hooks, such as `torch.autograd.graph.save_on_cpu()`, or a pair of functions (pack, unpack).
            `kept_bytes` counts all of these tensors, `moved_bytes` those on the host.
        head: a language model's logits are not computed as a whole. A linear layer with over three times as
            many outputs as inputs returns a tensor without values. Losses, log-probabilities and entropies
            compute some columns at a time. Anything else that reads it computes the whole tensor, once, and
            `reasons` names it. Gradients are then not bit-equal to plain PyTorch's.
        verify: for debugging; keeps everything as plain PyTorch does, rebuilds too, and compares bit for bit
            in the backward pass. The first difference raises, and names node, shape, layer and values.

    A norm's output can be computed again from the norm's input, an activation from its input, and a cast,
    view or copy from its source. So `lean` need not keep them: the backward pass calls the same kernels on
    the same tensors. Gradients equal plain PyTorch's bit for bit: each kind of call is first tried during the
    forward pass, and a tensor that would be rebuilt with other bits is kept.

    If rebuilds would free less than 4 MiB of a pass, the next passes opened at this line are left as they
    are, unless `budget`, `overhead`, `peak`, `limit`, `held` or `verify` is given.

    `kept_bytes` are saved for the backward pass and `rebuilt_bytes` are not; both count each storage once,
    without parameters. `records` has every saved tensor; their bytes add up to those two. `plan` is what was
    chosen, once there is a plan ("norm", "conv" and `limit` have none). `reasons` says why no memory, or less
    than asked, was saved; it is empty if all is well. What concerns the whole pass (compiled code, other
    hooks, a budget, peak or limit out of reach) also gives a warning, once per cause.

    Editing in place a tensor that autograd saved raises autograd's error in the backward pass, as without
    `lean`. So does editing a parameter, through .data too, if its old value is needed. Other tensors, such as
    a residual sum or the output of a batch norm before a ReLU, may be edited where autograd does not see it
    (under no_grad, through .data). On a CPU a few values of each rebuilt tensor are compared, and the
    backward pass raises if they changed; `verify` finds every such edit. Under no_grad, in compiled code,
    under torch.func transforms and within saved-tensor hooks that were set before (offloading,
    checkpointing), `lean` does nothing. One object may be used for several passes. Each call of a decorated
    function is a pass, and `function.saved` has the numbers of the last one.

    Raises: `InputError` for an unknown `recompute` (for a model, call `make_lean`), a `budget` outside
    (0, 1], a negative `overhead`, a `peak` that is neither a share nor bytes, a `limit` that is not in bytes,
    two of these, a `held` that is neither "host" nor hooks, or something that it cannot decorate (classes,
    generators, coroutines); at the first pass for a `limit` below what the process has; in the backward pass
    `RebuildError` for a rebuilt tensor that is not the one that was saved.

    >>> import torch, leannorm
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 4, 3))
    >>> with leannorm.lean("norm") as saved:
    ...     loss = model(torch.randn(2, 3, 20, 20)).square().mean()
    >>> loss.backward()
    >>> saved.kept_bytes < saved.rebuilt_bytes
    True
    """

    # Set in the class, as each step of a training loop makes an object
    place: Hashable = None
    plan: RebuildPlan | None = None
    _ledger = Ledger()  # of no pass
    _tells_why = False  # whether `reasons` also says why outputs of operations are kept

    def __init__(
        self,
        recompute: Literal["norm", "conv"] | None = None,
        *,
        budget: float | None = None,
        overhead: float | None = None,
        peak: float | int | str | None = None,
        limit: int | str | None = None,
        held: Literal["host"] | saved_tensors_hooks | tuple[Any, Any] | None = None,
        verify: bool = False,
        head: bool = False,
    ) -> None:
        if callable(recompute):
            raise _not_a_setting(recompute)
        is_named = not (verify or head) and (budget, overhead, peak, limit, held) == _NOTHING
        known = _NAMED.get(recompute) if is_named and type(recompute) in _NAMES else None
        if known is not None:  # each step of a training loop makes one of these
            self._arguments: dict[str, Any] = known[0]
            self._settings: Settings = known[1]
        else:
            asked = goal(recompute, budget, overhead, peak, limit)._replace(moves=held == "host")
            planned = asked.worth is None
            policy = LEANEST if planned else {"norm": NORM, "conv": CONV}[recompute or ""]
            shares: dict[str, Any] = {"budget": budget, "overhead": overhead, "peak": peak, "limit": limit}
            self._arguments = {"recompute": recompute, **shares, "held": held, "verify": verify, "head": head}
            hooks = None if held is None else hooks_of(held)
            self._settings = Settings(policy, asked if planned else None, hooks, verify, bool(head))
            if is_named:
                _NAMED[recompute] = self._arguments, self._settings
        self._told: list[Told] = []
        self._open: list[tuple[int, ForwardPass]] = []  # with the thread of each
        self._reasons: list[str] = []

    @left_to_python
    def __enter__(self) -> lean:
        if traced():
            self._reasons = [reasons.COMPILED]
            return self
        around = self._innermost() if self._open else None
        if around is None:
            self._ledger, self._reasons, self._tells_why, self._told = Ledger(), [], False, []
        place = place_of(sys._getframe(1)) if self.place is None else self.place
        passed = ForwardPass(self._settings, self._ledger if around is None else around[1].ledger, place)
        passed.open()
        if passed.refused is not None and passed.refused not in self._reasons:
            self._reasons.append(passed.refused)  # now: an error ends a checkpoint's second run early
        if passed.told is not None:
            self._told.append(passed.told)
        self._open.append((get_ident(), passed))
        return self

    @left_to_python
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if is_dynamo_compiling() or (opened := self._innermost()) is None:
            return  # entered while a compiler traced
        self._open.remove(opened)
        passed = opened[1]
        told = passed.end(error is not None)
        if error is not None:
            return
        self.plan, self._tells_why = passed.plan, self._tells_why or passed.tells_why
        for reason in told:
            reasons.warn_once(reason)
            if reason not in self._reasons:
                self._reasons.append(reason)

    def __call__(self, function: _Function) -> _Function:
        """The function, made to run in `lean()`: `function.saved` is the `lean` object of its last call."""
        unfit = inspect.isclass, inspect.isgeneratorfunction, inspect.iscoroutinefunction
        if not callable(function) or isinstance(function, nn.Module) or any(kind(function) for kind in unfit):
            raise _undecorated(function)
        context = copy.copy(self)
        context.place = lean, id(context)

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if traced():  # traced code may not enter a context that was made outside of it
                if not exporting():
                    reasons.warn_compiled()
                return function(*args, **kwargs)
            with context:
                return function(*args, **kwargs)

        run.saved = context  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    def _innermost(self) -> tuple[int, ForwardPass] | None:
        """The pass that was opened last of those that are open in this thread."""
        for opened in reversed(self._open):
            if opened[0] == get_ident():
                return opened
        return None

    def __reduce__(self) -> tuple[partial[lean], tuple[()]]:
        """How to copy or pickle it: the copy has the same settings, and no passes."""
        return partial(type(self), **self._arguments), ()

    def __repr__(self) -> str:
        """One line: what the last pass kept, what its backward pass rebuilds, the plan, and the reasons."""
        moved = f" ({bytes_in_words(self.moved_bytes)} on the host)" if self.moved_bytes else ""
        told = [
            f"{bytes_in_words(self.kept_bytes)} kept{moved}, {bytes_in_words(self.rebuilt_bytes)} to rebuild"
            if self.records
            else "no tensor saved"
        ]
        if self.plan is not None:
            told.append(f"plan: {self.plan.in_words()}")
        return f"lean({'; '.join(told + self.reasons)})"

    @property
    def reasons(self) -> list[str]:
        """Why no memory, or less than asked, was saved; names what keeps a twentieth or more of all bytes."""
        held = reasons.by_bytes(self._ledger.records()) if self._tells_why else ()
        of_heads = [reason for told in self._told for reason in told.reasons()]
        return [*self._reasons, *of_heads, *held]

    @property
    def kept_bytes(self) -> int:
        """Bytes saved for the backward pass: every storage once, parameters not counted."""
        return self._ledger.kept

    @property
    def moved_bytes(self) -> int:
        """Bytes of `kept_bytes` that `held="host"` has moved."""
        return self._ledger.moved

    @property
    def rebuilt_bytes(self) -> int:
        """Bytes that plain PyTorch would also keep, and that the backward pass rebuilds."""
        return self._ledger.rebuilt

    @property
    def records(self) -> list[Record]:
        """Every tensor that the last forward pass saved; a storage counts at the first tensor that has it."""
        return self._ledger.records()

    def _repr_html_(self) -> str:
        return f"<div>{escape(repr(self))}</div>"


_NOTHING = (None,) * 5
_NAMES = str, type(None)
_NAMED: dict[str | None, tuple[dict[str, Any], Settings]] = {}  # if `recompute` is the only argument


def _not_a_setting(given: object) -> InputError:
    """The error for a model or a function that was given as the first argument."""
    if isinstance(given, nn.Module):
        remedy = "leannorm.make_lean(model), or with leannorm.lean(): around model(...)"
    else:
        remedy = "@leannorm.lean() with its parentheses, or with leannorm.lean(): around the call"
    return InputError(f'recompute is "norm" or "conv"; got a {type(given).__name__}: write {remedy}')


def _undecorated(given: object) -> InputError:
    """The error for something whose forward pass is not one call, from its start to its return."""
    if isinstance(given, nn.Module):
        return InputError(f"lean() decorates functions; of a {type(given).__name__} write make_lean(model)")
    what = f"the class {given.__name__}" if inspect.isclass(given) else f"{given!r}"
    return InputError(
        f"lean() decorates functions that return when their forward pass is done; got {what}: decorate the"
        " function that runs it, such as forward"
    )
