"""Rows that are lines of memory but do not follow each other: the heads of q, k and v, without a copy."""

import pytest
import torch
from cases import DTYPES
from kernel_cases import needs_kernels

from leannorm import functional
from leannorm._types import KeptByRowNorm, Rows
from leannorm.ops.backends import CPU, REFERENCE

pytestmark = needs_kernels
B, L, H, D = 3, 37, 4, 24
VIEWS = {
    "a slice of the projection": lambda t: t(B, L, 3 * H * D)[..., H * D : 2 * H * D].view(B, L, H, D),
    "heads before tokens": lambda t: t(B, L, H, D).transpose(1, 2),
    "both": lambda t: t(B, L, 3, H, D)[:, :, 1].transpose(1, 2),
    "heads interleaved": lambda t: t(B, L, H, 3, D)[..., 0, :],
    "tokens first": lambda t: t(L, B, H, D).transpose(0, 1),
    "every other token": lambda t: t(B, 2 * L, H, D)[:, ::2],
    "backwards": lambda t: t(B, L, H, D).transpose(0, 2).transpose(1, 2),
    "one head": lambda t: t(B, L, 5, D)[:, :, 2:3],
    "one row": lambda t: t(2 * D)[D:].view(1, 1, 1, D),
    "expanded": lambda t: t(B, 1, H, 2 * D)[..., :D].expand(B, L, H, D),
    "no rows": lambda t: t(B, 0, 3 * H * D)[..., : H * D].view(B, 0, H, D),
}
VIEW = pytest.mark.parametrize("view", VIEWS)
RMS = pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])


def made(view, dtype=torch.float32):
    return VIEWS[view](lambda *shape: torch.randn(shape).to(dtype))


def both_ways(backend, x, dy, dtotal, weight, bias, rms):
    rows = Rows(3, 4, 1e-5, rms, 0.5)
    y, _, mean, rstd = backend.row_forward((x, None, None, None, None, weight, bias), rows)
    grads = backend.row_backward(dy, dtotal, KeptByRowNorm(x, mean, rstd, weight), rows)
    return y, mean, rstd, *grads


@RMS
@VIEW
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_as_of_a_contiguous_copy(view, dtype, rms):
    """But for the parameters' gradients, whose rows are added in the order of memory."""
    x = made(view, dtype)
    weight, bias = torch.randn(D), None if rms else torch.randn(D)
    for of_dy in VIEWS:
        dy = made(of_dy, dtype)
        if dy.shape != x.shape:
            continue
        for dtotal in (None, made(view, dtype)):
            got = both_ways(CPU, x, dy, dtotal, weight, bias, rms)
            plain = [None if t is None else t.contiguous() for t in (x, dy, dtotal)]
            want = both_ways(CPU, *plain, weight, bias, rms)
            for i, (g, w) in enumerate(zip(got, want, strict=True)):
                if i < 4:
                    assert torch.equal(g, w)
                elif w is not None:
                    torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
            assert got[0].stride() == got[3].stride() == torch.empty_like(x).stride()


@RMS
@VIEW
def test_agrees_with_the_reference(view, rms):
    x, dy = made(view), made(view)
    weight, bias = torch.randn(D), None if rms else torch.randn(D)
    for g, w in zip(*(both_ways(b, x, dy, None, weight, bias, rms) for b in (CPU, REFERENCE)), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)


COPIES = {"aten::copy_", "aten::clone", "aten::contiguous"}


@pytest.mark.parametrize("view", [v for v in VIEWS if v != "no rows"])
def test_nothing_is_copied(view):
    x, dy, weight = made(view), made(view), torch.randn(D)
    with torch.profiler.profile() as profile:
        both_ways(CPU, x, dy, None, weight, None, True)
    assert not COPIES & {event.key for event in profile.key_averages()}
    with torch.profiler.profile() as profile:  # the last axis is no line: else the test could not fail
        both_ways(
            CPU,
            x.flip(-1).transpose(2, 3).contiguous().transpose(2, 3)[..., ::2],
            *(t[..., ::2] for t in (dy,)),
            None,
            weight[::2],
            None,
            True,
        )
    assert COPIES & {event.key for event in profile.key_averages()}


def test_the_number_of_threads_changes_nothing():
    x, dy = (VIEWS["both"](lambda *shape: torch.randn(8, 600, *shape[2:])) for _ in range(2))
    weight, before, results = torch.randn(D), torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(both_ways(CPU, x, dy, None, weight, None, True))
    torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_queries_and_keys_of_attention():
    """Through the function: values and gradients of the projection's output."""
    qkv = torch.randn(2, 50, 3 * H * D).bfloat16().requires_grad_()
    weight = torch.randn(D).bfloat16().requires_grad_()

    def loss(norm):
        q, k, v = qkv.view(2, 50, 3, H, D).unbind(2)
        q, k = (norm(t).transpose(1, 2) for t in (q, k))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v.transpose(1, 2)).float().pow(2).sum()

    def plain(t):
        wide = t.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * weight

    ours = torch.autograd.grad(
        loss(lambda t: functional.rms_norm(t, (D,), weight, 1e-6, cast="before")), (qkv, weight)
    )
    theirs = torch.autograd.grad(loss(plain), (qkv, weight))
    for g, w in zip(ours, theirs, strict=True):
        assert (g - w).abs().max() <= 0.05 * w.abs().max()
