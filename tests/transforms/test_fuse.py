"""Fusing a norm with what follows it: where it is done, where it must not be, and that nothing changes."""

import copy
import pickle
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from convert_blocks import (
    BLOCKS,
    Block,
    Downsampled,
    Function,
    Modules,
    Optional,
    Pair,
    Residual,
    assert_same,
    count,
    fused,
    nodes_of_python,
)
from convert_blocks_apart import APART
from torch import nn as stock

from leannorm import convert, nn
from leannorm.transforms import preview

ACTIVATIONS = [
    (stock.ReLU(inplace=True), "relu"),
    (stock.LeakyReLU(), "leaky_relu"),
    (stock.SiLU(inplace=True), "silu"),
    (stock.GELU(), "gelu"),
    (stock.GELU("tanh"), "gelu_tanh"),
    (stock.Hardswish(), "hardswish"),
    (stock.Hardtanh(), "hardtanh"),
    (stock.ReLU6(), "relu6"),
    (stock.ELU(), "elu"),
    (stock.Mish(), "mish"),
    (stock.LeakyReLU(0.2), None),
    (stock.ELU(0.5), None),
    (stock.Hardtanh(-2, 2), None),
    (stock.PReLU(), None),
    (stock.Identity(), None),
]


def look(model):
    return [(name, type(m), sorted(vars(m)), m.training) for name, m in model.named_modules()]


@pytest.mark.parametrize("block", BLOCKS + APART, ids=lambda b: b.__name__)
def test_blocks_compute_the_same(block):
    model = stock.Sequential(block()).double()
    original, before = copy.deepcopy(model), look(model)
    assert convert(model, fuse="trace") is model
    assert isinstance(model[0], block)
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64) + 1
    assert_same(model, original, x)
    assert count(model, x) == block.fused
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    want = model(x)
    for copied in copies:
        with nodes_of_python():
            got = copied(x)
        assert fused(got) == block.fused
        assert torch.equal(got, want)
    convert(model.train(), to="torch")
    for m in model.modules():
        vars(m).pop("feat", None)
    assert look(model) == before


@pytest.mark.parametrize(("act", "name"), ACTIVATIONS, ids=lambda v: str(v))
def test_neighbours_in_a_sequential(act, name):
    model = stock.Sequential(stock.Conv2d(3, 4, 1), stock.BatchNorm2d(4), copy.deepcopy(act)).double()
    original = copy.deepcopy(model)
    convert(model)
    assert count(model, torch.randn(3, 3, 4, 4, dtype=torch.float64)) == (name is not None)
    assert_same(model, original, torch.randn(3, 3, 4, 4, dtype=torch.float64))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_rank(rank):
    model = convert(stock.Sequential(getattr(stock, f"BatchNorm{rank}d")(3), stock.ReLU()))
    assert type(model[0]) is getattr(nn, f"BatchNorm{rank}d")
    assert count(model, torch.randn(4, 3, *[2] * rank)) == 1


def shared_act():
    act = stock.ReLU()
    return stock.Sequential(stock.BatchNorm2d(4), act, stock.Conv2d(4, 4, 1), stock.BatchNorm2d(4), act)


def shared_norm():
    norm = stock.BatchNorm2d(4)
    return stock.Sequential(norm, stock.ReLU(), stock.Sequential(norm, stock.SiLU()))


def hooked(which):
    model = stock.Sequential(stock.BatchNorm2d(4), stock.ReLU())
    model[which].register_forward_hook(lambda module, inputs, output: None)
    return model


class Taps(stock.Sequential):
    """Hands out what is between its layers."""

    def forward(self, x):
        return sum(layer(x) for layer in self)


FUSED = {
    "act in two places": (shared_act, 2),
    "norm in two places": (shared_norm, 2),
    "hook on the norm": (lambda: hooked(0), 0),
    "hook on the activation": (lambda: hooked(1), 0),
    "a forward of its own": (lambda: Taps(stock.BatchNorm2d(4), stock.ReLU()), 0),
    "group norm": (lambda: stock.Sequential(stock.GroupNorm(2, 4), stock.ReLU()), 1),
    "a block of unknown class": (Function, 0),
    "a norm at the end of a Sequential": (
        lambda: stock.Sequential(stock.Sequential(stock.BatchNorm2d(4)), stock.Identity(), stock.ReLU()),
        1,
    ),
}


@pytest.mark.parametrize(("make", "expected"), FUSED.values(), ids=FUSED)
def test_joined_where_nobody_listens(make, expected):
    model = make().double()
    original = copy.deepcopy(model)
    x = torch.randn(3, 4, 4, 4, dtype=torch.float64)
    assert_same(convert(model), original, x)
    assert count(model, x) == expected


@pytest.mark.parametrize("which", ["outer", "outer.1", "outer.1.1"])
@pytest.mark.parametrize("late", [False, True])
def test_whoever_listens_inside_a_sequential_hears_the_norm(which, late):
    model, heard = Pair(), []

    def listen():
        model.get_submodule(which).register_forward_hook(lambda module, inputs, output: heard.append(output))

    if not late:
        listen()
    convert(model, fuse="trace")
    if late:
        listen()
    assert count(model) == 2
    assert heard[0].min() < -0.5  # silu would have none of it


def test_nothing_is_fused_on_request():
    assert count(convert(stock.Sequential(stock.BatchNorm2d(4), stock.ReLU()), fuse=None)) == 0


def test_a_preview_names_the_blocks():
    model = stock.Sequential(stock.Sequential(stock.BatchNorm2d(4), stock.ReLU()), Residual(), Keeps())
    swapped = preview(model, fuse="trace").swapped
    assert swapped["0"] == ("Sequential", "Sequential with fused calls")
    assert swapped["1"] == ("Residual", "Residual with fused calls")
    assert "2" not in swapped
    assert swapped["0.0"] == ("BatchNorm2d", "leannorm.nn.BatchNorm2d")
    assert preview(convert(model), to="torch").swapped["0.0"] == ("BatchNorm2d", "torch.nn.BatchNorm2d")


class Keeps(Block):
    def forward(self, x):
        y = self.bn(self.conv(x))
        self.feat = y
        return self.act(y)


def test_fusing_may_come_later():
    model = stock.Sequential(stock.BatchNorm2d(4), stock.ReLU(), Residual())
    before = look(model)
    for fuse, expected in ((None, 0), ("certain", 1), ("trace", 2), ("trace", 2)):
        assert count(convert(model, fuse=fuse)) == expected
    assert look(convert(model, to="torch")) == before


def test_layers_of_ours_are_fused_too_and_become_torchs():
    model = convert(stock.Sequential(nn.BatchNorm2d(4), stock.ReLU()))
    assert count(model) == 1
    assert [type(m) for m in convert(model, to="torch")] == [stock.BatchNorm2d, stock.ReLU]


def test_a_residual_of_another_dtype_is_added_as_before():
    model = stock.Sequential(Residual())
    original = copy.deepcopy(model)
    convert(model, fuse="trace")
    x = torch.randn(2, 4, 5, 5)
    with torch.autocast("cpu", torch.bfloat16):  # the norm's input is bfloat16, the residual float32
        got, want = model(x), original(x)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want)


def test_hooks_on_norms_and_blocks_are_called():
    model, calls = convert(stock.Sequential(Downsampled()), fuse="trace"), []
    for module in (model[0], model[0].bn, model[0].conv, model[0].shortcut):
        module.register_forward_hook(lambda module, inputs, output: calls.append(type(module).__name__))
    model(torch.randn(2, 4, 5, 5))
    assert sorted(calls) == ["BatchNorm2d", "Conv2d", "Downsampled", "Sequential"]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("block", [Modules, Downsampled, Optional], ids=lambda b: b.__name__)
@pytest.mark.parametrize("training", [False, True])
def test_compiles_and_traces(block, training):
    model, x = convert(stock.Sequential(block()), fuse="trace").train(training), torch.randn(2, 4, 5, 5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


elsewhere = lambda y: y + 1  # noqa: E731 (no name to import it by)
torch.fx.wrap("elsewhere")


class Local(Block):
    def forward(self, x):
        return elsewhere(torch.relu(self.bn(self.conv(x))))


def test_functions_known_by_no_import_are_called():
    model, x = Local().double(), torch.randn(2, 4, 5, 5, dtype=torch.float64)
    original = copy.deepcopy(model)
    assert count(convert(model, fuse="trace"), x) == 1
    assert_same(model, original, x)


def test_a_text_that_is_not_what_runs_is_left_alone():
    """Functions without a file, and one whose file says another thing."""
    namespace = {"F": F, "torch": torch}
    exec("def forward(self, x):\n    return F.relu(self.bn(x))", namespace)
    edited = copy.copy(Function.forward.__code__).replace(co_filename=__file__)
    for forward in (namespace["forward"], types.FunctionType(edited, vars(sys.modules[Function.__module__]))):
        model = type("Other", (Block,), {"forward": forward})()
        with pytest.warns(UserWarning, match=r"the model itself \(its source cannot be read"):
            convert(model, fuse="trace")
        assert count(model) == 0
