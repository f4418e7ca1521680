"""A forward pass whose operator calls are recorded: what is saved is made again by the calls that made it.

The log, the walk and the replay are C++ (csrc/nodes/record/). This module opens and closes a pass, hands over
the table of operators, and says in words what the pass kept.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from leannorm.autograd.nodes import NODES
from leannorm.saving import reasons
from leannorm.saving.flags import Flags, current
from leannorm.saving.ledger import Row
from leannorm.saving.moved import Hooks
from leannorm.saving.operators import OPERATORS, Operator
from leannorm.saving.policy import Policy
from leannorm.saving.shards import local_of, shared_as, spec_of
from leannorm.saving.units import Units
from leannorm.saving.unpacking import unpack as unpack_others
from leannorm.saving.verify import Layers, check_equal

_SKIP, _ONCE, _CHEAP, _SUM, _PRODUCT = range(5)  # as Kind in rules.h
_KINDS = {"view": _SKIP, "once": _ONCE, "empty": _ONCE, "product": _PRODUCT, "window": _PRODUCT}
_FORMULAS = ("", "matrix", "convolution", "attention")
_NOTHING, _ARGUMENT, _RESULT = range(3)  # as Source in rules.h

# in the order of `Why` in log.h
_WHYS = (
    "",
    reasons.NO_RECIPE,
    reasons.NOT_REPEATED,
    reasons.NOT_AT_HAND,
    reasons.TOO_DEEP,
    reasons.OTHER_BITS,
    reasons.EDITED,
    reasons.SMALLER,
    reasons.UNSEEN,
    reasons.OTHER_FLAGS,
    reasons.COLLECTIVE,
    reasons.SHARDED,
)
_SUMS, _CALLS, _PRODUCTS = 2, 32, 2  # in a row: what is rebuilt at once


def _kind(row: Operator) -> int:
    return _SUM if row.adds else _KINDS.get(row.kind, _CHEAP)


def _source(source: int | str | None) -> tuple[int, int]:
    if source is None:
        return _NOTHING, 0
    return (_RESULT, int(source)) if isinstance(source, str) else (_ARGUMENT, source)


def _with_flags(flags: Flags, saved: Any) -> Tensor:
    """Rebuild under the forward pass's flags."""
    with flags.set():
        tensor: Tensor = NODES.record_unpack_now(saved)
        return tensor


if NODES is not None:
    for _name, _row in OPERATORS.items():
        _formula, _sources = _FORMULAS.index(_row.formula), list(map(_source, _row.sources))
        NODES.set_operator(
            _name, _kind(_row), _formula, list(_row.writes), _row.gate, _row.fills, _row.instead, _sources
        )
    NODES.set_recorded(
        _with_flags, unpack_others, local_of, spec_of, shared_as, check_equal, torch.nn.Parameter
    )


def serves() -> bool:
    """Can the log see what a pass in this thread does? It records operators on CPU tensors."""
    if NODES is None or os.environ.get("LEANNORM_RECORD", "0") != "1":
        return False
    return not (torch.cuda.is_initialized() or torch._C._len_torch_dispatch_stack())


class RecordedPass:
    """One pass, from its making to `close`."""

    def __init__(self, policy: Policy, hooks: Hooks | None, layers: Layers | None) -> None:
        """`hooks` hold what is held; with `layers`, what is rebuilt is compared, and the layer named."""
        self.reasons = Counter[str]()
        units = Units()
        self._pass = NODES.RecordedPass(
            policy.products,
            policy.everything,
            _SUMS,
            _CALLS,
            _PRODUCTS,
            current(),
            layer=None if layers is None else layers.at_work,
            hold=None if hooks is None else partial(self._hold, hooks),
            owns=units.owns if units.exist else None,
            subclasses="torch.distributed.tensor" in sys.modules,
            gathers=torch.distributed.is_available() and torch.distributed.is_initialized(),
        )
        self.pack: Callable[[Tensor], Any] = NODES.record_pack
        self.unpack: Callable[[Any], Tensor] = NODES.record_unpack

    def _hold(self, hooks: Hooks, tensor: Tensor) -> Callable[[], Tensor] | None:
        """The tensor is held by the hooks alone: what is returned brings it back. None where they fail."""
        try:
            return partial(hooks.unpack, hooks.pack(tensor))
        except Exception as error:
            self.reasons[reasons.failed(tensor, error)] += 1
            return None

    def close(self) -> Recorded:
        """Stop recording; what the pass saved, and what of it is still there."""
        self._pass.close()
        self.seen = self._pass.seen() > 0
        return Recorded(self._pass.saved())


class Recorded:
    """What one pass held when it closed: its bytes, and rows once they are read."""

    def __init__(self, saved: Any) -> None:
        self._saved = saved
        self.kept: int = saved.held
        self.rebuilt: int = saved.dropped

    def __len__(self) -> int:
        return len(self._saved)

    def rows(self) -> list[Row]:
        """The fields of a `Record` for each tensor."""
        return [
            (name, torch.Size(shape), dtype, nbytes, dropped, None, _WHYS[why] if by_node else "")
            for name, shape, dtype, nbytes, dropped, why, by_node in self._saved.rows()
        ]
