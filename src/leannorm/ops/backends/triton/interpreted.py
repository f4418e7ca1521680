"""What Triton's interpreter needs: to go with the numpy of today, to be quick, and not to warn."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter


def _to_nearest(convert: Callable[..., Any]) -> Callable[..., Any]:
    """float32 to bfloat16 as devices do it: to the nearest, where the interpreter cuts off."""

    def converted(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            values = torch.from_numpy(np.array(data)).to(torch.bfloat16)
            return values.view(torch.int16).numpy().view(np.uint16)
        return convert(data, source, target, mode)

    return converted


@cache
def mend() -> None:
    """Let a scalar be the bound of a loop, call functions at little cost, and overflow as a GPU does; once.

    A scalar is an array of one element, which numpy turns into an int no more since 2.4 (Triton 3.6 does
    so). And every call of a function would patch Triton's language anew: for ours the kernel's patch does,
    and for Triton's own the first one's of each launch.
    """
    interpreter._convert_float = _to_nearest(interpreter._convert_float)
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    call = interpreter.InterpretedFunction.__call__
    unpatched = False

    def call_at_once(self: Any, *arguments: Any, **constants: Any) -> Any:
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
    interpreter._patch_lang_tensor = patch_and_mend
    interpreter.InterpretedFunction.__call__ = call_at_once
