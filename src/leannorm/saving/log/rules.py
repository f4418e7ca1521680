"""What is known of an operator: whether it may be called again, what it writes, and what it costs.

Its schema and tags say most. A row of the table in saving/operators.py says the rest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

SKIP, ONCE, CHEAP, SUM, PRODUCT = range(5)  # as Kind in rules.h
MATRIX, CONVOLUTION, ATTENTION = 1, 2, 3  # as Formula
NOTHING, ARGUMENT, RESULT = range(3)  # as Source
_SENDING = (
    "c10d",
    "fsdp",
    "_c10d_functional",
    "c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "symm_mem",
)


class Row(NamedTuple):
    """A row of the table in saving/operators.py. Positions count the schema's arguments."""

    kind: int
    formula: int
    writes: list[int]
    gate: int
    fills: bool
    moves: bool
    instead: str
    sources: list[tuple[int, int]]


TABLE: dict[str, Row] = {}
VARYING: set[str] = set()  # without the in-place forms


class Rule:
    """An operator. `again` computes its results again; `instead` computes the first from other results."""

    def __init__(self, op: Any) -> None:
        schema, self.op, self.again = op._schema, op, op
        self.instead: Any = None
        self.name = schema.name
        self.kind, self.formula, self.gate, self.fills, self.by_statistics = CHEAP, 0, -1, False, False
        self.moves = False  # whether it only moves elements, so that any two calls give the same bits
        self.edits = False  # whether its result is its first argument, written in place
        self.functional = False  # whether `again` returns a new tensor where `op` writes in place
        self.reshapes = False  # whether it changes, in place, only how the tensor shows its memory
        self.given: list[tuple[int, int]] = []  # the arguments of `instead`
        self.sources: set[int] = set()  # those of them that are arguments of this call
        self.results: list[int] = []  # those that are results of this call
        self.varies = (self.name if not self.name.endswith("_") else self.name[:-1]) in VARYING
        self.names = [one.name for one in schema.arguments]
        self.places = {name: i for i, name in enumerate(self.names)}
        self.defaults = [one.default_value if one.has_default_value() else None for one in schema.arguments]
        self.lists = len(schema.returns) == 1 and "List" in str(schema.returns[0].type)
        self.slack = (
            0 if op.namespace == "aten" else 1
        )  # a user's operator moves the counter before it writes
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
        if is_view:
            self.kind = SKIP
        elif is_composite or self.sends or torch.Tag.nondeterministic_seeded in op.tags:
            self.kind = ONCE  # a composite operator comes here undivided only where autograd is off
        row = TABLE.get(self.name)
        if row is not None:
            self.kind = row.kind if row.kind != SKIP or is_view else ONCE
            self.formula, self.gate, self.fills = row.formula, row.gate, row.fills
            self.moves = row.moves
            self.writes = self.writes + row.writes
            self.by_statistics = row.instead == "scale and shift"
            if row.instead and not self.by_statistics:
                self.instead, self.given = _named(row.instead), row.sources
                self.sources = {at for of, at in row.sources if of == ARGUMENT}
                self.results = [at for of, at in row.sources if of == RESULT]
        if torch.Tag.inplace_view in op.tags and self.kind == CHEAP:
            self.reshapes, self.kind = True, ONCE
            return
        if not self.writes or self.gate >= 0 or self.kind in (ONCE, SKIP):
            return
        of_tensor = "List" not in str(schema.arguments[self.writes[0]].type)
        self.edits = self.writes == [0] and schema.name.endswith("_") and of_tensor
        if self.edits:
            self._find_functional(schema)
        elif self.instead is None:
            self.kind = ONCE
        else:
            self.again = None  # a second call would write again

    def _find_functional(self, schema: Any) -> None:
        space, _, name = schema.name.partition("::")
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


def _named(name: str) -> Any:
    space, _, op = name.partition("::")
    return getattr(getattr(torch.ops, space), op).default


RULES: dict[Any, Rule | None] = {}


def rule_of(op: Any) -> Rule | None:
    """The rule of an operator; None for a compiler's loop or for `prim::device`, which asks for a device."""
    if op not in RULES:
        is_operator = isinstance(op, torch._ops.OpOverload) and op.namespace != "prim"
        RULES[op] = Rule(op) if is_operator else None
    return RULES[op]
