"""What a compiler is shown of a per-channel norm: the reference's numbers, and no more saved than stock's."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import ACTS, ChannelCase, lay_out
from kernel_cases import BF16, F16, F32, F64, Given, assert_close_to_reference, call_on, needs_kernels
from torch import nn

import leannorm
from leannorm.ops import schema
from leannorm.ops.backends import CPU
from leannorm.ops.backends.shown import SHOWN

pytestmark = needs_kernels
LAYOUTS = ("contiguous", "channels_last")


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", [0, 1, 2, 6])
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
@pytest.mark.parametrize("act", ACTS)
def test_the_formula_is_the_references(act, dtype, groups, layout):
    for residual, out_given in ((False, False), (True, False), (True, True)):
        given = Given(ChannelCase((3, 6, 5, 7), layout), dtype, act, groups, residual, out_given)
        assert_close_to_reference(call_on(*given), SHOWN)


@pytest.mark.parametrize("case", [(40, 3), (2, 6, 1), (2, 6, 9), (2, 3, 2, 4, 3)], ids=str)
@pytest.mark.parametrize("groups", [0, 3])
def test_any_number_of_axes(case, groups):
    if len(case) > 2 or not groups:
        assert_close_to_reference(call_on(ChannelCase(case), F32, "silu", groups), SHOWN)


@pytest.mark.parametrize(("mean", "std"), [(1e4, 1.0), (1.0, 0.0), (0.0, 1e-6), (0.0, 1e30), (3e30, 1e30)])
@pytest.mark.parametrize("groups", [0, 2])
def test_a_mean_far_from_zero(mean, std, groups):
    call = call_on(ChannelCase((4, 4, 3, 7)), F32, groups=groups)
    assert_close_to_reference(call._replace(x=(call.x - 0.5) / 2 * std + mean), SHOWN)


def test_a_residual_of_a_wider_dtype_is_added_in_the_arithmetics():
    call = call_on(ChannelCase((4, 4, 3, 7)), F32, "silu", residual=True)
    wide = call._replace(residual=call.residual.double())
    (y, mean, _, rstd, _), (same, *_) = (SHOWN.channel_forward(c.tensors, c.norm) for c in (wide, call))
    assert torch.equal(y, same)
    gradients = SHOWN.channel_backward(call.dy, wide.kept(mean, rstd), want_dz=True)
    assert [v.dtype for v in gradients] == [F32] * 4


@pytest.mark.parametrize("layout", ["sliced", "transposed", "expanded", "offset"])
def test_the_operator_that_stays_takes_any_layout(layout):
    """A compiler chooses layouts, and none may be read as another."""
    x = torch.randn(4, 6, 5, 3)
    for given in (lay_out(x, layout), x.permute(0, 3, 2, 1), x.permute(3, 1, 0, 2)):
        for groups in (0, 3):
            *found, _ = schema.OPS.channel_moments(given, groups)
            want = CPU.channel_moments(given.contiguous(), groups)
            assert all(map(torch.equal, found, (want.mean, want.m2)))


class SqueezeAndExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 8, 1), nn.Conv2d(8, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.up(torch.relu(self.down(means))))


def block(act: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False),
        nn.BatchNorm2d(16),
        act(),
        SqueezeAndExcite(16),
        nn.Conv2d(16, 4, 1, bias=False),
        nn.BatchNorm2d(4),
    )


def compiled(model: nn.Module, backend: str) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True)


def bytes_saved(model: nn.Module, x: torch.Tensor) -> int:
    """What the compiled forward pass saves for the backward pass: parted as inductor parts it."""
    y = compiled(model, "aot_eager_decomp_partition")(x)
    saved = {t.untyped_storage().data_ptr(): t for t in y.grad_fn.saved_tensors if t is not None}
    return sum(t.numel() * t.element_size() for t in saved.values())


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("act", [nn.Hardswish, nn.SiLU, nn.ReLU])
def test_a_compiled_block_saves_no_more_than_stocks(act):
    model, x = block(act), torch.randn(4, 3, 20, 20)
    converted = leannorm.convert(copy.deepcopy(model))
    stock, ours = bytes_saved(model, x), bytes_saved(converted, x)
    assert ours <= 1.02 * stock  # what is per channel is float64


BY = ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.conformance)]


@pytest.mark.parametrize("backend", BY)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_compiled_block(training, backend):
    """Output, gradients and buffers are the eager block's, for an input that lies in no usual order: but for
    twice what the backend makes of stock's, which it may round by approximations of its own."""
    stock = block(nn.Hardswish).train(training)
    ours = leannorm.convert(copy.deepcopy(stock))
    x = torch.randn(4, 12, 12, 3)

    def results(model, call):
        leaf = x.permute(0, 3, 2, 1).detach().requires_grad_()
        y = call(leaf)
        y.square().sum().backward()
        return [y, leaf.grad, *(p.grad for p in model.parameters()), *model.buffers()]

    found = []
    for model in (stock, ours):
        twin = copy.deepcopy(model)
        found += [results(model, model), results(twin, compiled(twin, backend))]
    for theirs, theirs_compiled, eager, fast in zip(*found, strict=True):
        rounding = (theirs_compiled - theirs).abs().max().item()
        torch.testing.assert_close(fast, eager, rtol=1e-4, atol=1e-4 + 2 * rounding)
