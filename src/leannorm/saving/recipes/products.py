"""Recipes that take many operations per value: convolutions and matrix products.

Such a step has the kind "product", and policies decide by its flops. Chains are short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from leannorm.saving.calls import CallArguments
from leannorm.saving.device import asynchronous
from leannorm.saving.graph import constant, inputs_of, is_lost, kind_of, saved
from leannorm.saving.recipes.registry import ValueOf, recipe
from leannorm.saving.steps import Step, behind
from leannorm.saving.values import Value, size_of

MOST = 768
"""Operations for each value of a convolution's output, above which it is costly: 384 inputs to each."""

MANY_OPERATIONS = "product", "attention"  # kinds of steps that take many for each value

IN_A_ROW = 6
"""So many products in a row are rebuilt, if all but the last are convolutions; else two (see `_is_late`)."""
MUCH_NARROWER = 8
"""A matrix product with so many times more inputs than outputs is held, such as the first factor of a LoRA
adapter: it is small, and what reads it is then one product in a row, not two."""


def _convolution(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    bias, *constants = rest if len(rest) == 7 else (None, *rest)
    return torch.convolution(x, weight, bias, *constants)


@recipe("ConvolutionBackward0")
def convolution(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    x, weight = saved(node, "input"), saved(node, "weight")
    if x is None or weight is None or is_long(x):
        return None
    inputs = [x, weight]
    if any(node._saved_bias_sym_sizes_opt or ()):
        bias = value_of(2) or frozen_bias(node, 2, weight)
        if bias is None:
            return None
        inputs.append(bias)
    window = node._saved_stride, node._saved_padding, node._saved_dilation  # no number of these is negative
    constants = *window, node._saved_transposed, node._saved_output_padding, node._saved_groups
    sizes = _sizes(weight, node, 1)
    if sizes is None:
        return None
    outputs = prod(node._input_metadata[0].shape) if like is None else like.numel()
    each = 2 * prod(sizes[1:])
    if constants[3]:  # each input, not each output, meets the whole kernel
        each = each * prod(x.tensor.shape if x.tensor is not None else x.shape) // max(outputs, 1)
    flops, costly = each * outputs, each > MOST
    return Step(_convolution, tuple(inputs), (), constants, kind="product", flops=flops, costly=costly)


def groups_of(step: Step) -> int:
    """The groups of a convolution; 0 for any other step."""
    return int(step.constants[-1]) if step.function is _convolution else 0  # type: ignore[call-overload]


def ends_in_matrix_product(value: Value) -> bool:
    """Is the last product in its rebuild a matrix product or attention, and no convolution?"""
    steps = (one.step for one in behind([value], MANY_OPERATIONS))
    return any(step is not None and step.kind in MANY_OPERATIONS and not groups_of(step) for step in steps)


def is_long(value: Value) -> bool:
    """Is it rebuilt by so many products in a row that no other may follow?"""
    return value.products > 1 and (value.products >= IN_A_ROW or ends_in_matrix_product(value))


def _is_late(a: Value, b: Value, outputs: Sequence[int]) -> bool:
    """Is a matrix product held, since too many products in a row come before it?

    Two are; three, if it is larger than the factor behind them, such as attention's scores: held in the place
    of that factor, it would take more memory.
    """
    return any(is_long(x) and (x.products > 2 or prod(outputs) <= size_of(x)) for x in (a, b))


def frozen_bias(node: Any, edge: int, weight: Value) -> Value | None:
    """A bias without an edge in the graph, where the call that saved the weight, and no other, is known."""
    if node.next_functions[edge][0] is not None or not isinstance(weight.call, CallArguments):
        return None
    bias = weight.call.bias
    return None if bias is None else Value(bias, bias._version, name="copy of a frozen bias")


def _plus(
    added: Tensor, a: Tensor, b: Tensor, product: Callable[..., Tensor], beta: float, alpha: float
) -> Tensor:
    return product(added, a, b, beta=beta, alpha=alpha)


_MATRIX_PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[str, str]]] = {
    "MmBackward0": (torch.mm, ("self", "mat2")),
    "BmmBackward0": (torch.bmm, ("self", "mat2")),
    "AddmmBackward0": (torch.addmm, ("mat1", "mat2")),
    "BaddbmmBackward0": (torch.baddbmm, ("batch1", "batch2")),
}
CONVOLUTIONS = {"ConvolutionBackward0", "leannorm.ConvNorm"}
PRODUCTS = {*CONVOLUTIONS, *_MATRIX_PRODUCTS, "GroupedMmBackward0"}


@recipe(*_MATRIX_PRODUCTS)
def matrix_product(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    """Linear layers and attention scores; costly: with fewer outputs than inputs."""
    product, names = _MATRIX_PRODUCTS[kind_of(node)]
    edges = node.next_functions
    first = len(edges) - 2  # the factors follow the added tensor, if there is one
    a, b = (saved(node, name) or value_of(first + i) for i, name in enumerate(names))
    outputs = node._input_metadata[0].shape
    if a is None or b is None or _is_late(a, b, outputs):
        return None
    sizes = _sizes(a, node, first)
    if sizes is None or sizes[-1] >= MUCH_NARROWER * outputs[-1]:
        return None
    work = {"kind": "product", "flops": 2 * sizes[-1] * prod(outputs), "costly": sizes[-1] > outputs[-1]}
    if not first:
        return Step(product, (a, b), **work)
    added = value_of(0) or frozen_bias(node, 0, b)
    if added is None:
        return None
    constants = product, constant(node, "beta"), constant(node, "alpha")
    return Step(_plus, (added, a, b), (), constants, **work)


def _grouped_mm(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    *offsets, dtype = rest
    return torch._grouped_mm(a, b, offs=(offsets or [None])[0], out_dtype=dtype)


@recipe("GroupedMmBackward0")
def grouped_product(node: Any, output: int, value_of: ValueOf, like: Tensor | None) -> Step | None:
    """Experts, each on its own rows of the first factor; costly: with fewer outputs than inputs."""
    a, b = (saved(node, name) or value_of(i) for i, name in enumerate(("self", "mat2")))
    offsets = saved(node, "offs")
    outputs = node._input_metadata[0].shape
    if a is None or b is None or is_lost(node, "offs") or _is_late(a, b, outputs):
        return None
    sizes = _sizes(a, node, 0)
    if sizes is None or len(sizes) < len(outputs) or sizes[-1] >= MUCH_NARROWER * outputs[-1]:
        return None
    if offsets is not None and not _fills(offsets, len(sizes), outputs):
        return None
    inputs = (a, b) if offsets is None else (a, b, offsets)
    flops, costly = 2 * sizes[-1] * prod(outputs), sizes[-1] > outputs[-1]
    dtype = (node._input_metadata[0].dtype,)
    return Step(_grouped_mm, inputs, (), dtype, kind="product", flops=flops, costly=costly)


def _fills(offsets: Value, dims: int, outputs: torch.Size) -> bool:
    """Are all values of the result computed? Behind the last expert's nobody writes; on a GPU, where asking
    would make the host wait, nobody samples them. `dims`: of the first factor, whose rows are cut where it
    has two; else the columns of the second are."""
    ends = offsets.look()
    if len(outputs) != 2 or asynchronous(ends):
        return True
    return bool(ends[-1] == outputs[0 if dims == 2 else 1])


def _sizes(value: Value, node: Any, i: int) -> torch.Size | None:
    """The sizes of the node's input `i`, whose value this is."""
    if value.tensor is not None:
        return value.tensor.shape if value.spec is None else value.spec.shape
    source = inputs_of(node)[i]
    return None if source is None else torch.Size(source.shape)
