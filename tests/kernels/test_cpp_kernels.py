"""What only the C++ kernels promise: threads, caches, instruction sets, memory, being the default.

Their numbers are asked for by the suites of all backends.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import DTYPES, ChannelCase
from kernel_cases import assert_close_to_reference, call_on, needs_kernels, results
from row_kernel_cases import both_ways, operands

from leannorm import functional
from leannorm._types import Channels, ChannelTensors, KeptByChannelNorm
from leannorm.ops import select
from leannorm.ops.backends import BACKENDS, CPU

pytestmark = needs_kernels


# Of two samples and of many, with a last set of fewer channels, that fill no vector.
SHORT = [
    (34, 600, 5, 11), (2100, 8, 3), (2, 50, 7, 7), (700, 33, 5, 5), (8, 1027, 4, 4), (3, 37, 14, 14),
]  # fmt: skip


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHORT, ids=str)
@pytest.mark.parametrize(("act", "out_given"), [("identity", False), ("relu", True), ("gelu", False)])
def test_short_planes_several_channels_at_a_time(shape, dtype, act, out_given):
    """Samples that differ, and channels of which one is constant and one far from its first samples."""
    call = call_on(ChannelCase(shape, "contiguous"), dtype, act, residual=True, out_given=out_given)
    x = call.x + torch.randn(*shape[:2], *[1] * (len(shape) - 2)).to(dtype)
    x[:2, 2] = 12
    if dtype != torch.float64:  # which sums in nothing wider, and so has no second way
        x[:, 1] = 3
    assert_close_to_reference(call._replace(x=x))


def test_planes_that_are_short_in_a_large_tensor_only():
    assert_close_to_reference(call_on(ChannelCase((6, 700, 16, 16), "contiguous"), torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plane", [(7, 7), (20, 20)], ids=str)
def test_blocks_of_samples_with_fewer_channels_in_the_last_set(plane, dtype):
    """Each block of samples begins where the last set of the one before it ends."""
    call = call_on(ChannelCase((6, 50, *plane), "contiguous"), dtype, "relu", -2, residual=True)
    assert_close_to_reference(call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plane", [(7, 7), (3, 3), (15, 15), (24, 24)], ids=str)
def test_a_channels_bits_do_not_depend_on_its_neighbours(plane, dtype):
    """However many of them are taken together; of float64 the last bits may."""
    call = call_on(ChannelCase((20, 100, *plane), "contiguous"), dtype, "silu", residual=True)
    whole = results(CPU, call)
    for channels in (slice(0, 16), slice(40, 57), slice(3, 100)):
        part = {
            name: value[channels] if value.dim() == 1 else value[:, channels].contiguous()
            for name, value in call._asdict().items()
            if isinstance(value, torch.Tensor)
        }
        for name, value in results(CPU, call._replace(**part)).items():
            other = whole[name][channels] if value.dim() == 1 else whole[name][:, channels]
            if dtype is torch.float64:
                torch.testing.assert_close(value, other, rtol=1e-13, atol=1e-13)
            else:
                assert torch.equal(value, other), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("value", [0.0, 0.75])
def test_a_channel_of_one_value_changes_no_bit_of_those_beside_it(value, masked, dtype):
    """As behind a ReLU, in channels_last, where all channels are summed together."""
    x = torch.randn(6, 24, 30, 30).to(dtype).to(memory_format=torch.channels_last)
    mask = torch.rand(6, 1, 30, 30) < 0.8 if masked else None
    before = CPU.channel_moments(x, 0, mask)
    x[:, 7] = value
    moments = CPU.channel_moments(x, 0, mask)
    others = [i for i in range(24) if i != 7]
    assert torch.equal(moments.mean[others], before.mean[others])
    assert torch.equal(moments.m2[others], before.m2[others])
    assert (moments.mean[7].item(), moments.m2[7].item()) == (value, 0.0)


@pytest.mark.parametrize("tiny", [1e-25, 1e-30])
def test_values_whose_squares_are_lost_are_not_taken_for_one_value(tiny):
    x = torch.tensor([tiny, -tiny]).repeat(400, 8).to(torch.float32)
    moments = CPU.channel_moments(x)
    torch.testing.assert_close(
        moments.m2, (x.double() - x.double().mean(0)).square().sum(0), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_group_norm_of_rows(dtype):
    """Each sample has one value a channel; what is not finite stays in its group."""
    call = call_on(ChannelCase((70, 48), "contiguous"), dtype, "identity", 4)
    assert_close_to_reference(call)
    before, x = CPU.channel_moments(call.x, 4), call.x.clone()
    x[3, 5], x[4, 47] = torch.inf, torch.nan
    moments = CPU.channel_moments(x, 4)
    at = [3, 4], [0, 3]
    assert moments.mean[3, 0] == torch.inf
    assert moments.mean[4, 3].isnan()
    assert moments.m2[at].isnan().all()
    moments.mean[at], moments.m2[at] = before.mean[at], before.m2[at]
    assert torch.equal(moments.mean, before.mean)
    assert torch.equal(moments.m2, before.m2)


CUTS = [
    ((4, 64, 30, 30), 0), ((2, 3, 160, 160), 0), ((6, 512, 7, 7), 0), ((3, 24, 20, 20), 4),
    ((1, 6, 200, 200), 2), ((300, 700), 0), ((5, 3, 5001), 0), ((41, 1500, 3, 3), 0), ((33, 1700, 11), 0),
]  # fmt: skip


def laid_out(cuts):
    """Each contiguous, and channels_last where there is such a layout."""
    layouts = ("contiguous", "channels_last")
    return [(shape, groups, layout) for shape, groups in cuts for layout in layouts[: len(shape) // 2]]


@pytest.mark.parametrize(("shape", "groups", "layout"), laid_out(CUTS), ids=str)
def test_threads_change_no_bit(shape, groups, layout):
    call = call_on(ChannelCase(shape, layout), torch.float32, "silu", groups, residual=True)
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.append(results(CPU, call))
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        for name, value in seen[0].items():
            assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    ("shape", "groups", "layout"), laid_out([((3, 31), 0), ((4, 6, 3, 3), 2), *CUTS]), ids=str
)
def test_float64_merges_far_means_without_losing_a_digit(shape, groups, layout):
    """Means of chunks are subtracted from each other: rounded, they leave eight digits of the variance."""
    call = call_on(ChannelCase(shape, layout), torch.float64, "identity", groups)
    assert_close_to_reference(call._replace(x=call.x + 1e8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plane", [(157, 157), (26, 26), (3, 3)], ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_what_is_written_past_the_caches_is_the_same_bits(dtype, plane, offset):
    """Large results are, from a line's first element on: planes that begin anywhere in a line."""
    samples = (9 << 20) // (5 * plane[0] * plane[1] * dtype.itemsize)
    shape = (samples, 5, *plane)

    def made(v):
        flat = v.expand(shape).to(dtype).flatten()
        return torch.cat((flat[:offset], flat))[offset:].view(shape)

    x, dy, residual = (made(torch.randn(1, 5, *plane)) for _ in range(3))
    given = torch.randn(5).double(), torch.rand(5).double(), torch.rand(5), torch.rand(5)
    kept = KeptByChannelNorm(x, *given, residual, norm=Channels(act="relu"))
    y = CPU.channel_normalize(kept)
    dx, dz = CPU.channel_input_grad(dy, kept, given[:2], True)
    alone = torch.ones(2, 5, *plane, dtype=dtype)  # too small for it
    x, dy, residual = (alone * v[:1] for v in (x, dy, residual))
    kept = kept._replace(x=x, residual=residual)
    small = CPU.channel_normalize(kept)
    small_dx, small_dz = CPU.channel_input_grad(dy, kept, given[:2], True)
    for large, want in ((y, small), (dx, small_dx), (dz, small_dz)):
        assert torch.equal(large, want[:1].expand(shape))


@pytest.mark.parametrize("act", ["relu", "silu", "gelu", "elu"])
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("shape", [(3, 40, 9, 11), (2, 6, 30, 30), (40, 64)], ids=str)
def test_where_a_gradient_waits_changes_no_bit(shape, groups, act):
    """Between its two passes it waits in the result, but for one that takes the input's place."""
    layout = "channels_last" if len(shape) == 4 else "contiguous"
    call = call_on(ChannelCase(shape, layout), torch.float32, act)
    groups = groups if shape[1] % 4 == 0 else groups // 2
    y, mean, _, rstd, _ = CPU.channel_forward(ChannelTensors(call.x), Channels(groups, 1e-5, act))
    given = mean, rstd, None, None, None, y if act == "elu" else None, act, groups, False
    dx, dweight, dbias, _ = torch.ops.leannorm.channel_backward(call.dy, call.x, *given)
    over = call.x.clone()
    dweight_over, dbias_over, _ = torch.ops.leannorm.channel_backward_(call.dy, over, *given)
    assert torch.equal(dx, over)
    assert torch.equal(dweight, dweight_over)
    assert torch.equal(dbias, dbias_over)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc counts, since 2.33")
def test_a_call_leaves_nothing_behind():
    """Not even a few bytes: a small block that stays keeps the large one beside it from being used again."""
    fields = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "in_use", "free", "top"]
    info = type("Info", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in fields]})
    malloc = ctypes.CDLL(None).mallinfo2
    malloc.restype = info
    call = call_on(ChannelCase((2, 4, 3, 3), "contiguous"), torch.float32, residual=True)
    mean, var = torch.zeros(4), torch.ones(4)
    tracked = ChannelTensors(call.x, mean=mean, var=var, num_batches=torch.tensor(0))
    unknown = KeptByChannelNorm(call.x, mean.double(), var.double(), norm=Channels(act="softplus"))

    def calls(n):
        for _ in range(n):
            results(CPU, call)
            CPU.channel_forward(tracked, Channels(0, 1e-5, momentum=0.1))
            with pytest.raises(RuntimeError, match="unknown activation"):
                CPU.channel_normalize(unknown)

    calls(200)
    before = malloc().in_use
    calls(1000)
    assert malloc().in_use - before < 16 * 1000


@pytest.mark.skipif("LEANNORM_LARGE" not in os.environ, reason="takes 14 GiB; set LEANNORM_LARGE to run")
@pytest.mark.parametrize("shape", [(2, 3, 2**29 // 3 + 5), (2**29 + 9, 2), (3, 2, 2**28 + 7)], ids=str)
def test_more_elements_than_an_int_counts(shape):
    torch.utils.deterministic.fill_uninitialized_memory = False
    x = torch.empty((*shape[:2], *shape[2:], 2) if len(shape) == 3 else (shape[0], 4), dtype=torch.bfloat16)
    assert x.numel() > 2**31
    x.fill_(1)
    x[-1, -1] = 3
    y, mean, _, rstd, _ = CPU.channel_forward(ChannelTensors(x), Channels(0, 1e-5))
    count = x[:, -1].numel()
    last = count + 2 * x[-1, -1].numel()
    assert abs(mean[-1].item() - last / count) < 1e-6
    assert y[-1, -1].flatten()[-1] == ((3 - mean[-1]) * rstd[-1]).bfloat16()
    torch.ops.leannorm.channel_backward_(y, x, mean, rstd, None, None, None, None, "identity", 0, False)
    assert x.flatten()[-1].isfinite()


HAS_V4 = torch.backends.cpu.get_cpu_capability() == "AVX512"  # else v3 is what all tests run


@pytest.mark.parametrize("isa", [*["v3"] * HAS_V4, "base"])
def test_every_instruction_set(isa):
    """The suites on the kernels of lesser machines, in a process of their own: the choice is made once."""
    suites = [str(Path(__file__).with_name(f"test_{kind}_kernels.py")) for kind in ("channel", "row")]
    names = "cpu and (test_the_verbs or (test_agrees and (17 or 14)) or hard or test_layout)"
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", ""]  # all cases: no other test runs these kernels
    command = [sys.executable, "-m", "pytest", *options, *suites, "-k", names]
    run = subprocess.run(command, env=os.environ | {"LEANNORM_ISA": isa}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", run.stdout).group(1)) > 400


ROWS = [
    *((shape, "contiguous") for shape in ((1000, 33), (7, 4097), (4, 96, 40, 20), (2, 20, 1100))),
    ((4, 96, 40, 20), "channels_last"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "layout"), ROWS, ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(shape, dtype, layout):
    given, before = operands(shape, 1, 2, dtype, False, True, layout), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(both_ways(CPU, given, 1, 2, False))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("cache", [0, 1 << 40], ids=["past", "into"])
@pytest.mark.sampled(of=2)
def test_the_way_to_memory_changes_no_bit(cache):
    """Large outputs past the caches or into them, in processes of their own: the bits of small ones."""
    done = subprocess.run(
        [sys.executable, "-c", LARGE], env={**os.environ, "LEANNORM_CACHE": str(cache)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]


LARGE = """
import torch
from leannorm._types import KeptByRowNorm, Rows
from leannorm.ops.backends import CPU

def a_third(*shape, dtype):
    return torch.randn(shape[0], 3, *shape[1:], dtype=dtype)[:, 0]

lines, heads = Rows(1, 2, 1e-5, False), Rows(2, 3, 1e-5, False)
CASES = [
    (lines, torch.randn, (40000, 64)), (lines, torch.randn, (10, 64, 4096)),  # lines, panels
    (heads, a_third, (5000, 16, 64)),  # short runs of lines
]
weight, bias = torch.randn(64), torch.randn(64)
for dtype in (torch.float32, torch.float64, torch.bfloat16):
    for rows, make, shape in CASES:
        x, dy, more = (make(*shape, dtype=dtype) for _ in range(3))
        for residual in (None, more):
            y, total, mean, rstd = CPU.row_forward((x, residual, None, None, None, weight, bias), rows)
            kept = x if residual is None else total
            dx, *_ = CPU.row_backward(dy, residual, KeptByRowNorm(kept, mean, rstd, weight), rows)
            for part in torch.arange(len(x)).chunk(10):
                add = None if residual is None else residual[part]
                y_, _, *statistics = CPU.row_forward((x[part], add, None, None, None, weight, bias), rows)
                kept_ = KeptByRowNorm(kept[part], *statistics, weight)
                dx_, *_ = CPU.row_backward(dy[part], add, kept_, rows)
                assert torch.equal(y[part], y_) and torch.equal(dx[part], dx_)
"""


def test_auto_takes_the_kernels_and_a_named_backend_is_obeyed():
    x = torch.randn(4, 8)
    assert next(name for name, why in select.backends(x).items() if not why) == "cpu"
    assert set(BACKENDS) >= {"cpu", "reference"}
    with select.use_backend("cpu"):
        kernels = functional.layer_norm(x, (8,))
    with select.use_backend("reference"):
        plain = functional.layer_norm(x, (8,))
    torch.testing.assert_close(kernels, plain)


_X, _LINES = torch.randn(4, 8), torch.ones(4, 8)
SHORT_OPERANDS = {
    "weight": lambda of: of.row_forward(_X, None, torch.ones(4), None, 1, 2, 1e-5, False),
    "residual": lambda of: of.row_forward(_X, _X[:2], None, None, 1, 2, 1e-5, False),
    "axes": lambda of: of.row_forward(_X, None, None, None, 1, 3, 1e-5, False),
    "dy": lambda of: of.row_backward(_X[:2], None, _X, _X[:, :1], _X[:, :1], None, 1, 2, False, True, True),
    "mean": lambda of: of.row_backward(_X, None, _X, _X[:2, :1], _X[:, :1], None, 1, 2, False, True, True),
    "lines": lambda of: of.row_forward(_X, None, _LINES[:, :4], None, 1, 2, 1e-5, False),
    "groups": lambda of: of.row_forward(_X, None, _LINES[:3], None, 1, 2, 1e-5, False),
    "lines of a transposed x": lambda of: of.row_forward(
        _X.t(), None, _LINES[:, :4], None, 1, 2, 1e-5, False
    ),
    "gate of a residual": lambda of: of.row_forward(
        _X, _X, None, None, 1, 2, 1e-5, False, 0.0, False, None, _LINES[:, :4]
    ),
    "gate": lambda of: of.row_gated_forward(_X, _X[:2], torch.ones(8), 1e-5, "silu", True, False),
}


@pytest.mark.parametrize("name", SHORT_OPERANDS)
def test_row_operators_refuse_what_is_too_short(name):
    """As they are in a graph, which may have been edited; the functions check before."""
    with pytest.raises(RuntimeError, match="leannorm: "):
        SHORT_OPERANDS[name](torch.ops.leannorm)
