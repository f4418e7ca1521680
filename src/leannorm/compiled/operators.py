"""What the compiler does with an operator, and what running it costs: by schema, a table, and shapes.

The table is `OPERATORS` of saving/operators.py, which says what the kinds mean. The result of a "fused"
operator is in memory only if one of its readers is not an elementwise kernel. An unknown operator never runs
again.
"""

from __future__ import annotations

import operator
from functools import cache
from math import prod
from typing import Any

import torch
from torch import fx

from leannorm.functional.graphs import arguments
from leannorm.saving.operators import OPERATORS
from leannorm.saving.operators import operations as operations_of
from leannorm.saving.rates import Rates

_IN_A_GRAPH = {"window": "pass", "empty": "fused"}  # kinds that make no difference to a compiler


def tensors(node: fx.Node) -> list[torch.Tensor]:
    """What a node gives: one fake tensor, several, or none."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [v for v in value if isinstance(v, torch.Tensor)]
    return []


def hint(size: int | torch.SymInt) -> int:
    """A size, or the compiler's hint for a dynamic one (`dynamic=True`)."""
    if isinstance(size, int):
        return size
    known = getattr(size.node, "hint", None)
    return 4096 if known is None else int(known)


def shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(map(hint, tensor.shape))


def nbytes(node: fx.Node) -> int:
    return sum(prod(shape(t)) * t.dtype.itemsize for t in tensors(node))


def packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


def kind(node: fx.Node) -> str:
    """One of the five, or "once"."""
    if node.op != "call_function":
        return "once"
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        of_source = kind(source)
        return of_source if of_source in ("view", "fused") else "part"
    return _kind_of(node.target) if not _drops_out(node) else "once"


@cache
def _kind_of(target: Any) -> str:
    if not isinstance(target, torch._ops.OpOverload):
        return "fused" if getattr(target, "__module__", "") in ("_operator", "torch", "math") else "once"
    schema = target._schema
    if schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return "once"
    row = OPERATORS.get(schema.name)
    if row is None and target.namespace not in ("aten", "prims"):
        return "once"
    if schema.returns and all(r.alias_info is not None for r in schema.returns):
        return "view"
    if row is not None:
        return "once" if row.writes else _IN_A_GRAPH.get(row.kind, row.kind)
    return "fused" if torch.Tag.pointwise in target.tags else "once"


def formula(node: fx.Node) -> str:
    """The formula for its operations: "matrix", "convolution", "attention", or "" if it is not a product."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    row = OPERATORS.get(target._schema.name)
    return "" if row is None else row.formula


def _drops_out(node: fx.Node) -> bool:
    """Attention that draws random numbers."""
    of_operator = isinstance(node.target, torch._ops.OpOverload)
    return of_operator and bool(arguments(node).get("dropout_p", 0.0) != 0.0)


def behind_views(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while kind(node) == "view" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def operations(node: fx.Node) -> int:
    """Multiplications and additions of a product."""
    inputs = [shape(t) for a in node.args if isinstance(a, fx.Node) for t in tensors(a)[:1]]
    outputs = [shape(t) for t in tensors(node)]
    name, how = str(packet(node)).rpartition(".")[2], formula(node)
    if not inputs or not outputs:
        return 0
    if name == "convolution_backward":
        return 2 * 2 * prod(inputs[0]) * prod(inputs[2][1:])
    if "scaled_dot_product" in name and "backward" in name:
        return 10 * prod(inputs[1]) * inputs[2][-2]
    how = "attention" if "scaled_dot_product" in name else how
    first = int(name in ("addmm", "baddbmm"))  # they add another tensor to the product
    transposed = how == "convolution" and bool(node.args[6])
    return operations_of(how, inputs[first], inputs[first + 1], outputs[0], transposed) if how else 0


def seconds(node: fx.Node, read: int, written: int, rates: Rates, channels_last: bool) -> float:
    """The cost of one kernel: bytes read and written, and the operations of a product.

    `channels_last`: whether the compiler lays out convolutions so, as it does for images.
    """
    total = rates.call + (read + written) / rates.memory
    count = operations(node) if node.op == "call_function" else 0
    if count:
        first = tensors(node)[0]
        of = rates.in_channels_last() if channels_last and first.dim() == 4 else rates
        total += count / of.operations(first.dtype.itemsize, _groups(node))
    return total


def _groups(node: fx.Node) -> int:
    """The operations of a convolution; 0 for other products."""
    return int(arguments(node)["groups"]) if "convolution" in str(packet(node)) else 0


def working_bytes(node: fx.Node, channels_last: bool) -> int:
    """Bytes that a kernel allocates while it runs: on a CPU a convolution's backward brings the weight, and
    its gradient if that is channels_last, into a layout of its own."""
    if str(packet(node)).rpartition(".")[2] != "convolution_backward":
        return 0
    weight = node.args[2]
    assert isinstance(weight, fx.Node)
    (value,) = tensors(weight)
    if value.device.type != "cpu":
        return 0
    last = channels_last or (value.dim() == 4 and not value.is_contiguous())
    return nbytes(weight) * (2 if last else 1)


def is_tensor(node: fx.Node) -> bool:
    """Whether it returns one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)
