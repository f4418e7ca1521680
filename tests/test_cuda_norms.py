"""What only a GPU can show of today's norms and of how kernels are launched: their numbers in every dtype."""

from __future__ import annotations

import pytest
import torch
from test_cuda import both_ways

import leannorm

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # torch's own, of what it offers
]


def of_both_backends(run, dtype, *given):
    """What `run` and its gradients give on the kernels, beside the reference in float64, same numbers.

    Of float64 the reference itself rounds: as much as it differs on a CPU, which adds up in another order.
    """
    leaves = [t.cuda().to(dtype).requires_grad_() for t in given]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    elsewhere = [t.detach().cpu().requires_grad_() for t in exact] if dtype == torch.float64 else exact
    found = []
    for backend, tensors in (("triton", leaves), ("reference", exact), ("reference", elsewhere)):
        with leannorm.use_backend(backend):
            y = run(*tensors)
            dy = torch.linspace(-1, 1, y.numel(), device="cuda").view(y.shape).to(dtype).to(y)
            found.append([y.detach(), *torch.autograd.grad(y, tensors, dy)])
    for a, b, c in zip(*found, strict=True):
        scale, rounds = b.abs().max().item() + 1, (b - c.to(b)).abs().max().item()
        assert a.dtype == dtype
        assert (a.double() - b).abs().max().item() <= 8 * torch.finfo(dtype).eps * scale + 2 * rounds


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
# rows of a tile, of two programs, and longer
WIDTHS = pytest.mark.parametrize("width", [40, 1152, 8192, 16384, 20000])


@DTYPES
@WIDTHS
@pytest.mark.parametrize("places", [(6,), (6, 37), (1, 37)])
def test_a_scale_a_shift_and_a_gated_residual(width, places, dtype):
    x, branch = torch.randn(6, 37, width), torch.randn(6, 37, width)
    gate, scale, shift = torch.randn(*places, 3 * width).chunk(3, -1)

    def run(*tensors):
        y, total = leannorm.functional.add_ada_layer_norm(*tensors[:3], (width,), *tensors[3:])
        return y + total

    of_both_backends(run, dtype, x, branch, gate, scale, shift)
    of_both_backends(
        lambda x, scale: leannorm.functional.ada_rms_norm(x, (width,), scale, 1e-5), dtype, x, scale
    )


@DTYPES
@WIDTHS
@pytest.mark.parametrize("before", [True, False])
def test_a_gate_that_is_a_slice(width, before, dtype):
    both, weight = torch.randn(50, 2 * width), torch.randn(width)

    def run(both, weight):
        x, gate = both.chunk(2, -1)
        return leannorm.functional.gated_rms_norm(
            x, gate, (width,), weight, 1e-5, "silu", norm_before_gate=before
        )

    of_both_backends(run, dtype, both, weight)


@DTYPES
@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_heads_where_they_are(size, dtype):
    """One launch forward: a copy would be another."""
    from benchmarks.gpu.shapes import launches

    qkv, weight = torch.randn(3, 70, 3, 5, size), torch.randn(size)

    def run(qkv, weight):
        q = qkv[:, :, 1]
        return leannorm.functional.rms_norm(q, (size,), weight, 1e-5, weight_offset=1.0).transpose(1, 2)

    of_both_backends(run, dtype, qkv, weight)
    x, w = qkv.cuda().to(dtype)[:, :, 1], weight.cuda().to(dtype)
    torch.use_deterministic_algorithms(False)  # which fill new memory, a launch each
    with torch.no_grad():
        assert launches(lambda: leannorm.functional.rms_norm(x, (size,), w, 1e-5), x.device) == 1


def padding(*positions):
    """A mask in which every third sample has no data."""
    mask = torch.rand(positions, device="cuda") < 0.7
    mask[::3] = False
    return mask


# one launch and several, extents that allow wide loads and not
MASKED = [(16, 32, 400), (7, 24, 33, 31), (64, 64, 56, 56)]


@DTYPES
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("groups", [0, 4, 8])
@pytest.mark.parametrize("shape", MASKED, ids=str)
def test_masked_norms_of_channels(shape, groups, last, dtype):
    """NaN in the padding."""
    x, residual = torch.randn(shape), torch.randn(shape)
    weight, bias = torch.rand(shape[1]), torch.rand(shape[1])
    mask = padding(shape[0], *shape[2:])
    if last and len(shape) == 4:
        x, residual = (t.to(memory_format=torch.channels_last) for t in (x, residual))

    def run(x, residual, weight, bias):
        x, r = (t.masked_fill(~mask.to(x.device).unsqueeze(1), float("nan")) for t in (x, residual))
        if groups:
            y = leannorm.functional.group_norm_act(
                x, groups, weight, bias, act="silu", mask=mask.to(x.device)
            )
            return y + residual
        return leannorm.functional.batch_norm_act(
            x, None, None, weight, bias, True, act="silu", residual=r, mask=mask.to(x.device)
        )

    of_both_backends(run, dtype, x, residual, weight, bias)


@DTYPES
@WIDTHS
def test_masked_rows(width, dtype):
    x, residual, weight = torch.randn(6, 37, width), torch.randn(6, 37, width), torch.rand(width)
    mask = padding(6, 37)

    def run(x, residual, weight):
        valid = mask.to(x.device)
        x = x.masked_fill(~valid.unsqueeze(-1), float("nan"))
        y, total = leannorm.functional.add_rms_norm(x, residual, (width,), weight, 1e-5, mask=valid)
        return y + total + leannorm.functional.layer_norm(x, (width,), weight, mask=valid)

    of_both_backends(run, dtype, x, residual, weight)


def test_all_valid_is_no_mask_and_nothing_waits_for_the_device():
    """To rounding: the compiler lays out the sums of the two in its own way."""
    x, dy = (torch.randn(64, 80, 1000, device="cuda") for _ in "xy")
    mask = torch.ones(64, 1000, dtype=torch.bool, device="cuda")
    layer = leannorm.nn.BatchNormAct1d(80, act="silu").cuda()

    def step(**masking):
        leaf = x.detach().requires_grad_()
        y = layer(leaf, **masking)
        return [y.detach(), *torch.autograd.grad(y, (leaf, layer.weight, layer.bias), dy)]

    want, _ = step(), step(mask=mask)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step(mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * b.abs().max().item())


def test_sums_of_groups_repeat_bit_for_bit():
    x, dy = (torch.randn(9, 300, 1024, device="cuda") for _ in "xy")
    scale, shift = (torch.randn(9, 1024, device="cuda", requires_grad=True) for _ in "xy")
    found = []
    for _ in range(5):
        y = leannorm.functional.ada_layer_norm(x, (1024,), scale, shift)
        found.append(torch.autograd.grad(y, (scale, shift), dy))
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True))


@pytest.mark.parametrize("last", [False, True])
def test_every_way_to_launch_the_channel_loops_is_right(last):
    """All numbers that a tuned file may have, one after the other: they compile, fit and agree."""
    from benchmarks.gpu.tune import launched_by
    from leannorm.ops.backends.triton import tuned
    from leannorm.ops.backends.triton.tiling import Choice

    x, dy = (torch.randn(64, 64, 56, 56, device="cuda", dtype=torch.bfloat16) for _ in "xy")
    if last:
        x, dy = (t.to(memory_format=torch.channels_last) for t in (x, dy))
    layer = leannorm.nn.BatchNormAct2d(64, act="relu").cuda()
    want = both_ways(layer, x, dy)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    about = {"triton": tuned.triton_version(), "multiprocessors": processors}
    for name, allowed in tuned.ALLOWED.items():
        for value in allowed:
            choice = Choice()._replace(**{name: value})
            try:
                tuned.read({**about, **choice._asdict()}, processors)
            except tuned.RefusedError:
                continue
            with launched_by(choice):
                for a, b in zip(both_ways(layer, x, dy), want, strict=True):
                    torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())
