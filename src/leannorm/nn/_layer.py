"""The parts that all our layers have: `forward`, and what FX quantization and TorchScript see of them.

Both of them recognize torch's layers by class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from leannorm._errors import InputError
from leannorm.functional.valid import Lengths

HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
"""Where a module keeps what runs around its calls."""

_TAKES_BACK: list[Callable[[torch.nn.Module], bool]] = []


def takes_back(function: Callable[[torch.nn.Module], bool]) -> Callable[[torch.nn.Module], bool]:
    """`function` undoes the last conversion of a layer, or returns False if there is none."""
    _TAKES_BACK.append(function)
    return function


class Layer:
    """The part of every layer that concerns exporting, and its name in `print(model)`."""

    __jit_unused_properties__ = ("as_torch",)
    _has_name_of_another = False  # of the class that it replaces

    @property
    def as_torch(self) -> Any:
        """The layer as `convert(to="torch")` would leave it, on the same parameters and buffers."""
        twin: Any = copy.copy(self)
        for one in _TAKES_BACK:
            while one(twin):
                pass
        return twin

    def _get_name(self) -> str:
        """The class's name, with "leannorm." in front if another layer has the same."""
        name = type(self).__name__
        return f"leannorm.{name}" if self._has_name_of_another or name in vars(torch.nn) else name

    def __prepare_scriptable__(self) -> NoReturn:
        raise InputError(
            f"torch.jit.script cannot compile {type(self).__name__}, a layer of leannorm; call "
            'leannorm.convert(model, to="torch") first, or take torch.jit.trace or torch.export'
        )


# Nothing in `forward` is keyword-only: TorchScript's ONNX exporter passes all defaults by position.


class MaskedLayer(Layer):
    """`forward` of the layers whose input may be padded: by the fast path, otherwise by the full path.

    `_fast(input)` is None if the fast path cannot be used; `_normalize` is the full path.
    """

    _fast: Callable[..., Tensor | None]
    _normalize: Callable[..., Tensor]

    def forward(
        self,
        input: Tensor,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        fill: str = "zero",
    ) -> Tensor:
        """`input` (N, C, ...), normalized; `mask` or `lengths` leave out padding, as in the function."""
        if mask is None and lengths is None and fill == "zero":
            y = self._fast(input)
            if y is not None:
                return y
            if quantizing(input) and (seen := quantized(self, input)) is not None:
                return seen  # type: ignore[no-any-return]
        return self._normalize(input, masking=(mask, lengths, fill))


class RowLayer(Layer):
    """The same for layers that normalize rows."""

    _fast: Callable[..., Tensor | None]
    _normalize: Callable[..., Tensor]

    def forward(self, input: Tensor, mask: Tensor | None = None, lengths: Lengths | None = None) -> Tensor:
        """`input`, normalized for each row over `normalized_shape`; 0 in the rows that are not data."""
        if mask is None and lengths is None:
            y = self._fast(input)
            if y is not None:
                return y
            if quantizing(input) and (seen := quantized(self, input)) is not None:
                return seen  # type: ignore[no-any-return]
        return self._normalize(input, mask, lengths)


def parameter_of(layer: Any, name: str) -> Any:
    """Shorter than `getattr`; with a parametrization, or in a replica, the value is elsewhere."""
    parameters = layer._parameters
    return parameters[name] if name in parameters else getattr(layer, name)


def quantizing(input: Any) -> bool:
    """Whether this is torch.fx's proxy while FX quantization traces."""
    return type(input) is fx.Proxy and any(
        cls.__module__.startswith("torch.ao.") for cls in type(input.tracer).__mro__
    )


def quantized(layer: Any, input: Any) -> Any:
    """What FX quantization sees of a layer: torch's own; None if torch has no such layer.

    It finds layers by their class, and by names in the graph. So the name is that of an attribute that is
    torch's layer.
    """
    twin, tracer = layer.as_torch, input.tracer
    if isinstance(twin, Layer):
        return None
    path = tracer.path_of_module(layer)
    if not tracer.is_leaf_module(twin, path):
        return twin.forward(input)
    return tracer.create_proxy("call_module", f"{path}.as_torch".lstrip("."), (input,), {})
