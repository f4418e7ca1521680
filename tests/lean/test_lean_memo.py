"""The memo of `lean()` (saving/memo.py, csrc/nodes/kinds.h): what it has learned of one save it may use for
another only where the Python search would find the same.

Each program is run twice for the memo to learn, then with a change that one of its guards sees.
"""

import contextlib
import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leannorm.autograd.nodes import NODES
from leannorm.saving import lean, memo, packing, small

pytestmark = pytest.mark.skipif(NODES is None, reason="the memo is a part of the C++ nodes")


@pytest.fixture(autouse=True)
def searched(monkeypatch):
    monkeypatch.setattr(small, "SMALL", -1)
    monkeypatch.setattr(packing, "SMALLEST", 1)
    memo.forget()
    yield
    memo.forget()


class Program:
    """Convolutions `m`, an input that is new in every pass, and `f(m, x, other)`, computed of them."""

    def __init__(self, f, kernel=1, after=None):
        torch.manual_seed(0)
        make = [nn.Conv2d(8, 8, kernel, padding=kernel // 2, bias=False) for _ in range(4)]
        self.f, self.m, self.after = f, nn.ModuleList(make), after
        self.m.scale = nn.Parameter(torch.randn(8, 6, 6))
        self.at_first = [p.detach().clone() for p in self.m.parameters()]

    def gradients(self, context, other, seed):
        for p, at_first in zip(self.m.parameters(), self.at_first, strict=True):
            p.data.copy_(at_first)
        torch.manual_seed(seed)
        x = torch.randn(4, 8, 6, 6)
        self.m.zero_grad()
        self.m.kept = self.m[0].weight.to(torch.bfloat16)
        with torch.no_grad():
            self.m[0].weight.mul_(2)
        with context:
            loss = self.f(self.m, x, other)
        if self.after is not None and other:
            self.after(self.m)
        try:
            loss.backward()
        except RuntimeError as error:
            return str(error)
        return [p.grad for p in self.m.parameters() if p.grad is not None]


def _records(saved):
    return [(r.node, r.shape, r.dtype, r.bytes, r.rebuilt, r.why) for r in saved.records]


def _asked_python(monkeypatch, asked):
    pack = packing.Packing._pack

    def noted(self, tensor, *rest):
        asked.append(tensor.grad_fn)
        return pack(self, tensor, *rest)

    monkeypatch.setattr(packing.Packing, "_pack", noted)


def _choice(m, x, other):
    a, b = F.silu(m[0](x)), F.silu(m[1](x))
    return m[2](b if other else a).sum() + (a + b).mean()


def _read_before_edit(m, x, other):
    y = m[0](x)
    r = y * 2.0
    with torch.no_grad():
        y.mul_(3.0)
    s = F.silu(y)
    t = y * 2.0
    return m[1](r if other else t).sum() + m[2](s).square().sum()


def _read_before_a_saved_edit(m, x, other):
    y = m[0](x)
    r = -y
    if other:
        with torch.no_grad():
            y.mul_(3.0)
    return m[2](F.silu(y)).square().sum() + m[1](r).square().sum()


def _edited_unseen_between_two_readers(m, x, other):
    a = F.silu(m[0](x))
    first = m[1](a)
    if other:
        a.data.mul_(2)
    return first.square().sum() + m[2](a).square().sum()


def _edited_behind(m, x, other):
    y = m[0](x)
    s = F.silu(y)
    if other:
        with torch.no_grad():
            y.mul_(2)
    return m[1](torch.relu(y)).square().sum() + s.detach().sum()


def _schedule(m, x, other):
    return m[1](F.leaky_relu(m[0](x), 0.3 if other else 0.1)).square().sum()


def _edited_output(m, x, other):
    a = F.silu(m[0](x))
    if other:
        with torch.no_grad():
            a.mul_(2)
    return m[1](a).square().sum()


def _address(m, x, other):
    a = m[0](x)
    q = F.silu(a)
    if other:
        del q, a
    b = m[1](x)
    return m[2](torch.relu(b if other else a)).square().sum()


def _flags_within(m, x, other):
    z = m[3](x)
    torch._C._set_mkldnn_enabled(not other)
    try:
        b = m[0](x)
    finally:
        torch._C._set_mkldnn_enabled(True)
    return m[2](F.silu(b)).square().sum() + z.sum()


def _other_sort(m, x, other):
    """The same node, whose input is rebuilt by another step: an activation joins a norm, or does not."""
    n = F.batch_norm(m[0](x), None, None, training=True) if other else F.silu(m[0](x))
    return m[1](F.hardswish(n)).square().sum()


def _frozen_bias(m, x, other):
    bias = torch.ones(8) if other else None
    return m[1](F.silu(F.batch_norm(m[0](x), None, None, None, bias, training=True))).square().sum()


def _scaled(m, x, other):
    """A number that the node keeps as a tensor tells nothing of itself."""
    return m[1](m[0](x) * torch.tensor(3.0 if other else 2.0)).square().sum()


def _eps(m, x, other):
    y = F.batch_norm(m[0](x), None, None, training=True, eps=0.5 if other else 1e-5)
    return m[1](F.silu(y)).square().sum()


def _with_itself(m, x, other):
    """A product of a tensor with itself, and one of two tensors that are alike."""
    a, b = m[0](x), m[1](x)
    return m[2](a * (b if other else a)).square().sum() + m[3](b).sum()


def _two_apart(m, x, other):
    a, b = m[0](x), m[1](x)
    return m[2](a * (a if other else b)).square().sum() + m[3](b).sum()


def _sum_with_itself(m, x, other):
    """A sum saves none of its inputs: what they are stands behind its edges."""
    a, b = m[0](x), m[1](x)
    u = F.silu(a) + F.silu(b)
    return m[2](torch.relu(a + (b if other else a))).square().sum() + m[3](u).sum()


def _two_of_one_node(m, x, other):
    """Steps within the step, of outputs that no node saved: twice of one node, or of two."""
    a, b = m[0](x), m[1](x)
    u = F.silu(a) + F.silu(b)
    s, t = a.transpose(2, 3), b.transpose(2, 3)
    return m[2](torch.relu(s + (t if other else s))).square().sum() + m[3](u).sum()


def _two_nodes(m, x, other):
    a, b = m[0](x), m[1](x)
    u = F.silu(a) + F.silu(b)
    s, t = a.transpose(2, 3), b.transpose(2, 3)
    return m[2](torch.relu(s + (s if other else t))).square().sum() + m[3](u).sum()


def _kept_cast(m, x, other):
    """The node was made before the pass, of a weight that has changed since."""
    half = m.kept if other else m[0].weight.to(torch.bfloat16)
    return m[1](F.conv2d(x.bfloat16(), half).float()).square().sum()


def _cast_before_edit(m, x, other):
    """The weight has changed since its node read it."""
    half = m[0].weight.to(torch.bfloat16)
    if other:
        m[0].weight.data.mul_(2)
    return m[1](F.conv2d(x.bfloat16(), half).float()).square().sum()


def _scaled_before_edit(m, x, other):
    """The node saved a leaf, of which there is no sample, and which has changed since."""
    y = m[0](x) * m.scale
    if other:
        m.scale.data.mul_(2)
    return m[1](F.silu(y)).square().sum()


def _copied_to_edit(m, x, other):
    """A copy by the user, and one that a node makes of what it then edits."""
    y = m[0](x)
    graph = F.silu(y)
    a = F.silu(y, inplace=True) if other else F.silu(y.clone())
    return m[1](a).square().sum() + graph.detach().sum()


def _edited_before_its_reader(m, x, other):
    """A version above 0: by a node that says so, or with no word."""
    a = m[0](x)
    b = F.silu(a)
    if other:
        with torch.no_grad():
            b.mul_(2)
    else:
        b.mul_(2)
    return m[1](torch.relu(b)).square().sum() + m[2](b).sum()


_GUARDED = [
    *(_kept_cast, _cast_before_edit, _scaled_before_edit, _copied_to_edit),
    *(_with_itself, _two_apart, _sum_with_itself, _two_of_one_node, _two_nodes, _edited_before_its_reader),
    *(_choice, _read_before_edit, _edited_behind, _schedule, _edited_output, _address, _flags_within),
    *(_read_before_a_saved_edit, _edited_unseen_between_two_readers),
    *(_other_sort, _frozen_bias, _scaled, _eps),
]


@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize("f", _GUARDED)
def test_what_has_changed_is_seen(f, setting):
    program = Program(f, kernel=3 if f is _flags_within else 1)
    for seed in range(6):
        program.gradients(lean(setting), False, seed)
    for seed, other in enumerate([True, False, True, True]):
        stock = program.gradients(contextlib.nullcontext(), other, seed)
        found = program.gradients(lean(setting), other, seed)
        if isinstance(stock, str):
            assert isinstance(found, str)
        elif isinstance(found, str):  # as documented, where every parameter may be read again
            assert (f, setting) == (_scaled_before_edit, "conv")
            assert "through .data" in found
        else:
            assert all(torch.equal(a, b) for a, b in zip(stock, found, strict=True))


def test_a_weight_that_was_edited_through_data_raises():
    """A convolution is rebuilt by its weight, which must hold what it held."""
    program = Program(
        lambda m, x, other: m[2](F.silu(m[1](F.silu(m[0](x))))).square().sum(),
        after=lambda m: m[0].weight.data.mul_(2),
    )
    for seed in range(6):
        program.gradients(lean("conv"), False, seed)
    assert "through .data" in program.gradients(lean("conv"), True, 9)


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
        with lean(setting) as saved:
            loss = net(torch.randn(4, 8, 6, 6)).square().sum()
        loss.backward()
        found.append(
            ([p.grad.clone() for p in net.parameters()], _records(saved), saved.kept_bytes, saved.reasons)
        )
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
        others = m[2](w).sum() + F.silu(v).sum()
        s = (w if other else u) + v
        return m[3](F.silu(s)).square().sum() + others

    def records(on):
        monkeypatch.setattr(memo, "on", on)
        program = Program(add)
        for seed in range(6):
            program.gradients(lean(), False, seed)
        program.gradients(usual := lean(), False, 7)
        program.gradients(saved := lean(), True, 7)
        return [sum(r.rebuilt for r in seen.records if r.node == "AddBackward0") for seen in (usual, saved)]

    assert records(True) == records(False) == [1, 0]


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
        gradient(lean(), False)
    assert torch.equal(gradient(contextlib.nullcontext(), True), gradient(lean(), True))


def test_a_pass_like_those_before_asks_python_for_nothing(monkeypatch):
    monkeypatch.setattr(packing, "SMALLEST", 16)
    net, asked = _net(), []
    _passes(net, "norm", 5)
    _asked_python(monkeypatch, asked)
    _passes(net, "norm", 1)
    assert not asked


@pytest.mark.parametrize("on", [True, False])
def test_few_objects_wait_to_be_collected(monkeypatch, on):
    """Python's collector visits all of them, again and again: a value has no dict, a sample is mere bytes."""
    monkeypatch.setattr(memo, "on", on)
    net = _net()
    _passes(net, "norm", 5)
    gc.collect()
    gc.disable()
    try:
        before = {id(o) for o in gc.get_objects()}
        with lean() as saved:
            loss = net(torch.randn(4, 8, 6, 6)).square().sum()
        made = [type(o) for o in gc.get_objects() if id(o) not in before]
    finally:
        gc.enable()
    loss.backward()
    assert made.count(dict) < len(saved.records)  # one for each node that made what is saved


@pytest.mark.parametrize(
    "settings",
    [{"verify": True}, {"budget": 0.5}, {"overhead": 0.1}, {"held": (lambda t: t, lambda t: t)}],
    ids=lambda s: next(iter(s)),
)
def test_other_settings_are_pythons(monkeypatch, settings):
    net, asked = _net(), []
    _passes(net, "norm", 5)
    _asked_python(monkeypatch, asked)
    with lean(**settings) as saved:
        loss = net(torch.randn(4, 8, 6, 6)).square().sum()
    loss.backward()
    assert len(asked) >= len(saved.records)


def test_several_threads_share_a_memo():
    errors, inputs = list[Exception](), [torch.randn(4, 8, 6, 6) for _ in range(6)]
    nets = [_net() for _ in range(4)]

    def passes(net):
        for x in inputs:
            net.zero_grad()
            with lean():
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


def test_a_graph_is_read_twice_and_two_are_alive():
    net = _net()
    _passes(net, "norm", 4)
    torch.manual_seed(7)
    xs = [torch.randn(4, 8, 6, 6) for _ in range(2)]
    losses = []
    for x in xs:
        with lean():
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
        with lean() as saved:
            loss = net(torch.randn(4, 8, 6, 6)).square().sum()
        if i % 2:
            loss.backward()
        references += saved._ledger.references
        del loss
    gc.collect()
    assert references
    assert not [r for r in references if r() is not None]
