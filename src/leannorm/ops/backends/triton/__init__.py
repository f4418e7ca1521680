"""The Triton kernels: CUDA tensors at the speed of memory.

`channel.py`, `channel_gradients.py`, `rows.py`, `gated.py` and `statistics.py` implement every operator
of `schema.py`, each under its name. They are registered for CUDA here and imported by the first call, since
importing Triton takes longer than importing this whole package. With TRITON_INTERPRET=1 in the environment
the kernels are interpreted: then they also take CPU tensors, but only if the backend is chosen by name
(`use_backend("triton")`), as that is slow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from shutil import which
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from leannorm._types import Channels, ChannelTensors
from leannorm.ops import schema
from leannorm.ops.backends.compiled import dense, flat
from leannorm.ops.backends.compiled_gated import CompiledGated
from leannorm.ops.backends.triton import tape
from leannorm.ops.modes import traced

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
_OLDEST = 8  # the compute capability that Triton itself supports


def _why_unavailable() -> str | None:
    """The reason why Triton cannot be used here; None if it can. Triton is not imported."""
    try:
        installed = find_spec("triton") is not None
    except ModuleNotFoundError:
        installed = False
    if not installed:
        return "Triton is not installed"
    if torch.version.hip is not None:
        return "the kernels are written for NVIDIA's GPUs, this torch is built for AMD's"
    if not (INTERPRETED or os.environ.get("CC") or which("gcc") or which("clang")):
        return "Triton compiles what launches kernels: install a C compiler (gcc), or name one in CC"
    return None


_UNAVAILABLE = _why_unavailable()


def _capability(device: torch.device) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor


# This is what torch.compiler.assume_constant_result sets; calling it would import the compiler with leannorm.
_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _room(operator: str) -> str:
    if operator in schema.BETWEEN or operator == "message_of":
        return "statistics"
    if operator.startswith("row_gated"):
        return "gated"
    if operator.startswith("row"):
        return "rows"
    return "channel_gradients" if "grad" in operator or "backward" in operator else "channel"


_OPERATORS = (*schema.OPERATORS, *schema.BETWEEN)
# kernels without an operator
_FUNCTIONS = ("message_of", "channel_evaluate")
_NAMES = _OPERATORS + _FUNCTIONS


class _Kernels:
    """The implementations under their operators' names, as `torch.ops.leannorm` offers the operators."""

    def __getattr__(self, operator: str) -> Any:
        if operator not in _NAMES:  # such as the special methods that copy and inspect look for
            raise AttributeError(f"no operator of leannorm is called {operator}")
        if INTERPRETED:
            import_module(f"{__name__}.interpreted").patch_interpreter()
        kernel = getattr(import_module(f"{__name__}.{_room(operator)}"), operator)
        setattr(self, operator, kernel)
        return kernel


_kernels = _Kernels()


def imported_by_call(operator: str) -> Callable[..., Any]:
    """An operator's implementation, which is imported at its first call."""
    if operator in schema.ANY_LAYOUT:
        return lambda x, groups, mask=None: getattr(_kernels, operator)(dense(x), groups, flat(mask))
    return lambda *arguments: getattr(_kernels, operator)(*arguments)


def repeated(operator: str, arguments: tuple[Any, ...]) -> Any:
    """What an operator returns; None if it has not seen a call of this kind yet, or if something listens."""
    return None if _listened_to() else getattr(_kernels, operator).again(arguments)


def _listened_to() -> bool:
    """Whether something listens at torch's dispatcher and must see operators."""
    by_mode = torch._C._len_torch_dispatch_stack() or profiler._is_profiler_enabled
    return bool(traced() or by_mode or tape.watched())


def _calls(operator: str) -> Callable[..., Any]:
    """An operator; without the dispatcher, which takes as long as the rest, if nothing listens there.

    Compilers, modes (fake tensors, selective checkpointing, counts of FLOPs), profilers and tensor subclasses
    get a call of the operator.
    """
    through = getattr(schema.OPS, operator)
    parameters = through._schema.arguments
    numbers = [i for i, a in enumerate(parameters) if str(a.type) in ("float", "Optional[float]")]

    def call(*arguments: Any) -> Any:
        if _listened_to():
            return through(*arguments)
        for i in numbers:
            if isinstance(arguments[i], Tensor):  # an eps, for example: the dispatcher reads its value
                return through(*arguments)
        return getattr(_kernels, operator).call(arguments, through)

    return call


if _UNAVAILABLE is None:
    for _operator in _OPERATORS:
        schema.LIBRARY.impl(_operator, imported_by_call(_operator), "CUDA")


class Triton(CompiledGated):
    """The Triton kernels, on CUDA."""

    name = "triton"
    launches = True
    narrow_lines = True  # a copy in another dtype would be one more launch

    def __init__(self) -> None:
        calls = SimpleNamespace(**{name: _calls(name) for name in _OPERATORS})
        super().__init__(_kernels if INTERPRETED else calls)

    def why_not(self, *tensors: Tensor | None, named: bool = False) -> list[str]:
        """Interpreted kernels also take CPU tensors, if the backend is `named`."""
        if _UNAVAILABLE is not None:
            return [_UNAVAILABLE]
        if not tensors and not torch.cuda.is_available() and not (named and INTERPRETED):
            return ["the kernels run on CUDA, torch finds no such device"]
        reasons = []
        for t in tensors:
            if t is None:
                continue
            if t.device.type != "cuda" and not (named and INTERPRETED and t.device.type == "cpu"):
                reasons.append(f"the kernels run on CUDA, a tensor is on {t.device}")
            elif t.device.type == "cuda":
                major, minor = _capability(t.device)
                if major < _OLDEST:
                    has = f"the device has {major}.{minor}"
                    reasons.append(f"the kernels need compute capability {_OLDEST}.0, {has}")
        return list(dict.fromkeys(reasons + super().why_not(*tensors)))

    def channel_evaluate(self, tensors: ChannelTensors, norm: Channels) -> Tensor:
        """One launch instead of two. Not an operator: whatever listens there sees the two."""
        mean, var = tensors[4:6]
        both = super().channel_evaluate
        if (
            mean is None
            or var is None
            or not (mean.is_contiguous() and var.is_contiguous())
            or _listened_to()
        ):
            return both(tensors, norm)
        x, *behind = self._laid_out(*tensors[:4])
        arguments = x, mean, var, float(norm.eps), *behind, norm.act
        y: Tensor = _kernels.channel_evaluate.call(arguments, lambda *_: both(tensors, norm))
        return y

    def message_of(
        self,
        sums: Sequence[Tensor],
        token: tuple[int, int],
        asked: int,
        count: int | Tensor,
        size: int,
        device: torch.device,
    ) -> Tensor:
        """One launch for up to two tensors. Not an operator: compilers see only the sum over the ranks."""
        if isinstance(count, Tensor) or not 0 < len(sums) <= 2:
            return super().message_of(sums, token, asked, count, size, device)
        message: Tensor = _kernels.message_of(sums, token, asked, count, size)
        return message


TRITON = Triton()
