"""The accuracy contract: error against float64 at any mean and scale, beside torch's best layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import needs_kernels

from leannorm import functional
from leannorm.report.answers import allowed_error

pytestmark = needs_kernels
LAYOUTS = ("contiguous", "channels_last")
# the mean in standard deviations, and the standard deviation
SCALES = [(0, 1), (1, 1), (10, 1), (100, 1), (1e3, 1), (1e4, 1), (0, 1e30), (3, 1e30)]


def norms(name):
    """Ours, torch's and the axes of the statistics."""
    if name == "batch":
        return (
            lambda x: functional.batch_norm(x, None, None, training=True),
            lambda x: F.batch_norm(x, None, None, training=True),
            lambda x: exact(x, (0, 2, 3)),
        )
    return (
        lambda x: functional.group_norm(x, 4),
        lambda x: F.group_norm(x, 4),
        lambda x: exact(x.unflatten(1, (4, -1)), (2, 3, 4)).flatten(1, 2),
    )


def exact(x, axes):
    centred = x - x.mean(axes, keepdim=True)
    return centred / (centred.square().mean(axes, keepdim=True) + 1e-5).sqrt()


def errors(function, x, dy, want, want_dx):
    x = x.detach().requires_grad_()
    y = function(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    scale = want_dx.abs().max().clamp_min(1e-300)  # gradients at 1e30 are 1e-30
    return (y.double() - want).abs().max().item(), ((dx.double() - want_dx).abs().max() / scale).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("gap", "std"), SCALES)
@pytest.mark.parametrize("layer", ["batch", "group"])
def test_error_is_at_most_twice_torchs_best(layer, gap, std, dtype):
    ours, torchs, definition = norms(layer)
    values = ((torch.randn(8, 16, 14, 14, dtype=torch.float64) + gap) * std).to(dtype)
    dy = torch.randn(values.shape).to(dtype)
    leaf = values.double().requires_grad_()
    want = definition(leaf)
    (want_dx,) = torch.autograd.grad(want, leaf, dy.double())
    want = want.detach()

    def laid_out(layout):
        format_ = torch.channels_last if layout == "channels_last" else torch.contiguous_format
        return values.contiguous(memory_format=format_), dy.contiguous(memory_format=format_)

    theirs = [errors(torchs, *laid_out(layout), want, want_dx) for layout in LAYOUTS]
    for layout in LAYOUTS:
        mine = errors(ours, *laid_out(layout), want, want_dx)
        for which, got, best, largest in zip(
            ("y", "dx"), mine, map(min, zip(*theirs, strict=True)), (want.abs().max(), 1.0), strict=True
        ):
            allowed = allowed_error(best if best == best else 0.0, dtype, float(largest), 2)
            assert got <= allowed, f"{layout} {which}: {got:.2e}, torch's best {best:.2e}"
