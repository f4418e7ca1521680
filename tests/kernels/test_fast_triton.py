"""The fast path of Triton's kernels (autograd/fast.py), beside the whole way: interpreted."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import is_fast
from more_inputs import Modulated, RowsOfSum, modulated_and_gated
from stand_ins import whole_way, without_nodes
from torch.utils.checkpoint import checkpoint

import leannorm
from leannorm import functional, nn, use_backend
from leannorm.autograd import fast
from leannorm.ops.backends import triton

pytestmark = pytest.mark.skipif(
    triton._UNAVAILABLE is not None or not triton.INTERPRETED, reason="runs on the interpreter"
)
SHAPE = (3, 4, 2, 3)
LAYERS = {
    "batch": lambda: nn.BatchNorm2d(4),
    "batch, cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "batch, act": lambda: nn.BatchNormAct2d(4, act="silu"),
    "evaluation": lambda: nn.BatchNorm2d(4).eval(),
    "evaluation, frozen": lambda: nn.BatchNorm2d(4).eval().requires_grad_(False),
    "evaluation, act by output": lambda: nn.BatchNormAct2d(4).eval().requires_grad_(False),
    "group": lambda: nn.GroupNorm(2, 4),
    "group, no affine": lambda: nn.GroupNorm(2, 4, affine=False),
    "instance": lambda: nn.InstanceNorm2d(4),
    "layer": lambda: nn.LayerNorm((2, 3)),
    "layer, no bias": lambda: nn.LayerNorm(3, bias=False),
    "layer, dim=1": lambda: nn.LayerNorm(4, dim=1),
    "rms": lambda: nn.RMSNorm(3),
    "rms, 1 + weight": lambda: nn.RMSNorm(3, weight_offset=1.0, cast="before"),
    "of a sum, layer": lambda: RowsOfSum(3),
    "of a sum, rms": lambda: RowsOfSum(3, rms=True, weight_offset=1.0, cast="before"),
    "modulated": lambda: Modulated(3, 3, 1, 1),
    **modulated_and_gated(*SHAPE),
}
ONLY_IN_CPP = ("modulated", "gated", "of a sum")
each_kind = pytest.mark.parametrize("name", ["batch, act", "evaluation", "group", "layer", "rms"])
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "unaligned": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
}


@pytest.fixture(params=["C++", "Python"] if fast.NODES is not None else ["Python"], autouse=True)
def nodes_in(request, monkeypatch):
    """Both kinds of autograd nodes, where both are here; no call has been seen yet."""
    from leannorm.ops.backends.triton import tape

    if request.param == "Python":
        without_nodes(monkeypatch, "autograd")
    tape.forget()
    with use_backend("triton"):
        yield request.param
    tape.forget()


def trained(name, dtype=torch.float32):
    torch.manual_seed(1)
    layer = LAYERS[name]()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) + 1)
    return layer.to(dtype)


def outcome(layer, x, dy, second=False):
    """What a call leaves behind, the gradients' gradients too, and what one without gradients gives."""
    x = x.detach().requires_grad_()
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    y = layer(x)
    found, more = torch.autograd.grad(y, leaves, dy, create_graph=second), ()
    if second:
        total = sum(g.square().sum() for g in found)
        more = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        plain = copy.deepcopy(layer)(x)
    return [y, *found, *more, plain, *layer.buffers()], is_fast(y.grad_fn)


def assert_equal(ours, others):
    assert len(ours) == len(others)
    for a, b in zip(ours, others, strict=True):
        assert (a.dtype, a.stride()) == (b.dtype, b.stride())
        assert torch.equal(a, b)


KINDS = [(name, torch.float32, "contiguous") for name in LAYERS]
KINDS += [(name, torch.bfloat16, "channels_last") for name in ("batch", "evaluation", "group", "layer")]
KINDS += [(name, torch.bfloat16, "contiguous") for name in ("modulated", "gated")]
KINDS += [(name, torch.float64, "unaligned") for name in ("batch, act", "instance", "rms")]


@pytest.mark.sampled(of=5)
@pytest.mark.parametrize(("name", "dtype", "layout"), KINDS)
def test_a_call_that_was_seen_is_fast_and_has_the_same_bits(name, dtype, layout, monkeypatch):
    calls = []
    for _ in range(2):
        x, dy = LAYOUTS[layout](torch.randn(SHAPE).to(dtype)), torch.randn(SHAPE).to(dtype)
        calls.append((x, dy, *outcome(trained(name, dtype), x, dy)))
    in_python_too = fast.NODES is not None or not name.startswith(ONLY_IN_CPP)
    assert [was_fast for *_, was_fast in calls] == [False, in_python_too]
    whole_way(monkeypatch)
    for x, dy, ours, _ in calls:
        others, was_fast = outcome(trained(name, dtype), x, dy)
        assert not was_fast
        assert_equal(ours, others)


@pytest.mark.sampled(of=3)
@each_kind
def test_the_same_second_derivatives(name, monkeypatch):
    x, dy = torch.randn(SHAPE, dtype=torch.float64), torch.randn(SHAPE, dtype=torch.float64)
    outcome(trained(name, torch.float64), x, dy)
    ours, was_fast = outcome(trained(name, torch.float64), x, dy, second=True)
    assert was_fast
    whole_way(monkeypatch)
    assert_equal(ours, outcome(trained(name, torch.float64), x, dy, second=True)[0])


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("name", ["batch, act", "evaluation", "evaluation, act by output", "layer", "rms"])
def test_each_part_of_the_gradient(name, monkeypatch):
    def told():
        found = []
        for frozen in ((), ("x",), ("weight",), ("bias",), ("weight", "bias")):
            layer, x, dy = trained(name), torch.randn(SHAPE), torch.randn(SHAPE)
            x.requires_grad_("x" not in frozen)
            for part in frozen:
                if getattr(layer, part, None) is not None:
                    getattr(layer, part).requires_grad_(False)
            y = layer(x)
            if y.requires_grad:
                y.backward(dy)
            found += [y.detach(), *(t.grad for t in (x, *layer.parameters()) if t.grad is not None)]
        return found

    for _ in range(2):
        torch.manual_seed(2)
        ours = told()
    torch.manual_seed(2)
    whole_way(monkeypatch)
    assert_equal(ours, told())


def changed(**values):
    def change(layer):
        for key, value in values.items():
            if key == "weight" and not isinstance(value, torch.nn.Parameter):
                del layer.weight
                layer.register_buffer("weight", value)
            else:
                setattr(layer, key, value)

    return change


BAD = {
    "another rank": (torch.Size((3, 4)), changed()),
    "other channels": (torch.Size((3, 2, 2, 3)), changed()),
    "one value": (torch.Size((1, 4, 1, 1)), changed()),
    "eps": (SHAPE, changed(eps=0.0)),
    "eps nan": (SHAPE, changed(eps=float("nan"))),
    "momentum": (SHAPE, changed(momentum=1.5)),
    "weight's axes": (SHAPE, changed(weight=torch.nn.Parameter(torch.ones(1, 4)))),
    "integer weight": (SHAPE, changed(weight=torch.ones(4, dtype=torch.int64))),
    "weight elsewhere": (SHAPE, changed(weight=torch.nn.Parameter(torch.ones(4, device="meta")))),
    "short bias": (SHAPE, changed(bias=torch.nn.Parameter(torch.ones(3)))),
    "statistics' axes": (SHAPE, changed(running_mean=torch.zeros(4, 1))),
    "short variance": (SHAPE, changed(running_var=torch.ones(3))),
    "statistics that are leaves": (SHAPE, changed(running_mean=torch.zeros(4).requires_grad_())),
}


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("name", BAD)
def test_errors_are_those_of_the_rules_after_calls_that_went_well(name, monkeypatch):
    shape, change = BAD[name]

    def told():
        layer = trained("batch")
        for _ in range(2):
            assert layer(torch.randn(SHAPE)).isfinite().all()
        change(layer)
        before = copy.deepcopy(layer.state_dict())
        with pytest.raises(leannorm.LeannormError) as error:
            layer(torch.randn(shape))
        for key, value in layer.state_dict().items():
            assert value.device.type == "meta" or torch.equal(value, before[key]), key
        return type(error.value), str(error.value)

    ours = told()
    whole_way(monkeypatch)
    assert ours == told()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_move_once_and_not_by_what_is_not_finite(momentum):
    layer, x = nn.BatchNorm2d(4, momentum=momentum), torch.randn(SHAPE, requires_grad=True)
    layer(x).sum().backward()
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    checkpoint(layer, x, use_reentrant=True).sum().backward()
    assert layer.num_batches_tracked == 3
    before, spoiled = copy.deepcopy(layer.state_dict()), x.detach().clone()
    spoiled[0, 0, 0, 0] = float("inf")
    y = layer(spoiled)
    assert is_fast(y.grad_fn)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key])
    with leannorm.no_stats_update():
        layer(x)
    assert layer.num_batches_tracked == 3


def test_statistics_that_autograd_saved_are_seen_to_change():
    layer, x = nn.BatchNorm2d(4), torch.randn(SHAPE)
    layer(x)
    product = torch.ones(4, requires_grad=True) * layer.running_mean
    assert is_fast(layer(x).grad_fn)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.sampled(of=3)
@each_kind
def test_gradients_under_lean_are_the_same(name):
    def gradients(within):
        layer = trained(name)
        leaf = torch.arange(72.0).view(SHAPE).sin().requires_grad_()
        with within():
            loss = layer(leaf * 2).square().sin().sum()
        loss.backward()
        return [leaf.grad, *(p.grad for p in layer.parameters() if p.grad is not None), *layer.buffers()]

    gradients(torch.enable_grad)
    stock = gradients(torch.enable_grad)
    for _ in range(2):
        assert_equal(gradients(leannorm.lean), stock)


def test_who_listens_gets_no_fast_call():
    layer, x = nn.BatchNorm2d(4).eval(), torch.randn(SHAPE)
    want = layer(x)
    torch.testing.assert_close(torch.func.vmap(lambda v: layer(v[None])[0])(x), want)
    _, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    assert tangent.abs().max() > 0
    group = nn.GroupNorm(2, 4)
    y = [group(x) for _ in range(2)][1]
    assert is_fast(y.grad_fn)
    with torch.profiler.profile():  # which is to be told of operators
        assert not is_fast(group(x).grad_fn)
        y.sum().backward()
    found = group.weight.grad.clone()
    group.weight.grad = None
    group(x).sum().backward()
    assert torch.equal(group.weight.grad, found)


def test_a_repeated_call_makes_tensors_as_torch_does():
    """The nodes in C++ take them from the device's allocator, in inference mode too."""
    layer, x = nn.LayerNorm(3), torch.randn(SHAPE)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y, want = [layer(x) for _ in range(3)][2], torch.empty_like(x)
        assert torch._C._dispatch_keys(y) == torch._C._dispatch_keys(want)
        assert y.is_inference() == want.is_inference()
        assert y.untyped_storage().resizable()
        assert y.untyped_storage().nbytes() == want.untyped_storage().nbytes()


def test_a_number_that_is_no_python_number():
    numpy = pytest.importorskip("numpy")
    x, weight = torch.randn(4, 6), torch.ones(6)
    want = functional.rms_norm(x, (6,), weight, float(numpy.float32(1e-3)))
    for _ in range(3):
        assert torch.equal(functional.rms_norm(x, (6,), weight, numpy.float32(1e-3)), want)
    ones = [functional.rms_norm(x, (6,), weight, eps) for eps in (1, 1.0, 1, 1.0)]
    assert all(torch.equal(y, ones[0]) for y in ones)
