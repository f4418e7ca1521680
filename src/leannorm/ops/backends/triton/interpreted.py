"""What Triton's interpreter needs with a numpy of today."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def mend() -> None:
    """Let a scalar of the interpreter be the bound of a loop.

    It is an array of one element, which numpy turns into an int no more since 2.4 (Triton 3.6 does so).
    """
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend
