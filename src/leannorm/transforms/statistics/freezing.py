"""`freeze`: norm layers that stay as they are in training, and `unfreeze`.

A frozen layer is an ordinary one in evaluation mode whose `train` does not end that mode. Its class, buffers
and parameters are its own, so whatever reads these (a state_dict, an exporter, `isinstance`) sees the same
layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch.nn import Module, Parameter
from torch.nn.modules.lazy import LazyModuleMixin

from leannorm import _checks
from leannorm._catalog import norms_of
from leannorm._errors import InputError


class Frozen:
    """Replaces a layer's `train`, and knows what `unfreeze` restores."""

    def __init__(self, layer: Module) -> None:
        self.layer, self.mode = layer, layer.training
        self.statistics = self.affine = False
        self.trained: list[str] = []  # the parameters that required a gradient

    def __call__(self, mode: bool = True) -> Module:
        """As `Module.train`, for the layer's children too, except for the mode of frozen statistics."""
        type(self.layer).train(self.layer, mode)
        self.mode = self.layer.training
        if self.statistics:
            self.layer.training = False
        return self.layer

    def extra_repr(self) -> str:
        """The layer's own text and what of it is frozen; replaces the layer's `extra_repr`."""
        parts = [name for name, held in (("statistics", self.statistics), ("affine", self.affine)) if held]
        own = type(self.layer).extra_repr(self.layer)
        return f"{own}{', ' if own else ''}frozen={'+'.join(parts)}"

    def reduced(self, protocol: Any) -> tuple[Any, ...]:
        """As the layer's class defines a copy or a pickle, which gets a `Frozen` of its own.

        A shallow copy would have the layer's attributes, which would go on changing the layer.
        """
        plain: Any = type(self.layer).__reduce_ex__(self.layer, protocol)
        make, of, *rest = plain
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name not in _ADDED}
        return _frozen_again, (self._memory(), make, of), *rest

    def replicated(self) -> Module:
        """The layer as `torch.nn.DataParallel` copies it."""
        replica: Any = type(self.layer)._replicate_for_data_parallel(self.layer)
        return _frozen(replica, self._memory())

    def _memory(self) -> dict[str, Any]:
        return {**vars(self), "layer": None, "trained": list(self.trained)}

    def put_on(self, layer: Module) -> None:
        self.layer = layer
        vars(layer).update(zip(_ADDED, (self, self.extra_repr, self.reduced, self.replicated), strict=False))
        if self.statistics:
            vars(layer)["reset_running_stats"] = nothing  # torch's `update_bn` calls this first

    def hold_statistics(self) -> None:
        if not self.statistics:
            self.mode, self.statistics = self.layer.training, True
            self.layer.training = False
            self.put_on(self.layer)

    def hold_affine(self) -> None:
        self.affine = True
        for name, parameter in _affine(self.layer):
            if parameter.requires_grad:
                self.trained.append(name)
            parameter.requires_grad_(False)
            # an optimizer with momentum moves everything that has a gradient, even of 0
            parameter.grad = None

    def let_go(self) -> None:
        parameters = dict(_affine(self.layer))
        for name in self.trained:
            if name in parameters:
                parameters[name].requires_grad_(True)
        if self.statistics:
            self.layer.training = self.mode
        for name in _ADDED:
            vars(self.layer).pop(name, None)  # a model frozen by an older release does not have all of them


_ADDED = "train", "extra_repr", "__reduce_ex__", "_replicate_for_data_parallel", "reset_running_stats"
"""A frozen layer's attributes, in the place of its class's methods."""


def _frozen(layer: Module, memory: dict[str, Any]) -> Module:
    """The layer, with a `Frozen` that remembers this."""
    frozen = Frozen.__new__(Frozen)
    vars(frozen).update(memory)
    frozen.put_on(layer)
    return layer


def _frozen_again(memory: dict[str, Any], make: Callable[..., Module], of: tuple[Any, ...]) -> Module:
    return _frozen(make(*of), memory)


def _frozen_of(layer: Module) -> Frozen | None:
    """What a frozen layer has, or a new one if its attributes were copied one by one."""
    frozen = vars(layer).get("train")
    if isinstance(frozen, Frozen) and frozen.layer is not layer:
        _frozen(layer, frozen._memory())
        frozen = vars(layer)["train"]
    return frozen if isinstance(frozen, Frozen) else None


def nothing() -> None:
    """The `reset_running_stats` of a frozen layer."""


def _affine(layer: Module) -> list[tuple[str, Parameter]]:
    """The layer's own parameters; for parametrized ones the originals."""
    own = list(layer.named_parameters(recurse=False))
    made = layer._modules.get("parametrizations")
    return own if made is None else own + list(made.named_parameters(prefix="parametrizations"))


def freeze(
    model: Module,
    *,
    statistics: bool = True,
    affine: bool = True,
    match: Callable[[str, Module], Any] | str | None = None,
) -> Module:
    """Make norm layers use and keep their running statistics, whatever `train()` says; returns the model.

    For every layer with running statistics: leannorm's, torch's, timm's, torchvision's, and subclasses. Such
    a layer is in evaluation mode until `unfreeze`, alone or in a model: `train()`, a trainer and torch's
    `update_bn` do not change it. It is the same object of the same class with the same state_dict; copies and
    pickles are frozen too, independently (a shallow copy has the same parameters). Gradients flow through it
    to its input.

    Norms without running statistics (layer, group, RMS norm) are left alone. Freeze before
    DistributedDataParallel is built, which expects a gradient for every parameter that required one.

    Args:
        model: any module, or a single norm layer.
        statistics: running mean, running variance and counter stay.
        affine: weight and bias stay: they no longer require a gradient, and their present gradient is
            dropped, so that an optimizer's momentum does not change them either. `torch.optim.LBFGS`, which
            moves all parameters along a past direction, must be made again.
        match: the name of a part of the model, or a function that is called with each layer's name and the
            layer. Layers outside of that part, or for which it is false, are left alone.

    A model without such layers is named in a `UserWarning`.

    Raises: `InputError` if there is nothing to freeze: neither statistics nor affine, or no layer that
    matches; and for anything that is not a module.

    >>> import torch, leannorm
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    >>> model = leannorm.freeze(model).train()
    >>> model[1].training, model[1].weight.requires_grad
    (False, False)
    >>> leannorm.unfreeze(model)[1].training
    True
    """
    _checks.module(model, "freeze")
    if not (match is None or isinstance(match, str) or callable(match)):
        raise InputError(
            "match must be a part's name or a function of a layer's name and the layer, "
            f"got a {type(match).__name__}; as match='backbone'"
        )
    if not (statistics or affine):
        raise InputError(
            "freeze needs something to freeze, got statistics=False and affine=False; set one of them"
        )
    layers = [(norm.path, norm.module) for norm in norms_of(model) if norm.mean is not None]
    chosen = [layer for name, layer in layers if _chosen(match, name, layer)]
    if match is not None and not chosen:
        names = ", ".join(repr(name) for name, _ in layers[:3]) or "none at all"
        raise InputError(
            "match must be true of a norm layer with running statistics, it is of none; their names are "
            + names
            + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")
        )
    lazy = next((layer for layer in chosen if isinstance(layer, LazyModuleMixin)), None)
    if lazy is not None:
        raise InputError(
            f"freeze needs layers that know their sizes, got a {type(lazy).__name__} before its first batch;"
            " run the model once"
        )
    if not layers:
        _warn("freeze", model, False)
    for layer in chosen:
        frozen = _frozen_of(layer)
        if frozen is None:
            frozen = Frozen(layer)
            frozen.put_on(layer)
        if statistics:
            frozen.hold_statistics()
        if affine:
            frozen.hold_affine()
    return model


def _warn(function: str, model: Module, trained: bool) -> None:
    warnings.warn(
        f"{function} found no norm layer with running statistics in {type(model).__name__} and left it as it "
        f"is; for its parameters, requires_grad_({trained})",
        stacklevel=3,
    )


def _chosen(match: Callable[[str, Module], Any] | str | None, name: str, layer: Module) -> bool:
    if isinstance(match, str):
        return name == match or name.startswith(f"{match}.")
    return match is None or bool(match(name, layer))


def unfreeze(model: Module) -> Module:
    """Undo `freeze`: every frozen layer is in the mode that `train()` last asked for; returns the model.

    Parameters that required a gradient before `freeze` require one again. Layers that are not frozen are left
    alone; a model without norm layers that could be frozen gets a `UserWarning`.

    Raises: `InputError` for anything that is not a module.

    >>> import torch, leannorm
    >>> model = leannorm.freeze(torch.nn.Sequential(torch.nn.BatchNorm2d(8)))
    >>> leannorm.unfreeze(model)[0].weight.requires_grad
    True
    """
    _checks.module(model, "unfreeze")
    if all(norm.mean is None for norm in norms_of(model)):
        _warn("unfreeze", model, True)
    for module in model.modules():
        frozen = _frozen_of(module)
        if frozen is not None:
            frozen.let_go()
    return model
