"""What a search looked for in vain, the next passes of the same line hold without one."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leannorm import lean
from leannorm.saving import memo, vain
from leannorm.saving.search import Search

WIDTH = 64


@pytest.fixture
def searched(monkeypatch):
    """The kinds of nodes that were searched, of the pass that runs."""
    monkeypatch.setenv("LEANNORM_RECORD", "0")  # as the fixture of this name in conftest.py
    vain._BEFORE.clear()
    found, step = [], Search.step

    def spy(self, node, *rest):
        found.append(type(node).__name__)
        return step(self, node, *rest)

    monkeypatch.setattr(Search, "step", spy)
    return found


class Block(nn.Module):
    """A residual sum, which the setting does not repeat, behind a norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return (x + self.linear(self.norm(x))).sin()


def passes(count, searched, model=None, xs=None):
    """Runs passes opened at one line; what each searched, and held."""
    model = model or nn.Sequential(Block(), Block())
    for i in range(count):
        searched.clear()
        x = torch.randn(64, WIDTH) if xs is None else xs[i]
        with lean("norm") as saved:
            loss = model(x).square().mean()
        loss.backward()
        yield list(searched), saved


def test_sums_that_are_not_repeated_are_searched_once(searched):
    found, saved = zip(*passes(4, searched), strict=True)
    assert [kinds.count("AddBackward0") for kinds in found] == [2, 2, 0, 0]
    assert len({one.kept_bytes for one in saved}) == 1
    whys = [[r.why for r in one.records] for one in saved]
    assert whys[1] == whys[2] == whys[3]
    assert any(r.node == "AddBackward0" and "does not repeat" in r.why for r in saved[3].records)


def test_after_some_passes_they_are_searched_again(searched):
    every = vain._EVERY
    counts = [found.count("AddBackward0") for found, _ in passes(every + 2, searched)]
    assert counts == [2, 2, *[0] * (every - 2), 2, 0]


def test_layouts_may_take_turns(searched):
    """Each is searched twice; later passes are told, whatever came between."""
    xs = [torch.randn(rows, WIDTH) for rows in (64, 64, 64, 96, 64, 96, 64, 80, 96, 80, 64, 80)]
    counts = [found.count("AddBackward0") for found, _ in passes(len(xs), searched, xs=xs)]
    assert counts == [2, 2, 0, 2, 0, 2, 0, 2, 0, 2, 0, 0]


def test_so_many_layouts_at_most_are_kept(searched):
    xs = [torch.randn(64 + 8 * i, WIDTH) for i in range(vain._MAX_LIKE + 3)]
    for _ in range(3):
        counts = [found.count("AddBackward0") for found, _ in passes(len(xs), searched, xs=xs)]
    assert counts == [2] * len(xs)
    assert all(len(known) <= vain._MAX_LIKE for _, known in vain._BEFORE.values())


def test_lengths_without_end_are_searched(searched):
    xs = [torch.randn(64 + i, WIDTH) for i in range(24)]
    counts = [found.count("AddBackward0") for found, _ in passes(len(xs), searched, xs=xs)]
    assert counts == [2] * len(xs)


def test_another_place_in_the_pass_is_searched(searched):
    model = nn.Sequential(Block(), Block())
    *_, third = passes(3, searched, model)
    assert third[0].count("AddBackward0") == 0
    model.insert(0, nn.Linear(WIDTH, WIDTH))
    assert next(passes(1, searched, model))[0].count("AddBackward0") == 2


def test_two_models_may_take_turns(searched):
    blocks = [Block(), Block(), Block()]
    models = [nn.Sequential(*blocks), nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)]
    counts = [next(passes(1, searched, models[i % 2]))[0].count("AddBackward0") for i in range(8)]
    assert counts == [3, 3, 3, 3, 0, 0, 0, 0]


def test_models_of_before_are_in_nobodys_way(searched):
    """Whatever they held, and in whatever order."""
    for i in range(6):
        before = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(i)), *(Block() for _ in range(i + 1)))
        for _ in passes(3, searched, before):
            pass
    counts = [found.count("AddBackward0") for found, _ in passes(5, searched)]
    assert counts[2:] == [0, 0, 0]


@pytest.mark.parametrize("by", ["C++", "Python"])
def test_what_the_other_model_holds_is_rebuilt(by, searched, monkeypatch):
    """Both have the same tensors up to a sum, which one of them can rebuild."""
    monkeypatch.setattr(memo, "on", by == "C++")

    class Sum(nn.Module):
        def __init__(self, held):
            super().__init__()
            self.layers, self.held = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), held

        def forward(self, x):
            a, b, c, d = (layer(x) for layer in self.layers)
            y = a.sin() + b.sin()
            return (c + d if self.held else a + b) * y.sigmoid()  # which is made of what saved a and b

    models = [Sum(held) for held in (True, False)]
    for i in range(12):
        _, saved = next(passes(1, searched, models[i % 2]))
        rebuilt = any(r.node == "AddBackward0" and r.rebuilt for r in saved.records)
        assert rebuilt == (i % 2 == 1)


class SumOfHeld(nn.Module):
    """Two products that are held, and their sum, which takes one addition."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        return (a + b) * (a.sin() + b.sin()).sigmoid()


def test_what_is_rebuilt_is_never_told(searched):
    """A sum of what is held is rebuilt in each pass."""
    found = [saved for _, saved in passes(4, searched, SumOfHeld())]
    assert len({saved.kept_bytes for saved in found[1:]}) == 1
    for saved in found:
        assert any(r.node == "AddBackward0" and r.rebuilt for r in saved.records)


def test_a_dropped_pass_tells_nothing(searched):
    model, x = nn.Sequential(Block(), Block()), torch.randn(64, WIDTH)

    def run(drop):
        searched.clear()
        with lean("norm"):
            loss = model(x).square().mean()
            if drop:
                del loss
                return None
        loss.backward()
        return searched.count("AddBackward0")

    run(drop=False), run(drop=True)
    assert run(drop=False) == run(drop=False) == 2


@pytest.mark.parametrize("setting", ["norm", "conv"])
def test_gradients_are_stocks_in_each_pass(setting):
    model, x = nn.Sequential(Block(), SumOfHeld(), Block()), torch.randn(64, WIDTH, requires_grad=True)

    def step(context):
        with context:
            loss = model(x).square().sum()
        return torch.autograd.grad(loss, [x, *model.parameters()])

    stock = step(nullcontext())
    for _ in range(4):
        assert all(map(torch.equal, stock, step(lean(setting))))


def test_what_a_norm_saved_first_tells_all_of_its_call():
    """Attention's scores are looked at anew after some passes: is a causal mask added to them?"""
    norm, linear, mask = nn.LayerNorm(16), nn.Linear(16, 16), torch.randn(6, 6)
    for _ in range(2 * vain._EVERY + 2):
        with lean("conv") as saved:
            h = linear(torch.randn(2, 6, 16))
            scores = torch.bmm(h, F.gelu(norm(h)).transpose(1, 2))
            loss = (F.gelu(scores + mask) * scores.sin()).sum()
        loss.backward()
        assert not [reason for reason in saved.reasons if "Error" in reason]


def test_what_pooling_holds_is_narrowed_in_each_pass():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3))
    x = torch.randn(4, 3, 64, 64)
    kept = []
    for _ in range(4):
        with lean("norm") as saved:
            loss = model(x).square().mean()
        loss.backward()
        kept.append(saved.kept_bytes)
    assert len(set(kept)) == 1


class Widened(nn.Module):
    """A residual sum that the setting does not repeat, read through a widening cast, perhaps edited."""

    def __init__(self):
        super().__init__()
        self.linear, self.edited = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), False

    def forward(self, x):
        x = x.bfloat16()
        wide = (x + self.linear(x)).float()
        if self.edited:
            wide.data.add_(1e-3)  # no bfloat16 has these bits
        return wide.pow(2)


def test_what_is_held_in_fewer_bytes_is_searched_once(searched):
    net = Widened()
    found, saved = zip(*passes(4, searched, net), strict=True)
    assert [kinds.count("ToCopyBackward0") for kinds in found] == [1, 1, 0, 0]
    narrow = [next(r.bytes for r in one.records if r.node == "ToCopyBackward0" and r.bytes) for one in saved]
    assert narrow == [2 * 64 * WIDTH] * 4


def test_what_fits_into_fewer_bytes_no_more_is_held_whole():
    net, held = Widened(), []

    def gradient(context):
        torch.manual_seed(0)
        net.zero_grad()
        with context as saved:
            loss = net(torch.randn(64, WIDTH)).sum()
        loss.backward()
        return net.linear.weight.grad.clone(), saved

    for i in range(5):
        net.edited = i == 4
        stock, _ = gradient(nullcontext())
        found, saved = gradient(lean("norm"))
        held.append(saved.kept_bytes)
        assert torch.equal(stock, found)
    assert held[4] - held[3] == 2 * 64 * WIDTH
