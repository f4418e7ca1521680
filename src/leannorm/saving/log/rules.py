"""What is known of an operator: whether it may be called again, what it writes, and what it costs.

Its schema and tags say most. A row of the table in saving/operators.py says the rest.
"""

from __future__ import annotations

from typing import Any

import torch

from leannorm.saving.operators import CHEAP, ONCE, OPERATORS, VARYING, VIEW, Operator

_COLLECTIVES = "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"
_SENDING = *_COLLECTIVES, "_dtensor", "fsdp", "symm_mem"
_NO_ROW = Operator("fused")


class Rule:
    """An operator. `again` computes its results again; `instead` computes the first from other results."""

    def __init__(self, op: Any) -> None:
        schema, self.op, self.again = op._schema, op, op
        self.instead: Any = None
        self.name = schema.name
        self.edits = False  # whether its result is its first argument, written in place
        self.functional = False  # whether `again` returns a new tensor where `op` writes in place
        self.reshapes = False  # whether it changes, in place, only how the tensor shows its memory
        self.varies = self.name in VARYING or (self.name.endswith("_") and self.name[:-1] in VARYING)
        self.names = [one.name for one in schema.arguments]
        self.places = {name: i for i, name in enumerate(self.names)}
        self.defaults = [one.default_value if one.has_default_value() else None for one in schema.arguments]
        self.lists = len(schema.returns) == 1 and "List" in str(schema.returns[0].type)
        self.slack = int(op.namespace != "aten")  # a user's operator moves the counter before it writes
        self.sends = op.namespace in _SENDING
        self.writes = [
            i
            for i, one in enumerate(schema.arguments)
            if one.alias_info is not None and one.alias_info.is_write
        ]
        if op.namespace == "c10d" and self.name != "c10d::send":
            self.writes.append(0)
        if self.name == "fsdp::split_with_sizes_copy":
            self.writes.clear()  # it brings weights back to where they were before
        self._read_table(schema, op)

    def _read_table(self, schema: Any, op: Any) -> None:
        is_view = not self.writes and any(one.alias_info is not None for one in schema.returns)
        is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
        is_once = is_composite or self.sends or torch.Tag.nondeterministic_seeded in op.tags
        row = OPERATORS.get(self.name, _NO_ROW)
        # a composite operator comes here undivided only where autograd is off
        self.kind = VIEW if is_view else ONCE if is_once else CHEAP
        if row is not _NO_ROW and not (row.counts == VIEW and is_view):
            self.kind = ONCE if row.counts == VIEW else row.counts
        self.formula, self.gate, self.fills, self.moves = row.formula, row.gate, row.fills, row.moves
        self.writes += row.writes
        self.sources = row.sources  # the arguments of `instead`
        self.by_statistics = bool(row.instead and not row.sources)
        self.results = (
            [1, 2] if self.by_statistics else [int(at) for at in self.sources if isinstance(at, str)]
        )
        if row.instead and not self.by_statistics:
            space, _, name = row.instead.partition("::")
            self.instead = getattr(getattr(torch.ops, space), name).default
        if torch.Tag.inplace_view in op.tags and self.kind == CHEAP:
            self.reshapes, self.kind = True, ONCE
        elif self.writes and self.gate < 0 and self.kind not in (ONCE, VIEW):
            self._read_writes(schema)

    def _read_writes(self, schema: Any) -> None:
        of_tensor = "List" not in str(schema.arguments[self.writes[0]].type)
        self.edits = self.writes == [0] and self.name.endswith("_") and of_tensor
        if self.edits:
            self._find_functional(schema)
        elif self.instead is None:
            self.kind = ONCE
        else:
            self.again = None  # a second call would write again

    def _find_functional(self, schema: Any) -> None:
        space, _, name = self.name.partition("::")
        packet = getattr(getattr(torch.ops, space), name[:-1], None)
        overload = schema.overload_name or "default"
        if packet is None or overload not in packet.overloads():
            return
        pure = getattr(packet, overload)
        if len(pure._schema.arguments) == len(schema.arguments):
            self.functional, self.again = True, pure

    def full(self, args: Any, kwargs: Any) -> list[Any]:
        """All arguments in the order of the schema."""
        if len(args) == len(self.names):
            return list(args)
        made = [*args, *self.defaults[len(args) :]]
        for name, value in kwargs.items():
            made[self.places[name]] = value
        return made


RULES: dict[Any, Rule | None] = {}


def rule_of(op: Any) -> Rule | None:
    """The rule of an operator; None for a compiler's loop or for `prim::device`, which asks for a device."""
    if op not in RULES:
        is_operator = isinstance(op, torch._ops.OpOverload) and op.namespace != "prim"
        RULES[op] = Rule(op) if is_operator else None
    return RULES[op]
