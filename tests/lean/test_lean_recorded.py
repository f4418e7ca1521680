"""The log of operators (csrc/nodes/record/), by which `lean()` knows what its search infers.

Everything is as without `lean()`, bit for bit, for the networks of these tests, for random programs, and for
what the search cannot see.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lean_cases import IMAGES, SEQUENCES, assert_network_as_stock, forget_trials, in_threads
from programs.campaign import run_seeds, summary
from programs.compare import judge
from programs.language import parse
from programs.listings import FAIRLY_REFUSED, KNOWN
from torch import nn

from leannorm import lean
from leannorm.autograd.nodes import NODES
from leannorm.saving.operators import OPERATORS

pytestmark = pytest.mark.skipif(NODES is None, reason="the log is C++")

PROGRAMS, PARTS = 300, 2


@pytest.fixture(autouse=True)
def recording():
    forget_trials()


def train(context, make, inputs, steps=3):
    """The gradients, outputs and buffers of a few steps; the last context, if it is a lean()."""
    torch.manual_seed(0)
    network, seen = make(), []
    for x in inputs(steps):
        network.zero_grad()
        with (opened := context()):
            loss = network(x).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]
    return [*seen, *network.buffers()], opened


def equal(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize("name", [*IMAGES, *SEQUENCES])
def test_networks_as_without_it(name, setting):
    assert_network_as_stock(name, 3, recompute=setting)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part):
    size = PROGRAMS // PARTS
    counts, failures = run_seeds(range(10_000 + part * size, 10_000 + (part + 1) * size), most=3)
    assert not failures, "\n\n".join([summary(counts), *map(str, failures)])
    assert counts["refused"] < 0.05 * size


@pytest.mark.parametrize("name", KNOWN)
def test_programs_that_were_wrong(name):
    assert judge(parse(KNOWN[name])).kind in ("same", "refused", *FAIRLY_REFUSED.get(name, ()))


def test_it_keeps_less_than_the_search():
    def make():
        return nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.SiLU(), nn.Conv2d(32, 8, 1), nn.Softplus()
        )

    def inputs(steps):
        return torch.randn(steps, 4, 3, 32, 32)

    ours, saved = train(lambda: lean("norm"), make, inputs)
    assert equal(ours, train(nullcontext, make, inputs)[0])
    assert 0 < saved.kept_bytes < 0.5 * (saved.kept_bytes + saved.rebuilt_bytes)
    assert {r.node for r in saved.records if r.rebuilt} >= {"aten::silu", "aten::native_batch_norm"}


class Quantized(nn.Linear):
    """A weight that is swapped through .data for the time of a call, as in quantization-aware training."""

    def forward(self, x):
        kept = self.weight.data
        self.weight.data = (kept * 8).round() / 8
        try:
            return super().forward(x)
        finally:
            self.weight.data = kept


class TwoBiases(nn.Module):
    """One standardized kernel with a frozen bias for each domain."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)
        self.register_buffer("a", torch.zeros(8))
        self.register_buffer("b", torch.ones(8))

    def forward(self, x):
        w = self.conv.weight - self.conv.weight.mean((1, 2, 3), keepdim=True)
        return F.silu(F.conv2d(x, w, self.a)) * F.silu(F.conv2d(x, w, self.b))


class DeadLog(nn.Module):
    """A logged norm has saved what a residual sum edits: no part of the loss, so plain PyTorch trains."""

    def __init__(self):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x):
        h = self.l1(x)
        self.activity = h.norm()
        y = F.relu(h)
        h += self.l2(y)
        return self.l3(h)


class HiddenEdit(nn.Module):
    """An edit through .data, and one under no_grad, between a norm and what reads it."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x):
        h = self.norm(x)
        y = F.relu(h)
        h.data.mul_(2)
        with torch.no_grad():
            h.clamp_(-1, 1)
        return self.out(F.silu(h) + y)


class Overwrites(nn.Module):
    """A user's function writes its gradient over what it has saved; others have saved it too."""

    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x.sigmoid()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            s = x.sigmoid()
            return x.copy_(g * s * (1 + x * (1 - s)))

    def __init__(self):
        super().__init__()
        self.l, self.n, self.w = nn.Linear(32, 32), nn.LayerNorm(32), nn.Parameter(torch.ones(32))

    def forward(self, x):
        h = self.n(self.l(x))
        return F.relu(h) * self.w + self.Swish.apply(h)


@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(Quantized(32, 64), nn.LayerNorm(64), nn.GELU(), Quantized(64, 8)),
        DeadLog,
        HiddenEdit,
        Overwrites,
    ],
    ids=["weights swapped through .data", "a dead branch's save", "hidden edits", "a backward that writes"],
)
def test_what_the_search_cannot_see(make, setting):
    def inputs(steps):
        return torch.randn(steps, 128, 32)

    ours, _ = train(lambda: lean(setting), make, inputs)
    assert equal(ours, train(nullcontext, make, inputs)[0])


def test_arguments_are_those_of_the_call():
    def inputs(steps):
        return torch.randn(steps, 4, 8, 12, 12)

    ours, _ = train(lambda: lean("conv"), TwoBiases, inputs)
    assert equal(ours, train(nullcontext, TwoBiases, inputs)[0])


def test_a_pass_around_many_steps_does_not_grow():
    network = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 8))
    with lean("norm") as saved:
        for _ in range(1500):
            network(torch.randn(32, 32)).square().mean().backward()
        calls = len(saved._open[-1][1]._recorded._pass.seconds())
    assert calls < 5000


def test_two_threads_record_by_themselves():
    def work(seed, results):
        def inputs(steps):
            generator = torch.Generator().manual_seed(seed)
            return torch.randn(steps, 64, 32, generator=generator)

        layers = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)).state_dict()

        def make():
            network = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))
            network.load_state_dict(layers)
            return network

        results[seed] = equal(
            train(lambda: lean("conv"), make, inputs, 8)[0], train(nullcontext, make, inputs, 8)[0]
        )

    assert in_threads(work, 4) == dict.fromkeys(range(4), True)


def test_an_edit_of_what_a_rebuild_needs_raises():
    network = nn.Sequential(nn.Linear(256, 512, bias=False), nn.SiLU())
    with lean("conv"):
        loss = network(torch.randn(512, 256)).square().mean()
    with torch.no_grad():
        network[0].weight.data.mul_(2)  # no counter moves
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation after leannorm\.lean\(\)'s forward pass"
    ):
        loss.backward()


def test_an_unlisted_operator_is_rebuilt_if_its_bits_are_the_same():
    @torch.library.custom_op("leannorm_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_autograd(lambda ctx, g: g * 2)

    @torch.library.custom_op("leannorm_test::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        counted.calls = getattr(counted, "calls", 0) + 1
        return x * counted.calls

    counted.register_autograd(lambda ctx, g: g)
    for operator, rebuilt in ((twice, True), (counted, False)):
        x = torch.randn(64, 64, requires_grad=True)
        with lean("norm") as saved:
            y = operator(x * 1.5).exp()  # exp saves its result
            loss = (operator(y) ** 2).sum()
        loss.backward()
        name = operator._qualname
        assert any(r.rebuilt for r in saved.records if r.node == name) is rebuilt


def test_every_row_names_an_operator():
    spaces = {name.split("::")[0] for name in OPERATORS}
    assert spaces <= {"aten", "leannorm", "prims"}
    spaces -= {"prims"}  # some are of other releases of torch alone
    unknown = [
        name
        for name in OPERATORS
        if name.split("::")[0] in spaces
        and not hasattr(getattr(torch.ops, name.split("::")[0]), name.split("::")[1])
    ]
    assert unknown == []
