"""The C++ per-channel kernels: the reference's numbers in every layout, dtype, size and activation."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch
from cases import ACTS, CASES, DTYPES, EMPTY, ChannelCase, lay_out
from kernel_cases import assert_close_to_reference, call_on, needs_kernels, results

from leannorm.ops.backends import CPU, REFERENCE

pytestmark = needs_kernels
SIZES = (1, 7, 8, 15, 16, 17, 4095, 4097)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_verbs_are_the_references(case, dtype):
    groups = [0, *(g for g in (1, case.shape[1]) if dtype != torch.float64 and case.shape != (40, 1))]
    for g in groups:
        if g == 0 or torch.Size(case.shape[2:]).numel() * case.shape[1] // g > 1:
            assert_close_to_reference(call_on(case, dtype, groups=g))


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("out_given", [False, True])
def test_every_activation(act, layout, residual, out_given):
    for dtype in (torch.float32, torch.float64):
        case = ChannelCase((3, 5, 5, 7), layout)
        assert_close_to_reference(call_on(case, dtype, act, residual=residual, out_given=out_given))


@pytest.mark.parametrize("size", SIZES)
def test_every_size_in_every_place(size):
    shapes = [(size, 2), (2, size), (2, 3, size), (2, size, 3), (size, 3, 2), (1, 2, size), (1, size, 2)]
    for shape in shapes:
        for layout in ("contiguous", "offset"):
            assert_close_to_reference(call_on(ChannelCase(shape, layout), torch.float32))
    assert_close_to_reference(call_on(ChannelCase((1, size, 2, 2), "channels_last"), torch.bfloat16))


@pytest.mark.parametrize("shape", [*EMPTY, (3, 0, 4), (3, 0)], ids=str)
def test_nothing_in_it(shape):
    x = torch.empty(shape)
    y, mean, m2, rstd = CPU.channel_forward(x, None, None, None, 1e-5, "relu", 0)
    assert y.shape == shape
    assert mean.eq(0).all()
    assert m2.eq(0).all()
    torch.testing.assert_close(rstd, torch.full_like(rstd, 1e-5).rsqrt())
    dx, dweight, dbias, dz = CPU.channel_backward(x, x, mean, rstd, None, None, None, None, "relu", 0, True)
    assert dx.shape == dz.shape == shape
    assert dweight.eq(0).all()
    assert dbias.eq(0).all()


@pytest.mark.parametrize("shape", [(3, 0, 4), (0, 4, 5), (2, 4, 0)], ids=str)
def test_groups_of_nothing(shape):
    x = torch.empty(shape)
    y, mean, _, rstd = CPU.channel_forward(x, None, None, None, 1e-5, "identity", 2)
    assert (y.shape, mean.shape) == (shape, (shape[0], 2))
    assert mean.eq(0).all()
    dx, dweight, dbias, _ = CPU.channel_backward(x, x, mean, rstd, None, None, None, None, "identity", 2)
    assert (dx.shape, dweight.shape, dbias.shape) == (shape, shape[1:2], shape[1:2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(34, 600, 5, 11), (2100, 8, 3)], ids=str)
@pytest.mark.parametrize(("act", "out_given"), [("identity", False), ("relu", True), ("gelu", False)])
def test_short_planes_sample_by_sample(shape, dtype, act, out_given):
    """Samples that differ, and channels of which one is constant and one far from its first samples."""
    call = call_on(ChannelCase(shape, "contiguous"), dtype, act, residual=True, out_given=out_given)
    x = call.x + torch.randn(*shape[:2], *[1] * (len(shape) - 2)).to(dtype)
    x[:2, 2] = 12
    if dtype != torch.float64:  # which sums in nothing wider, and so has no second way
        x[:, 1] = 3
    assert_close_to_reference(call._replace(x=x))


CUTS = [
    ((4, 64, 30, 30), 0), ((2, 3, 160, 160), 0), ((6, 512, 7, 7), 0), ((3, 24, 20, 20), 4),
    ((1, 6, 200, 200), 2), ((300, 700), 0), ((5, 3, 5001), 0), ((41, 1500, 3, 3), 0), ((33, 1700, 11), 0),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "groups"), CUTS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_threads_change_no_bit(shape, groups, layout):
    if layout == "channels_last" and len(shape) != 4:
        pytest.skip("no such layout")
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


@pytest.mark.parametrize(("shape", "groups"), [((3, 31), 0), ((4, 6, 3, 3), 2), *CUTS], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_float64_merges_far_means_without_losing_a_digit(shape, groups, layout):
    """Means of chunks are subtracted from each other: rounded, they leave eight digits of the variance."""
    if layout == "channels_last" and len(shape) != 4:
        pytest.skip("no such layout")
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
    given = torch.randn(5).double(), torch.rand(5).double(), torch.rand(5), torch.rand(5), residual
    y = CPU.channel_normalize(x, *given, "relu")
    dx, dz = CPU.channel_input_grad(dy, x, *given, None, *given[:2], "relu", True)
    alone = torch.ones(2, 5, *plane, dtype=dtype)  # too small for it
    x, dy, residual = (alone * v[:1] for v in (x, dy, residual))
    given = *given[:4], residual
    small = CPU.channel_normalize(x, *given, "relu")
    small_dx, small_dz = CPU.channel_input_grad(dy, x, *given, None, *given[:2], "relu", True)
    for large, want in ((y, small), (dx, small_dx), (dz, small_dz)):
        assert torch.equal(large, want[:1].expand(shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ["identity", "relu", "gelu"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_rebuilt_output_is_the_same_bits(dtype, act, layout):
    for shape, groups in (((4, 64, 15, 15), 0), ((2, 6, 33, 17), 3)):
        call = call_on(ChannelCase(shape, layout), dtype, act, groups)
        y, mean, _, rstd = CPU.channel_forward(call.x, call.weight, call.bias, None, 1e-5, act, groups)
        assert torch.equal(y, CPU.channel_normalize(call.x, mean, rstd, call.weight, call.bias, None, act))
        # and so are the gradients, whether the derivative is read from the output or rebuilt
        saved = (call.dy, call.x, mean, rstd, call.weight, call.bias, None)
        kept = CPU.channel_backward(*saved, y, act, groups)
        rebuilt = CPU.channel_backward(*saved, None, act, groups)
        for a, b in zip(kept[:3], rebuilt[:3], strict=True):
            assert torch.equal(a, b)


def test_the_gradient_in_the_inputs_place_is_the_same():
    for layout in ("contiguous", "channels_last"):
        call = call_on(ChannelCase((4, 20, 9, 9), layout), torch.float32, "silu")
        _, mean, _, rstd = CPU.channel_forward(call.x, call.weight, call.bias, None, 1e-5, "silu")
        arguments = (mean, rstd, call.weight, call.bias, None, None, "silu", 0, False)
        dx, dweight, dbias, _ = CPU.channel_backward(call.dy, call.x, *arguments)
        place = call.x.clone()
        more = torch.ops.leannorm.channel_backward_(call.dy, place, *arguments)
        assert torch.equal(place, dx)
        assert torch.equal(more[0], dweight)
        assert torch.equal(more[1], dbias)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("groups", [0, 2])
def test_the_dispatcher_finds_nothing_wrong(layout, groups):
    call = call_on(ChannelCase((2, 4, 3, 3), layout), torch.float32, residual=True)
    x, dy, weight, bias, residual, act, _, _ = call
    _, mean, m2, rstd = CPU.channel_forward(x, weight, bias, residual, 1e-5, act, groups)
    saved = (dy, x, mean, rstd, weight, bias, residual, None)
    buffers = torch.zeros(4), torch.ones(4), torch.tensor(0)
    ops = torch.ops.leannorm
    for op, arguments in (
        (ops.channel_moments, (x, groups)),
        (ops.channel_normalize, (x, mean, rstd, weight, bias, residual, act)),
        (ops.channel_grad_sums, (*saved, act)),
        (ops.channel_input_grad, (*saved, mean, m2, act, True)),
        (ops.channel_forward, (x, weight, bias, residual, 1e-5, act, groups)),
        (ops.channel_forward_tracked_, (x, weight, bias, residual, 1e-5, act, *buffers, 0.1)),
        (ops.channel_backward, (*saved, act, groups, True)),
        (ops.channel_backward_, (dy, x.clone(), *saved[2:], act, groups, False)),
    ):
        torch.library.opcheck(op.default, arguments)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc counts, since 2.33")
def test_a_call_leaves_nothing_behind():
    """Not even a few bytes: a small block that stays keeps the large one beside it from being used again."""
    fields = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "in_use", "free", "top"]
    info = type("Info", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in fields]})
    malloc = ctypes.CDLL(None).mallinfo2
    malloc.restype = info
    call = call_on(ChannelCase((2, 4, 3, 3), "contiguous"), torch.float32, residual=True)
    running = torch.zeros(4), torch.ones(4), torch.tensor(0), 0.1

    def calls(n):
        for _ in range(n):
            results(CPU, call)
            CPU.channel_forward(call.x, None, None, None, 1e-5, running=running)
            with pytest.raises(RuntimeError, match="unknown activation"):
                CPU.channel_normalize(call.x, running[0].double(), running[1].double(), act="softplus")

    calls(200)
    before = malloc().in_use
    calls(1000)
    assert malloc().in_use - before < 16 * 1000


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"groups": 3}, "cannot be divided into 3 groups"),
        ({"act": "softplus"}, "unknown activation softplus"),
        ({"weight": torch.ones(3)}, "weight must have one value a channel"),
        ({"residual": torch.ones(2, 4, 3, 2)}, "residual must have the dtype, shape and layout"),
        ({"x": torch.ones(2, 4, 3, 6)[..., ::2]}, "contiguous or channels_last"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_kernel_refuses_what_it_cannot_read(changed, words):
    good = {
        "x": torch.ones(2, 4, 3, 3),
        "weight": None,
        "residual": None,
        "act": "relu",
        "groups": 0,
    } | changed
    with pytest.raises(RuntimeError, match=words):
        torch.ops.leannorm.channel_forward(
            good["x"], good["weight"], None, good["residual"], 1e-5, good["act"], good["groups"]
        )


def test_a_parameter_of_any_dtype():
    x = torch.randn(4, 6, 5, dtype=torch.bfloat16)
    weight, bias = torch.rand(6, dtype=torch.float64), torch.randn(6, dtype=torch.float16)
    y, *_ = CPU.channel_forward(x, weight, bias, None, 1e-5)
    want, *_ = REFERENCE.channel_forward(x.double(), weight, bias.double(), None, 1e-5)
    assert (y.double() - want).abs().max() <= torch.finfo(torch.bfloat16).eps * want.abs().max()


@pytest.mark.parametrize("isa", ["v3", "base"])
def test_every_instruction_set(isa):
    """The same tests on the kernels of lesser machines, in a process of their own."""
    if os.environ.get("LEANNORM_ISA"):
        pytest.skip("this is that process")
    names = "references or activation or size"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", names],
        env=os.environ | {"LEANNORM_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:]


@pytest.mark.skipif("LEANNORM_LARGE" not in os.environ, reason="takes 14 GiB; set LEANNORM_LARGE to run")
@pytest.mark.parametrize("shape", [(2, 3, 2**29 // 3 + 5), (2**29 + 9, 2), (3, 2, 2**28 + 7)], ids=str)
def test_more_elements_than_an_int_counts(shape):
    torch.utils.deterministic.fill_uninitialized_memory = False
    x = torch.empty((*shape[:2], *shape[2:], 2) if len(shape) == 3 else (shape[0], 4), dtype=torch.bfloat16)
    assert x.numel() > 2**31
    x.fill_(1)
    x[-1, -1] = 3
    y, mean, _, rstd = CPU.channel_forward(x, None, None, None, 1e-5, "identity", 0)
    count = x[:, -1].numel()
    last = count + 2 * x[-1, -1].numel()
    assert abs(mean[-1].item() - last / count) < 1e-6
    assert y[-1, -1].flatten()[-1] == ((3 - mean[-1]) * rstd[-1]).bfloat16()
    torch.ops.leannorm.channel_backward_(y, x, mean, rstd, None, None, None, None, "identity", 0, False)
    assert x.flatten()[-1].isfinite()


def test_lay_out_is_what_the_kernels_are_fed():
    x = lay_out(torch.randn(2, 3, 4, 5), "channels_last")
    y, *_ = CPU.channel_forward(x, None, None, None, 1e-5)
    assert y.stride() == x.stride()
