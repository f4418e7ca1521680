"""`"conv"` on transformers: the same in every dtype and at every width, and what a share of the step buys."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from lean_cases import assert_as_stock
from test_lean_narrow import RMSNorm, assert_stock
from torch import nn

from leannorm import lean
from leannorm import nn as ours
from leannorm.planning.goal import Goal
from leannorm.saving import rates
from leannorm.saving.plan import plan
from leannorm.saving.policy import CONV

TOKENS = 96


class Block(nn.Module):
    """As in a Llama, without rotary embeddings; MLP of 11/4 the width."""

    def __init__(self, width):
        super().__init__()
        inner = 11 * width // 4
        self.first, self.second = RMSNorm(width), RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        y = self.first(x)
        q, k, v = (f(y).unflatten(-1, (-1, 64)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def kept(width, dtype, passes=1, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(3))).to(dtype)
    x = torch.randn(2, TOKENS, width, dtype=dtype, requires_grad=True)
    for _ in range(passes):
        saved = lean(**settings)
        assert_stock(lambda: model(x.sin()).float().square().mean(), [x, *model.parameters()], saved)
    return saved.kept_bytes / (saved.kept_bytes + saved.rebuilt_bytes), saved


@pytest.mark.parametrize("width", [128, 512])
@pytest.mark.sampled(of=2)
def test_conv_is_the_same_in_every_dtype(width):
    wide, narrow = (kept(width, dtype, recompute="conv")[0] for dtype in (torch.float32, torch.bfloat16))
    assert max(wide, narrow) < 0.22
    assert abs(wide - narrow) < 0.05


@pytest.mark.parametrize(
    ("dtype", "processor", "least", "most"),
    [
        (torch.float32, "_CPU", 0.15, 0.26),
        (torch.float32, "_CPU_TILES", 0.24, 0.32),  # the faster products are, the more takes all else
        (torch.bfloat16, "_CPU", 0.15, 0.26),
        (torch.bfloat16, "_CPU_BFLOAT16", 0.22, 0.30),
        (torch.bfloat16, "_CPU_TILES", 0.33, 0.42),
    ],
    ids=str,
)
def test_what_conv_takes_of_the_step(dtype, processor, least, most, monkeypatch):
    """By the table of prices, as `overhead` reads it: what it takes to keep as few bytes as "conv" does, or
    as few as it did where nodes are searched: the log keeps a third less."""
    monkeypatch.setattr(rates, "_measured", lambda device, file: (getattr(rates, processor), None))
    width = 512
    model, x = Block(width).to(dtype), torch.randn(2, TOKENS, width, dtype=dtype, requires_grad=True)
    saved, priced = lean("conv"), lean(overhead=10.0)
    priced._settings = replace(priced._settings, policy=CONV)
    losses = list[torch.Tensor]()  # while they live, what was saved does
    for one in (saved, priced):
        with one:
            losses.append(model(x.sin()).float().square().mean())
    share = saved.kept_bytes / (saved.kept_bytes + saved.rebuilt_bytes)
    chosen = plan(Goal(budget=max(share, 0.125)), priced.plan.made_for).chosen
    assert chosen.reached
    assert least <= chosen.overhead <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_residual_connection_is_held_where_all_behind_it_would_be(dtype):
    """Rebuilt by two products in a row, it would have every linear layer behind it held: a larger tensor."""
    share, saved = kept(128, dtype, passes=2, budget=0.16)
    assert share <= 0.162
    assert not saved.reasons


@pytest.mark.parametrize(("inputs", "rebuilt"), [(96, True), (104, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_convolutions_of_few_inputs_to_a_value(inputs, rebuilt, dtype):
    """A limit of 384 inputs: 96 channels by 2 × 2."""
    layer = nn.Conv2d(inputs, 64, 2).to(dtype)
    x, saved = torch.randn(2, inputs, 9, 9, dtype=dtype, requires_grad=True), lean("conv")
    assert_stock(lambda: F.silu(layer(x)).float().sum(), [x, *layer.parameters()], saved)
    assert [r.rebuilt for r in saved.records if r.node == "aten::convolution"] == [rebuilt]


class Modulated(nn.Module):
    """As in a diffusion transformer, without attention: a condition shifts and scales the norm's output."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, condition):
        shift, scale, gate = self.condition(condition).unsqueeze(1).chunk(3, -1)
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_condition_shifts_is_rebuilt(dtype):
    """Linear layers on the condition are small: they are no products in a row with those of the blocks."""
    blocks = nn.ModuleList(Modulated(512) for _ in range(3)).to(dtype)
    x = torch.randn(2, TOKENS, 512, dtype=dtype, requires_grad=True)
    condition, saved = torch.randn(2, 512, dtype=dtype, requires_grad=True), lean("conv")

    def run():
        y = x
        for block in blocks:
            y = block(y, condition.sin())
        return y.float().square().mean()

    assert_stock(run, [x, condition, *blocks.parameters()], saved)
    sums = [r.rebuilt for r in saved.records if (r.node, r.shape) == ("aten::add", (2, TOKENS, 512))]
    assert sum(sums) >= 3
    assert saved.kept_bytes / (saved.kept_bytes + saved.rebuilt_bytes) < 0.25


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.AvgPool2d(2)], ids=["maximum", "average"])
def test_what_is_pooled_of_a_rebuilt_product_is_held(pool):
    """It is small, and the product behind it, a larger one, is then the first in a row."""
    first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), pool)
    second = nn.Sequential(nn.Conv2d(16, 64, 1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 8, 1))
    x, saved = torch.randn(2, 3, 64, 64), lean("conv")
    with saved:
        loss = second(first(x)).square().mean()
    loss.backward()
    held = [r.shape for r in saved.records if not r.rebuilt and r.node == "aten::convolution" and r.bytes]
    assert (2, 64, 32, 32) not in held
    assert (2, 16, 64, 64) not in held


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_cast_of_a_bias_is_part_of_its_product(contiguous):
    """A linear layer adds its bias by itself where its input has axes in another order."""
    mlp = nn.Sequential(ours.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
    found = []
    for turn in range(3):
        torch.manual_seed(turn)
        x = torch.randn(16, 24, 32).transpose(0, 1).requires_grad_()
        x = x.contiguous() if contiguous else x
        for context in (nullcontext(), lean("conv")):
            with context as saved, torch.autocast("cpu", torch.bfloat16):
                loss = mlp(x * 2).float().square().mean()
            found.append(torch.autograd.grad(loss, list(mlp.parameters())))
        assert all(torch.equal(a, b) for a, b in zip(*found[-2:], strict=True))
    hidden = [record for record in saved.records if record.shape[-1:] == (128,) and record.bytes > 2**14]
    hidden = [record for record in hidden if record.dtype is torch.bfloat16]
    assert len(hidden) >= 2
    assert all(record.rebuilt for record in hidden)


def test_rows_behind_the_last_expert_are_nobodys(with_and_without_nodes):
    """A grouped product leaves them as the memory was; once its kind is proved, a pass may have such rows."""

    def fill(value):
        for _ in range(3):
            torch.full((2048, 64), value)

    def program(context):
        weight, found = (torch.randn(2, 32, 64) / 8).requires_grad_(), []
        for used in (2048, 2048, 2048, 1024, 1024):
            rows, offsets = torch.randn(2048, 32), torch.tensor([used // 2, used], dtype=torch.int32)
            fill(-3.0)
            with context():
                loss = F.silu(torch._grouped_mm(rows, weight, offs=offsets))[:used].square().mean()
            fill(7.0)
            weight.grad = None
            loss.backward()
            found.append(weight.grad)
        return found

    assert_as_stock(program, recompute="conv")
