"""The sort of a value: a number for all that recipes and policies ask of it; by sorts kinds are known."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

from leannorm.saving import trial
from leannorm.saving.policy import is_bias, needs_no_norm, sums_before
from leannorm.saving.recipes.products import ends_in_matrix_product
from leannorm.saving.search import is_held, is_view_of_held
from leannorm.saving.values import Value

_SORTS: dict[Hashable, int] = {}
_MOST = 1 << 16
_numbers = itertools.count(1)  # none comes again: values keep theirs

clear = _SORTS.clear


def are_too_many() -> bool:
    """Are there so many that those who know some should forget them?"""
    return len(_SORTS) >= _MOST


def sort_of(value: Value) -> int:
    """A number for all that recipes and policies ask of a value; the same where all of it is equal."""
    step = value.step
    if value.layout is not None:
        seen_as: Hashable = value.layout
    elif step is not None:
        seen_as = tuple(value.shape), value.dtype, trial.signature_of(value), trial.proved(step)
    else:
        seen_as = None if value.tensor is None else trial.layout(value.tensor)
    kind = None if step is None else (step.kind, value.is_held, _norm_before(value))
    held_too = is_held(value), step is not None and is_view_of_held(step)
    chain = value.products, ends_in_matrix_product(value), sums_before(value)
    asked = *chain, needs_no_norm(value), is_bias(value), *held_too
    plain = value.spec is None, value.stream is None, value.from_narrow, value.in_rows, value.original is None
    known = seen_as, value.name, kind, asked, plain
    value.sort = _SORTS.setdefault(known, next(_numbers))
    return value.sort


def _norm_before(value: Value) -> Hashable:
    """The norm whose output this is, perhaps copied: an activation may join its step."""
    step, proved = value.step, True
    while step is not None and step.kind == "copy":
        proved, step = proved and step.proved, step.inputs[0].step
    if step is None or step.then is None:
        return None
    return trial.key_of(step), step.proved and proved
