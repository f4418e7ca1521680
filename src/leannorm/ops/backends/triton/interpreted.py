"""Patches of Triton's interpreter: it works with today's numpy, has less overhead per call, and does not
warn."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter


def _to_nearest(convert: Callable[..., Any]) -> Callable[..., Any]:
    """float32 to bfloat16 rounded to nearest, as devices do; the interpreter truncates."""

    def converted(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            values = torch.from_numpy(np.array(data)).to(torch.bfloat16)
            return values.view(torch.int16).numpy().view(np.uint16)
        return convert(data, source, target, mode)

    return converted


@cache
def patch_interpreter() -> None:
    """Patch the interpreter, once: scalars as bounds of loops, cheap calls, and overflow without a warning.

    Triton 3.6 converts a scalar, which is an array of one element, to an int; numpy 2.4 and later raise. The
    interpreter also patches Triton's language at every call of a function. For our functions the patch made
    for the kernel is enough, for Triton's own the patch of the first call in each launch.
    """
    interpreter._convert_float = _to_nearest(interpreter._convert_float)
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    call = interpreter.InterpretedFunction.__call__
    unpatched = False

    def call_unpatched(self: Any, *arguments: Any, **constants: Any) -> Any:
        nonlocal unpatched
        if unpatched and self.fn.__module__.startswith("triton."):
            unpatched = False
            return call(self, *arguments, **constants)
        return self.rewrite()(*arguments, **constants)

    launch = interpreter.GridExecutor.__call__

    def launch_quietly(self: Any, *arguments: Any, **constants: Any) -> None:
        nonlocal unpatched
        unpatched = True
        with np.errstate(all="ignore"):
            launch(self, *arguments, **constants)

    interpreter.GridExecutor.__call__ = launch_quietly
    interpreter._patch_lang_tensor = patch_with_index
    interpreter.InterpretedFunction.__call__ = call_unpatched
