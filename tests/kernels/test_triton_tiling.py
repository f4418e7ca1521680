"""How the per-channel Triton kernels are launched: every element once, 64-bit offsets, few variants."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from cases import CASES
from stand_ins import gpu_with
from torch._subclasses import FakeTensorMode

from leannorm import functional, use_backend
from leannorm._errors import BackendUnavailableError
from leannorm.ops import schema
from leannorm.ops.backends import TRITON, triton
from leannorm.ops.select import backends, pick

needs_triton = pytest.mark.skipif(triton._UNAVAILABLE is not None, reason=str(triton._UNAVAILABLE))
H200 = 132

RESNET = [(128, 64, 56), (128, 256, 56), (128, 512, 28), (128, 1024, 14), (128, 2048, 7)]
SHAPES = [
    *((n, c, s, s) for n, c, s in RESNET),
    *(case.shape for case in CASES),
    (2, 64, 28, 28), (1, 3, 1 << 32), (1 << 31, 3), (8192, 1024), (100000, 8, 4), (1, 128, 512, 512),
]  # fmt: skip


def plans(shape, contiguous, itemsize=2):
    from leannorm.ops.backends.triton import tiling

    more = (1, shape[1] // 4, shape[1]) if shape[0] < 1 << 20 else ()  # a program for each sample at least
    groups = [0, *filter(None, more)]
    return [tiling.planned(shape, g, contiguous, itemsize, H200) for g in groups if shape[1] % max(g, 1) == 0]


@needs_triton
@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_cover_all_tiles(shape, contiguous, itemsize):
    for plan in plans(shape, contiguous, itemsize):
        tiles = plan.tiling.tiles(plan.geometry)
        for parts in (plan.moments, plan.sums, plan.mapping):
            assert (parts.parts - 1) * parts.tiles < tiles <= parts.parts * parts.tiles
            assert plan.programs(parts) < 2**31
        for tiling in filter(None, (plan.tiling, plan.sets)):
            block = tiling.channels * tiling.elements
            assert block & (block - 1) == 0
            assert block * itemsize <= 32 * 32 * tiling.warps or tiling.warps == 1
            stride = plan.geometry.channels if tiling.columns else plan.geometry.inner
            reach = (tiling.elements if tiling.columns else tiling.channels) * stride
            reach += (tiling.span - 1) * plan.geometry.channels * plan.geometry.inner
            assert tiling.wide == (reach > 2**31 - 1)
            if tiling.columns:
                assert tiling.channels % tiling.vector == 0 or tiling.vector < tiling.channels


@needs_triton
@pytest.mark.parametrize("contiguous", [True, False])
def test_the_batch_decides_next_to_nothing_that_is_compiled(contiguous):
    """One of two ways of merging, and whether there is anything to merge."""
    from leannorm.ops.backends.triton import tiling

    for _, c, s in RESNET:
        seen = [plans((n, c, s, s), contiguous)[0] for n in (2, 3, 17, 40, 128, 1000)]
        assert len({plan.tiling for plan in seen}) == 1
        assert len({plan.sets for plan in seen if plan.sets is not None}) <= 1
        assert len({tiling.merging(plan.geometry, plan.moments) for plan in seen}) <= 2


@needs_triton
def test_large_inputs_fill_the_processors_and_small_ones_take_one_launch():
    for n, c, s in RESNET:
        for contiguous in (True, False):
            plan = plans((n, c, s, s), contiguous)[0]
            if plan.sets is None:
                assert plan.programs(plan.moments) >= 3 * H200
                assert plan.programs(plan.mapping) >= 3 * H200
    for contiguous in (True, False):
        batch, *_, instance = plans((2, 64, 28, 28), contiguous)
        assert batch.sets is not None
        assert instance.sets is not None
    # a group's values fit the cache: no second reading from memory
    from leannorm.ops.backends.triton import tiling

    for contiguous in (True, False):
        assert tiling.planned((32, 256, 32, 32), 32, contiguous, 2, H200).sets is not None


@needs_triton
@pytest.mark.skipif(not triton.INTERPRETED, reason="runs on the interpreter")
@pytest.mark.parametrize("columns", [True, False])
def test_a_tile_far_behind_2_to_the_31(columns):
    import tile_probe

    from leannorm.ops.backends.triton.tiling import Tiling

    c, inner, samples = 48, 1 << 20, 4096
    found = torch.zeros(2, dtype=torch.int64)
    t = (samples * inner - 32) // 32 if columns else (samples - 1) * (inner // 32) + 7
    tile_probe.probe[(1,)](found, t, c, inner, samples, TILE=Tiling(columns, 16, False, 16, 32, 4))
    start = t * 32 * c + 16 if columns else ((samples - 1) * c + 16) * inner + 7 * 32
    assert start > 2**31
    assert found.tolist() == [start, t * 32 if columns else (samples - 1) * inner + 7 * 32]


# in four rows of a tile, along a row, beside it
FAR_ROWS = [(4, 720_000_000, 1), (7, 2**31 - 1, 1), (2, 2**32 + 24, 1), (3, 2**20, 4096), (2, 3, 2**30 + 1)]


@needs_triton
@pytest.mark.skipif(not triton.INTERPRETED, reason="runs on the interpreter")
@pytest.mark.parametrize("kind", ["along", "shares"])
@pytest.mark.parametrize(("outer", "kept", "inner"), FAR_ROWS)
def test_rows_of_a_tile_that_reaches_behind_2_to_the_31(outer, kept, inner, kind):
    import tile_probe

    from leannorm.ops.backends.triton import row_tiles

    tile = getattr(row_tiles, kind)(inner, 2)
    at, block = tile.needed(outer, inner) - 1, -(-kept // tile.block) - 1
    found = torch.zeros(tile.rows, tile.block, dtype=torch.int64)
    constants = tile.constants(kept, inner)
    tile_probe.row_probe[(1,)](found, at, outer * inner, kept, inner, block, TILE=constants)
    blocks = -(-inner // tile.rows)
    row = (at // blocks * inner + at % blocks * tile.rows if inner > 1 else at * tile.rows) + torch.arange(
        tile.rows
    )
    k = block * tile.block + torch.arange(tile.block)
    place = (row // inner * kept)[:, None] * inner + k * inner + (row % inner)[:, None]
    there = (row < (at // blocks + 1) * inner if inner > 1 else row < outer)[:, None] & (k < kept)
    assert place.max() > 2**31
    assert torch.equal(found, place.where(there, -1))


@needs_triton
def test_only_by_name_does_an_interpreter_serve():
    x = torch.randn(4, 6, 3, 3)
    assert pick(x) is not TRITON
    assert backends(x)["triton"] == ["the kernels run on CUDA, a tensor is on cpu"]
    with use_backend("triton"):
        assert pick(x) is TRITON
        with pytest.raises(BackendUnavailableError, match="the kernels take float32"):
            pick(x.to(torch.float8_e4m3fn))


@needs_triton
@pytest.mark.parametrize(
    ("setting", "path", "words"),
    [("None", "/nowhere", "install a C compiler"), ("'6.0'", os.environ["PATH"], "built for AMD's")],
)
@pytest.mark.sampled(of=2)
def test_without_what_triton_needs_plain_torch_serves(setting, path, words):
    """A slim container has no compiler; a ROCm build's devices are called cuda as well."""
    code = f"""
import torch
torch.version.hip = {setting}
from leannorm.ops.select import backends
print(*backends()['triton'])
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("CC", "TRITON_INTERPRET")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**environment, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


@needs_triton
@pytest.mark.parametrize("compute_capability", [(7, 5), (8, 0)])
def test_old_devices_are_refused_while_compiling_too(compute_capability, monkeypatch):
    major, minor = compute_capability
    gpu_with(monkeypatch, major=major, minor=minor)
    monkeypatch.setattr(TRITON, "ops", schema.OPS)  # as where nothing is interpreted
    called = set()

    def seen(graph, example):
        called.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compiler.reset()
    with FakeTensorMode():  # tensors of a device that is not there
        x = torch.empty(4, 8, device="cuda")
        torch.compile(functional.layer_norm, backend=seen, fullgraph=True)(x, (8,))
        refused = "the kernels need compute capability 8.0, the device has 7.5"
        assert backends(x)["triton"] == ([refused] if major < 8 else [])
    assert called
    assert ("leannorm.row_forward.default" in called) == (major >= 8)


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only without one")
def test_the_reason_without_a_device():
    assert backends()["triton"] == ["the kernels run on CUDA, torch finds no such device"]


@needs_triton
@pytest.mark.skipif(not triton.INTERPRETED, reason="runs on the interpreter")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_layers_train_by_name(layout):
    """Autograd, running statistics and all: what a layer gives is what it gives without."""

    def run():
        torch.manual_seed(0)
        x = torch.randn(4, 6, 5, 5).to(memory_format=layout).requires_grad_()
        other = torch.randn(4, 6, 5, 5).to(memory_format=layout).requires_grad_()
        weight, bias = torch.ones(6, requires_grad=True), torch.zeros(6, requires_grad=True)
        mean, var = torch.zeros(6), torch.ones(6)
        y = functional.batch_norm_act(x, mean, var, weight, bias, residual=other, training=True, act="relu")
        y = functional.group_norm(y, 3, weight, bias)
        y.square().sum().backward()
        return [y.detach(), x.grad, other.grad, weight.grad, bias.grad, mean, var]

    with use_backend("reference"):
        plain = run()
    with use_backend("triton"):
        ours = run()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(not triton.INTERPRETED, reason="runs on the interpreter")
def test_the_interpreter_is_mended_whoever_imported_the_module_first():
    code = (
        "import leannorm.ops.backends.triton.interpreted, leannorm, torch\n"
        "with leannorm.use_backend('triton'):\n"
        "    leannorm.nn.LayerNorm(4)(torch.randn(300, 4)).sum().backward()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
