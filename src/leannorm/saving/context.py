"""`lean()` around a forward pass."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal

import torch
from torch.autograd.graph import saved_tensors_hooks

from leannorm.saving import reasons
from leannorm.saving.ledger import Ledger, Record
from leannorm.saving.packing import Packing, unpack
from leannorm.saving.plan import RebuildPlan
from leannorm.saving.policy import CONV, LEANEST, NORM, check
from leannorm.saving.verify import Layers

_PLANS: dict[tuple[float, Hashable], RebuildPlan] = {}
_MAX_PLANS = 64


class lean:  # noqa: N801  (a context manager named as a verb, as torch.no_grad is)
    """Hold less for the backward pass: what can be rebuilt from what is held anyway is not held.

    Around the forward pass of any eager model, which is not changed. Every tensor that autograd saves is
    looked at with the node that made it: the output of a norm follows from the norm's input, that of an
    activation from its input, a cast, view or copy from what it was made of. The backward pass rebuilds them
    with the same kernels from the same tensors. Gradients are those of stock autograd bit for bit: each kind
    of step is tried once on the spot, and what does not come out equal is held.

    Args:
        recompute: "norm" rebuilds outputs of norms, activations, products, casts and views; "conv" also
            outputs of convolutions, linear layers and attention's scores that take few operations per byte.
        budget: in place of `recompute`, the share of stock's bytes to keep, in (0, 1]. The first forward pass
            keeps as little as it can and measures; later ones (of the same shapes) rebuild the cheapest set
            that meets the budget, or nearly all there is if that is not enough.
        verify: for debugging; holds everything as stock autograd does, rebuilds too, and compares bit for bit
            in the backward pass. The first difference raises, and names node, shape, layer and values.

    `kept_bytes`, `rebuilt_bytes`: held for the backward pass (storages, each once, without parameters), and
    left out. `records`: every saved tensor; they add up to those. `plan`: what `budget` chose, once there is
    a plan. `reasons`: why nothing, or less than asked, was saved; empty where all is well. What concerns the
    whole pass (compiled code, others' hooks, a budget out of reach) is also warned of, once per cause.

    Editing in place a tensor that a node saved raises autograd's error in the backward pass, as without
    `lean`. An edit of a parameter between forward and backward raises, where its old value is needed, also if
    it was made through .data. Edits that autograd does not see (under no_grad, through .data) of a tensor
    that no node saves, such as between a batch norm and a ReLU, are not noticed; `verify` finds them. Nothing
    happens under no_grad, in compiled code, under torch.func transforms, and within saved-tensor hooks that
    were there first (offloading, checkpointing): those go on as without `lean`. One object may serve several
    passes.

    Raises: `InputError` for an unknown `recompute` or a `budget` outside (0, 1]; with `verify`,
    `RebuildError` in the backward pass.

    >>> import torch, leannorm
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 4, 3))
    >>> with leannorm.lean() as saved:
    ...     loss = model(torch.randn(2, 3, 20, 20)).square().mean()
    >>> loss.backward()
    >>> saved.kept_bytes < saved.rebuilt_bytes
    True
    """

    def __init__(
        self,
        recompute: Literal["norm", "conv"] = "norm",
        *,
        budget: float | None = None,
        verify: bool = False,
    ) -> None:
        check(recompute, budget)
        self._policy = {"norm": NORM, "conv": CONV}[recompute] if budget is None else LEANEST
        self._budget, self._verify = budget, verify
        self._open: list[tuple[ExitStack, Packing]] = []
        self._ledger = Ledger()
        self.plan: RebuildPlan | None = None
        self.reasons: list[str] = []

    def __enter__(self) -> lean:
        if torch.compiler.is_compiling():
            self.reasons = [reasons.COMPILED]
            return self
        if not self._open:
            self._ledger, self.reasons = Ledger(), []
        layers = Layers() if self._verify else None
        packing = Packing(self._policy, self._ledger, self._choose if self._budget else None, layers)
        stack = ExitStack()
        self._open.append((stack, packing))
        refused = _refusal()
        if refused is None:
            stack.enter_context(saved_tensors_hooks(packing.pack, unpack))
            if layers is not None:
                stack.callback(layers.close)
                layers.open()
        else:
            packing.reasons[refused] += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if torch.compiler.is_compiling():
            return
        stack, packing = self._open.pop()
        stack.close()
        packing.search.leaves.forget()
        self._ledger.close()
        if error is not None:
            return
        if self._budget is not None and packing.calls:
            self._replan(packing)
        self._explain(packing)

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
        """Every tensor that the last forward pass saved; bytes are counted at the first of each storage."""
        return self._ledger.records()

    def _choose(self, i: int, call: Hashable) -> bool:
        """May saved tensor i be rebuilt, by the plan of its budget? Without a plan all may."""
        if i == 0:
            assert self._budget is not None
            self.plan = _PLANS.get((self._budget, call))
        if self.plan is not None and (i >= len(self.plan.calls) or self.plan.calls[i] != call):
            self.plan = None  # another model, or other shapes: measure again
        return self.plan is None or self.plan.rebuild[i]

    def _replan(self, packing: Packing) -> None:
        """Make a plan from this pass's measurements, unless one was followed to its end."""
        if self.plan is not None and len(self.plan.calls) == len(packing.calls):
            return
        assert self._budget is not None
        if len(_PLANS) >= _MAX_PLANS:
            _PLANS.clear()
        measured = packing.plan(self._budget)
        if measured.stock_bytes:
            self.plan = _PLANS[self._budget, packing.calls[0]] = measured
        else:
            packing.reasons[reasons.BACKWARD_WITHIN] = 1

    def _explain(self, packing: Packing) -> None:
        """Fill `reasons`, and warn of those that concern the whole pass."""
        whole = [reason for reason in packing.reasons if reason in reasons.OF_THE_PASS]
        if not packing.seen and not packing.reasons and torch.is_grad_enabled():
            whole.append(reasons.NOTHING)
        if self._budget is not None:
            kept, stock = self.kept_bytes, self.kept_bytes + self.rebuilt_bytes
            ratio = kept / max(stock, 1) if self.plan is None else self.plan.ratio
            if ratio > 1.01 * self._budget:
                whole.append(reasons.out_of_reach(self._budget, ratio))
        held = [
            f"{count} tensors: {reason}" if count > 1 else reason
            for reason, count in packing.reasons.items()
            if reason not in reasons.OF_THE_PASS
        ]
        self.reasons += [reason for reason in (*whole, *held) if reason not in self.reasons]
        for reason in (*whole, *held):
            reasons.warn_once(reason)


def _refusal() -> str | None:
    """Why no hooks may be set here, or None. Hooks that are already set (offloading, checkpointing) win."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return reasons.TRANSFORMED
    top: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    ours = top is None or isinstance(getattr(top[0], "__self__", None), Packing)
    return None if ours else reasons.HOOKS_AROUND
