"""What a call of a layer may not bypass: hooks, a forward of its own, tensors that see each operation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as _module
from torch.overrides import _get_current_function_mode_stack

from leannorm.nn._layer import HOOKS


def has_hooks(module: Module) -> bool:
    """Whether the module has hooks. Those marked `sees_nothing` do not count: they ignore inputs and
    outputs."""
    return any(
        not getattr(hook, "sees_nothing", False)
        for hooks in HOOKS
        for hook in getattr(module, hooks).values()
    )


def is_unobserved(module: Module) -> bool:
    """Whether the module has no hooks, its own or global ones, and no `forward` set on the instance."""
    return not (
        "forward" in vars(module)
        or has_hooks(module)
        or _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def is_plain_tensor(value: object) -> bool:
    """Whether it is a tensor without `__torch_function__` overrides, its own or of an active mode."""
    if not isinstance(value, Tensor):
        return False
    cls = type(value)
    if cls not in (Tensor, torch.nn.Parameter) and (
        cls.__torch_function__ is not torch._C._disabled_torch_function_impl
    ):
        return False
    return torch._C._len_torch_function_stack() == 0 or all(
        type(mode).__module__.split(".")[0] in ("torch", "leannorm")
        for mode in _get_current_function_mode_stack()
    )
