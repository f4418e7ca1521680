"""`lean()` gives stock's gradients bit for bit, on every kind of node it knows and some it does not."""

from __future__ import annotations

import contextlib
import copy

import lean_cases
import pytest
import torch
from torch import nn

from leannorm.saving import lean

# small networks cannot meet every budget, and say so
pytestmark = pytest.mark.filterwarnings("ignore:leannorm. budget=.* is out of reach")

SETTINGS = {
    "plain": {},
    "norm": {"recompute": "norm"},
    "conv": {"recompute": "conv"},
    "budget": {"budget": 0.3},
}


class Stock(torch.autograd.graph.saved_tensors_hooks):
    """Holds as stock autograd does, and counts."""

    def __init__(self):
        self.held = {}

        def pack(tensor):
            base = tensor if tensor._base is None else tensor._base
            if not (base.is_leaf and base.requires_grad):
                storage = tensor.untyped_storage()
                self.held[storage._cdata] = storage
            return tensor.detach()

        super().__init__(pack, lambda tensor: tensor)

    @property
    def kept_bytes(self):
        return sum(storage.nbytes() for storage in self.held.values())


def step(model, x, context, autocast=None):
    """Everything that a training step leaves behind."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    with context, torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        y = model(x)
        loss = y.float().square().mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"output": y.detach(), "input": x.grad, **gradients, **dict(model.named_buffers())}, context


def assert_same(ours, stock):
    assert ours.keys() == stock.keys()
    different = [name for name in stock if not same(ours[name], stock[name])]
    assert not different, f"not equal bit for bit: {different}"


def same(a, b):
    return (a is None and b is None) or (torch.equal(a, b) and a.stride() == b.stride())


def check(make, x, passes=2, autocast=None, **settings):
    """Two passes: in the first, steps are tried; in the second they are trusted, or planned."""
    model = make().to(x.dtype)
    if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        model = model.to(memory_format=torch.channels_last)
    stock_model = copy.deepcopy(model)
    for _ in range(passes):
        stock, counted = step(stock_model, x, Stock(), autocast)
        ours, saved = step(model, x, lean(**settings), autocast)
        assert_same(ours, stock)
        assert saved.kept_bytes <= counted.kept_bytes
        for m in (model, stock_model):
            m.zero_grad()
    return saved.kept_bytes / counted.kept_bytes


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", lean_cases.IMAGES)
@pytest.mark.sampled(of=2)
def test_images(name, setting):
    check(lean_cases.IMAGES[name], torch.randn(lean_cases.IMAGE), **SETTINGS[setting])


@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize("name", lean_cases.IMAGES)
@pytest.mark.sampled(of=2)
def test_images_channels_last(name, setting):
    x = torch.randn(lean_cases.IMAGE).to(memory_format=torch.channels_last)
    check(lean_cases.IMAGES[name], x, **SETTINGS[setting])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", lean_cases.IMAGES)
@pytest.mark.sampled(of=2)
def test_images_in_other_dtypes(name, dtype):
    check(lean_cases.IMAGES[name], torch.randn(lean_cases.IMAGE, dtype=dtype), recompute="conv")


@pytest.mark.parametrize("name", lean_cases.IMAGES)
def test_images_under_autocast(name):
    check(lean_cases.IMAGES[name], torch.randn(lean_cases.IMAGE), autocast=torch.bfloat16, recompute="conv")


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's, on RMS norm
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", lean_cases.SEQUENCES)
@pytest.mark.sampled(of=2)
def test_sequences(name, dtype, autocast):
    check(lean_cases.SEQUENCES[name], torch.randn(lean_cases.TOKENS, dtype=dtype), autocast=autocast)


LEAST_KEPT = {
    "silu": 0.75,
    "silu, in place": 0.55,
    "relu": 0.75,
    "relu, in place": 0.75,
    "squeeze and excite, in place": 0.5,
    "dense block": 0.55,
    "layer scale": 0.6,
    "group norm": 0.75,
    "instance norm": 0.75,
    "leannorm batch norm": 0.75,
    "batch norm, evaluation": 0.75,
}


@pytest.mark.parametrize("name", LEAST_KEPT)
def test_keeps_little(name):
    assert check(lean_cases.IMAGES[name], torch.randn(lean_cases.IMAGE), recompute="norm") < LEAST_KEPT[name]


@pytest.mark.parametrize("name", ["silu", "relu", "gelu", "group norm", "layer scale", "dropout"])
def test_odd_shapes(name):
    for shape in [(2, 3, 14, 14), (5, 3, 14, 14)]:
        check(lean_cases.IMAGES[name], torch.randn(shape), recompute="conv")
        check(lean_cases.IMAGES[name], torch.randn(shape).transpose(2, 3), recompute="conv")


def test_a_mean_of_ten_thousand_and_values_that_are_no_numbers():
    model = lean_cases.IMAGES["silu"]
    check(model, torch.randn(lean_cases.IMAGE) + 1e4, recompute="norm")
    x = torch.randn(lean_cases.IMAGE)
    x[0, 0, 0, 0] = float("inf")
    stock, _ = step(network := model(), x, Stock())
    network.zero_grad()
    ours, _ = step(network, x, lean("norm"))
    assert all(torch.equal(ours[k].isnan(), stock[k].isnan()) for k in stock if k.endswith("weight"))


def test_one_rebuild_serves_every_reader():
    model, x = lean_cases.SEQUENCES["three readers"](), torch.randn(lean_cases.TOKENS)
    step(model, x, lean("norm"))
    with lean("norm"):
        loss = model(x).sum()
    with torch.autograd.profiler.profile() as called:
        loss.backward()
    assert [event.name for event in called.function_events].count("aten::native_layer_norm") == 1


def test_settings_that_do_not_exist():
    for wrong in ({"recompute": "everything"}, {"budget": 0.0}, {"budget": 1.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            lean(**wrong)


def test_budget_is_met_and_can_be_looked_at():
    model, x = lean_cases.IMAGES["dense block"](), torch.randn(lean_cases.IMAGE)
    for budget in (0.9, 0.7, 0.5):
        for _ in range(2):
            _, saved = step(model, x, lean(budget=budget))
        plan = saved.plan
        stock = step(model, x, Stock())[1].kept_bytes
        assert plan.kept_bytes == saved.kept_bytes
        assert saved.kept_bytes <= budget * stock
        assert saved.kept_bytes > (budget - 0.25) * stock  # no more is rebuilt than asked for
        assert any(plan.rebuild)
        assert not all(plan.rebuild)
    _, saved = step(model, x[:2], lean(budget=0.5))
    assert saved.plan.made_for.calls != plan.made_for.calls  # planned again for other shapes


def test_a_transformer_meets_its_budgets():
    model, x = lean_cases.SEQUENCES["transformer"](), torch.randn(lean_cases.TOKENS)
    stock, counted = step(model, x, Stock())
    for budget in (0.9, 0.7, 0.5, 0.3):
        for _ in range(2):
            model.zero_grad()
            ours, saved = step(model, x, lean(budget=budget))
        assert_same(ours, stock)
        assert saved.plan.stock_bytes == counted.kept_bytes  # q, k and v hold one storage, once
        assert budget - 0.15 < saved.kept_bytes / counted.kept_bytes <= budget


def linear_outputs(setting, width, *layers):
    """Which outputs of linear layers are rebuilt."""
    _, saved = step(nn.Sequential(nn.LayerNorm(width), *layers), torch.randn(3, 30, width), lean(setting))
    return [r.rebuilt for r in saved.records if r.node == "aten::addmm"]


def test_linear_layers_are_rebuilt_that_do_not_narrow():
    layers = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU()
    assert linear_outputs("conv", 32, *layers) == [True, False, True]
    assert linear_outputs("norm", 32, *layers) == [False, False, False]
    assert linear_outputs("conv", 512, nn.Linear(512, 512), nn.GELU()) == [True]  # of any width


def test_of_linear_layers_in_a_row_every_third_is_held():
    layers = (nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6))
    assert linear_outputs("conv", 32, *layers) == [True, True, False, True, True, False]


@pytest.mark.parametrize("make", [lambda: lean_cases.Attention(True), lean_cases.BiasedAttention])
def test_softmax_of_scores_is_rebuilt_from_what_they_were_made_of(make):
    model = nn.Sequential(nn.LayerNorm(32), make())
    for setting, rebuilt in (("norm", False), ("conv", True)):
        _, saved = step(model, torch.randn(lean_cases.TOKENS), lean(setting))
        assert rebuilt in {r.rebuilt for r in saved.records if r.shape[-2:] == (30, 30)}


def test_records_say_what_became_of_each_tensor():
    model, x = lean_cases.IMAGES["silu"](), torch.randn(lean_cases.IMAGE)
    _, saved = step(model, x, lean("norm"))
    fates = {record.node: record.rebuilt for record in saved.records if record.node}
    assert fates == {"aten::convolution": False, "aten::native_batch_norm": True, "aten::silu": True}


def test_concatenations_of_many_parts_are_rebuilt():
    def rebuilt(**settings):
        model, x = lean_cases.DenseBlock(layers=5), torch.randn(2, 16, 14, 14)
        for _ in range(2):  # the second one follows the plan
            _, saved = step(model, x, lean(**settings))
        return [r.shape[1] for r in saved.records if r.node == "aten::cat" and r.rebuilt]

    assert rebuilt(recompute="norm") == rebuilt(budget=0.1) == [16, 24, 32, 40, 48, 56]


def test_what_is_small_beside_the_largest_is_held_but_for_a_budget():
    norms = lambda: nn.Sequential(nn.BatchNorm2d(16), nn.ReLU())  # noqa: E731
    model = nn.Sequential(
        nn.Conv2d(3, 16, 1), norms(), nn.MaxPool2d(4), norms(), nn.Conv2d(16, 16, 1), norms()
    )

    def rebuilt(pool, **settings):
        model[2].kernel_size = model[2].stride = pool
        _, saved = step(model, torch.randn(2, 3, 64, 64), lean(**settings))
        return [record.rebuilt for record in saved.records if record.node == "aten::relu"]

    assert rebuilt(4, recompute="norm") == [True, True, True]  # a sixteenth of the size
    assert rebuilt(8, recompute="norm") == [True, False, False]  # less than a thirty-second
    assert rebuilt(8, budget=0.01) == [True, True, True]


def test_buffers_move_once_and_no_random_number_is_drawn_in_the_backward_pass():
    model, x = lean_cases.around(nn.Dropout(0.5)), torch.randn(lean_cases.IMAGE)
    step(model, x, lean("norm"))
    with lean("norm"):
        loss = model(x).sum()
    before, buffers = torch.get_rng_state(), copy.deepcopy(dict(model.named_buffers()))
    loss.backward()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("act", [nn.Identity, nn.ReLU, nn.ReLU6, nn.Hardswish], ids=lambda act: act.__name__)
def test_a_zero_is_rebuilt_with_its_sign(act, layout):
    """A bias of -0 and a mean of 0 shift by -0, which leaves -0 as it is; the factor's gradient shows it."""
    x = torch.randint(-9, 9, (2, 4, 16, 16)).float()
    x[:, :, 0] = 0
    zeros = torch.cat((x, -x))  # whose sum is 0 in any order
    norm = nn.BatchNorm2d(4)
    nn.init.constant_(norm.bias, -0.0)
    factor = nn.Parameter(torch.ones_like(zeros))
    gradients = []
    for context in (lean("norm"), contextlib.nullcontext()):
        for values in (torch.randn_like(zeros), zeros):  # a kind of step is tried at the first
            with context:
                y = act()(norm(values.to(memory_format=layout).requires_grad_())) * factor
            gradients.append(torch.autograd.grad(y.sum(), factor)[0])
    assert gradients[1][:, :, 0].signbit().any()
    assert torch.equal(gradients[1].signbit(), gradients[3].signbit())
