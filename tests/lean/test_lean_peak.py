"""What `peak` promises: the peak of a step as it was planned, measured from the allocator's events."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch import nn

import leannorm
from leannorm.autograd import nodes
from leannorm.planning.goal import Goal
from leannorm.report.memory import measure_step
from leannorm.saving import lean, make_lean
from leannorm.saving.plan import plan

SHARES = [i / 40 for i in range(8, 41)]


def convolutions():
    layers = [
        m for a, b in pairwise((3, 32, 32, 64)) for m in (nn.Conv2d(a, b, 3), nn.BatchNorm2d(b), nn.SiLU())
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        n, tokens, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(n, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(n, tokens, width))
        return x + self.mlp(self.norms[1](x))


def transformer():
    return nn.Sequential(*(Block(64) for _ in range(4)))


CASES = {
    "convolutions": (convolutions, (8, 3, 48, 48), torch.float32),
    "transformer": (transformer, (8, 96, 64), torch.float32),
    "transformer, bfloat16": (transformer, (8, 96, 64), torch.bfloat16),
}


class Run:
    def __init__(self, make, shape, dtype):
        torch.manual_seed(0)
        self.model, self.x = make().to(dtype), torch.randn(shape, dtype=dtype)

    def forward(self, around):
        self.model.zero_grad()
        with around as self.saved:
            return self.model(self.x).float().square().mean()

    def gradients(self, around):
        self.forward(around).backward()
        return [p.grad for p in self.model.parameters()]

    def measured(self, around):
        return measure_step(lambda: self.forward(around))


@pytest.fixture(params=CASES, scope="module")
def run(request):
    return Run(*CASES[request.param])


@pytest.fixture(autouse=True)
def products_that_take_no_memory_of_their_own(request):
    """oneDNN packs matrices of bfloat16 where a processor multiplies such, which no plan sees."""
    before = torch._C._get_mkldnn_enabled()
    packs = "bfloat16" in request.node.name and torch.cpu._is_avx512_bf16_supported()
    torch._C._set_mkldnn_enabled(before and not packs)
    yield
    torch._C._set_mkldnn_enabled(before)


@pytest.mark.sampled(of=4)
@pytest.mark.filterwarnings("ignore:leannorm. peak=")
@pytest.mark.parametrize(
    "setting", [{"peak": 0.8}, {"peak": 0.6}, {"budget": 0.4}, {"overhead": 1e3}], ids=str
)
def test_the_peak_is_as_planned_and_gradients_are_those_of_stock(run, setting):
    torch.use_deterministic_algorithms(False)  # which fills memory by operations of its own
    stock, of_stock = run.gradients(nullcontext()), run.measured(nullcontext())
    for _ in range(2):
        ours = run.gradients(lean(**setting))
    assert all(map(torch.equal, ours, stock))
    measured, chosen = run.measured(lean(**setting)), run.saved.plan.chosen
    assert chosen.stock.peak == pytest.approx(of_stock.peak, rel=0.04)
    assert chosen.point.peak == pytest.approx(measured.peak, rel=0.04)
    assert measured.peak < of_stock.peak
    if "peak" in setting and chosen.reached:
        assert measured.peak <= 1.04 * setting["peak"] * of_stock.peak


def recorded(run):
    run.gradients(lean(peak=0.9))
    return run.saved.plan.made_for


def test_a_smaller_peak_never_holds_a_higher_one_and_takes_no_less_time(run):
    passed = recorded(run)
    made = [plan(Goal(peak=share), passed) for share in SHARES]
    peaks, seconds = ([getattr(one.chosen.point, name) for one in made] for name in ("peak", "seconds"))
    assert peaks == sorted(peaks)
    assert seconds == sorted(seconds, reverse=True)
    assert peaks[0] < 0.9 * peaks[-1]


def test_a_peak_beats_every_budget_at_equal_time(run):
    passed = recorded(run)
    for share in SHARES:
        budget = plan(Goal(budget=share), passed).chosen.point
        ours = plan(Goal(peak=max(budget.peak, 1)), passed).chosen
        assert ours.point.seconds <= budget.seconds + 1e-12
        assert ours.point.peak <= budget.peak


def test_bytes_and_their_text_are_the_same_peak():
    run = Run(*CASES["convolutions"])
    run.gradients(lean(peak=0.8))
    most = run.saved.plan.chosen.stock.peak * 8 // 10
    for text in (most, f"{most}B"):
        for _ in range(2):
            run.gradients(lean(peak=text))
        assert run.saved.plan.chosen.point.peak <= most
        assert run.saved.reasons == []


def test_another_batch_keeps_to_the_same_bytes():
    run = Run(*CASES["convolutions"])
    run.gradients(lean(peak=0.8))
    most = run.saved.plan.chosen.stock.peak * 8 // 10
    for _ in range(2):
        run.gradients(lean(peak=most))
    few = run.saved.kept_bytes / run.saved.plan.stock_bytes
    run.x = torch.cat([run.x, run.x[:1]])
    for _ in range(2):
        run.gradients(lean(peak=most))
    assert run.saved.plan.chosen.point.peak <= most
    assert run.saved.kept_bytes / run.saved.plan.stock_bytes < few


def test_a_peak_below_the_least_says_what_is_possible():
    run = Run(*CASES["transformer"])
    with pytest.warns(UserWarning, match="peak=10.0 KB is out of reach"):
        run.gradients(lean(peak="10kB"))
    (reason,) = run.saved.reasons
    least = run.saved.plan.chosen.least
    assert leannorm._report.bytes_in_words(least) in reason
    run.gradients(lean(peak=least))
    assert run.saved.reasons == []


@pytest.mark.filterwarnings("default:leannorm. this (budget|overhead) frees memory:UserWarning")
def test_a_budget_that_lowers_no_peak_is_said_once_and_names_the_peak(recwarn):
    """The gradient of the last weight is nearly all of the peak, whatever is kept."""
    hidden = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())]
    model, x = nn.Sequential(*hidden, nn.Linear(64, 20_000)), torch.randn(8, 64)
    for _ in range(3):
        with lean(budget=0.3) as saved:
            loss = model(x).square().mean()
        loss.backward()
        assert saved.plan.ratio < 0.3
        assert saved.plan.peak_ratio > 0.95
        (reason,) = saved.reasons
        assert "lowers no peak" in reason
        assert f"{saved.plan.ratio:.2f} of the bytes" in reason
        assert f"is {saved.plan.peak_ratio:.2f} of" in reason
        assert "peak=0.8" in reason
    assert [str(w.message).count("lowers no peak") for w in recwarn] == [1]


@pytest.mark.parametrize("goal", [{"budget": 0.5}, {"overhead": 0.5}, {"peak": 0.8}], ids=str)
def test_nothing_is_said_where_the_peak_falls(goal):
    run = Run(*CASES["convolutions"])
    for _ in range(2):
        run.gradients(lean(**goal))
    assert run.saved.plan.peak_ratio < 0.9
    assert run.saved.reasons == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"peak": "8 apples"}, "a memory is written like 24GiB, 24GB or 500MB; got '8 apples'"),
        ({"peak": 0.0}, "peak is a share"),
        ({"peak": -1}, "peak is a share"),
        ({"peak": 1.5}, "peak is a share"),
        ({"peak": True}, "peak is a share"),
        (
            {"peak": 0.5, "budget": 0.5},
            "one of budget, overhead and peak; got budget=0.5 and peak=0.5",
        ),
        ({"overhead": 0.5, "budget": 0.5}, "one of budget, overhead and peak"),
        ({"overhead": 0.5, "peak": "1GB", "budget": 0.5}, "one of budget, overhead and peak"),
    ],
    ids=str,
)
def test_what_is_no_peak_is_said_in_one_line(settings, said):
    model = nn.Linear(2, 2)
    for call in (lean, lambda **given: make_lean(model, **given)):
        with pytest.raises(leannorm.InputError, match=said) as raised:
            call(**settings)
        assert "\n" not in str(raised.value)
    assert "forward" not in model.__dict__


def test_make_lean_takes_a_peak():
    run = Run(*CASES["convolutions"])
    stock = run.gradients(nullcontext())
    make_lean(run.model, peak=0.9)
    for _ in range(3):
        ours = run.gradients(nullcontext())
    assert all(map(torch.equal, ours, stock))


class Wide(nn.Module):
    """A network of equal widths, as those that make images sharper: nothing narrows behind a sum."""

    def __init__(self, width=32, blocks=16):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        layers = [
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
            )
            for _ in range(blocks)
        ]
        self.blocks = nn.ModuleList(layers)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


@pytest.mark.filterwarnings("ignore:leannorm")
def test_a_pass_that_follows_no_plan_has_a_low_peak_where_nothing_narrows():
    """Sums in a row without end would be rebuilt, and there, all at once."""
    model, x = Wide(), torch.randn(2, 3, 32, 32)
    stock = measure_step(lambda: model(x).square().mean())
    model.zero_grad()

    def forward():
        with lean(budget=0.1):
            return model(x).square().mean()

    first = measure_step(forward)
    assert first.held < 0.2 * stock.held
    assert first.peak < 0.5 * stock.peak


@pytest.mark.skipif(nodes.NODES is None, reason="the log in Python does not know who else has what it keeps")
@pytest.mark.parametrize("budget", [0.7, 0.4, 0.2])
def test_a_plan_knows_how_long_the_program_has_what_the_first_pass_kept(budget):
    """Of a long row of calls the first pass keeps some results, so it does not see them freed."""
    x = torch.randn(1 << 16, requires_grad=True)

    def forward(around, hidden):
        with around:
            y = x
            for _ in range(60):
                y = (y.sin() * 0.5).exp()
                hidden.append(y)
            return y.sum()

    around = lean(budget=budget)
    for _ in range(4):
        x.grad = torch.zeros_like(x)
        forward(around, []).backward()
    measured = measure_step(lambda: forward(around, [])).peak
    assert around.plan.chosen.point.peak == pytest.approx(measured, rel=0.01)
