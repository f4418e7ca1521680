"""Random blocks before and after `convert(fuse="trace")`: everything that a program can see is the same.

Each block is run in training and in evaluation; flags, globals, hooks and layers are changed after the
conversion, and again it is run; then it is taken back. `make test` tries half of the 5,000, `make
conformance` the rest; LEANNORM_CONVERT_FUZZ=100000 tries more.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import os
import types
import warnings

import pytest
import torch
from convert_phrases import HEAD
from convert_programs import Program, program

from leannorm import convert

BLOCKS = int(os.environ.get("LEANNORM_CONVERT_FUZZ", "5000"))
CHUNK, DAILY = 250, 2500
FLAG = "LEANNORM_TEST_FLAG"
COUNTER = itertools.count()
START = compile(HEAD, "<start of convert programs>", "exec")
WEIGHTS = torch.linspace(-1, 2, 108, dtype=torch.float64).view(3, 4, 3, 3)
INPUT = torch.randn(3, 4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def load(source):
    """The source as a module whose text can be found, as that of a file."""
    filename = f"<convert program {next(COUNTER)}>"
    module = types.ModuleType("convert_program")
    module.edits = ".data" in source
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(START, vars(module))
    exec(compile(source, filename, "exec", dont_inherit=True), vars(module))
    return module, filename


def do(module, line, model=None):
    exec(line, vars(module), {"m": model})


def build(module, setup):
    torch.default_generator.manual_seed(1)
    model = module.Block().double()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.3)  # a constant channel must not lie on a kink
    for line in setup:
        with contextlib.suppress(AttributeError):  # of a layer that another line has replaced
            do(module, line, model)
    return model


def tensors(value):
    """Everything to compare in a value: tensors, numbers, texts."""
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors(v)]
    return [value] if isinstance(value, (torch.Tensor, float, int, str)) else []


def run(module, model, training):
    """What one forward and backward pass shows: outputs, gradients, buffers, kept values, calls of hooks.

    No gradients where a norm's input is edited through `.data`: torch's own are wrong then.
    """
    for kept in (module.KEPT, module.TABLE, module.HEARD):
        kept.clear()
    blocks = [model, *(child for child in model.children() if type(child).__name__ == "Inner")]
    for block in blocks:
        block.items, block.table, block.feat, block.log = [], {}, None, None
        block.training = training
    torch.default_generator.manual_seed(2)
    leaf = INPUT.clone().requires_grad_()
    try:
        outputs = tensors(model(leaf))
        total = sum((y * WEIGHTS).sum() for y in outputs)
        wanted = [leaf, *(p for p in model.parameters() if p.requires_grad)]
        gradients = (
            torch.autograd.grad(total, wanted, allow_unused=True)
            if total.requires_grad and not module.edits
            else []
        )
        seen = [module.KEPT, module.TABLE, module.HEARD]
        seen += [[block.items, block.table, block.feat, block.log, block.calls] for block in blocks]
        values = [*outputs, *(torch.zeros(()) if g is None else g for g in gradients), *tensors(seen)]
    except Exception as error:
        return error
    values += model.buffers()
    return [v.detach().double().clone() if isinstance(v, torch.Tensor) else v for v in values]


def difference(got, want):
    """A sentence, or None where all is the same."""
    if isinstance(want, Exception):
        return None
    if isinstance(got, Exception):
        return f"raises {type(got).__name__}: {got}"
    if [getattr(v, "shape", None) for v in got] != [getattr(v, "shape", None) for v in want]:
        return f"{len(got)} values, {len(want)} expected, or of other shapes"
    rest = [(g, w) for g, w in zip(got, want, strict=True) if not isinstance(w, torch.Tensor)]
    if any(g != w if isinstance(w, str) else abs(g - w) > 1e-9 * (1 + abs(w)) for g, w in rest):
        return f"{rest} differ"
    got, want = ([v for v in values if isinstance(v, torch.Tensor)] for values in (got, want))
    flat = [torch.cat([v.reshape(-1) for v in values]) for values in (got, want)]
    if bool(((flat[0] - flat[1]).abs() <= 1e-9).all()):
        return None
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if not torch.allclose(
            g, w, rtol=0, atol=1e-9 * (1 + w.abs().max().nan_to_num().item()), equal_nan=True
        ):
            return f"tensor {i} of {len(got)} differs by {(g - w).abs().max().item():.1e}"
    return None


def look(model):
    return [(name, type(m)) for name, m in model.named_modules()]


def wrong(given: Program):
    """What `convert` changes in what this program computes; None where nothing."""
    module, filename = load(given.source())
    before = os.environ.pop(FLAG, None)
    try:
        original, converted = (build(module, given.setup) for _ in range(2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            convert(converted, fuse="trace")

        def compare(when, modes=(True, False)):
            for training in modes:
                want, got = (run(module, model, training) for model in (original, converted))
                found = difference(got, want)
                if found is not None:
                    return f"{when}, {'training' if training else 'evaluation'}: {found}"
            return None

        found = compare("converted")
        if found is not None:
            return found
        for model in (original, converted):
            for line in given.later:
                with contextlib.suppress(AttributeError, IndexError, TypeError):
                    do(module, line, model)
        for line in given.later_global:
            do(module, line)
        found = compare("changed since") if given.later or given.later_global else None
        if found is not None:
            return found
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            convert(converted, to="torch")
        if look(converted) != look(original):
            return "taken back: other classes"
        return compare("taken back", [True])
    finally:
        del linecache.cache[filename]
        os.environ.pop(FLAG, None)
        if before is not None:
            os.environ[FLAG] = before


def shrunk(given: Program) -> Program:
    """The smallest program near this one that is still wrong."""
    for smaller in given.smaller():
        with contextlib.suppress(Exception):
            if wrong(smaller) is not None:
                return shrunk(smaller)
    return given


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(start, marks=pytest.mark.conformance if start >= DAILY else [])
        for start in range(0, BLOCKS, CHUNK)
    ],
)
def test_any_block(start):
    for seed in range(start, start + CHUNK):
        given = program(seed)
        if wrong(given) is not None:
            smallest = shrunk(given)
            pytest.fail(f"{wrong(smallest)}\n{smallest}")
