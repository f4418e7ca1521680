"""The log in C++ (csrc/nodes/record/): what it needs of Python, and how a pass of it begins.

It has the same names as saving/log/, the log in Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leannorm.autograd.nodes import NODES
from leannorm.ops import modes
from leannorm.saving import rows, unbuilt
from leannorm.saving.flags import current
from leannorm.saving.operators import OPERATORS, VARYING
from leannorm.saving.policy import Policy
from leannorm.saving.shards import has_ranks, local_of, nbytes_of, shared_as, spec_of
from leannorm.saving.small import unpack
from leannorm.saving.units import Units
from leannorm.saving.verify import check_equal

if TYPE_CHECKING:
    from leannorm.saving.planned_pass import PlannedPass

_FORMULAS = ("", "matrix", "convolution", "attention")  # as Formula in rules.h
_NOTHING, _ARGUMENT, _RESULT = range(3)  # as Source in rules.h


def _source(source: int | str | None) -> tuple[int, int]:
    if source is None:
        return _NOTHING, 0
    return (_RESULT, int(source)) if isinstance(source, str) else (_ARGUMENT, source)


def _is_captured(tensor: Tensor) -> bool:
    return modes.capturing(tensor)


def _set_up() -> None:
    """Give it the table of operators, and the functions that it calls."""
    for name, row in OPERATORS.items():
        does = row.counts, _FORMULAS.index(row.formula), list(row.writes), row.gate, row.fills, row.moves
        NODES.set_operator(name, *does, row.instead, list(map(_source, row.sources)), row.act)
    NODES.set_varying(list(VARYING))
    NODES.set_capturing(_is_captured)
    read_rows, may_wait = list(unbuilt.READ_ROWS.values()), list(unbuilt.MAY_WAIT.values())
    NODES.set_stand_ins(rows.fits, unbuilt.stand_in, read_rows, may_wait)
    NODES.set_recorded(unpack, nbytes_of, local_of, spec_of, shared_as, check_equal)


if NODES is not None:
    _set_up()
    record_pack, record_unpack, record_first = NODES.record_pack, NODES.record_unpack, NODES.record_first
    alive, exposed, forget_trials = NODES.alive, NODES.exposed, NODES.forget_trials
    Places = NODES.Places  # a plan in the form that C++ reads


def _fake(mode: Any, meta: Tensor, device: str) -> Tensor:
    """A fake tensor that has the storage of a tensor on the meta device."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor(mode, meta, torch.device(device))


@lru_cache
def _know_fakes() -> None:
    """Have it record fake tensors from now on."""
    NODES.set_fakes(sys.modules["torch._subclasses.fake_tensor"].FakeTensor, _fake)


def begin(
    policy: Policy,
    way: PlannedPass | None,
    layer: Callable[[], str] | None,
    hold: Callable[[Tensor], Any] | None,
    other: Callable[[Tensor], Any],
    subclasses: bool,
    units: Units,
) -> Any:
    """A pass, which is recorded from now on."""
    if "torch._subclasses.fake_tensor" in sys.modules:
        _know_fakes()
    owns = units.owner_runs if units.exist else None
    return NODES.RecordedPass(policy, way, current(), layer, hold, owns, other, subclasses, has_ranks())
