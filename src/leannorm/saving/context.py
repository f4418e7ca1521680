"""`lean()` around a forward pass, `make_lean()` on a model."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from leannorm.saving.hooks import Packing
from leannorm.saving.ledger import Ledger
from leannorm.saving.policy import CONV, LEANEST, NORM, Plan, Record, check
from leannorm.saving.values import unpack

_PLANS: dict[tuple[float, Hashable], Plan] = {}
_MOST_PLANS = 64
_Model = TypeVar("_Model", bound=nn.Module)


class lean:  # noqa: N801  (a context manager named as a verb, as torch.no_grad is)
    """Hold less for the backward pass: what can be rebuilt from what is held anyway is not held.

    Around the forward pass of any eager model, which is not changed. Every tensor that autograd saves is
    looked at with the node that made it: the output of a norm follows from the norm's input, that of an
    activation from its input, a cast, view or copy from what it was made of. The backward pass rebuilds
    them with the same kernels from the same tensors. Gradients are those of stock autograd bit for bit:
    each kind of step is tried once on the spot, and what does not come out equal is held.

    recompute: "norm" rebuilds outputs of norms, activations, products, casts and views; "conv" also
    outputs of convolutions, linear layers and attention's scores that take few operations per byte.
    budget: in place of `recompute`, the share of stock's bytes to keep, in (0, 1]. The first forward pass
    keeps as little as it can and measures; later ones (of the same shapes) rebuild the cheapest set that
    meets the budget, or nearly all there is if that is not enough.

    kept_bytes, rebuilt_bytes: held for the backward pass (storages, each once, without parameters), and
    left out. records: every saved tensor. plan: what `budget` chose, once there is a plan.
    Editing in place a tensor that is held raises autograd's error in the backward pass. One that is
    rebuilt may be edited by operations that autograd sees. Edits that it does not see (under no_grad,
    through .data) between a norm and a ReLU, whose input nobody keeps, are not noticed.
    Nothing happens under no_grad, in compiled code, under torch.func transforms, and within saved-tensor
    hooks that were there first (offloading, checkpointing): those go on as without `lean`.
    One object may serve several passes.

    Raises InputError for an unknown `recompute` or a `budget` outside (0, 1].

    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 4, 3))
    >>> with lean() as saved:
    ...     loss = model(torch.randn(2, 3, 20, 20)).square().mean()
    >>> loss.backward()
    >>> saved.kept_bytes < saved.rebuilt_bytes
    True
    """

    def __init__(self, recompute: Literal["norm", "conv"] = "norm", *, budget: float | None = None) -> None:
        check(recompute, budget)
        self._policy = {"norm": NORM, "conv": CONV}[recompute] if budget is None else LEANEST
        self._budget = budget
        self._open: list[tuple[AbstractContextManager[None], Packing]] = []
        self._ledger = Ledger()
        self.plan: Plan | None = None
        self._last: Packing | None = None

    def __enter__(self) -> lean:
        if torch.compiler.is_compiling():
            return self
        if not self._open:
            self._ledger = Ledger()
        packing = Packing(self._policy, self._ledger, None if self._budget is None else self._choose)
        hooks = saved_tensors_hooks(packing.pack, unpack) if _free() else nullcontext()
        hooks.__enter__()
        self._open.append((hooks, packing))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if torch.compiler.is_compiling():
            return
        hooks, packing = self._open.pop()
        hooks.__exit__(kind, error, trace)
        self._ledger.close()
        self._last = packing
        if self._budget is not None and packing.calls and error is None:
            self._replan(packing)

    @property
    def kept_bytes(self) -> int:
        """Bytes held for the backward pass: every storage once, parameters not counted."""
        return self._ledger.kept()

    @property
    def rebuilt_bytes(self) -> int:
        """Bytes that stock autograd would hold beside those, and that the backward pass rebuilds."""
        return self._ledger.rebuilt()

    @property
    def records(self) -> list[Record]:
        """Every tensor that the last forward pass saved, once."""
        records = self._last.records() if self._last else ()
        return [record for record in records if record is not None]

    def _choose(self, i: int, call: Hashable) -> bool:
        if i == 0:
            assert self._budget is not None
            self.plan = _PLANS.get((self._budget, call))
        if self.plan is not None and (i >= len(self.plan.calls) or self.plan.calls[i] != call):
            self.plan = None  # another model, or other shapes: measure again
        return self.plan is None or self.plan.rebuild[i]

    def _replan(self, packing: Packing) -> None:
        if self.plan is not None and len(self.plan.calls) == len(packing.calls):
            return
        assert self._budget is not None
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        self.plan = packing.plan(self._budget)
        _PLANS[self._budget, packing.calls[0]] = self.plan


def _free() -> bool:
    """May hooks be set, and does nobody but us have any? Others' (offloading, checkpointing) come first."""
    top: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    ours = top is None or isinstance(getattr(top[0], "__self__", None), Packing)
    return ours and bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


# ---------------------------------------------------------------- models whose training loop is not ours

_ATTRIBUTE = "_leannorm_lean"


class _Around:
    """Forward hooks that open and close `lean()`; one stack a thread, as replicas may run in several."""

    def __init__(self, recompute: Literal["norm", "conv"], budget: float | None) -> None:
        self.settings = recompute, budget
        self.handles: list[RemovableHandle] = []
        self._local = threading.local()

    def enter(self, module: nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_compiling():
            recompute, budget = self.settings
            self._stack().append(lean(recompute, budget=budget).__enter__())

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._stack():
            self._stack().pop().__exit__(None, None, None)

    def _stack(self) -> list[lean]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[lean] = self._local.stack
        return stack

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings, "handles": self.handles}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _local=threading.local())


def make_lean(
    model: _Model, recompute: Literal["norm", "conv"] = "norm", *, budget: float | None = None
) -> _Model:
    """Let every forward pass of `model` run in `lean(recompute, budget=budget)`, and return the model.

    For training loops that cannot be edited. Two forward hooks are added; parameters, state_dict and
    class stay as they are. On a model that is lean already the new settings replace the old ones.

    Raises InputError as `lean` does; the model is unchanged then.

    >>> model = make_lean(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    >>> model(torch.randn(4, 8)).sum().backward()
    """
    check(recompute, budget)
    unmake_lean(model)
    around = _Around(recompute, budget)
    around.handles = [
        model.register_forward_pre_hook(around.enter, prepend=True),
        model.register_forward_hook(around.leave, always_call=True),
    ]
    model.__dict__[_ATTRIBUTE] = around
    return model


def unmake_lean(model: _Model) -> _Model:
    """Undo `make_lean` and return the model; a model that is not lean stays as it is.

    >>> model = unmake_lean(make_lean(nn.Linear(2, 2)))
    """
    around = model.__dict__.pop(_ATTRIBUTE, None)
    if around is not None:
        for handle in around.handles:
            handle.remove()
    return model
