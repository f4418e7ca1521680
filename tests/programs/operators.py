"""Every operator of torch's own table of tests, under `lean()`: gradients are stock's bit for bit.

python -m programs.operators                    all: some 237,000 programs
python -m programs.operators --most 2           two calls of each, in float32
python -m programs.operators --start 400        without the first 400 operators; --count: how many

The table has more arguments of each operator than a test would think of. They come out of a layer, so that
they can be rebuilt, and the result goes into one, so that it may be. One process tries them all: what is
remembered of one call must not serve another. (A process of its own: importing torch's tests changes torch.)
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from leannorm import lean
from leannorm.saving import recorded_pass
from leannorm.saving.evidence import same_bits

LAYERS = {"product": lambda x: x * 1.0, "leaky relu": nn.LeakyReLU(1.0), "copy": torch.clone}
# torch hands LAPACK's gelsy uninitialized pivots: the same call has several results
NOT_REPEATABLE = "linalg.lstsq", "linalg.lstsq.grad_oriented"
FEWEST_REBUILT = 30  # kinds of nodes; below, the equality would say little


def calls(op, most: int | None) -> Iterator[tuple[torch.dtype, object]]:
    """Arguments of the operator, and their dtype."""
    if op.full_name in NOT_REPEATABLE or not op.supports_autograd:
        return
    for dtype in (torch.float32,) if most else (torch.float32, torch.bfloat16, torch.float64):
        if dtype not in op.supported_dtypes("cpu"):
            continue
        try:
            samples = list(op.sample_inputs("cpu", dtype, requires_grad=True))
        except RuntimeError:  # needs a library that this torch lacks
            continue
        for sample in samples[:most]:
            yield dtype, sample


def gradients(op, sample, layer, saving) -> list[Tensor | None] | None:
    """Of a program around one call; None if the call has no gradient."""
    leaves: list[Tensor] = []

    def argument(value):
        if not isinstance(value, Tensor):
            return value
        copy = value.detach().clone()
        if not (value.requires_grad and value.layout is torch.strided):
            return copy
        leaves.append(copy.requires_grad_())
        return layer(copy) if copy.is_floating_point() else copy * 1

    with saving:
        args, kwargs = tree_map(argument, ((sample.input, *sample.args), sample.kwargs))
        torch.manual_seed(1)
        found = [y for y in tree_leaves(op.op(*args, **kwargs)) if isinstance(y, Tensor)]
        found = [y for y in found if y.requires_grad and y.layout is torch.strided]
        found = [y.abs() if y.is_complex() else y for y in found]
        loss = sum((y * y.sigmoid()).float().sum() for y in found) if found else None
    return None if loss is None else list(torch.autograd.grad(loss, leaves, allow_unused=True))


def equal(ours: list[Tensor | None], stock: list[Tensor | None]) -> bool:
    return all(
        a is b is None or (a is not None and b is not None and same_bits(a, b))
        for a, b in zip(ours, stock, strict=True)
    )


def stock_of(op, sample, layer) -> list[Tensor | None] | None:
    """Stock's gradients, if there are some, and the same at every try."""
    try:
        tries = [gradients(op, sample, layer, nullcontext()) for _ in range(2)]
    except (RuntimeError, TypeError, NotImplementedError):  # torch has no gradient of this call
        return None
    return tries[0] if None not in tries and equal(*tries) else None


def fault(op, sample, layer, saving, stock) -> str:
    """What is wrong under `lean()`: "" if nothing is."""
    try:
        return "" if equal(gradients(op, sample, layer, saving), stock) else "other gradients"
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def main() -> int:
    parser = argparse.ArgumentParser(prog="programs.operators", description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=len(op_db))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch's own tests
    recorded_pass.SMALLEST = 1
    os.environ["LEANNORM_SMALL_BYTES"] = "-1"
    layers, policies = (["product"], ["conv"]) if options.most else (list(LAYERS), ["norm", "conv"])
    count, wrong, rebuilt = 0, 0, set()
    chosen = op_db[options.start : options.start + options.count]
    for i, op in enumerate(chosen, options.start):
        began, before, faults = time.monotonic(), count, Counter()
        for (dtype, sample), layer in product(calls(op, options.most), layers):
            stock = stock_of(op, sample, LAYERS[layer])
            for policy in policies if stock is not None else ():
                saving = lean(policy)
                count += 1
                if found := fault(op, sample, LAYERS[layer], saving, stock):
                    faults[f"{dtype}, {layer}, {policy}: {found}"] += 1
                rebuilt |= {record.node for record in saving.records if record.rebuilt}
        seconds = time.monotonic() - began
        if not options.most:
            print(f"{i} {op.full_name}: {count - before} programs, {seconds:.0f} s", flush=True)
        for words, times in faults.items():
            print(f"WRONG {op.full_name}, {words} ({times} times)", flush=True)
        wrong += faults.total()
    print(f"{count} programs, {len(rebuilt)} kinds of nodes rebuilt, {wrong} wrong")
    return bool(wrong) or (len(chosen) == len(op_db) and len(rebuilt) < FEWEST_REBUILT)


if __name__ == "__main__":
    sys.exit(main())
