"""Leaves that have other data for a while (`leaf.data = other`): gradients are those of plain torch."""

import contextlib

import pytest
import torch
from lean_cases import assert_trains_as_torch, gradients
from torch import nn

from leannorm import lean

SETTINGS = [{}, {"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.3}]
pytestmark = pytest.mark.filterwarnings("ignore:leannorm. (budget|more is kept|no plan)")


def on_a_grid(data):
    step = data.abs().max() / 8
    return (data / step).round() * step


def with_a_row_less(data):
    data = data.clone()
    data[-1] = 0
    return data


class Swapped:
    """Has the weights of a model changed for the time of a call, as quantization-aware training does."""

    def __init__(self, model, changed, names):
        self.on, self.changed, self.names = False, changed, names
        for layer in model.modules():
            layer.register_forward_pre_hook(self.before)
            layer.register_forward_hook(self.after)

    def before(self, layer, _):
        layer.kept = {n: p.data for n, p in layer._parameters.items() if n in self.names and p is not None}
        for name, data in layer.kept.items() if self.on else ():
            layer._parameters[name].data = self.changed(data)

    def after(self, layer, *_):
        for name, data in layer.kept.items() if self.on else ():
            layer._parameters[name].data = data


def images():
    layers = (
        nn.Conv2d(8, 16, 1),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.Conv2d(16, 16, 1),
        nn.ReLU(),
        nn.Conv2d(16, 8, 1),
    )
    return nn.Sequential(*layers), torch.randn(4, 8, 16, 16)


def rows():
    layers = nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
    return nn.Sequential(*layers), torch.randn(64, 32)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("names", [("weight",), ("bias",), ("weight", "bias")], ids=str)
@pytest.mark.parametrize("changed", [on_a_grid, with_a_row_less])
@pytest.mark.parametrize("make", [images, rows])
@pytest.mark.parametrize("autocast", [False, True])
def test_leaves_that_have_other_data_for_the_time_of_a_call(
    make, changed, names, settings, autocast, with_and_without_nodes
):
    def train(context):
        model, x = make()
        swapped, seen = Swapped(model, changed, names), []
        for i in range(5):
            swapped.on = i > 2
            model.zero_grad()
            with torch.autocast("cpu", enabled=autocast), context():
                loss = model(x).float().square().mean()
            loss.backward()
            seen += gradients(model)
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)
        return seen

    assert_trains_as_torch(train, settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("inside", [True, False])
def test_leaves_that_have_other_data_for_the_time_of_a_pass(settings, inside, with_and_without_nodes):
    """Torch's backward pass of a convolution reads the weight as it is then; a rebuild reads what it was."""

    def train(context):
        model, x = images()
        seen = []
        for i in range(5):
            model.zero_grad()
            with contextlib.ExitStack() as around:
                if inside:
                    around.enter_context(context())
                kept = [p.data for p in model.parameters()]
                for p in model.parameters() if i > 2 else ():
                    p.data = with_a_row_less(p.data)
                if not inside:
                    around.enter_context(context())
                loss = model(x).square().mean()
                for p, data in zip(model.parameters(), kept, strict=True):
                    p.data = data
            loss.backward()
            seen += gradients(model)
        return seen

    assert_trains_as_torch(train, settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("made", ["cast", "transposed", "standardized"])
def test_what_is_made_of_a_leaf_that_has_other_data_meanwhile(made, settings, with_and_without_nodes):
    """No node that is made in that time saves anything."""

    def train(context):
        w, x, seen = nn.Parameter(torch.randn(64, 64)), torch.randn(64, 64), []
        for i in range(5):
            w.grad = None
            with context():
                kept = w.data
                if i > 2:
                    w.data = with_a_row_less(kept)
                h = {"cast": w.double, "transposed": w.t, "standardized": lambda: w - w.mean()}[made]()
                w.data = kept
                loss = torch.sin(x.to(h.dtype) @ h).square().mean()
            loss.backward()
            seen.append(w.grad)
        return seen

    assert_trains_as_torch(train, settings)


def test_what_layers_read_is_rebuilt_where_no_leaf_has_other_data(with_and_without_nodes):
    model, x = rows()
    for _ in range(3):
        with lean("conv") as saved:
            loss = model(x).square().mean()
        loss.backward()
    rebuilt = {r.node for r in saved.records if r.rebuilt}
    assert rebuilt >= {"aten::addmm", "aten::relu"}


def test_parameters_that_are_swapped_for_others():
    """Torch swaps no tensor that has weak references."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:

        def train(context):
            model, x = rows()
            seen = []
            for dtype in (torch.float32, torch.float64, torch.float32, torch.float32):
                model.zero_grad()
                model.to(dtype)
                with context():
                    loss = model(x.to(dtype)).square().mean()
                loss.backward()
                seen += gradients(model)
                del loss
            return seen

        assert_trains_as_torch(train, {"recompute": "conv"})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
