"""A batch norm, a sum and a ReLU are rebuilt by one call of leannorm's kernel, with the bits of torch's."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from lean_cases import forget_trials
from torch import nn
from torch.profiler import ProfilerActivity, profile

import leannorm
from leannorm import lean
from leannorm.autograd.nodes import NODES
from leannorm.saving import planned_pass
from leannorm.saving.timeline import Timeline

KERNEL = "leannorm::channel_normalize"
pytestmark = pytest.mark.skipif(NODES is None, reason="the C++ nodes are not built")
LIBRARY = torch.library.Library("leannorm_fused", "DEF")
LIBRARY.define("doubled(Tensor x) -> Tensor")
LIBRARY.impl("doubled", lambda x: torch.from_numpy(x.detach().numpy() * 2), "CPU")


class Doubled(torch.autograd.Function):
    """An operator of the program, which is no ReLU."""

    @staticmethod
    def forward(ctx, x):
        return torch.ops.leannorm_fused.doubled(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.fixture(autouse=True)
def _fresh():
    forget_trials()
    yield
    forget_trials()


def steps(run, leaves, count=4, setting="norm"):
    """What plain PyTorch's step gives, and by step of `lean()` the operators that its backward pass calls."""
    called = []
    first = None
    for context in [nullcontext(), *(lean(setting) for _ in range(count))]:
        for leaf in leaves:
            leaf.grad = None
        with context:
            loss = run()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            loss.backward()
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        first = first or gradients
        assert all(torch.equal(a, b) for a, b in zip(gradients, first, strict=True))
        called.append(Counter(event.name for event in seen.events()))
    return called[1:]


def image(dtype=torch.float32, layout=torch.contiguous_format, shape=(8, 8, 16, 16)):
    return torch.randn(shape).to(dtype=dtype, memory_format=layout).requires_grad_()


def norm_of(x):
    """In the dtype in which torch computes statistics."""
    norm = nn.BatchNorm2d(x.shape[1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2), norm.bias.normal_()
    return norm


SUMS = "sum", "sum from the left"
FORMS = {
    "relu": lambda norm, x, other: norm(x).relu(),
    "in place": lambda norm, x, other: norm(x).relu_(),
    "sum": lambda norm, x, other: norm(x) + other,
    "sum from the left": lambda norm, x, other: other + norm(x),
    "sum and relu": lambda norm, x, other: (norm(x) + other).relu(),
    "sum and relu in place": lambda norm, x, other: norm(x).add_(other).relu_(),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_rebuild_is_one_call(form, dtype, layout):
    x, other = image(dtype, layout), image(dtype, layout)
    norm = norm_of(x)

    def run():
        return FORMS[form](norm, x * 2, other * 3).square().sum()

    *_, last = steps(run, [x, other, norm.weight, norm.bias])
    assert last[KERNEL] == 1
    assert not any(last[f"aten::{name}"] for name in ("native_batch_norm", "relu", "relu_"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_norm_with_a_narrow_result_is_called_again(dtype, form):
    """Its result would hide other bits in most trials."""
    x, other = image(dtype), image(dtype)
    norm = norm_of(x)
    last = steps(lambda: FORMS[form](norm, x * 2, other * 3).square().sum(), [x, other])[-1]
    assert last["aten::native_batch_norm"] == 1
    assert not last[KERNEL]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_layers_of_ours(dtype, form):
    """Of a narrow dtype the kernel rounds once, behind the sum and the ReLU: those are made by themselves."""
    x, other = image(dtype), image(dtype)
    norm = leannorm.nn.BatchNorm2d(8)
    last = steps(lambda: FORMS[form](norm, x * 2, other * 3).square().sum(), [x, other])[-1]
    assert last[KERNEL] == 1
    wide = x.dtype.itemsize > 2
    assert any(last[f"aten::{name}"] for name in ("relu", "relu_")) == (not wide and form not in SUMS)


@pytest.mark.parametrize("dims", [2, 3, 5])
def test_other_numbers_of_dimensions(dims):
    x = torch.randn((512, 8, 5, 4, 3)[:dims]).requires_grad_()
    norm = (nn.BatchNorm3d if dims == 5 else nn.BatchNorm1d)(8)
    assert steps(lambda: norm(x * 2).relu().square().sum(), [x])[-1][KERNEL] == 1


def test_special_values_have_the_same_bits():
    x = torch.randn(4, 3, 8, 8)
    x[:, 1] = 1  # a constant channel: zeros of both signs, by the sign of its weight
    x[0, 2, 0, :4] = torch.tensor([1e30, -1e30, 1e-42, -0.0])
    weight, bias = torch.tensor([1.0, -1.0, 1.0]), torch.tensor([0.0, -0.0, 1e-40])
    y, mean, rstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    scale = rstd * weight
    shift = torch.addcmul(bias, mean, scale, value=-1)
    zeros, ones = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for other in (None, -y, torch.full_like(y, float("nan")), torch.full_like(y, -float("inf"))):
        expected = torch.relu(y if other is None else y + other)
        made = torch.ops.leannorm.channel_normalize(x, zeros, ones, scale, shift, other, "relu")
        same = made.view(torch.int32) == expected.view(torch.int32)
        assert torch.all(same | (made.isnan() & expected.isnan()))


@pytest.mark.parametrize("between", ["norm", "sum"])
def test_what_others_read_is_made_by_itself(between):
    x, other = image(), image()
    norm = norm_of(x)

    def run():
        y = norm(x * 2)
        z = y + other * 3
        return (z.relu().square() + {"norm": y, "sum": z}[between].sin()).sum()

    last = steps(run, [x, other])[-1]
    assert last["aten::relu"] or between == "norm"


def test_a_parallel_sum_of_two_norms():
    x = image()
    first, second = norm_of(x), norm_of(x)
    last = steps(lambda: (first(x * 2) + second(x * 3)).relu().square().sum(), [x])[-1]
    assert last[KERNEL] == 2
    assert not last["aten::relu"]


def test_a_residual_of_another_layout_is_added_by_itself():
    x, other = image(), image(layout=torch.channels_last)
    norm = norm_of(x)
    steps(lambda: (norm(x * 2) + other * 3).relu().square().sum(), [x, other])


def test_an_activation_with_other_bits_is_made_by_itself():
    """A wrong row of the table, which calls it a ReLU. It is tried once."""
    NODES.set_operator("leannorm_fused::doubled", 2, 0, [], -1, False, False, "", [], "relu")
    x = image()
    norm = norm_of(x)
    called = steps(lambda: Doubled.apply(norm(x * 2)).square().sum(), [x])
    assert [one[KERNEL] for one in called] == [2, 1, 1, 1]
    assert all(one["leannorm_fused::doubled"] for one in called)


def test_values_that_prove_nothing_are_made_one_by_one():
    x = image()
    norm = norm_of(x)
    with torch.no_grad():
        norm.weight.zero_(), norm.bias.fill_(-1.0)
    called = steps(lambda: norm(x * 2).relu().square().sum(), [x], count=8)
    assert all(one["aten::relu"] for one in called)


@pytest.mark.parametrize(
    ("threads", "layout"), list(product([1, 2], [torch.contiguous_format, torch.channels_last]))
)
def test_a_network_in_several_threads(threads, layout):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 8, 3))
        model.to(memory_format=layout)
        x = image(layout=layout, shape=(8, 3, 24, 24))
        steps(lambda: model(x).square().mean(), list(model.parameters()), setting="conv")
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def timelines(monkeypatch):
    """Those that plans are made of."""
    made = []

    class Noted(Timeline):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(planned_pass, "Timeline", Noted)
    return made


def rebuilt_by_name(timeline):
    return {timeline.calls[value.call].name: value for value in timeline.values if value.makes}


def test_a_plan_counts_one_call(timelines):
    """A sum costs what it adds, an activation nothing, and what is between them takes no memory."""
    x, other = image(), image()
    norm = norm_of(x)
    with lean(budget=0.5):
        y = norm(x * 2)
        loss = (y + other * 3).relu().square().sum()
    loss.backward()
    (timeline,) = timelines
    by_name = rebuilt_by_name(timeline)
    one, added, top = (by_name[f"aten::{name}"] for name in ("native_batch_norm", "add", "relu"))
    assert timeline.values[top.follows] is added
    assert timeline.values[added.follows] is one
    assert timeline.price_of(top) == 0
    assert timeline.price_of(added) == timeline.slower * other.nbytes / timeline.rates.memory
    fused = {timeline.calls[timeline.values[i].call].name for i in timeline.fused}
    assert fused == {"aten::native_batch_norm", "aten::add"}


@pytest.mark.parametrize(
    ("make", "name", "share"),
    [
        (nn.BatchNorm2d, "aten::native_batch_norm", 0.35),  # computes the statistics in passes of its own
        (
            leannorm.nn.BatchNorm2d,
            "leannorm::channel_forward_tracked_",
            0.7,
        ),  # while the memory is in a cache
    ],
)
def test_the_price_of_a_norm_with_known_statistics(make, name, share, timelines):
    x, norm = image(), make(8)
    with lean(budget=0.5):
        loss = norm(x * 2).relu().square().sum()
    loss.backward()
    (timeline,) = timelines
    one = rebuilt_by_name(timeline)[name]
    timeline.taken[one.call] = 1.0
    assert timeline.price_of(one) == share
