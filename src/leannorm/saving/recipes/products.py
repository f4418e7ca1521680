"""Recipes that take many operations per value: convolutions and matrix products.

Such a step has the kind "product", and policies decide by its flops. Chains are short: a convolution depends
on no rebuilt product, a matrix product on at most one.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from leannorm.saving.calls import CallArguments
from leannorm.saving.graph import constant, kind_of, saved
from leannorm.saving.recipes.registry import Given, recipe
from leannorm.saving.values import Step, Value

MOST = 768
"""Operations for each value of a convolution's output, above which it is costly: 384 inputs to each."""


MUCH_NARROWER = 8
"""A matrix product with so many times more inputs than outputs is held, such as the first factor of a LoRA
adapter: it is small, and what reads it is then one product in a row, not two."""


def _convolution(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    bias, *constants = rest if len(rest) == 7 else (None, *rest)
    return torch.convolution(x, weight, bias, *constants)


@recipe("ConvolutionBackward0")
def convolution(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    x, weight = saved(node, "input"), saved(node, "weight")
    if x is None or weight is None or x.products:
        return None
    inputs = [x, weight]
    if any(node._saved_bias_sym_sizes_opt or ()):
        bias = given(2) or frozen_bias(weight)
        if bias is None:
            return None
        inputs.append(bias)
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    constants = tuple(constant(node, name) for name in names)
    if constants[3]:
        return None
    sizes, outputs = _sizes(weight, *node.next_functions[1]), prod(node._input_metadata[0].shape)
    if sizes is None:
        return None
    each = 2 * prod(sizes[1:])
    flops, costly = each * outputs, each > MOST
    return Step(_convolution, tuple(inputs), (), constants, kind="product", flops=flops, costly=costly)


def frozen_bias(weight: Value) -> Value | None:
    """A bias without an edge in the graph, where the call that saved the weight is known."""
    bias = weight.call.bias if isinstance(weight.call, CallArguments) else None
    return None if bias is None else Value(bias, bias._version, name="copy of a frozen bias")


def _addmm(added: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    return torch.addmm(added, a, b, beta=beta, alpha=alpha)


def _baddbmm(added: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    return torch.baddbmm(added, a, b, beta=beta, alpha=alpha)


_MATRIX_PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[str, str]]] = {
    "MmBackward0": (torch.mm, ("self", "mat2")),
    "BmmBackward0": (torch.bmm, ("self", "mat2")),
    "AddmmBackward0": (_addmm, ("mat1", "mat2")),
    "BaddbmmBackward0": (_baddbmm, ("batch1", "batch2")),
}
CONVOLUTIONS = {"ConvolutionBackward0", "leannorm.ConvNorm"}
PRODUCTS = {*CONVOLUTIONS, *_MATRIX_PRODUCTS}


@recipe(*_MATRIX_PRODUCTS)
def matrix_product(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    """Linear layers and attention scores; costly: with fewer outputs than inputs."""
    function, names = _MATRIX_PRODUCTS[kind_of(node)]
    edges = node.next_functions
    first = len(edges) - 2  # the factors follow the added tensor, if there is one
    a, b = (saved(node, name) or given(first + i) for i, name in enumerate(names))
    if a is None or b is None or max(a.products, b.products) > 1:
        return None
    sizes, outputs = _sizes(a, *edges[first]), node._input_metadata[0].shape
    if sizes is None or sizes[-1] >= MUCH_NARROWER * outputs[-1]:
        return None
    work = {"kind": "product", "flops": 2 * sizes[-1] * prod(outputs), "costly": sizes[-1] > outputs[-1]}
    if not first:
        return Step(function, (a, b), **work)
    added = given(0) or frozen_bias(b)
    if added is None:
        return None
    factors = constant(node, "beta"), constant(node, "alpha")
    return Step(function, (added, a, b), (), factors, **work)


def _sizes(value: Value, producer: Any, number: int) -> torch.Size | None:
    if value.tensor is not None:
        return value.tensor.shape if value.spec is None else value.spec.shape
    return None if producer is None else torch.Size(producer._input_metadata[number].shape)
