"""A model's inputs as they are typed: `8x3x224x224`, `2x512:int64<32000`, `input_ids=2x512:int64<32000`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leannorm._batch import inputs_of
from leannorm._errors import InputError
from leannorm._untouched import untouched
from leannorm.cli.models import in_one_line

FLOATS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_WHOLE = {"int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8, "bool": torch.bool}
_DTYPES = FLOATS | _WHOLE
_WRITTEN = re.compile(r"(?:([a-z_]\w*)=)?(\d+(?:x\d+)*)(?::(\w+)(?:([<=])(\d+))?)?", re.IGNORECASE)


class Spec(NamedTuple):
    """One tensor: random, integers below `below`, or all `value`; without a dtype it has the model's."""

    name: str
    sizes: tuple[int, ...]
    dtype: torch.dtype | None = None
    below: int | None = None
    value: int | None = None

    def tensor(self, dtype: torch.dtype, device: str, batch: tuple[int, ...] = ()) -> Tensor:
        """The tensor for a step, with `batch` in front of its sizes."""
        sizes = (*batch, *self.sizes)
        if self.value is not None:
            return torch.full(sizes, self.value, dtype=self.dtype, device=device)
        if self.dtype in _WHOLE.values():
            return torch.randint(self.below or 2, sizes, device=device).to(self.dtype)
        return torch.randn(sizes, dtype=self.dtype or dtype, device=device)


def specs_of(texts: Sequence[str]) -> list[Spec]:
    """Parse what was typed. Raises InputError if it cannot be parsed.

    >>> specs_of(["2x512:int64<32000"])
    [Spec(name='', sizes=(2, 512), dtype=torch.int64, below=32000, value=None)]
    """
    specs = [_spec_of(text) for text in texts]
    names = [spec.name for spec in specs]
    if any(names) != all(names):
        raise InputError(f"name all inputs or none, as input_ids=2x512:int64<32000; got {', '.join(texts)}")
    if any(names) and len(set(names)) < len(names):
        raise InputError(f"each input has a name of its own; got {', '.join(names)}")
    return specs


def _spec_of(text: str) -> Spec:
    written = _WRITTEN.fullmatch(text.strip())
    sizes = tuple(map(int, written[2].lower().split("x"))) if written else ()
    if not written or not all(sizes):
        raise InputError(
            "an input is written as its sizes, batch first, like 8x3x224x224, or with dtype and range, like "
            f"'2x512:int64<32000'; got {text!r}"
        )
    name, dtype, sign, number = written[1] or "", written[3], written[4], written[5]
    if dtype is None:
        return Spec(name, sizes)
    if dtype.lower() not in _DTYPES:
        raise InputError(f"an input's dtype is one of {', '.join(_DTYPES)}; got {dtype!r} in {text!r}")
    chosen = _DTYPES[dtype.lower()]
    if chosen in _WHOLE.values() and chosen != torch.bool and (sign is None or (sign, number) == ("<", "0")):
        raise InputError(
            f"whole numbers need a range, or all one value: '{text.partition('<')[0]}<32000' or "
            f"'{text.partition('<')[0]}=1'; got {text!r}"
        )
    if sign == "<" and chosen not in _WHOLE.values():
        raise InputError(f"a range is for whole numbers; leave it out of {text!r}")
    value = None if number is None else int(number)
    most = {torch.bool: 1, torch.uint8: 255, torch.int32: 2**31 - 1}.get(chosen)
    if value is not None and most is not None and value > most + (sign == "<"):
        raise InputError(f"{dtype.lower()} holds whole numbers up to {most}; got {text!r}")
    return Spec(name, sizes, chosen, *((value, None) if sign == "<" else (None, value)))


def made(specs: Sequence[Spec], dtype: torch.dtype, device: str = "cpu", batch: tuple[int, ...] = ()) -> Any:
    """A tensor, a tuple of several, or a mapping if they have names."""
    tensors = [spec.tensor(dtype, device, batch) for spec in specs]
    if specs[0].name:
        return dict(zip((spec.name for spec in specs), tensors, strict=True))
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def dtype_named(text: str) -> torch.dtype:
    """The dtype of the model and of its floating-point inputs. Raises InputError for an unknown one."""
    if text not in FLOATS:
        raise InputError(f"--dtype is one of {', '.join(FLOATS)}; got {text!r}")
    return FLOATS[text]


def tried(
    model: nn.Module, texts: Sequence[str], spec: str, device: str = "cpu", dtype: str = "float32"
) -> Any:
    """Random inputs as typed, tried on the model once, which is left as it was.

    Raises InputError with the model's own message if it does not take them.
    """
    inputs = made(specs_of(texts), dtype_named(dtype), device)
    try:
        with untouched(model), torch.no_grad():
            inputs_of(inputs).copied().call(model)
    except Exception as error:
        raise InputError(
            f"{spec} does not take --input {' --input '.join(texts)}: {in_one_line(error)}{_hint(error)}"
        ) from error
    return inputs


def _hint(error: Exception) -> str:
    if "scalar types: Long, Int" in str(error):
        return "; tokens are whole numbers, as '2x512:int64<32000'"
    return ""
