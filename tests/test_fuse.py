"""Fusing a norm with what follows it: where it is done, where it must not be, and that nothing changes."""

import copy
import pickle

import pytest
import torch
from convert_blocks import BLOCKS, Block, Downsampled, Function, Modules, Pair, Residual
from torch import nn as stock

from leannorm import convert, nn
from leannorm.transforms.known import WITH_ACT

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
FUSED = set(WITH_ACT.values())


def fused(model):
    return sum(type(m) in FUSED for m in model.modules())


def results(model, x):
    """Outputs, gradients and buffers after a step of training and an evaluation, from the same start."""
    leaf = x.clone().requires_grad_()
    y = model.train()(leaf)
    gradients = torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()], materialize_grads=True)
    with torch.no_grad():
        return [y, *gradients, *model.buffers(), model.eval()(x)]


def assert_same(model, original, x):
    for got, want in zip(results(model, x), results(original, x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def look(model):
    return [(name, type(m), sorted(vars(m)), m.training) for name, m in model.named_modules()]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.__name__)
def test_blocks_compute_the_same(block):
    model = stock.Sequential(block()).double()
    original, before = copy.deepcopy(model), look(model)
    assert convert(model, fuse="trace") is model
    assert fused(model) == block.fused
    assert (type(model[0]) is not block) == block.rewritten
    assert isinstance(model[0], block)
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64) + 1
    assert_same(model, original, x)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    want = model(x)
    for copied in copies:
        assert fused(copied) == block.fused
        assert torch.equal(copied(x), want)
    convert(model.train(), to="torch")
    assert look(model) == before


@pytest.mark.parametrize(("act", "name"), ACTIVATIONS, ids=lambda v: str(v))
def test_neighbours_in_a_sequential(act, name):
    model = stock.Sequential(stock.Conv2d(3, 4, 1), stock.BatchNorm2d(4), copy.deepcopy(act)).double()
    original = copy.deepcopy(model)
    convert(model)
    assert fused(model) == (name is not None)
    assert getattr(model[1], "activation", None) == name
    assert_same(model, original, torch.randn(3, 3, 4, 4, dtype=torch.float64))
    assert type(convert(model, to="torch")[2]) is type(act)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_rank(rank):
    norm = getattr(stock, f"BatchNorm{rank}d")
    model = convert(stock.Sequential(norm(3), stock.ReLU()))
    assert type(model[0]) is getattr(nn, f"BatchNormAct{rank}d")


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


UNFUSED = {
    "act in two places": shared_act,
    "norm in two places": shared_norm,
    "hook on the norm": lambda: hooked(0),
    "hook on the activation": lambda: hooked(1),
    "a forward of its own": lambda: Taps(stock.BatchNorm2d(4), stock.ReLU()),
    "a list": lambda: stock.ModuleList([stock.BatchNorm2d(4), stock.ReLU()]),
    "group norm": lambda: stock.Sequential(stock.GroupNorm(2, 4), stock.ReLU()),
    "a block of unknown class": Function,
}


@pytest.mark.parametrize("make", UNFUSED.values(), ids=UNFUSED)
def test_left_apart_where_it_is_not_certain(make):
    model = make().double()
    original = copy.deepcopy(model)
    assert fused(convert(model)) == 0
    if type(model) is not stock.ModuleList:
        assert_same(model, original, torch.randn(3, 4, 4, 4, dtype=torch.float64))


@pytest.mark.parametrize("which", ["outer", "outer.1", "outer.1.1"])
def test_whoever_listens_inside_a_sequential_hears_the_norm(which):
    model = Pair()
    heard = []
    model.get_submodule(which).register_forward_hook(lambda module, inputs, output: heard.append(output))
    convert(model, fuse="trace")(torch.randn(3, 4, 5, 5))
    assert fused(model) == 2
    assert heard[0].min() < -0.5  # silu would have none of it


def test_nothing_is_fused_on_request():
    assert fused(convert(stock.Sequential(stock.BatchNorm2d(4), stock.ReLU()), fuse=None)) == 0


def test_fusing_may_come_later():
    model = stock.Sequential(stock.BatchNorm2d(4), stock.ReLU(), Residual())
    before = look(model)
    for fuse, count in ((None, 0), ("certain", 1), ("trace", 2), ("trace", 2)):
        assert fused(convert(model, fuse=fuse)) == count
    assert look(convert(model, to="torch")) == before


def test_layers_of_ours_are_fused_too_and_become_torchs():
    model = convert(stock.Sequential(nn.BatchNorm2d(4), stock.ReLU()))
    assert type(model[0]) is nn.BatchNormAct2d
    assert [type(m) for m in convert(model, to="torch")] == [stock.BatchNorm2d, stock.ReLU]


def test_a_residual_of_another_dtype_is_added_as_before():
    model = stock.Sequential(Residual())
    original = copy.deepcopy(model)
    convert(model, fuse="trace")
    half = model[0].bn.register_forward_pre_hook(lambda module, inputs: None)
    half.remove()
    x = torch.randn(2, 4, 5, 5)
    with torch.autocast("cpu", torch.bfloat16):  # the norm's input is bfloat16, the residual float32
        got, want = model(x), original(x)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want)


def test_hooks_on_fused_norms_and_blocks_are_called():
    model, calls = convert(stock.Sequential(Downsampled()), fuse="trace"), []
    for module in (model[0], model[0].bn, model[0].conv, model[0].shortcut):
        module.register_forward_hook(lambda module, inputs, output: calls.append(type(module).__name__))
    model(torch.randn(2, 4, 5, 5))
    assert sorted(calls) == ["BatchNormAct2d", "Conv2d", "Downsampled", "Sequential"]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("block", [Modules, Downsampled], ids=lambda b: b.__name__)
def test_compiles_and_traces(block):
    model, x = convert(stock.Sequential(block()), fuse="trace").eval(), torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


elsewhere = lambda y: y + 1  # noqa: E731 (no name to import it by)
torch.fx.wrap("elsewhere")


class Local(Block):
    def forward(self, x):
        return elsewhere(torch.relu(self.normalized(x)))


def test_a_text_that_cannot_be_imported_is_not_rewritten():
    model, x = Local().double(), torch.randn(2, 4, 5, 5, dtype=torch.float64)
    original = copy.deepcopy(model)
    assert type(convert(model, fuse="trace")) is Local
    assert_same(model, original, x)
