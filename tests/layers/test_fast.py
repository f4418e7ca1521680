"""The fast path (autograd/fast.py), beside the whole way: same bits, errors and state."""

from __future__ import annotations

import copy
import itertools
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
from cases import is_fast, output_and_gradients
from stand_ins import whole_way, without_nodes
from torch.utils.checkpoint import checkpoint

import leannorm
from leannorm import functional, nn
from leannorm._types import Channels, KeptByChannelNorm
from leannorm.autograd import fast
from leannorm.ops.backends import CPU

pytestmark = pytest.mark.skipif(bool(CPU.why_not()), reason="; ".join(CPU.why_not()))


@pytest.fixture(params=["C++", "Python"] if fast.NODES is not None else ["Python"], autouse=True)
def nodes_in(request, monkeypatch):
    """Both kinds of autograd nodes, where both are here."""
    if request.param == "Python":
        without_nodes(monkeypatch, "autograd")


class Summed(torch.nn.Module):
    """A batch norm, plus a residual that its input makes, through an activation."""

    def __init__(self, act):
        super().__init__()
        self.norm = nn.BatchNormAct2d(8, act=act)

    def forward(self, x):
        return self.norm(x, x.sin())


IMAGE = (6, 8, 5, 3)
LAYERS = {
    "batch": (lambda: nn.BatchNorm2d(8), IMAGE),
    "batch, cumulative": (lambda: nn.BatchNorm2d(8, momentum=None), IMAGE),
    "batch, rows": (lambda: nn.BatchNorm1d(8), (6, 8)),
    "batch, signals": (lambda: nn.BatchNorm1d(8), (6, 8, 5)),
    "batch, volumes": (lambda: nn.BatchNorm3d(8), (2, 8, 3, 2, 2)),
    "batch, no affine": (lambda: nn.BatchNorm2d(8, affine=False), IMAGE),
    "batch, float64 statistics": (lambda: nn.BatchNorm2d(8, stats_dtype=torch.float64), IMAGE),
    "batch, no statistics": (lambda: nn.BatchNorm2d(8, track_running_stats=False), IMAGE),
    "batch, no statistics, eval": (lambda: nn.BatchNorm2d(8, track_running_stats=False).eval(), IMAGE),
    "batch, act": (lambda: nn.BatchNormAct2d(8, act="silu"), IMAGE),
    "batch, act by output": (lambda: nn.BatchNormAct2d(8, act="relu"), IMAGE),
    "batch, residual": (lambda: Summed("identity"), IMAGE),
    "batch, residual, act": (lambda: Summed("silu"), IMAGE),
    "batch, residual, act by output": (lambda: Summed("relu"), IMAGE),
    "batch, residual, eval": (lambda: Summed("silu").eval(), IMAGE),
    "batch, residual, eval, act by output": (lambda: Summed("relu").eval(), IMAGE),
    "batch, eval": (lambda: nn.BatchNorm2d(8).eval(), IMAGE),
    "batch, eval, act": (lambda: nn.BatchNormAct2d(8, act="relu").eval(), IMAGE),
    "group": (lambda: nn.GroupNorm(2, 8), IMAGE),
    "group, act": (lambda: nn.GroupNormAct(4, 8), IMAGE),
    "group, no affine": (lambda: nn.GroupNorm(2, 8, affine=False), IMAGE),
    "instance": (lambda: nn.InstanceNorm2d(8, affine=True), IMAGE),
    "instance, no affine": (lambda: nn.InstanceNorm1d(8), (6, 8, 5)),
    "layer": (lambda: nn.LayerNorm((5, 3)), IMAGE),
    "layer, no bias": (lambda: nn.LayerNorm(3, bias=False), IMAGE),
    "layer, no affine": (lambda: nn.LayerNorm(3, elementwise_affine=False), IMAGE),
    "layer, dim=1": (lambda: nn.LayerNorm(8, dim=1), IMAGE),
    "rms": (lambda: nn.RMSNorm(3), IMAGE),
    "rms, 1 + weight": (lambda: nn.RMSNorm(3, weight_offset=1.0), IMAGE),
    "rms, dim=-3, cast": (lambda: nn.RMSNorm(8, dim=-3, cast="before"), IMAGE),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],  # which is not dense
}


def trained(make, dtype):
    torch.manual_seed(1)
    layer = make()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) + 1)
        for name, b in layer.named_buffers():
            if b.is_floating_point():
                b.copy_(torch.rand_like(b) + ("var" in name))
    return layer.to(dtype)


def outcome(layer, x, dy, second=False):
    """All that a call leaves behind: output, gradients, buffers, and the gradients' gradients."""
    y, found, more = output_and_gradients(layer, x, dy, second)
    with torch.no_grad():
        plain = copy.deepcopy(layer)(x)
    return [y, *found, *more, plain, *layer.buffers()], y.grad_fn


def assert_equal(ours, others):
    assert len(ours) == len(others)
    for a, b in zip(ours, others, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sampled(of=3)
def test_the_same_bits(name, dtype, layout, monkeypatch):
    make, shape = LAYERS[name]
    x, dy = LAYOUTS[layout](torch.randn(shape).to(dtype)), torch.randn(shape).to(dtype)
    ours, node = outcome(trained(make, dtype), x, dy)
    assert is_fast(node) == (layout != "strided" or name.startswith(("layer", "rms")))
    whole_way(monkeypatch)
    others, node = outcome(trained(make, dtype), x, dy)
    assert not is_fast(node)
    assert_equal(ours, others)


@pytest.mark.parametrize("name", LAYERS)
def test_the_same_second_derivatives(name, monkeypatch):
    make, shape = LAYERS[name]
    x, dy = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    ours, node = outcome(trained(make, torch.float64), x, dy, second=True)
    assert is_fast(node)
    whole_way(monkeypatch)
    assert_equal(ours, outcome(trained(make, torch.float64), x, dy, second=True)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ["identity", "relu", "silu"])
def test_evaluation_has_the_gradients_of_the_single_verbs(act, dtype, layout, monkeypatch):
    """Each part of them, whichever operator makes it, by the fast path and by the whole way."""
    layer = trained(lambda: nn.BatchNormAct2d(8, act=act).eval(), dtype)
    x, dy = LAYOUTS[layout](torch.randn(IMAGE).to(dtype)), torch.randn(IMAGE).to(dtype)
    mean, rstd = CPU.constants_of(layer.running_mean, layer.running_var, layer.eps)
    affine = layer.weight.detach(), layer.bias.detach()
    kept = KeptByChannelNorm(x, mean, rstd, *affine, norm=Channels(act=act))
    dbias, dweight = CPU.channel_grad_sums(dy, kept)
    dx, _ = CPU.channel_input_grad(dy, kept)
    want = dx, dweight.to(dtype), dbias.to(dtype)
    for way in ("fast", "whole"):
        for needed in itertools.product((False, True), repeat=3):
            if not any(needed):
                continue
            leaves = [x.detach(), layer.weight, layer.bias]
            for leaf, need in zip(leaves, needed, strict=True):
                leaf.requires_grad_(need).grad = None
            layer(leaves[0]).backward(dy)
            for leaf, need, gradient in zip(leaves, needed, want, strict=True):
                assert torch.equal(leaf.grad, gradient) if need else leaf.grad is None, (way, needed)
        whole_way(monkeypatch)


def test_evaluation_goes_back_by_one_operator():
    layer, x = nn.BatchNorm2d(8).eval(), torch.randn(IMAGE, requires_grad=True)
    y = layer(x)
    with torch.profiler.profile() as profile:
        y.backward(torch.ones_like(y))
    seen = [event.name for event in profile.events() if event.name.startswith("leannorm::")]
    assert seen == ["leannorm::channel_backward"]


def test_evaluation_with_a_bias_wider_than_the_weight(monkeypatch):
    """Its gradient has all of its digits."""
    layer, x, dy = trained(LAYERS["batch, eval"][0], torch.float32), torch.randn(IMAGE), torch.randn(IMAGE)
    layer.bias.data = layer.bias.data.double()
    x.requires_grad_()
    layer(x).backward(dy)
    mean, rstd = CPU.constants_of(layer.running_mean, layer.running_var, layer.eps)
    dbias, dweight = CPU.channel_grad_sums(dy, KeptByChannelNorm(x.detach(), mean, rstd))
    assert torch.equal(layer.bias.grad, dbias)
    assert torch.equal(layer.weight.grad, dweight.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_input_of_a_float32_layer(dtype, monkeypatch):
    x, dy = torch.randn(IMAGE).to(dtype), torch.randn(IMAGE).to(dtype)
    ours, node = outcome(trained(LAYERS["batch"][0], torch.float32), x, dy)
    assert is_fast(node)
    whole_way(monkeypatch)
    assert_equal(ours, outcome(trained(LAYERS["batch"][0], torch.float32), x, dy)[0])


BAD = {
    "another rank": lambda: (torch.randn(6, 8), {}),
    "other channels": lambda: (torch.randn(6, 4, 5, 3), {}),
    "integers": lambda: (torch.ones(IMAGE, dtype=torch.int64), {}),
    "complex": lambda: (torch.ones(IMAGE, dtype=torch.complex64), {}),
    "sparse": lambda: (torch.randn(IMAGE).to_sparse(), {}),
    "one value": lambda: (torch.randn(1, 8, 1, 1), {}),
    "eps": lambda: (torch.randn(IMAGE), {"eps": 0.0}),
    "eps nan": lambda: (torch.randn(IMAGE), {"eps": float("nan")}),
    "momentum": lambda: (torch.randn(IMAGE), {"momentum": 1.5}),
    "weight's axes": lambda: (torch.randn(IMAGE), {"weight": torch.nn.Parameter(torch.ones(1, 8))}),
    "integer weight": lambda: (torch.randn(IMAGE), {"weight": torch.ones(8, dtype=torch.int64)}),
    "weight elsewhere": lambda: (
        torch.randn(IMAGE),
        {"weight": torch.nn.Parameter(torch.ones(8, device="meta"))},
    ),
    "short bias": lambda: (torch.randn(IMAGE), {"bias": torch.nn.Parameter(torch.ones(7))}),
    "statistics' axes": lambda: (torch.randn(IMAGE), {"running_mean": torch.zeros(8, 1)}),
    "expanded statistics": lambda: (torch.randn(IMAGE), {"running_var": torch.ones(1).expand(8)}),
    "statistics that are leaves": lambda: (
        torch.randn(IMAGE),
        {"running_mean": torch.zeros(8).requires_grad_()},
    ),
    "short variance": lambda: (torch.randn(IMAGE), {"running_var": torch.ones(7)}),
    "one statistic": lambda: (torch.randn(IMAGE), {"running_var": None}),
    "count elsewhere": lambda: (
        torch.randn(IMAGE),
        {"num_batches_tracked": torch.zeros((), dtype=torch.int64, device="meta")},
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_those_of_the_rules_and_change_nothing(name, monkeypatch):
    def told():
        torch.manual_seed(0)
        x, changed = BAD[name]()
        layer = nn.BatchNorm2d(8)
        for key, value in changed.items():
            if key == "weight" and not isinstance(value, torch.nn.Parameter):
                del layer.weight
                layer.register_buffer("weight", value)
            else:
                setattr(layer, key, value)
        before = copy.deepcopy(layer.state_dict())
        with pytest.raises(leannorm.LeannormError) as error:
            layer(x)
        for key, value in layer.state_dict().items():
            assert value.device.type == "meta" or torch.equal(value, before[key]), key
        return type(error.value), str(error.value)

    ours = told()
    whole_way(monkeypatch)
    assert ours == told()


def test_groups_and_rows_are_checked_too():
    x = torch.randn(IMAGE)
    for groups in (0, -1, 3):
        with pytest.raises(leannorm.InputError):
            functional.group_norm(x, groups)
    with pytest.raises(leannorm.InputError):
        functional.group_norm(torch.randn(1, 8), 8)
    with pytest.raises(leannorm.InputError):
        functional.layer_norm(x, (3,), torch.ones(3), torch.ones(2))
    with pytest.raises(leannorm.InputError):
        functional.layer_norm(x, (3,), torch.ones(3, 1))
    with pytest.raises(leannorm.InputError):
        functional.layer_norm(x, (3,), eps=-1.0)
    with pytest.raises(leannorm.DtypeError):
        functional.layer_norm(x, (3,), torch.ones(3, dtype=torch.int64))
    with pytest.raises(leannorm.InputError):
        nn.InstanceNorm2d(8)(torch.randn(2, 8, 1, 1))


def test_a_batch_that_is_not_finite_moves_nothing():
    layer, x = nn.BatchNorm2d(8), torch.randn(IMAGE)
    x[0, 0, 0, 0] = float("inf")
    y = layer(x.requires_grad_())
    assert is_fast(y.grad_fn)
    assert layer.num_batches_tracked == 0
    assert torch.equal(layer.running_mean, torch.zeros(8))


def test_a_recompute_moves_nothing():
    layer, x = nn.BatchNorm2d(8), torch.randn(IMAGE, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    checkpoint(layer, x, use_reentrant=True).sum().backward()
    assert layer.num_batches_tracked == 2


def test_statistics_that_autograd_saved_are_seen_to_change():
    layer, x = nn.BatchNorm2d(8), torch.randn(IMAGE)
    factor = torch.ones(8, requires_grad=True)
    product = factor * layer.running_mean
    layer(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_buffers_of_inference_mode():
    with torch.inference_mode():
        layer, x = nn.BatchNorm2d(8), torch.randn(IMAGE)
        layer(x)
        assert layer.num_batches_tracked == 1
    with pytest.raises(leannorm.InputError):
        layer(torch.randn(IMAGE))
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("act", ["identity", "silu"])
@pytest.mark.parametrize("name", ["input", "weight"])
def test_nothing_moves_where_a_tensor_of_inference_mode_would_be_kept(act, name):
    layer, x = nn.BatchNormAct2d(8, act=act), torch.randn(IMAGE)
    with torch.inference_mode():
        inference = torch.randn(8)
        if name == "input":
            x = torch.randn(IMAGE)
    if name == "weight":
        layer.weight = torch.nn.Parameter(inference, requires_grad=False)
    before = {name: v.clone() for name, v in layer.named_buffers()}
    with pytest.raises(leannorm.InputError, match=f"{name} must not be of inference mode"):
        layer(x)
    torch.testing.assert_close(dict(layer.named_buffers()), before, rtol=0, atol=0)
    with torch.no_grad():
        layer(x)
    assert layer.num_batches_tracked == 1


def test_a_count_that_is_no_int64():
    layer = nn.BatchNorm2d(8)
    layer.num_batches_tracked = torch.tensor(0.0)
    layer(torch.randn(IMAGE))
    assert layer.num_batches_tracked == 1


class Doubled(torch.nn.Module):
    def forward(self, w):
        return 2 * w


@pytest.mark.parametrize("name", ["batch", "group", "layer", "rms", "instance"])
def test_parameters_that_lie_elsewhere(name):
    make, shape = LAYERS[name]
    layer, x = trained(make, torch.float32), torch.randn(shape)
    twice = copy.deepcopy(layer)
    with torch.no_grad():
        twice.weight.mul_(2)
    parametrize.register_parametrization(layer, "weight", Doubled())
    assert torch.equal(layer(x), twice(x))
    called = torch.func.functional_call(twice, {"weight": layer.weight}, x)
    assert is_fast(called.grad_fn)


def test_within_transforms_and_tracers_the_whole_way_is_gone():
    layer, x = nn.BatchNorm2d(8).eval(), torch.randn(IMAGE)
    want = layer(x)
    inside = torch.func.vmap(lambda v: layer(v[None])[0])(x)
    torch.testing.assert_close(inside, want)
    y, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(y, want)
    assert tangent.abs().max() > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(layer, x)
    assert "aten::batch_norm" in str(traced.inlined_graph)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_under_lean_are_the_same(name):
    make, shape = LAYERS[name]
    x = torch.randn(shape)

    def gradients(within):
        layer = trained(make, torch.float32)
        leaf = x.clone().requires_grad_()
        with within():
            loss = layer(leaf * 2).square().sin().sum()
        loss.backward()
        return [leaf.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]

    for ours, stock in zip(gradients(leannorm.lean), gradients(nullcontext), strict=True):
        assert torch.equal(ours, stock)
