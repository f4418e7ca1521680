"""Recipes for what takes many operations a byte: convolutions and matrix products.

Such a step is of the kind "product", and policies go by its operations. None rests on a long chain of others:
a convolution on no rebuilt product, a matrix product on one at most.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from leannorm.saving.recipes import Given, _constant, recipe
from leannorm.saving.values import Step, Value, saved


@recipe("ConvolutionBackward0")
def convolution(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    x, weight = saved(node, "input"), saved(node, "weight")
    if x is None or weight is None or x.products:
        return None
    inputs = [x, weight]
    if any(node._saved_bias_sym_sizes_opt or ()):
        bias = given(node, 2)
        if bias is None:  # frozen and out of reach
            return None
        inputs.append(bias)
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    constants = tuple(_constant(node, name) for name in names)
    kernel = node.next_functions[1][0] and weight.look()
    if kernel is None or constants[3]:
        return None
    flops = 2 * kernel[0].numel() * prod(node._input_metadata[0].shape)

    def rebuild(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.convolution(x, weight, bias, *constants)

    return Step(rebuild, tuple(inputs), constants, kind="product", flops=flops)


_MATRIX_PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[str, str]]] = {
    "MmBackward0": (torch.mm, ("self", "mat2")),
    "BmmBackward0": (torch.bmm, ("self", "mat2")),
    "AddmmBackward0": (torch.addmm, ("mat1", "mat2")),
    "BaddbmmBackward0": (torch.baddbmm, ("batch1", "batch2")),
}
PRODUCTS = {"ConvolutionBackward0", "ConvNormBackward", *_MATRIX_PRODUCTS}


@recipe(*_MATRIX_PRODUCTS)
def matrix_product(node: Any, output: int, given: Given, like: Tensor | None) -> Step | None:
    """Linear layers and attention's scores, but for those of fewer outputs than inputs.

    Such a one takes more operations than the tensor that it was made of, and brings less.
    """
    function, names = _MATRIX_PRODUCTS[node.name()]
    edges = node.next_functions
    first = len(edges) - 2  # behind what is added, where there is such a thing
    a, b = (saved(node, name) or given(node, first + i) for i, name in enumerate(names))
    if a is None or b is None or max(a.products, b.products) > 1:
        return None
    sizes, outputs = _sizes(a, *edges[first]), node._input_metadata[0].shape
    if sizes is None or sizes[-1] > outputs[-1]:
        return None
    inputs, factors = [a, b], {}
    if first:
        added = given(node, 0)
        if added is None:  # frozen and out of reach
            return None
        inputs, factors = [added, a, b], {name: _constant(node, name) for name in ("beta", "alpha")}
    key = node.name(), *factors.values()
    flops = 2 * sizes[-1] * prod(outputs)
    return Step(partial(function, **factors), tuple(inputs), key, kind="product", flops=flops)


def _sizes(value: Value, producer: Any, number: int) -> torch.Size | None:
    if value.tensor is not None:
        return value.tensor.shape
    return None if producer is None else torch.Size(producer._input_metadata[number].shape)
