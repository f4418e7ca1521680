"""What the compiler does with an operator, and the price of running it: by schema, a few lists, and shapes.

Five kinds. "view": no memory of its own. "fused": computed element by element inside the kernel that reads
it; it lies in memory only where a reader is no such kernel. "reduced": reads as those do, and writes. "pass":
a kernel of its own at the speed of memory. "product": operations per byte count. All others are "once":
random numbers, collectives, what changes its arguments, and what nothing is known about never run again.
"""

from __future__ import annotations

import operator
from functools import cache
from math import prod
from typing import Any

import torch
from torch import fx

from leannorm.functional.graphs import arguments
from leannorm.saving.rates import Rates

_aten, _prims = torch.ops.aten, torch.ops.prims


def _packets(space: Any, names: str) -> frozenset[Any]:
    """Those of these operators that this torch has."""
    return frozenset(getattr(space, name) for name in names.split() if hasattr(space, name))


PRODUCTS = _packets(
    _aten,
    "mm addmm bmm baddbmm convolution _scaled_dot_product_flash_attention_for_cpu"
    " _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"
    " _scaled_dot_product_cudnn_attention _scaled_mm linear",
)
CONVOLUTIONS = _packets(_aten, "convolution")
_PASSES = _packets(
    _aten,
    "cat constant_pad_nd max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d"
    " _adaptive_avg_pool2d _adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d"
    " upsample_bilinear2d upsample_trilinear3d _softmax _log_softmax native_layer_norm native_group_norm"
    " embedding index_select roll flip",
) | _packets(_prims, "_low_memory_max_pool_with_offsets _low_memory_max_pool2d_with_offsets")
_REDUCED = _packets(
    _aten, "sum mean amax amin max min var var_mean std any all prod argmax argmin logsumexp norm"
) | _packets(_prims, "sum var prepare_softmax_online xor_sum amax amin")
_FUSED = _packets(
    _aten,
    "clone _to_copy to copy full full_like zeros zeros_like ones ones_like new_zeros new_ones empty_like"
    " arange scalar_tensor where masked_fill index gather _unsafe_index lift_fresh_copy slice_scatter"
    " select_scatter triu tril native_dropout_backward gelu gelu_backward silu silu_backward"
    " threshold_backward sigmoid_backward tanh_backward repeat expand_copy glu constant",
) | _packets(_prims, "convert_element_type iota _low_memory_max_pool_offsets_to_indices fma")
_VIEWS = _packets(_aten, "_unsafe_view _reshape_alias reshape detach lift_fresh") | _packets(
    _prims, "broadcast_in_dim"
)
_OURS = frozenset(f"{verb}_forward" for verb in ("channel", "row", "row_ada", "row_gated")) | {
    "channel_moments",
    "channel_normalize",
    "constants_of",
}
"""Operators of ours that change nothing and read each element once or twice."""


def tensors(node: fx.Node) -> list[torch.Tensor]:
    """What a node gives: one fake tensor, several, or none."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [v for v in value if isinstance(v, torch.Tensor)]
    return []


def hint(size: int | torch.SymInt) -> int:
    """A size, or what the compiler expects of one that is open (`dynamic=True`)."""
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
    schema, name = target._schema, target.overloadpacket
    if schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return "once"
    if target.namespace == "leannorm":
        return "pass" if str(name).rpartition(".")[2] in _OURS else "once"
    if target.namespace not in ("aten", "prims"):
        return "once"
    if name in _VIEWS or (schema.returns and all(r.alias_info is not None for r in schema.returns)):
        return "view"
    for of_kind, names in (
        ("product", PRODUCTS),
        ("reduced", _REDUCED),
        ("pass", _PASSES),
        ("fused", _FUSED),
    ):
        if name in names:
            return of_kind
    return "fused" if torch.Tag.pointwise in target.tags else "once"


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
    name = str(packet(node)).rpartition(".")[2]
    if not inputs or not outputs:
        return 0
    if name == "convolution_backward":
        return 2 * 2 * prod(inputs[0]) * prod(inputs[2][1:])
    if name == "convolution":
        moving = inputs[0] if node.args[6] else outputs[0]
        return 2 * prod(moving) * prod(inputs[1][1:])
    if name in ("mm", "bmm", "_scaled_mm", "addmm", "baddbmm"):
        left = inputs[-2] if name in ("addmm", "baddbmm") else inputs[0]
        return 2 * prod(outputs[0]) * left[-1]
    if "scaled_dot_product" in name:
        query, key = inputs[1:3] if "backward" in name else inputs[:2]
        return (10 if "backward" in name else 4) * prod(query) * key[-2]
    return 0


def seconds(node: fx.Node, read: int, written: int, rates: Rates, channels_last: bool) -> float:
    """The price of one kernel: so many bytes read and written, and the operations of a product.

    `channels_last`: does the compiler lay out convolutions so? It does those of images.
    """
    total = rates.call + (read + written) / rates.memory
    count = operations(node) if node.op == "call_function" else 0
    if count:
        first = tensors(node)[0]
        of = rates.in_channels_last() if channels_last and first.dim() == 4 else rates
        total += count / of.operations(first.dtype.itemsize, _groups(node))
    return total


def _groups(node: fx.Node) -> int:
    """Of a convolution; 0 of other products."""
    return int(arguments(node)["groups"]) if "convolution" in str(packet(node)) else 0


def working_bytes(node: fx.Node, channels_last: bool) -> int:
    """Bytes that a kernel has for itself while it runs: on a CPU a convolution's gradients bring the weight,
    and its gradient where that is laid out channels_last, into a layout of their own."""
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
    """Does it give one tensor?"""
    return isinstance(node.meta.get("val"), torch.Tensor)
