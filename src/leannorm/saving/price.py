"""Prices: the estimated seconds of a rebuild and of a training step, by shapes and a device's rates.

A price is the number of operations over the device's rate, and the bytes moved over its memory bandwidth. By
the table's rates the same shapes have the same price, and the same plan, in every run and on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch

from leannorm.saving.graph import ACCUMULATES, inputs_of, kind_of
from leannorm.saving.narrowed import copy_that
from leannorm.saving.rates import Rates
from leannorm.saving.recipes.products import CONVOLUTIONS, PRODUCTS, groups_of
from leannorm.saving.recipes.views import SAME_MEMORY
from leannorm.saving.steps import Step
from leannorm.saving.values import Value

_PASSES = 2.5  # over an operation's inputs and outputs in a step: one forward, the others backward
_NO_WORK = {*SAME_MEMORY, ACCUMULATES}


class Prices:
    """Prices by the rates of one device."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates

    def of_rebuild(self, step: Step, shape: Iterable[int], dtype: torch.dtype) -> float:
        """The price of a rebuild; a step that is not proved also runs in the forward pass, to be compared."""
        total, rate = 0.0, self.rates
        if step.flops:
            total += step.flops / rate.operations(dtype.itemsize, groups_of(step))
        if step.kind != "view" and not _is_there(step):
            moved = prod(shape) * dtype.itemsize + sum(value.nbytes for value in step.inputs)
            total += rate.call + moved / rate.memory
        return total if step.proved else 2 * total

    def of_narrowing(self, value: Value) -> float:
        """The price of a copy of this value in a narrower dtype, where one is held, or would be: the value is
        read twice, and the copy is written."""
        if value.step is None or not (value.from_narrow or value.if_held):
            return 0.0
        narrow = value.if_held or copy_that(value.step).nbytes
        return self.rates.call + (2 * value.nbytes + narrow) / self.rates.memory

    def of_step(self, nodes: Iterable[Any]) -> float:
        """The price of stock autograd's step: all nodes that these depend on, forward and backward."""
        total, rate = 0.0, self.rates
        seen, left = set(), list(nodes)
        while left:
            node = left.pop()
            if node in seen:
                continue
            seen.add(node)
            left += [producer for producer, _ in node.next_functions if producer is not None]
            kind = kind_of(node)
            if kind in _NO_WORK:
                continue
            inputs, (output, *others) = inputs_of(node), node._input_metadata
            read = [() if i is None else tuple(i.shape) for i in inputs]
            transposed = getattr(node, "_saved_transposed", False) and read[0]
            flops = _flops(kind, read, read[0] if transposed else tuple(output.shape))
            frozen = None in (inputs[:2] if kind in CONVOLUTIONS else inputs[-2:])  # one gradient, not two
            groups = node._saved_groups if kind == "ConvolutionBackward0" else int(kind in CONVOLUTIONS)
            total += (2 if frozen else 3) * flops / rate.operations(output.dtype.itemsize, groups)
            moved = sum(prod(m.shape) * m.dtype.itemsize for m in (output, *others, *inputs) if m is not None)
            total += 2 * rate.call + _PASSES * moved / rate.memory
        return total


def _is_there(step: Step) -> bool:
    """Is it a copy of what lies as it should, such as of a norm's output by an activation in place?"""
    if step.kind != "copy" or torch.preserve_format in step.constants:
        return False
    x = step.inputs[0]
    return x.step is not None and not x.step.view


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
