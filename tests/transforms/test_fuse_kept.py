"""What code outside of a pair sees of it, and what is changed after the conversion: as without one."""

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from convert_blocks import Block, Modules, Optional, assert_same, count
from torch import nn as stock

from leannorm import convert


def keep_in_attribute(self, x):
    y = self.bn(self.conv(x))
    self.feat = y
    return self.act(y)


def keep_in_list(self, x):
    y = self.bn(self.conv(x))
    y2 = self.act(y)
    self.kept.append(y)
    return y2


def keep_in_dict(self, x):
    self.table["y"] = y = self.bn(self.conv(x))
    y = F.silu(y)
    return y


def keep_a_view(self, x):
    y = self.bn(self.conv(x))
    kept = y[0]
    y = F.silu(y)
    self.feat = kept
    return y


def keep_by_walrus(self, x):
    return F.silu(self.keep(y := self.bn(self.conv(x)))) + y.detach()


def keep_by_comprehension(self, x):
    y = self.bn(self.conv(x))
    z = F.silu(y)
    self.kept += [y for _ in range(1)]
    return z


def keep_by_locals(self, x):
    y = self.bn(self.conv(x))
    z = F.silu(y)
    self.table.update(locals())
    return z


def keep_by_finally(self, x):
    try:
        y = self.bn(self.conv(x))
        return F.silu(y)
    finally:
        self.feat = y


def keep_by_closure(self, x):
    def late():
        self.feat = y

    y = self.bn(self.conv(x))
    z = F.silu(y)
    late()
    return z


def keep_in_the_next_turn(self, x):
    y, z = None, x
    for _ in range(2):
        self.feat = y
        y = self.bn(self.conv(x))
        z = F.silu(y)
    return z


class Keeper(Block):
    """`forward` is one of the above."""

    def __init__(self):
        super().__init__()
        self.kept, self.table, self.feat, self.act = [], {}, None, stock.SiLU()

    def keep(self, y):
        self.feat = y
        return y

    def values(self):
        kept = [self.feat, *self.kept, self.table.get("y")]
        return [t for t in kept if t is not None]


@pytest.mark.parametrize("forward", [v for k, v in globals().items() if k.startswith("keep_")])
def test_a_norms_output_that_is_kept_is_the_norms(forward):
    block = type("Keeping", (Keeper,), {"forward": forward})
    model = block().double()
    original, x = copy.deepcopy(model), torch.randn(2, 4, 5, 5, dtype=torch.float64)
    got, want = convert(model, fuse="trace")(x), original(x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert len(original.values()) == 1
    torch.testing.assert_close(model.values(), original.values(), rtol=1e-12, atol=1e-12)


CFG, ON = {"relu": True}, True


def answer():
    return ON


class Asks(Block):
    """Decides by values of every kind that may change."""

    ON = True

    def __init__(self):
        super().__init__()
        self.on, self.extra = True, None
        self.bn1, self.bn2 = stock.BatchNorm2d(4), stock.BatchNorm2d(4)

    def forward(self, x):
        y = F.relu(self.bn(self.conv(x)))
        if CFG["relu"]:
            y = F.silu(self.bn1(y))
        y = self.bn2(self.conv(y))
        if self.on and self.ON and answer():
            y = F.gelu(y)
        y = self.act(y)
        if self.extra is not None:
            y = self.extra(y)
        return y


class AsksTheEnvironment(Block):
    def forward(self, x):
        y = self.act(self.bn(self.conv(x)))
        return y if os.environ.get("LEANNORM_TEST_FLAG") is None else y * 2


class AsksADefault(Block):
    def forward(self, x, option={"on": True}):  # noqa: B006 (what may be changed)
        y = self.act(self.bn(self.conv(x)))
        return F.relu(self.bn(y)) if option["on"] else self.bn(y)


def other_activation(model, patch):
    model.act = stock.Tanh()


def other_norm(model, patch):
    model.bn = stock.Identity()


def own_forward_of_the_activation(model, patch):
    model.act.forward = torch.tanh


def hook_that_changes(model, patch):
    model.bn.register_forward_hook(lambda module, inputs, output: output * 2)


CHANGES = {
    "global dict": lambda model, patch: patch.setitem(CFG, "relu", False),
    "global name": lambda model, patch: patch.setitem(globals(), "ON", False),
    "global function": lambda model, patch: patch.setitem(globals(), "answer", lambda: False),
    "attribute": lambda model, patch: setattr(model, "on", False),
    "class attribute": lambda model, patch: patch.setattr(Asks, "ON", False),
    "module": lambda model, patch: setattr(model, "extra", stock.Tanh()),
    "other activation": other_activation,
    "other norm": other_norm,
    "patched function": lambda model, patch: patch.setattr(F, "relu", lambda x, inplace=False: x.tanh()),
    "patched class": lambda model, patch: patch.setattr(stock.ReLU, "forward", lambda self, x: x.tanh()),
    "patched block": lambda model, patch: patch.setattr(Asks, "forward", lambda self, x: self.bn(x)),
    "patched activation": own_forward_of_the_activation,
    "hook": hook_that_changes,
    "mode": lambda model, patch: model.bn.eval(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_after_the_conversion_counts(change, monkeypatch):
    model = Asks().double()
    original, x = copy.deepcopy(model), torch.randn(3, 4, 5, 5, dtype=torch.float64)
    convert(model, fuse="trace")
    assert count(model, x) == 2  # but gelu's, which stands behind a question
    assert count(original, x) == 0
    for m in (model, original):
        change(m, monkeypatch)
    for got, want in zip([model(x), *model.buffers()], [original(x), *original.buffers()], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_the_environment_counts(monkeypatch):
    model, x = AsksTheEnvironment().double(), torch.randn(3, 4, 5, 5, dtype=torch.float64)
    original = copy.deepcopy(model)
    assert count(convert(model, fuse="trace"), x) == 1
    monkeypatch.setenv("LEANNORM_TEST_FLAG", "1")
    assert_same(model, original, x)


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setitem(AsksADefault.forward.__defaults__[0], "on", False),
        lambda patch: patch.setattr(AsksADefault.forward, "__defaults__", ({"on": False},)),
    ],
)
def test_default_arguments_count(change, monkeypatch):
    model, x = AsksADefault().double(), torch.randn(3, 4, 5, 5, dtype=torch.float64)
    original = copy.deepcopy(model)
    assert count(convert(model, fuse="trace"), x) == 2
    change(monkeypatch)
    assert_same(model, original, x)


def test_layers_put_into_a_block_after_the_conversion_are_called():
    model, x = Optional().double(), torch.randn(2, 4, 5, 5, dtype=torch.float64)
    original = copy.deepcopy(model)
    assert count(convert(model, fuse="trace"), x) == 1
    for se, downsample in ((stock.Softplus(), None), (None, None), (None, model.bn), (None, Modules())):
        for m in (model, original):
            m.se, m.downsample = se, copy.deepcopy(downsample)
            if downsample is model.bn:
                m.downsample = m.bn
        original.double(), model.double()
        assert_same(model, original, x)


def test_a_norm_waits_for_nothing_that_may_write_its_input():
    """Where the convolution is none, the shortcut is the norm's input, and is overwritten before the sum."""
    model, x = Optional().double(), torch.randn(2, 4, 5, 5, dtype=torch.float64)
    model.conv, model.downsample = stock.Identity(), stock.ReLU(inplace=True)
    original = copy.deepcopy(model)
    convert(model, fuse="trace")
    with torch.no_grad():
        torch.testing.assert_close(model(x.clone()), original(x.clone()), rtol=1e-12, atol=1e-12)


def test_a_norm_does_not_wait_for_one_that_shares_its_statistics():
    model, x = Optional().double(), torch.randn(2, 4, 5, 5, dtype=torch.float64) + 1
    model.downsample[1].running_mean = model.bn.running_mean
    original = copy.deepcopy(model)
    convert(model, fuse="trace")
    assert_same(model, original, x)


def test_an_error_finds_the_norm_run():
    """What stands between a norm and its addition raises: the norm before it has counted the batch, once."""
    for se, downsample in ((None, stock.Conv2d(3, 4, 1)), (stock.Conv2d(3, 4, 1), None)):
        model, x = Optional().double(), torch.randn(2, 4, 5, 5, dtype=torch.float64)
        model.se, model.downsample = se, downsample
        original = copy.deepcopy(model)
        convert(model, fuse="trace")
        for m in (model, original):
            with pytest.raises(RuntimeError):
                m(x)
        assert int(original.bn.num_batches_tracked) == 1
        for got, want in zip(model.buffers(), original.buffers(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


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
