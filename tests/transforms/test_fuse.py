"""Fusing a norm with the activation behind it: where it is done, and where it must not be."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from fuse_cases import assert_same, count, fused, nodes_of_python
from torch import nn as stock

from leannorm import convert, nn
from leannorm.ops.activation import ACTIVATIONS as TABLE
from leannorm.transforms import preview

ACTIVATIONS = [
    *((of.module(**of.parameters), name) for name, of in TABLE.items() if name != "identity"),
    (stock.ReLU(inplace=True), "relu"),
    (stock.SiLU(inplace=True), "silu"),
    (stock.LeakyReLU(0.2), None),
    (stock.ELU(0.5), None),
    (stock.Hardtanh(-2, 2), None),
    (stock.PReLU(), None),
    (stock.Identity(), None),
]
X = torch.randn(3, 4, 5, 5, dtype=torch.float64) + 1


def look(model):
    return [(name, type(m), sorted(vars(m)), m.training) for name, m in model.named_modules()]


def pair(norm=stock.BatchNorm2d, act=stock.ReLU):
    return stock.Sequential(norm(4), act())


class Pair(stock.Module):
    """A norm at the end of a Sequential, and behind that an activation."""

    def __init__(self):
        super().__init__()
        inner = stock.Sequential(stock.Conv2d(4, 4, 3, padding=1), stock.BatchNorm2d(4))
        self.outer = stock.Sequential(
            stock.Identity(), inner, stock.SiLU(), stock.BatchNorm2d(4), stock.ReLU()
        )

    def forward(self, x):
        return self.outer(x)


class Block(stock.Module):
    """Calls a norm and an activation by itself."""

    def __init__(self):
        super().__init__()
        self.bn, self.act = stock.BatchNorm2d(4), stock.ReLU()

    def forward(self, x):
        return self.act(self.bn(x))


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
    model = pair()
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
    "instance norm": (
        lambda: stock.Sequential(stock.InstanceNorm2d(4, affine=True), stock.LeakyReLU(inplace=True)),
        1,
    ),
    "instance norm with running statistics": (
        lambda: stock.Sequential(stock.InstanceNorm2d(4, track_running_stats=True), stock.SiLU()),
        0,
    ),
    "a block that is no Sequential": (Block, 0),
    "a norm at the end of a Sequential": (Pair, 2),
    "an identity between": (
        lambda: stock.Sequential(stock.BatchNorm2d(4), stock.Identity(), stock.ReLU()),
        1,
    ),
    "a subclass of Sequential": (
        lambda: type("Named", (stock.Sequential,), {})(stock.BatchNorm2d(4), stock.ReLU()),
        1,
    ),
}


@pytest.mark.parametrize(("make", "expected"), FUSED.values(), ids=FUSED)
def test_joined_where_nobody_listens(make, expected):
    model = make().double()
    original, before = copy.deepcopy(model), look(model)
    assert convert(model) is model
    assert_same(model, original, X)
    assert count(model, X) == expected
    assert isinstance(model, type(original))
    model.train()
    convert(model, to="torch")
    assert look(model) == before


def test_copies_and_pickles_are_fused_too():
    model = convert(Pair().double())
    want = copy.deepcopy(model)(X)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with nodes_of_python():
            got = copied(X)
        assert fused(got) == 2
        assert torch.equal(got, want)


@pytest.mark.parametrize("which", ["outer.1", "outer.1.1"])
@pytest.mark.parametrize("late", [False, True])
def test_whoever_listens_inside_a_sequential_hears_the_norm(which, late):
    model, heard = Pair(), []

    def listen():
        model.get_submodule(which).register_forward_hook(lambda module, inputs, output: heard.append(output))

    if not late:
        listen()
    convert(model)
    if late:
        listen()
    model(X.float())
    assert heard[0].min() < 0


def test_nothing_is_fused_on_request():
    assert count(convert(pair(), fuse=False)) == 0


def test_a_preview_names_the_blocks():
    model = stock.Sequential(pair(), Block())
    swapped = preview(model).swapped
    assert swapped["0"] == ("Sequential", "Sequential with fused calls")
    assert "1" not in swapped
    assert swapped["0.0"] == ("BatchNorm2d", "leannorm.nn.BatchNorm2d")
    assert preview(convert(model), to="torch").swapped["0.0"] == ("BatchNorm2d", "torch.nn.BatchNorm2d")


def test_fusing_may_come_later():
    model = stock.Sequential(stock.BatchNorm2d(4), stock.ReLU())
    before = look(model)
    for fuse, expected in ((False, 0), (True, 1), (True, 1), (False, 1)):
        assert count(convert(model, fuse=fuse)) == expected
    assert look(convert(model, to="torch")) == before


def test_layers_of_ours_are_fused_too_and_become_torchs():
    model = convert(stock.Sequential(nn.BatchNorm2d(4), stock.ReLU()))
    assert count(model) == 1
    assert [type(m) for m in convert(model, to="torch")] == [stock.BatchNorm2d, stock.ReLU]


def test_hooks_on_norms_and_blocks_are_called():
    model, calls = convert(Pair()), []
    for module in (model, model.outer, model.outer[3], model.outer[1][0]):
        module.register_forward_hook(lambda module, inputs, output: calls.append(type(module).__name__))
    model(X.float())
    assert sorted(calls) == ["BatchNorm2d", "Conv2d", "Pair", "Sequential"]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("training", [False, True])
def test_compiles_and_traces(training):
    model, x = convert(Pair()).train(training), X.float()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


def other_activation(model, patch):
    model[1] = stock.Tanh()


def other_norm(model, patch):
    model[0] = stock.Identity()


def own_forward_of_the_activation(model, patch):
    model[1].forward = torch.tanh


def hook_that_changes(model, patch):
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)


CHANGES = {
    "other activation": other_activation,
    "other norm": other_norm,
    "patched function": lambda model, patch: patch.setattr(F, "relu", lambda x, inplace=False: x.tanh()),
    "patched class": lambda model, patch: patch.setattr(stock.ReLU, "forward", lambda self, x: x.tanh()),
    "patched Sequential": lambda model, patch: patch.setattr(
        stock.Sequential, "forward", lambda self, x: self[1](x)
    ),
    "patched activation": own_forward_of_the_activation,
    "hook": hook_that_changes,
    "mode": lambda model, patch: model[0].eval(),
    "a layer between": lambda model, patch: model.insert(1, stock.Softplus()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_after_the_conversion_counts(change, monkeypatch):
    model = stock.Sequential(stock.BatchNorm2d(4), stock.ReLU()).double()
    original = copy.deepcopy(model)
    convert(model)
    assert count(model, X) == 1
    assert count(original, X) == 0
    for m in (model, original):
        change(m, monkeypatch)
    for got, want in zip([model(X), *model.buffers()], [original(X), *original.buffers()], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_tensor_that_sees_each_operation_sees_the_norm():
    seen = []

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", ""))
            return super().__torch_function__(func, types, args, kwargs)

    model = convert(stock.Sequential(stock.BatchNorm2d(4), stock.ReLU()))
    model(X.float().as_subclass(Logged))
    assert "relu" in seen


def test_parts_called_by_themselves_are_what_they_were():
    """The taps of a perceptual loss: code outside of the model calls the layers of a Sequential."""
    model = stock.Sequential(stock.BatchNorm2d(4), stock.ReLU()).double()
    original, x = copy.deepcopy(model), torch.randn(2, 4, 3, 3, dtype=torch.float64)
    convert(model)
    for got, want in (
        (model[0](x), original[0](x)),
        (model[:1](x), original[:1](x)),
        (model(x), original(x)),
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_an_error_finds_the_norm_run_once():
    """What stands behind a norm raises: the norm has counted the batch, once."""

    class Raising(stock.Module):
        def forward(self, x):
            raise RuntimeError

    for layers in ((stock.BatchNorm2d(4), Raising()), (stock.BatchNorm2d(4), stock.ReLU(), Raising())):
        model = convert(stock.Sequential(*layers))
        with pytest.raises(RuntimeError):
            model(X.float())
        assert int(model[0].num_batches_tracked) == 1
