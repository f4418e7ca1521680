"""`make_lean()`: models whose training loop cannot be edited."""

from __future__ import annotations

import inspect
import threading
import weakref
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from leannorm.saving import reasons
from leannorm.saving.context import lean
from leannorm.saving.policy import check

_ATTRIBUTE = "_leannorm_lean"
_OF_A_METHOD = {
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
    """Stands in a model's `forward` attribute and runs the model's own in `lean()`.

    A `with` statement around the call closes on every exit, KeyboardInterrupt included, where torch's
    forward hooks do not run. A hook says which module is called, as replicas share this object.
    """

    def __init__(self, model: nn.Module, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.inner = model.__dict__.get("forward")  # somebody else's stand-in
        self.handle: RemovableHandle = model.register_forward_pre_hook(self._called, prepend=True)
        self._model, self._local = weakref.ref(model), threading.local()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _say_compiled()
            return self._run(None, *args, **kwargs)
        with lean(**self.settings):
            return self._run(self._local.__dict__.pop("module", None), *args, **kwargs)

    def _called(self, module: nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._local.module = module

    def _run(self, module: nn.Module | None, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        module = self._model() if module is None else module
        assert module is not None
        return type(module).forward(module, *args, **kwargs)  # torch 2.10 compiles no method bound by hand

    def _forward(self) -> Any:
        """The model's own, for who looks at it."""
        if self.inner is not None:
            return self.inner
        model = self._model()
        assert model is not None
        return type(model).forward.__get__(model)

    def remove(self, model: nn.Module) -> None:
        self.handle.remove()
        if model.__dict__.get("forward") is self:
            del model.__dict__["forward"]
            if self.inner is not None:
                model.__dict__["forward"] = self.inner

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward())

    def __getattr__(self, name: str) -> Any:
        if name in _OF_A_METHOD:  # exporters look at the method that they take this for
            return getattr(self._forward(), name)
        raise AttributeError(name)

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.__dict__.items() if key != "_local"}
        return {**kept, "_model": self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _model=weakref.ref(state["_model"]), _local=threading.local())


def _say_compiled() -> None:
    reasons.say(reasons.COMPILED)


_say_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run once, while it is traced


def make_lean(
    model: _Model,
    recompute: Literal["norm", "conv"] = "norm",
    *,
    budget: float | None = None,
    verify: bool = False,
) -> _Model:
    """Let every forward pass of `model` run in `lean(recompute, budget=budget)`, and return the model.

    For training loops that cannot be edited. A forward hook and an attribute `forward` are added; parameters,
    state_dict and class stay as they are. On a model that is lean already the new settings replace the old
    ones. Compiled, the model runs as without, and a warning says so once.

    Raises InputError as `lean` does; the model is unchanged then.

    >>> model = make_lean(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    >>> model(torch.randn(4, 8)).sum().backward()
    """
    check(recompute, budget)
    unmake_lean(model)
    around = _LeanForward(model, {"recompute": recompute, "budget": budget, "verify": verify})
    model.__dict__["forward"] = model.__dict__[_ATTRIBUTE] = around
    return model


def unmake_lean(model: _Model) -> _Model:
    """Undo `make_lean` and return the model; a model that is not lean stays as it is.

    >>> model = unmake_lean(make_lean(nn.Linear(2, 2)))
    """
    around = model.__dict__.pop(_ATTRIBUTE, None)
    if around is not None:
        around.remove(model)
    return model
