"""The log in Python (leannorm.saving.log), which records where the C++ nodes are not built."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lean_cases import without_nodes
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from leannorm import lean
from leannorm.autograd.nodes import NODES
from leannorm.saving import cpp_log, log, plans, reasons, recorded_pass
from leannorm.saving.log import trials
from leannorm.saving.log.recorder import THREAD

SETTINGS = [{"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.5}]


@pytest.fixture(autouse=True)
def in_python(monkeypatch):
    without_nodes(monkeypatch)
    log.forget_trials()


def images(inplace=False):
    torch.manual_seed(0)
    blocks = [
        (nn.Conv2d(n, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(inplace=inplace)) for n in (3, 16, 16)
    ]
    return nn.Sequential(*(layer for block in blocks for layer in block), nn.Flatten(), nn.Linear(4096, 4))


def tokens():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)


def trained(make, x, context, steps=3):
    """Losses, gradients and buffers of some steps; the last pass."""
    model, found = make(), []
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        with context() as saved:
            loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        found += [b.clone() for b in model.buffers()]
    return found, saved


CASES = {
    "images": (images, (4, 3, 16, 16)),
    "in place": (lambda: images(inplace=True), (4, 3, 16, 16)),
    "tokens": (tokens, (4, 30, 32)),
}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_trains_as_stock_and_keeps_less(name, settings):
    make, shape = CASES[name]
    x = torch.randn(shape)
    stock, _ = trained(make, x, nullcontext)
    ours, saved = trained(make, x, lambda: lean(**settings))
    assert all(map(torch.equal, stock, ours))
    assert saved.rebuilt_bytes > 0
    assert recorded_pass.LOG is log


@pytest.mark.skipif(NODES is None, reason="the C++ nodes are not built")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_keeps_what_cpp_keeps(settings, monkeypatch):
    monkeypatch.setattr(cpp_log, "NODES", NODES)
    x, kept = torch.randn(4, 3, 16, 16), []
    for module in (cpp_log, log):
        recorded_pass.LOG = module
        plans.KNOWN.clear()
        kept.append(trained(images, x, lambda: lean(**settings))[1].kept_bytes)
    assert kept[0] == kept[1]


def test_what_only_moves_elements_is_not_tried():
    """Any two calls of it give the same bits."""
    x = torch.randn(64, 64, requires_grad=True)
    with lean("norm") as saved:
        y = x.exp().flip(0).sin()
    tried = {op for (op, *_), _ in trials._TRIED}
    assert torch.ops.aten.exp.default in tried
    assert torch.ops.aten.flip.default not in tried
    assert saved.rebuilt_bytes > 0
    y.sum().backward()


def test_a_mode_is_on_within_a_pass_alone():
    x = torch.randn(64, 64, requires_grad=True)
    before = torch._C._len_torch_dispatch_stack()
    with lean("norm"):
        x.exp()
        assert torch._C._len_torch_dispatch_stack() == before + 1
        with lean("conv"):  # it shares the log
            x.exp()
            assert torch._C._len_torch_dispatch_stack() == before + 1
    assert torch._C._len_torch_dispatch_stack() == before
    assert THREAD.log is None


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_program_that_begins_within_and_ends_behind():
    x, counting = torch.randn(64, 64, requires_grad=True), Counting()
    around = lean("conv")
    with around:
        counting.__enter__()
        y = x.sin().cos().sum()
    (x * 2).sum()
    counting.__exit__(None, None, None)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert counting.count >= 5
    assert torch.equal(torch.autograd.grad(y, x)[0], -x.sin().sin() * x.cos())


def test_the_mode_that_watches_is_below_those_of_the_program_and_leaves_last():
    """What the program can write, and a rebuild needs, is watched behind the pass."""
    weight, counting = torch.randn(64, 64, requires_grad=True), Counting()
    found = []
    for context in (nullcontext, lambda: lean("norm")):
        with context():
            h = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) @ weight
            unused, loss = h.norm(), (F.relu(h) * 2).exp().sum()
        watched = torch._C._len_torch_dispatch_stack()
        with counting, context():
            weight.exp()
        assert torch._C._len_torch_dispatch_stack() == watched
        h.detach().zero_()
        found.append(torch.autograd.grad(loss, weight)[0])
        assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.equal(*found)
    assert watched == 1
    assert unused.isfinite()


def test_what_is_about_to_be_written_is_copied():
    x = torch.randn(64, 64, requires_grad=True)
    found = []
    for context in (nullcontext, lambda: lean("conv")):
        with context():
            h = x.detach() * 1
            y = (x * h).exp()
            z = y * y
            h.data.mul_(3)  # z's factor is made of it
            w = h.sum() + z.sum()
        found.append(torch.autograd.grad(w, x)[0])
    h = x.detach() * 3  # what plain PyTorch reads of `h`
    assert torch.equal(*found)
    assert found[0].isfinite().all()
    assert h.shape == x.shape


@pytest.mark.parametrize("saves", [True, False], ids=["saved", "read"])
def test_an_edit_behind_the_pass_is_reported(saves):
    x = torch.randn(128, 128, requires_grad=True)  # a smaller one is copied
    with lean("conv"):
        h = x * 2
        y = h.sin() if saves else (h + 1).exp()
    with torch.no_grad():
        (h if saves else x).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_edit_through_the_memory_is_reported():
    x = torch.randn(128, 128, requires_grad=True)
    with lean("conv"):
        y = (x * 2).exp().sum()
    x.detach().numpy()[:] = 1
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|not what the forward"):
        y.backward()


def test_random_numbers_are_never_drawn_again():
    x = torch.randn(64, 64, requires_grad=True)
    with lean("conv") as saved:
        mask = F.dropout(x * 1, 0.5)
        y = (mask * mask).exp()
    assert saved.rebuilt_bytes > 0
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient == 0, mask == 0)


def test_a_kind_whose_rebuild_has_other_bits_is_refused():
    """`sin` gives other bits when it is called again, as a library that has chosen another kernel."""
    x, calls = torch.randn(64, 64, requires_grad=True), []
    kept = torch.library.Library("log_in_python", "DEF")
    kept.define("odd(Tensor x) -> Tensor")
    kept.impl("odd", lambda x: calls.append(1) or x + len(calls), "CPU")
    with lean("conv") as saved:
        y = (torch.ops.log_in_python.odd(x.detach()) + x).exp().sum()
    assert any("other bits" in reason for reason in saved.reasons)
    y.backward()
    kept._destroy()


def test_flags_are_those_of_the_forward_pass():
    x = torch.randn(256, 256, requires_grad=True)
    with lean("conv"):
        y = (x @ x).sin().sum()
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        y.backward()
    finally:
        torch.set_num_threads(before)
    assert torch.get_num_threads() == before


def test_a_second_backward_pass_reads_again():
    x = torch.randn(64, 64, requires_grad=True)
    with lean("conv"):
        y = x.exp().sin().exp().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, x)[0])


def test_held_and_verify():
    x, got = torch.randn(64, 64, requires_grad=True), []
    with lean("norm", held=(lambda t: got.append(t) or t.clone(), lambda t: t)):
        y = (x.exp() @ x).sin().sum()
    assert got
    stock = torch.autograd.grad((x.exp() @ x).sin().sum(), x)[0]
    assert torch.equal(torch.autograd.grad(y, x)[0], stock)
    with lean("conv", verify=True):
        y = (x.exp() @ x).sin().sum()
    assert torch.equal(torch.autograd.grad(y, x)[0], stock)


def test_many_calls_in_a_row_are_made_again_without_recursion():
    x = torch.randn(4096, requires_grad=True)

    def run(context):
        with context():
            y = x
            for _ in range(300):
                y = (y * 0.5).sin()
        return torch.autograd.grad(y.sum(), x)[0]

    stock = run(nullcontext)
    for _ in range(3):
        assert torch.equal(run(lambda: lean(budget=0.05)), stock)


def test_nothing_is_left_when_the_graph_has_gone():
    x = torch.randn(64, 64, requires_grad=True)
    with lean("conv") as saved:
        y = x.exp().sin().sum()
    kept = saved.kept_bytes
    y.backward()
    assert kept > 0
    assert not any(value.held is not None for value in log_of(y))


def log_of(_):
    return [] if THREAD.log is None else THREAD.log.values


def test_compiled_functions_run_compiled():
    compiled = torch.compile(lambda x: x.sin().exp(), backend="aot_eager")
    x = torch.randn(64, 64, requires_grad=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with lean("conv"):
        y = compiled(x).sum()
    assert torch._dynamo.utils.counters["frames"]["ok"] == 1
    stock = torch.autograd.grad(x.sin().exp().sum(), x)[0]
    assert torch.equal(torch.autograd.grad(y, x)[0], stock)


@pytest.mark.filterwarnings("ignore:leannorm. other saved-tensor hooks")
def test_hooks_of_others_within_win():
    x = torch.randn(64, 64, requires_grad=True)
    with lean("conv") as saved:
        y = x.exp().exp()
        rebuilt = saved.rebuilt_bytes
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            y = y.exp().exp().sum()
    assert saved.rebuilt_bytes == rebuilt > 0
    assert reasons.HOOKS_WITHIN in saved.reasons
    y.backward()


def test_a_pass_that_opens_within_an_operator_reads_no_part_of_it():
    x = torch.randn(2048, 64, requires_grad=True)
    layer = nn.Linear(64, 64)
    with torch.no_grad(), lean("norm") as saved, torch.enable_grad():
        y = layer(x).exp().sum()
    assert not any("other bits" in reason for reason in saved.reasons)
    y.backward()
