"""`convert`: what is swapped, what is kept, what is left alone, and that it can be taken back."""

import copy
import pickle

import pytest
import torch
from torch import nn as stock

from leannorm import InputError, convert, nn
from leannorm.transforms.converting import classes as norm_classes

LAYERS = {
    "BatchNorm1d": (lambda: stock.BatchNorm1d(6), (4, 6, 5)),
    "BatchNorm1d-momentum": (lambda: stock.BatchNorm1d(6, momentum=None), (4, 6)),
    "BatchNorm2d": (lambda: stock.BatchNorm2d(6, eps=1e-3), (4, 6, 3, 3)),
    "BatchNorm2d-plain": (
        lambda: stock.BatchNorm2d(6, affine=False, track_running_stats=False),
        (4, 6, 3, 3),
    ),
    "BatchNorm3d": (lambda: stock.BatchNorm3d(6), (4, 6, 2, 3, 3)),
    "InstanceNorm1d": (lambda: stock.InstanceNorm1d(6), (4, 6, 5)),
    "InstanceNorm2d": (lambda: stock.InstanceNorm2d(6, affine=True, track_running_stats=True), (4, 6, 3, 3)),
    "InstanceNorm3d": (lambda: stock.InstanceNorm3d(6), (4, 6, 2, 3, 3)),
    "GroupNorm": (lambda: stock.GroupNorm(3, 6), (4, 6, 3, 3)),
    "LayerNorm": (lambda: stock.LayerNorm((3, 6), eps=0.1), (4, 3, 6)),
    "LayerNorm-plain": (lambda: stock.LayerNorm(6, elementwise_affine=False), (4, 6)),
    "RMSNorm": (lambda: stock.RMSNorm(6), (4, 6)),
}


def results(model, x):
    leaf = x.clone().requires_grad_()
    y = model.train()(leaf)
    gradients = torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()])
    with torch.no_grad():
        return [y, *gradients, *model.buffers(), model.eval()(x)]


def look(model):
    """Everything that undoing must bring back."""
    return [
        (name, id(m), type(m), sorted(vars(m)), m.training, [id(p) for p in m._parameters.values()])
        for name, m in model.named_modules(remove_duplicate=False)
    ]


@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_swaps_and_takes_back_torchs_layers(make, shape):
    layer, x = make().double(), torch.randn(shape, dtype=torch.float64) + 1
    original, before = copy.deepcopy(layer), look(layer)
    assert convert(layer) is layer
    assert type(layer) is getattr(nn, type(original).__name__)
    assert repr(layer) == f"leannorm.{original!r}"
    for got, want in zip(results(layer, x), results(original, x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))
    assert look(convert(layer.train(), to="torch")) == before


def test_keeps_everything_that_a_model_carries():
    norm, calls = stock.BatchNorm2d(4), []
    model = stock.ModuleDict(
        {"a": norm, "b": stock.Sequential(norm, stock.LayerNorm(3)), "c": stock.GroupNorm(2, 4)}
    )
    norm.register_forward_hook(lambda module, inputs, output: calls.append(module))
    norm.weight.requires_grad_(False)
    model["c"].eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before, state = look(model), list(model.state_dict())
    convert(model)
    assert model["a"] is model["b"][0] is norm
    assert list(model.state_dict()) == state
    assert [id(p) for p in model.parameters()] == [id(p) for p in optimizer.param_groups[0]["params"]]
    assert not norm.weight.requires_grad
    assert not model["c"].training
    model["b"](torch.randn(2, 4, 3, 3))
    assert calls == [norm]
    assert [type(m) for m in model["b"]] == [nn.BatchNorm2d, nn.LayerNorm]
    assert look(convert(model)) != before
    assert look(convert(model, to="torch")) == before


class ByHand(stock.Module):
    def __init__(self):
        super().__init__()
        self.weight = stock.Parameter(torch.ones(4))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_print_says_what_is_leannorms():
    model = stock.Sequential(stock.BatchNorm1d(4), stock.ReLU(), ByHand())
    before = str(model).splitlines()
    norm, _, unlisted = (line.replace("): ", "): leannorm.") for line in before[1:4])
    assert str(convert(model, fuse=False)).splitlines() == [before[0], norm, before[2], unlisted, before[4]]
    assert str(convert(model, to="torch")).splitlines() == before


class Subclass(stock.BatchNorm2d):
    def forward(self, input):
        return super().forward(input) + 1


LEFT = {
    "unknown subclass": (lambda: Subclass(4), r"Subclass is not known"),
    "lazy": (stock.LazyBatchNorm2d, "without a size yet"),
    "momentum": (lambda: stock.BatchNorm2d(4, momentum=1.5), "momentum is 1.5"),
    "eps": (lambda: stock.BatchNorm2d(4, eps=0.0), "eps is 0.0"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize(("make", "says"), LEFT.values(), ids=LEFT)
def test_what_would_change_is_left_alone_and_named_once(make, says):
    model = stock.Sequential(make(), stock.ReLU(), stock.Sequential(make()), stock.GroupNorm(2, 4))
    kinds = [type(model[0]), stock.ReLU, stock.Sequential, nn.GroupNorm]
    with pytest.warns(UserWarning, match=says) as caught:
        convert(model)
    assert len(caught) == 1
    assert "0, 2.0 (" in str(caught[0].message)
    assert [type(m) for m in model] == kinds


def test_what_torch_does_not_have_stays_and_is_named():
    model = stock.Sequential(nn.LayerNorm(4, dim=1), nn.BatchNormAct2d(4), nn.BatchNorm2d(4))
    with pytest.warns(UserWarning, match=r"0 \(LayerNorm, torch has no such layer\); 1 \(BatchNormAct2d"):
        convert(model, to="torch")
    assert [type(m) for m in model] == [nn.LayerNorm, nn.BatchNormAct2d, stock.BatchNorm2d]


class Slotted(stock.Module):
    __slots__ = ("place",)


def test_an_error_midway_leaves_the_model_as_it_was(monkeypatch):
    """The last layer is told to become a class that its object cannot have."""
    monkeypatch.setitem(norm_classes.KNOWN, norm_classes.name_of(Subclass), norm_classes.Entry(Slotted))
    model = stock.Sequential(stock.BatchNorm2d(4), stock.ReLU(), stock.LayerNorm(3), Subclass(4))
    before = look(model)
    with pytest.raises(TypeError, match="__class__ assignment"):
        convert(model)
    assert look(model) == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"to": "tensorflow"}, "to must be one of"),
        ({"fuse": "trace"}, "fuse is True or False"),
        ({"process_group": "node"}, 'to="sync"'),
    ],
)
def test_errors_say_the_rule(arguments, says):
    with pytest.raises(InputError, match=says):
        convert(stock.BatchNorm2d(3), **arguments)


def test_activations_without_a_norm_are_not_touched_and_convert_says_so():
    model = stock.Sequential(stock.Linear(3, 3), stock.ReLU())
    before = look(model)
    with pytest.warns(UserWarning, match="convert found no norm layer in Sequential"):
        convert(model)
    assert look(model) == before
