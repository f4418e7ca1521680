"""`make_lean()`: models whose training loop cannot be edited."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from leannorm import _checks
from leannorm._errors import InputError
from leannorm.ops.modes import exporting, recording, traced
from leannorm.saving import reasons
from leannorm.saving.context import lean

_ATTRIBUTE = "_leannorm_lean"
_METHOD_ATTRIBUTES = {
    "__code__",
    "__defaults__",
    "__func__",
    "__globals__",
    "__kwdefaults__",
    "__name__",
    "__self__",
}
_Model = TypeVar("_Model", bound=nn.Module)


class _LeanForward:
    """A model's `forward` attribute: runs the class's forward in `lean()`.

    A `with` statement around the call closes on every exit, also on KeyboardInterrupt, after which torch
    runs no forward hooks. Replicas of a model share this object, so a pre-hook records which module is
    called.
    """

    def __init__(self, model: nn.Module, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.inner = model.__dict__.get("forward")  # a `forward` that other code has set on the instance
        self.handle: RemovableHandle = model.register_forward_pre_hook(self._called, prepend=True)
        self._model: Callable[[], nn.Module | None] = weakref.ref(model)
        self._local = threading.local()
        self._references = 0  # how many there were when this object was last found to have one owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if traced():
            if not exporting():
                reasons.warn_compiled()
            return self._run(None, *args, **kwargs)
        if exporting() or recording():
            return self._run(self._local.__dict__.pop("module", None), *args, **kwargs)
        context = lean(**self.settings)
        context.place = _LeanForward, id(self)
        self._local.saved = context
        with context:
            return self._run(self._local.__dict__.pop("module", None), *args, **kwargs)

    @property
    def saved(self) -> lean | None:
        """What the last forward pass in this thread kept; None before the first."""
        return self._local.__dict__.get("saved")

    def __repr__(self) -> str:
        return f"lean forward: {self.saved or 'before its first pass'}"

    def _called(self, module: nn.Module, inputs: object) -> None:
        if not traced() and module.__dict__.get(_ATTRIBUTE) is self:  # a shallow copy shares its hooks
            self._local.module = module

    def _run(self, module: nn.Module | None, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        module = self._only_model() if module is None else module
        return type(module).forward(module, *args, **kwargs)  # torch 2.10 cannot compile forward.__get__

    def _only_model(self) -> nn.Module:
        """The model whose `forward` was called by name, so that no pre-hook recorded which one it is."""
        model = self._model()
        if not traced() and (model is None or sys.getrefcount(self) > self._references):
            owners = self._owners()
            if len(owners) > 1:
                raise InputError(
                    f"{len(owners)} modules share this lean forward, as copy.copy(model) makes them, and"
                    " .forward(...) does not say which one is meant: call the module itself, or"
                    " leannorm.make_lean(copy)"
                )
            if owners and owners[0] is not model:  # only a copy is left: the model is gone, or not lean now
                model, self._model = owners[0], weakref.ref(owners[0])
            self._references = sys.getrefcount(self)  # hooks and others refer to it, too
        assert model is not None
        return model

    def _owners(self) -> list[nn.Module]:
        """The modules that this object makes lean: the model, and shallow copies of it."""
        attributes = [d for d in gc.get_referrers(self) if isinstance(d, dict) and d.get(_ATTRIBUTE) is self]
        return [
            module
            for d in attributes
            for module in gc.get_referrers(d)
            if isinstance(module, nn.Module) and module.__dict__ is d
        ]

    def _forward(self) -> Any:
        """The model's own `forward`, for code that inspects it."""
        if self.inner is not None:
            return self.inner
        model = self._model()
        assert model is not None
        return type(model).forward.__get__(model)

    def remove(self, model: nn.Module) -> None:
        self._references = 0
        if not self._owners():
            self.handle.remove()
        if model.__dict__.get("forward") is self:
            del model.__dict__["forward"]
            if self.inner is not None:
                model.__dict__["forward"] = self.inner

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward())

    def __getattr__(self, name: str) -> Any:
        if name in _METHOD_ATTRIBUTES:  # exporters read these attributes of a model's `forward`
            return getattr(self._forward(), name)
        raise AttributeError(name)

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.__dict__.items() if key != "_local"}
        return {**kept, "_model": self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        model = state["_model"]
        of = (lambda: None) if model is None else weakref.ref(model)  # a copy may outlive the model
        self.__dict__.update(state, _model=of, _local=threading.local(), _references=0)


def last_pass(model: nn.Module) -> lean | None:
    """The `lean` object of a `make_lean` model's last forward pass in this thread; None if there was none."""
    around = model.__dict__.get(_ATTRIBUTE)
    return None if around is None else around.saved


def make_lean(  # noqa: PLR0913
    model: _Model,
    recompute: Literal["norm", "conv"] | None = None,
    *,
    budget: float | None = None,
    overhead: float | None = None,
    peak: float | int | str | None = None,
    limit: int | str | None = None,
    held: Literal["host"] | saved_tensors_hooks | tuple[Any, Any] | None = None,
    verify: bool = False,
    head: bool = False,
) -> _Model:
    """Let every forward pass of `model` run in `lean` with these settings, and return the model.

    It is for training loops that cannot be edited. It adds a forward hook and an attribute `forward`;
    parameters, state_dict and class stay as they are. On a model that is lean already the new settings
    replace the old ones. A compiled model runs as without `lean`, and a warning says so once.
    `model.forward.saved` is the `lean` object of the last pass in this thread: what it kept, and why no less.
    It is None before the first pass.

    If rebuilds would free less than 4 MiB of a pass, this model's next passes are left as they are, unless
    `budget`, `overhead`, `peak`, `limit`, `held` or `verify` is given.

    Args:
        model: any model; it is changed in place.
        recompute, budget, overhead, peak, limit, held, verify, head: as in `lean`: what is rebuilt, the
            share of the bytes to keep, the share of a step's time to spend, the peak of a step, the memory
            of the process, the hooks for what must be kept, a check, and logits that are not computed. A peak
            cannot count what the loss allocates outside of the model's forward pass; a limit learns it.

    Raises: `InputError` as `lean` does; the model is then unchanged.

    >>> import torch, leannorm
    >>> model = leannorm.make_lean(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)))
    >>> model(torch.randn(4, 8)).sum().backward()
    >>> model.forward.saved.records[0].dtype
    torch.float32
    """
    settings: dict[str, Any] = {"recompute": recompute, "budget": budget, "overhead": overhead, "peak": peak}
    settings |= {"limit": limit, "held": held, "verify": verify, "head": head}
    _checks.module(model, "make_lean")
    lean(**settings)  # raises if the settings are wrong
    unmake_lean(model)
    around = _LeanForward(model, settings)
    model.__dict__["forward"] = model.__dict__[_ATTRIBUTE] = around
    return model


def unmake_lean(model: _Model) -> _Model:
    """Undo `make_lean` and return the model; a model that is not lean stays as it is.

    Raises: `InputError` if it is not a module.

    >>> import torch, leannorm
    >>> model = leannorm.unmake_lean(leannorm.make_lean(torch.nn.Linear(2, 2)))
    """
    _checks.module(model, "unmake_lean")
    around = model.__dict__.pop(_ATTRIBUTE, None)
    if around is not None:
        around.remove(model)
    return model
