"""Which kernels, of which argument types and constants, are compiled for every architecture.

`VARIANTS` has (name, kernel, signature, constants): `signature` the type of every argument by name
("*bf16", "i32", "constexpr"), `constants` the value of every one of type constexpr.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Variant(NamedTuple):
    """One kernel as it is launched."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4


VARIANTS: list[Variant] = []
