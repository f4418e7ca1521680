"""The memo of `lean()` (saving/memo.py, csrc/nodes/kinds.h): what it has learned of one save it may use for
another only where the Python search would find the same.

Each program is run twice for the memo to learn, then with a change that one of its guards sees.
"""

import contextlib
import gc
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from memo_listings import GUARDED, Program, flags_within, scaled_before_edit
from torch import nn

from leannorm.autograd.nodes import NODES
from leannorm.saving import lean, memo, packing, small

pytestmark = pytest.mark.skipif(NODES is None, reason="the memo is a part of the C++ nodes")


@pytest.fixture(autouse=True)
def searched(monkeypatch):
    monkeypatch.setenv("LEANNORM_RECORD", "0")
    monkeypatch.setattr(small, "SMALL", -1)
    monkeypatch.setattr(packing, "SMALLEST", 1)
    memo.forget()
    yield
    memo.forget()


@pytest.fixture(params=["0", "1"], ids=["searched", "recorded"])
def on_both(request, searched, monkeypatch):
    """Where operators are recorded too, which no memo sees."""
    monkeypatch.setenv("LEANNORM_RECORD", request.param)


def next_key(settings):
    return next(iter(settings))


def _records(saved):
    return [(r.node, r.shape, r.dtype, r.bytes, r.rebuilt, r.why) for r in saved.records]


def _asked_python(monkeypatch, asked):
    pack = packing.Packing._pack

    def noted(self, tensor, *rest):
        asked.append(tensor.grad_fn)
        return pack(self, tensor, *rest)

    monkeypatch.setattr(packing.Packing, "_pack", noted)


@pytest.mark.usefixtures("on_both")
@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize("f", GUARDED)
@pytest.mark.sampled(of=2)
def test_what_has_changed_is_seen(f, setting):
    program = Program(f, kernel=3 if f is flags_within else 1)
    for seed in range(6):
        program.gradients(lean(setting), False, seed)
    for seed, other in enumerate([True, False, True, True]):
        stock = program.gradients(contextlib.nullcontext(), other, seed)
        found = program.gradients(lean(setting), other, seed)
        if isinstance(stock, str):
            assert isinstance(found, str)
        elif isinstance(found, str):  # as documented, where every parameter may be read again
            assert (f, setting) == (scaled_before_edit, "conv")
            assert "through .data" in found
        else:
            assert all(torch.equal(a, b) for a, b in zip(stock, found, strict=True))


@pytest.mark.usefixtures("on_both")
def test_a_weight_that_was_edited_through_data_raises():
    """A convolution is rebuilt by its weight, which must hold what it held; the log copies small ones."""
    program = Program(
        lambda m, x, other: m[2](F.silu(m[1](F.silu(m[0](x))))).square().sum(),
        after=lambda m: m[0].weight.data.mul_(2),
    )
    for seed in range(6):
        program.gradients(lean("conv"), False, seed)
    stock = program.gradients(contextlib.nullcontext(), True, 9)
    found = program.gradients(saved := lean("conv"), True, 9)
    assert saved.rebuilt_bytes
    if serves():
        assert all(map(torch.equal, found, stock))
    else:
        assert "through .data" in found


@pytest.mark.usefixtures("on_both")
@pytest.mark.parametrize("setting", ["norm", "conv"])
def test_flags_set_between_passes_are_seen(setting):
    program = Program(lambda m, x, other: m[2](F.silu(m[1](F.silu(m[0](x))))).square().sum(), kernel=3)
    for seed in range(6):
        program.gradients(lean(setting), False, seed)
    torch._C._set_mkldnn_enabled(False)
    try:
        stock = program.gradients(contextlib.nullcontext(), False, 7)
        found = program.gradients(lean(setting), False, 7)
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert all(torch.equal(a, b) for a, b in zip(stock, found, strict=True))


def _net():
    torch.manual_seed(0)
    acts = nn.SiLU(), nn.ReLU(), nn.Hardswish(True)
    parts = [(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), act) for act in acts]
    return nn.Sequential(*[layer for part in parts for layer in part], nn.Flatten(), nn.Linear(8 * 36, 10))


def _passes(net, setting, count, like=None):
    """Gradients and records of passes on inputs of their own."""
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        net.zero_grad()
        with contextlib.nullcontext() if setting is None else lean(setting) as saved:
            loss = net(torch.randn(4, 8, 6, 6)).square().sum()
        loss.backward()
        told = () if saved is None else (_records(saved), saved.kept_bytes, saved.reasons)
        found.append(([p.grad.clone() for p in net.parameters()], *told))
    return found


@pytest.mark.parametrize("setting", ["norm", "conv"])
def test_ledgers_and_gradients_are_those_of_the_search(monkeypatch, setting):
    monkeypatch.setattr(memo, "on", False)
    searched = _passes(_net(), setting, 6)
    monkeypatch.setattr(memo, "on", True)
    for _ in range(2):
        for a, b in zip(searched, _passes(_net(), setting, 6), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
            assert a[1:] == b[1:]


def test_a_sum_goes_by_what_is_added(monkeypatch):
    """A sum of held tensors is rebuilt, one of an activation's output is held, by lean()'s rule."""

    def add(m, x, other):
        u, v = m[0](x), m[1](x)
        w = F.silu(u)
        gate = (w + F.silu(v)).sigmoid()  # of what saves u and v
        s = (w if other else u) + v
        return m[3](s * gate).square().sum() + m[2](w).sum()

    def records(on):
        monkeypatch.setattr(memo, "on", on)
        program = Program(add)
        for seed in range(6):
            program.gradients(lean("norm"), False, seed)
        program.gradients(usual := lean("norm"), False, 7)
        program.gradients(saved := lean("norm"), True, 7)
        return [sum(r.rebuilt for r in seen.records if r.node == "AddBackward0") for seen in (usual, saved)]

    assert records(True) == records(False) == [1, 0]


@pytest.mark.usefixtures("on_both")
def test_an_edit_that_the_backward_pass_never_meets():
    """What a node saved was edited before its output was saved: the output is held."""

    def gradient(context, other):
        torch.manual_seed(1)
        with context:
            y = program.m[0](torch.randn(4, 8, 6, 6))
            a = F.silu(y)
            if other:
                with torch.no_grad():
                    y.mul_(2)
            loss = program.m[1](a).square().sum()
        return torch.autograd.grad(loss, program.m[1].weight)[0]

    program = Program(None)
    for _ in range(6):
        gradient(lean("norm"), False)
    assert torch.equal(gradient(contextlib.nullcontext(), True), gradient(lean("norm"), True))


def test_a_pass_like_those_before_asks_python_for_nothing(monkeypatch):
    monkeypatch.setattr(packing, "SMALLEST", 16)
    net, asked = _net(), []
    _passes(net, "norm", 5)
    _asked_python(monkeypatch, asked)
    _passes(net, "norm", 1)
    assert not asked


@pytest.mark.parametrize("in_place", [False, True])
def test_products_whose_leaves_are_known_later_use_up_no_attempts(monkeypatch, in_place):
    """More layers of a kind than a memo tries: what is held in the first pass leaves room for the rest."""
    torch.manual_seed(0)
    layers = [m for _ in range(30) for m in (nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.SiLU(in_place))]
    net, asked = nn.Sequential(*layers), []
    _passes(net, "conv", 4)
    _asked_python(monkeypatch, asked)
    _passes(net, "conv", 1)
    assert not asked


class _Blocks(nn.Module):
    """Norms that are run again, sums that are searched in vain, statistics of many rows, and an alias."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.rows, self.channels = nn.LayerNorm(24), nn.GroupNorm(2, 24)

    def forward(self, x):
        for norm, linear in ((self.rows, self.first), (self.channels, self.second)):
            x = (x + F.gelu(linear(norm(x)))).sin()
        return self.second(F.gelu(x)[:, :])


@pytest.mark.parametrize("setting", ["norm", "conv"])
def test_norms_that_are_run_again_and_searches_in_vain_ask_python_for_nothing(monkeypatch, setting):
    torch.manual_seed(0)
    net, asked = _Blocks(), []

    def step(context, seed):
        torch.manual_seed(seed)
        net.zero_grad()
        with context as saved:
            loss = net(torch.randn(64, 24)).square().sum()
        loss.backward()
        return [p.grad.clone() for p in net.parameters()], saved

    stock, _ = step(contextlib.nullcontext(), 7)
    ledgers = []
    for seed in range(8):  # opened at one line of the program
        if seed == 7:
            _asked_python(monkeypatch, asked)
        found, saved = step(lean(setting), seed)
        ledgers.append(_records(saved))
    assert not asked
    assert all(torch.equal(a, b) for a, b in zip(stock, found, strict=True))
    assert ledgers[-1] == ledgers[1]
    assert any(r.rebuilt and "LayerNorm" in r.node for r in saved.records)
    assert any(r.rebuilt and "GroupNorm" in r.node for r in saved.records)
    assert any(r.rebuilt and "Alias" in r.node for r in saved.records)
    assert any("does not repeat" in r.why for r in saved.records)


_COUNTED = """
import gc, sys, torch, weakref
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from leannorm.saving import lean, memo, small
from leannorm.saving.calls import CallArguments
from leannorm.saving.steps import Step
from leannorm.saving.values import Value
small.SMALL, memo.on = -1, sys.argv[1] == "True"
net = nn.Sequential(*[m for _ in range(9) for m in (nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.SiLU())])
def visited(context):
    before = {id(o) for o in gc.get_objects()}
    gc.disable()
    with context:
        loss = net(torch.randn(4, 8, 6, 6)).square().sum()
    made = [type(o) for o in gc.get_objects() if id(o) not in before]
    gc.enable()
    loss.backward()
    return made
for _ in range(6):
    ours, plain = visited(lean(sys.argv[2])), visited(saved_tensors_hooks(lambda t: t, lambda t: t))
kinds = Value, Step, CallArguments, weakref.ref
print(len(ours), len(plain), ours.count(dict), sum(map(ours.count, kinds)))
"""


@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.sampled(of=2)
def test_few_objects_wait_to_be_collected(on, setting):
    """What lives from the forward to the backward pass, Python's collector visits again and again, and in the
    end with it all of Python's objects. What the C++ hook makes is in no circle, and not visited: no more is
    than with hooks that do nothing, but for what a pass has once."""
    command = [sys.executable, "-c", _COUNTED, str(on), setting]
    ours, plain, dicts, others = map(int, subprocess.check_output(command, text=True).split())
    assert dicts < 2 * 9 * 3  # there are 9 * 3 nodes and two
    assert others == 0 if on else others > dicts
    assert ours < plain + 40 if on else ours > 2 * plain


@pytest.mark.parametrize("settings", [{"verify": True}, {"held": (lambda t: t, lambda t: t)}], ids=next_key)
def test_other_settings_are_pythons(monkeypatch, settings):
    net, asked = _net(), []
    _passes(net, "norm", 5)
    _asked_python(monkeypatch, asked)
    with lean(**settings) as saved:
        loss = net(torch.randn(4, 8, 6, 6)).square().sum()
    loss.backward()
    assert len(asked) >= len(saved.records)


@pytest.mark.parametrize("settings", [{"budget": 0.5}, {"peak": 0.9}, {"overhead": 10.0}], ids=next_key)
def test_a_pass_that_follows_a_plan_asks_python_for_little(monkeypatch, settings):
    """The first one makes the plan; another batch size has one of its own, from the next pass on."""
    net, asked = _net(), []
    _asked_python(monkeypatch, asked)
    kept, counts = [], []
    for seed, batch in enumerate((4, 4, 4, 4, 3, 3, 3, 4)):
        torch.manual_seed(seed)
        x = torch.randn(batch, 8, 6, 6)
        stock = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
        asked.clear()
        with lean(**settings) as saved:
            loss = net(x).square().sum()
        found = torch.autograd.grad(loss, list(net.parameters()))
        assert all(map(torch.equal, stock, found))
        kept.append(saved.kept_bytes), counts.append(len(asked))
    assert counts[0] >= len(saved.records)
    assert max(counts[3], counts[6], counts[7]) <= 4
    assert kept[1] == kept[2] == kept[3] == kept[7]
    assert all(r.rebuilt or r.why or not r.node for r in saved.records if r.bytes >= 1152)


@pytest.mark.usefixtures("on_both")
def test_several_threads_share_a_memo():
    errors, inputs = list[Exception](), [torch.randn(4, 8, 6, 6) for _ in range(6)]
    nets = [_net() for _ in range(4)]

    def passes(net):
        for x in inputs:
            net.zero_grad()
            with lean("norm"):
                loss = net(x).square().sum()
            loss.backward()
            yield [p.grad.clone() for p in net.parameters()]

    alone = list(passes(nets[0]))

    def work(net):
        try:
            for a, b in zip(alone, passes(net), strict=True):
                assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(net,)) for net in nets[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.usefixtures("on_both")
def test_a_graph_is_read_twice_and_two_are_alive():
    net = _net()
    _passes(net, "norm", 4)
    torch.manual_seed(7)
    xs = [torch.randn(4, 8, 6, 6) for _ in range(2)]
    losses = []
    for x in xs:
        with lean("norm"):
            losses.append(net(x).square().sum())
    first = torch.autograd.grad(losses[0], list(net.parameters()), retain_graph=True)
    torch.autograd.grad(losses[1], list(net.parameters()))
    second = torch.autograd.grad(losses[0], list(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nothing_is_left_of_passes_with_and_without_a_backward_pass():
    net = _net()
    _passes(net, "norm", 4)
    references = []
    for i in range(20):
        with lean("norm") as saved:
            loss = net(torch.randn(4, 8, 6, 6)).square().sum()
        if i % 2:
            loss.backward()
        references += saved._ledger.references
        del loss
    gc.collect()
    assert references
    assert not [r for r in references if r() is not None]
