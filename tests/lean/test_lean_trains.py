"""Where plain torch trains, `lean()` does, with the same gradients: it once raised, or was off."""

import asyncio
import warnings

import lean_cases
import pytest
import torch
import torch.nn.functional as F
from lean_cases import assert_trains_as_torch, gradients
from torch import nn

from leannorm import lean

SETTINGS = [{}, {"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.3}]
pytestmark = pytest.mark.filterwarnings("ignore:leannorm. (budget|more is kept|no plan)")


# ---------------------------------------------------------------- calls


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("second", ["a layer's", "torch's", "of a tensor in the middle"])
def test_two_calls_of_one_weight_with_biases_of_their_own(second, settings, with_and_without_nodes):
    """Equal in the first passes, so that trials pass."""

    def train(context):
        conv, out, scale = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Parameter(torch.ones(8))
        biases, seen = [torch.zeros(8), torch.zeros(8)], []
        for i in range(5):
            if i == 3:
                biases[1] += 0.01
            a, b = torch.randn(2, 4, 8, 16, 16)
            with context():
                w = conv.weight - conv.weight.mean((1, 2, 3), keepdim=True)
                a = conv._conv_forward(a, w, biases[0])
                if second == "a layer's":
                    b = conv._conv_forward(b, w, biases[1])
                else:
                    b = F.conv2d(b, w, biases[1] if second == "torch's" else (scale * biases[1]).cumsum(0))
                loss = out(F.silu(a)).square().mean() + out(F.silu(b)).square().mean()
            seen += torch.autograd.grad(loss, [conv.weight, *out.parameters()])
        return seen

    assert_trains_as_torch(train, settings)


# ---------------------------------------------------------------- edits that torch allows


def logged_before(h):
    log = h.norm()
    return F.relu(h), log


def logged_afterwards(h):
    y = F.relu(h)
    return y, h.norm()


def logged_of_a_view(h):
    y = F.relu(h).flatten()
    return y.view_as(h), h.view(-1).square().mean()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("of", [logged_before, logged_afterwards, logged_of_a_view])
@pytest.mark.parametrize("done", [False, True])
def test_what_another_branch_alone_has_saved_is_edited(of, done, settings, with_and_without_nodes):
    """A branch that no loss reads, or whose backward pass is done."""

    def train(context):
        first, second, third, seen = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8), []
        for _ in range(3):
            x = torch.randn(64, 64)
            with context():
                h = first(x)
                y, log = of(h)
                part = second(y)
                if not done:
                    h += part
                    loss = third(h).square().mean()
            if done:
                seen += torch.autograd.grad(log, first.weight, retain_graph=True)
                with context():
                    h += part
                    loss = third(h).square().mean()
            parameters = [*first.parameters(), *second.parameters(), *third.parameters()]
            seen += torch.autograd.grad(loss, parameters)
        return seen

    assert_trains_as_torch(train, settings)


class Written(nn.Module):
    """GELU by its formula: what saves half of its input also saves what the cube's branch leads to."""

    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0))))


def test_what_both_operands_lead_to_is_a_source(with_and_without_nodes):
    model = nn.Sequential(nn.Linear(64, 64), Written(), nn.Linear(64, 64))
    for _ in range(3):
        with lean("norm") as saved:
            loss = model(torch.randn(64, 64)).square().mean()
        loss.backward()
        assert any(r.node == "aten::mul" and r.rebuilt for r in saved.records)


# ---------------------------------------------------------------- who reads, and where


@torch.library.custom_op("leannorm_tests::swish", mutates_args=())
def swish(x: torch.Tensor) -> torch.Tensor:
    return x * x.sigmoid()


def swish_backward(ctx, g):
    (x,) = ctx.saved_tensors
    s = x.sigmoid()
    slope = g * s * (1 + x * (1 - s))
    x.numpy()[...] = slope.numpy()
    return x


swish.register_fake(torch.empty_like)
swish.register_autograd(
    swish_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])
)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_custom_operator_may_write_into_what_it_has_saved(settings, with_and_without_nodes):
    def train(context):
        model, scale, seen = (
            nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)),
            nn.Parameter(torch.ones(64)),
            [],
        )
        for _ in range(4):
            model.zero_grad()
            with context():
                h = model(torch.randn(64, 64))
                log = h.norm()
                loss = (F.relu(h) * scale + swish(h)).square().mean()
            loss.backward()
            seen += [*gradients(model), log.detach()]
        return seen

    assert_trains_as_torch(train, settings)


class Forks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, x):
        future = torch.jit.fork(self.inner, x)
        h = self.inner(x * 2)
        return torch.jit.wait(future) + h


@pytest.mark.parametrize("settings", [*SETTINGS, {"verify": True}], ids=str)
@pytest.mark.parametrize("limit", [-1, 1 << 18])
def test_a_part_that_torch_runs_in_a_thread_of_its_own(settings, limit, monkeypatch):
    monkeypatch.setenv("LEANNORM_SMALL_BYTES", str(limit))

    def train(context):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, seen = torch.jit.script(Forks()), []
            for rows in (64, 64, 1024, 64):
                model.zero_grad()
                with context():
                    loss = model(torch.randn(rows, 64)).square().mean()
                loss.backward()
                seen += gradients(model)
        return seen

    assert_trains_as_torch(train, settings)


def hooks_left():
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("limit", [-1, 1 << 18])
def test_tasks_of_one_thread_that_take_turns(settings, limit, monkeypatch, with_and_without_nodes):
    """The first to end has its hooks below the other's."""
    monkeypatch.setenv("LEANNORM_SMALL_BYTES", str(limit))

    def train(context):
        async def task(model, rows, turns):
            with context():
                h = model[:2](torch.randn(rows, 64))
                for _ in range(turns):
                    await asyncio.sleep(0)
                loss = model[2:](h).square().mean()
            loss.backward()

        async def both():
            for _ in range(4):
                await asyncio.gather(task(a, 8, 1), task(b, 1024, 2))
                assert not hooks_left()

        a, b = (
            nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)) for _ in range(2)
        )
        asyncio.run(both())
        return gradients(a) + gradients(b)

    assert_trains_as_torch(train, settings)


def test_others_hooks_stay_where_they_are_when_a_pass_below_them_ends():
    packed, x = [], torch.ones(3, requires_grad=True)
    first = lean("norm")
    others = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t)
    first.__enter__()
    y = x.exp()
    others.__enter__()
    first.__exit__(None, None, None)
    y.exp()
    assert packed
    others.__exit__(None, None, None)
    assert not hooks_left()


# ---------------------------------------------------------------- how a pass opens


def deep(rows):
    return nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GroupNorm(4, 64))),
        nn.Linear(64, 8),
    ), torch.randn(rows, 64)


def test_a_pass_that_opens_without_grad_or_grows_keeps_no_more(monkeypatch, with_and_without_nodes):
    """The call that saves a norm's statistics is seen in each."""
    model, x = deep(2048)
    few = x[:8]

    def usual():
        with lean("norm") as saved:
            return saved, model(x).square().mean()

    def without_grad():
        with torch.no_grad(), lean("norm") as saved, torch.enable_grad():
            return saved, model(x).square().mean()

    def grows():
        for part in (few, few, x):
            with lean("norm") as saved:
                loss = model(part).square().mean()
        return saved, loss

    found = []
    for run in (usual, without_grad, grows):
        monkeypatch.setenv("LEANNORM_SMALL_BYTES", str((1 << 18) if run is grows else -1))
        for _ in range(3):
            saved, loss = run()
            model.zero_grad()
            loss.backward()
        found.append((saved.kept_bytes, saved.rebuilt_bytes, saved.reasons, gradients(model)))
    for kept, rebuilt, why, ours in found[1:]:
        assert (kept, rebuilt, why) == found[0][:3]
        assert all(map(torch.equal, ours, found[0][3]))
    assert found[0][1] > found[0][0]


def test_networks_that_are_searched_from_the_first_tensor_on_are_exact():
    for make, shape in ((lean_cases.IMAGES["dense block"], lean_cases.IMAGE),):
        model, x = make(), torch.randn(shape)

        def train(context, model=model, x=x):
            model.zero_grad()
            with torch.no_grad(), context(), torch.enable_grad():
                loss = model(x).square().mean()
            loss.backward()
            return gradients(model)

        assert_trains_as_torch(train, {"recompute": "conv"})
