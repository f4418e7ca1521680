"""Prices: the estimated seconds of a rebuild and of a training step, by shapes alone.

A price is the number of operations over the device's rate, or the bytes moved over its memory bandwidth, from
a table. Nothing is measured, so the same shapes have the same price, and the same plan, in every run and on
every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from leannorm.saving.graph import kind_of
from leannorm.saving.recipes.products import CONVOLUTIONS, PRODUCTS
from leannorm.saving.recipes.views import ALIASES
from leannorm.saving.steps import Step
from leannorm.saving.values import Value


class Rates(NamedTuple):
    """Bytes moved per second; operations of a product per second, by element size; seconds per call."""

    memory: float
    products: dict[int, float]
    call: float


_GB, _T = 1e9, 1e12
# What torch reaches on large tensors: half to two thirds of what data sheets say.
_CPU = Rates(4 * _GB, {8: 0.018 * _T, 4: 0.036 * _T, 2: 0.036 * _T}, 4e-6)  # each core
_CPU_BFLOAT16 = _CPU._replace(products={**_CPU.products, 2: 0.072 * _T})
_CPU_TILES = _CPU._replace(products={**_CPU.products, 2: 0.29 * _T})
_CUDA = {
    7: Rates(600 * _GB, {8: 5 * _T, 4: 10 * _T, 2: 60 * _T}, 5e-6),
    8: Rates(1300 * _GB, {8: 9 * _T, 4: 15 * _T, 2: 200 * _T}, 5e-6),
    9: Rates(2500 * _GB, {8: 35 * _T, 4: 45 * _T, 2: 550 * _T}, 5e-6),
    10: Rates(6000 * _GB, {8: 35 * _T, 4: 60 * _T, 2: 1300 * _T}, 5e-6),
}


@lru_cache
def rates(device: torch.device) -> Rates:
    """The row of the table for this device."""
    if device.type == "cuda" and torch.cuda.is_available():
        major = torch.cuda.get_device_capability(device)[0]
        return _CUDA[min(max(major, min(_CUDA)), max(_CUDA))]
    if device.type != "cpu":
        return _CUDA[8]
    if torch.cpu._is_amx_tile_supported():
        return _CPU_TILES
    return _CPU_BFLOAT16 if torch.cpu._is_avx512_bf16_supported() else _CPU


def of_rebuild(step: Step, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> float:
    """The price of one rebuild, with all tensors on the way to it that were not packed."""
    total, rate = 0.0, rates(device)
    if step.flops:
        total += step.flops / rate.products.get(dtype.itemsize, rate.products[2])
    if step.kind != "view":
        moved = prod(shape) * dtype.itemsize + sum(map(_nbytes, step.inputs))
        total += rate.call + moved / rate.memory
    for value in step.inputs:
        if value.layout is None and value.step is not None:
            total += of_rebuild(value.step, value.shape, value.dtype, device)
    return total


def _nbytes(value: Value) -> int:
    if value.tensor is not None:
        return value.tensor.nbytes
    return prod(value.shape) * value.dtype.itemsize


_PASSES = 2.5  # over an operation's inputs and outputs in a step: one forward, the others backward
_NO_WORK = ALIASES | {"AccumulateGrad", "ReshapeAliasBackward0", "UnsafeViewBackward0", "TBackward0"}


def of_step(nodes: Iterable[Any], device: torch.device) -> float:
    """The price of stock autograd's training step: all nodes that these depend on, forward and backward."""
    total, rate = 0.0, rates(device)
    seen, left = set(), list(nodes)
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        edges = node.next_functions
        left += [producer for producer, _ in edges if producer is not None]
        kind = kind_of(node)
        if kind in _NO_WORK:
            continue
        inputs = [None if p is None else p._input_metadata[number] for p, number in edges]
        output, *others = node._input_metadata
        read = [() if i is None else tuple(i.shape) for i in inputs]
        transposed = getattr(node, "_saved_transposed", False) and read[0]
        flops = _flops(kind, read, read[0] if transposed else tuple(output.shape))
        frozen = None in (inputs[:2] if kind in CONVOLUTIONS else inputs[-2:])  # one gradient, not two
        total += (2 if frozen else 3) * flops / rate.products.get(output.dtype.itemsize, rate.products[2])
        moved = sum(prod(m.shape) * m.dtype.itemsize for m in (output, *others, *inputs) if m is not None)
        total += 2 * rate.call + _PASSES * moved / rate.memory
    return total


def _flops(kind: str, inputs: list[tuple[int, ...]], output: tuple[int, ...]) -> int:
    """Operations of a product's forward pass, by the shapes at its node; () for an input without gradient."""
    if kind.startswith("ScaledDotProduct"):
        return 4 * prod(inputs[0]) * inputs[1][-2] if inputs[0] and inputs[1] else 0
    if kind in CONVOLUTIONS:
        return 2 * prod(inputs[1][1:]) * prod(output)
    if kind in PRODUCTS:
        *_, a, b = inputs
        return 2 * prod(output) * (b[-2] if b else a[-1] if a else 0)
    return 0
