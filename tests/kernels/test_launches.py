"""Launches and copies of a layer on a GPU, and of a pass under `lean()`, by the tables in docs/gpu.md."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import standin
import torch
from stand_ins import on_device
from standin_cases import LAUNCHED
from test_lean_device import needs_standin
from torch.utils._python_dispatch import TorchDispatchMode

from leannorm import functional, nn, use_backend
from leannorm._types import Channels, ChannelTensors, KeptByChannelNorm, KeptByRowNorm, Rows
from leannorm.autograd import sync
from leannorm.autograd.sync import Sharing
from leannorm.functional import channels
from leannorm.ops.backends import REFERENCE, TRITON, triton
from leannorm.ops.sums import HEADER

pytestmark = pytest.mark.skipif(triton._UNAVAILABLE is not None, reason=str(triton._UNAVAILABLE))
PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BF16 = torch.bfloat16
IMAGES, SMALL, ROWS = (64, 64, 80, 80), (2, 64, 14, 14), (4096, 1024)
POSITIONS = 64, 80, 80
TOKENS = (8, 512, 1024)


def no_grad(layer: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.no_grad()(layer.forward)


def with_residual(layer: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: layer(x, torch.empty_like(x).requires_grad_())


def masked(layer: torch.nn.Module, *shape: int) -> Callable[[torch.Tensor], torch.Tensor]:
    mask = torch.empty(shape, dtype=torch.bool)
    return lambda x: layer(x, mask=mask)


def add_norm() -> Callable[[torch.Tensor], torch.Tensor]:
    weight = torch.ones(ROWS[-1:], dtype=BF16, requires_grad=True)
    return lambda x: functional.add_rms_norm(x, torch.empty_like(x), ROWS[-1:], weight)[0]


def ada_norm(*places: int, rms: bool = False, summed: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """A scale and a shift of these leading sizes, in 16 bits as a network makes them."""

    def line() -> torch.Tensor:
        return torch.empty(*places, TOKENS[-1], dtype=BF16, requires_grad=True)

    scale, shift, gate = line(), line(), line()
    if summed:
        return lambda x: functional.add_ada_layer_norm(
            x, torch.empty_like(x).requires_grad_(), gate, TOKENS[-1:], scale, shift
        )[0]
    if rms:
        return lambda x: functional.ada_rms_norm(x, TOKENS[-1:], scale, shift=shift)
    return lambda x: functional.ada_layer_norm(x, TOKENS[-1:], scale, shift)


def gated_norm(before: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    weight = torch.ones(TOKENS[-1:], requires_grad=True)
    return lambda x: functional.gated_rms_norm(
        x, torch.empty_like(x).requires_grad_(), TOKENS[-1:], weight, norm_before_gate=before
    )


def heads() -> Callable[[torch.Tensor], torch.Tensor]:
    """Every second of several heads, as in a projection of q, k and v."""
    weight = torch.ones(64, dtype=BF16, requires_grad=True)
    return lambda x: functional.rms_norm(
        x.unflatten(2, (-1, 2, 64))[..., 1, :], (64,), weight, weight_offset=1.0, cast="before"
    )


def over_ranks() -> Callable[[torch.Tensor], torch.Tensor]:
    """What SyncBatchNorm calls where there are several ranks; the sum over them counts as one launch."""
    m = nn.SyncBatchNorm(64)
    of_layer = m.weight, m.bias, None, m.running_mean, m.running_var, m.num_batches_tracked
    norm, sharing = Channels(0, 1e-5, momentum=0.1), Sharing("ranks", "layer")
    return lambda x: channels._by_batch(ChannelTensors(x, *of_layer), norm, None, sharing, None)


# each row of the table: the layer, and an input; bf16 layers have parameters in 16 bits
CASES: dict[str, tuple[Callable[[], Callable[[torch.Tensor], torch.Tensor]], tuple[int, ...]]] = {
    "`BatchNorm2d`": (lambda: nn.BatchNorm2d(64), IMAGES),
    "`BatchNorm2d`, a small input": (lambda: nn.BatchNorm2d(64), SMALL),
    "`BatchNorm2d`, bfloat16 parameters": (lambda: nn.BatchNorm2d(64, dtype=BF16), IMAGES),
    "`BatchNorm2d`, evaluation": (lambda: nn.BatchNorm2d(64).eval(), IMAGES),
    "`BatchNorm2d`, evaluation without gradients": (lambda: no_grad(nn.BatchNorm2d(64).eval()), IMAGES),
    "`BatchNorm2d` with a mask": (lambda: masked(nn.BatchNorm2d(64), *POSITIONS), IMAGES),
    "`BatchNorm2d` with a mask, a small input": (lambda: masked(nn.BatchNorm2d(64), 2, 14, 14), SMALL),
    "`BatchNormAct2d` with a residual": (lambda: with_residual(nn.BatchNormAct2d(64)), IMAGES),
    "`GroupNorm`": (lambda: nn.GroupNorm(32, 64), IMAGES),
    "`GroupNorm` with a mask": (lambda: masked(nn.GroupNorm(32, 64), *POSITIONS), IMAGES),
    "`GroupNorm`, large planes": (lambda: nn.GroupNorm(2, 64), (2, 64, 512, 512)),
    "`GroupNorm`, one sample": (lambda: nn.GroupNorm(32, 64, dtype=BF16), (1, 64, 56, 56)),
    "`GroupNorm`, bfloat16 parameters": (lambda: nn.GroupNorm(32, 64, dtype=BF16), IMAGES),
    "`InstanceNorm2d`": (lambda: nn.InstanceNorm2d(64, affine=True), IMAGES),
    "`InstanceNorm2d` with a mask": (
        lambda: masked(nn.InstanceNorm2d(64, affine=True), *POSITIONS),
        IMAGES,
    ),
    "`InstanceNorm2d`, running statistics": (
        lambda: nn.InstanceNorm2d(64, affine=True, track_running_stats=True),
        IMAGES,
    ),
    "`LayerNorm`": (lambda: nn.LayerNorm(1024), ROWS),
    "`LayerNorm` with a mask": (lambda: masked(nn.LayerNorm(1024), 4096), ROWS),
    "`LayerNorm`, bfloat16 parameters": (lambda: nn.LayerNorm(1024, dtype=BF16), ROWS),
    "`LayerNorm`, rows longer than a tile": (lambda: nn.LayerNorm(65536), (64, 65536)),
    "`SyncBatchNorm` over several ranks": (over_ranks, IMAGES),
    "`ada_layer_norm`, of a sample": (lambda: ada_norm(8), TOKENS),
    "`ada_layer_norm`, of a token": (lambda: ada_norm(8, 512), TOKENS),
    "`ada_rms_norm`, of a sample": (lambda: ada_norm(8, rms=True), TOKENS),
    "`add_ada_layer_norm`, of a sample": (lambda: ada_norm(8, summed=True), TOKENS),
    "`add_ada_layer_norm`, of a token": (lambda: ada_norm(8, 512, summed=True), TOKENS),
    "`add_rms_norm`": (add_norm, ROWS),
    "`gated_rms_norm`": (lambda: gated_norm(True), TOKENS),
    "`gated_rms_norm`, behind the gate": (lambda: gated_norm(False), TOKENS),
    "`group_norm_act`": (lambda: nn.GroupNormAct(32, 64, act="silu"), IMAGES),
    "`RMSNorm`": (lambda: nn.RMSNorm(1024), ROWS),
    "`RMSNorm` with a mask": (lambda: masked(nn.RMSNorm(1024), 4096), ROWS),
    "`rms_norm` of strided heads": (heads, TOKENS),
    "`RMSNorm`, bfloat16 parameters": (lambda: nn.RMSNorm(1024, dtype=BF16), ROWS),
}


class Counted(TorchDispatchMode):
    """Counts torch's operations that launch something: all but views and new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        silent = "empty" in func.__name__ or func.__name__.startswith(
            ("detach", "promote_types", "_unsafe_view")
        )
        if not (func.is_view or silent):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def counted(monkeypatch):
    """The kernels are noted in place of being run, on tensors without memory."""
    mode = Counted()
    note = lambda kernel, *_, **__: mode.seen.append(kernel.__name__)  # noqa: E731
    on_device(monkeypatch, processors=132, launch=note)

    def add_up(sums, count, *_):  # type: ignore[no-untyped-def]
        message = TRITON.message_of(sums, (1, 2), 0, count, 512, sums[0].device)
        mode.seen.append("all_reduce")
        return message.narrow(0, HEADER - 1, 1 + sum(s.numel() for s in sums))

    taken = (
        (sync, "add_up", add_up),
        (TRITON, "why_not", lambda *_, **__: []),
        (TRITON, "ops", triton._kernels),
        (triton, "_listened_to", lambda: False),  # except for this count
    )
    for owner, name, stand_in in taken:
        monkeypatch.setattr(owner, name, stand_in)
    with use_backend("triton"), torch.device("meta"):
        yield mode


def table() -> dict[str, tuple[int, int]]:
    rows = re.findall(r"^\| ([^|]*) \| (\d+) \| (\d+) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: (int(forward), int(backward)) for name, forward, backward in rows}


def test_the_table_has_every_case():
    assert set(table()) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_launches_are_those_of_the_table(counted, name):
    make, shape = CASES[name]
    call, x = make(), torch.empty(shape, dtype=BF16, requires_grad=True)
    dy = torch.empty_like(call(x))
    call(x)  # what is launched once, for all later calls
    counted.seen.clear()
    with counted:
        y = call(x)
        forward = list(counted.seen)
        counted.seen.clear()
        if y.requires_grad:
            torch.autograd.backward(y, dy)
    backward = counted.seen
    print(name, len(forward), len(backward), forward, backward)
    assert (len(forward), len(backward)) == table()[name], (forward, backward)


def table_of_passes() -> dict[str, tuple[int, ...]]:
    rows = re.findall(r"^\| ([^|]*) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: tuple(map(int, counts)) for name, *counts in rows}


@cache
def added_by_passes() -> dict[str, list[dict[str, dict[str, int]]]]:
    found: dict[str, list[dict[str, dict[str, int]]]] = standin.found_by("launched_on_standin.py")
    return found


def test_the_table_of_passes_has_every_case():
    assert set(table_of_passes()) == {", ".join(case) for case in LAUNCHED}


@needs_standin
@pytest.mark.parametrize(("name", "which"), LAUNCHED)
def test_what_a_pass_adds_is_that_of_the_table(name, which):
    """Counted on the stand-in for a GPU; the host reads nothing back once all calls were tried."""
    passes = added_by_passes()[f"{name}, {which}"]
    assert not any(one["waits"] for one in passes[2:])
    most = table_of_passes()[f"{name}, {which}"]
    for one in passes[2:]:
        added = tuple(sum(one[part].values()) for part in ("forward", "again", "others"))
        assert all(map(operator.le, added, most)), one
        assert added == most or which == "budget", one  # prices decide what a plan makes again


@pytest.fixture
def as_on_a_device(monkeypatch):
    """The interpreted kernels store what a device's would."""
    from leannorm.ops.backends.triton import channel_gradients, rows

    for module, name in ((channel_gradients, "gradient_dtype"), (rows, "row_gradient_dtype")):
        monkeypatch.setattr(module, name, lambda x, weight: weight.dtype)
    with use_backend("triton"):
        yield


@pytest.mark.sampled(of=4)
@pytest.mark.skipif(not triton.INTERPRETED, reason="runs on the interpreter")
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [0, 2])
@pytest.mark.parametrize("samples", [1, 3, 40])
def test_channel_kernels_store_the_weights_dtype(as_on_a_device, dtype, groups, samples):
    x, dy = torch.randn(samples, 4, 6), torch.randn(samples, 4, 6)
    weight = torch.rand(4).to(dtype)
    found, norm = [], Channels(groups, 1e-5)
    for backend in (TRITON, REFERENCE):
        _, mean, _, rstd, _ = REFERENCE.channel_forward(ChannelTensors(x, weight), norm)
        kept = KeptByChannelNorm(x, mean, rstd, weight, norm=norm)
        _, dweight, dbias, _ = backend.channel_backward(dy, kept)
        found.append((dweight, dbias))
    for ours, plain in zip(*found, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, plain.to(dtype), rtol=2 * torch.finfo(dtype).eps + 1e-6, atol=1e-5)


@pytest.mark.skipif(not triton.INTERPRETED, reason="runs on the interpreter")
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(2, 40), (900, 40), (3, 20000)])
def test_row_kernels_store_the_weights_dtype(as_on_a_device, dtype, shape):
    x, dy, weight = torch.randn(shape), torch.randn(shape), torch.rand(shape[1:]).to(dtype)
    rows = Rows(1, 2, 1e-5, False)
    _, _, mean, rstd = REFERENCE.row_forward((x, None, None, None, None, weight, None), rows)
    kept = KeptByRowNorm(x, mean, rstd, weight)
    ours, plain = (backend.row_backward(dy, None, kept, rows) for backend in (TRITON, REFERENCE))
    for a, b in zip(ours[1:], plain[1:], strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b.to(dtype), rtol=2 * torch.finfo(dtype).eps + 1e-6, atol=1e-4)


@pytest.mark.skipif(not triton.INTERPRETED, reason="runs on the interpreter")
@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(8), lambda: nn.LayerNorm(8)])
def test_a_bias_wider_than_the_weight_gets_all_digits_of_its_gradient(as_on_a_device, make):
    layer, x, dy = make(), torch.randn(50, 8), torch.randn(50, 8)
    layer.weight.data = layer.weight.data.to(BF16)
    layer(x).backward(dy)
    assert layer.weight.grad.dtype == BF16
    torch.testing.assert_close(layer.bias.grad, dy.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not triton.INTERPRETED, reason="runs on the interpreter")
@pytest.mark.parametrize("running", [torch.float32, torch.float64, BF16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16])
def test_evaluation_in_one_launch_is_that_in_two(dtype, running):
    x, residual = torch.randn(3, 4, 5, 5, dtype=dtype), torch.randn(3, 4, 5, 5, dtype=dtype)
    mean, var = torch.randn(4).to(running), torch.rand(4).to(running)
    weight, bias = torch.randn(4), torch.randn(4)
    for layout in (torch.contiguous_format, torch.channels_last):
        for *behind, act in ((None, None, None, "identity"), (weight, bias, residual, "relu")):
            norm = Channels(0, 1e-5, act, False)
            given, constants = x.to(memory_format=layout), TRITON.constants_of(mean, var, 1e-5)
            both = TRITON.channel_normalize(KeptByChannelNorm(given, *constants, *behind, norm=norm))
            one = TRITON.channel_evaluate(ChannelTensors(given, *behind, mean, var), norm)
            assert torch.equal(one, both)
            assert one.stride() == both.stride()
    stepped = torch.stack((mean, mean), 1)[:, 0], torch.stack((var, var), 1)[:, 0]
    some, other = (
        TRITON.channel_evaluate(ChannelTensors(x, None, None, None, *of), Channels(0, 1e-5))
        for of in (stepped, (mean, var))
    )
    assert torch.equal(some, other)


def test_evaluation_follows_every_edit_of_its_statistics():
    """By `.data`, by a replayed graph, from another rank: not all of them count a tensor's version up."""
    layer, x = nn.BatchNorm1d(4).eval(), torch.randn(8, 4)
    with use_backend("triton") if triton.INTERPRETED else nullcontext(), torch.no_grad():
        before = layer(x)
        layer.running_mean.data.add_(1.0)
        torch.testing.assert_close(layer(x), before - 1.0 / (1 + layer.eps) ** 0.5)
