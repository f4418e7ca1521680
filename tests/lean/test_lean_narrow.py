"""What fits in fewer bytes is held in those: sources of casts, logits of a loss, masks of dropout."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lean_cases import watched_by_the_compiler
from torch import nn

from leannorm import lean
from leannorm.report.memory import measure_step
from leannorm.saving.evidence import same_bits

HALVES = (torch.bfloat16, torch.float16)


class RMSNorm(nn.Module):
    """As language models write it."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Residual(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.up, self.down = RMSNorm(size), nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


def gradients(run, leaves, context=None):
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(1)
    if context is None:
        loss = run()
    else:
        with context:
            loss = run()
    loss.backward()
    return [leaf.grad for leaf in leaves]


def assert_stock(run, leaves, context):
    stock = gradients(run, leaves)
    for ours, theirs in zip(gradients(run, leaves, context), stock, strict=True):
        assert same_bits(ours, theirs)


def held(saved, node):
    return sum(r.bytes for r in saved.records if r.node == node and not r.rebuilt)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_widening_cast_is_held_by_its_source(dtype):
    model = nn.Sequential(*(Residual(64) for _ in range(3))).to(dtype)
    x, saved = torch.randn(64, 64, dtype=dtype, requires_grad=True), lean("norm")
    assert_stock(lambda: model(x).square().mean(), [x, *model.parameters()], saved)
    wide = [r for r in saved.records if not r.rebuilt and r.dtype is torch.float32 and r.bytes > 64 * 4]
    assert not wide
    narrow = [r for r in saved.records if not r.rebuilt and r.shape.numel() == 64 * 64]
    assert sum(r.bytes for r in narrow) <= 4 * 64 * 64 * 2  # a source for each block, and the result


def test_autocast_casts_to_float32_by_themselves():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 64)), torch.randn(64, 64)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(model(x), x.square())

    saved = lean("norm")
    assert_stock(run, list(model.parameters()), saved)
    kept = [r.node for r in saved.records if r.dtype is torch.float32 and not r.rebuilt]
    assert "aten::_to_copy" not in kept


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e-40, 3e38], ids=str)
def test_values_at_the_edge_keep_their_bits(value):
    x = torch.randn(64, 64).bfloat16()
    x[3, 5] = value
    x.requires_grad_()
    assert_stock(lambda: (x + 0).float().pow(2).mul(0.5).sum(), [x], lean("norm"))


def test_a_cast_that_was_edited_unseen_is_not_narrowed():
    """Through .data: autograd counts no edit, and the values do not fit in the source's dtype any more."""
    x, saved = torch.randn(64, 64).bfloat16().requires_grad_(), lean("norm")

    def run():
        wide = (x * 1).float()
        wide.data.add_(1e-3)
        return wide.pow(2).sum()

    assert_stock(run, [x], saved)
    assert saved.kept_bytes == saved.rebuilt_bytes == 64 * 64 * 2  # x is kept, the cast is made by its calls


def test_a_source_that_another_branch_saves_too():
    x, saved = torch.randn(64, 64).bfloat16().requires_grad_(), lean("norm")

    def run():
        y = x.sin()
        return y.float().square().sum() + y.exp().float().sum() + F.silu(y).float().sum()

    assert_stock(run, [x], saved)


def test_a_source_that_was_edited_before_others_read_it_is_another():
    x = torch.randn(64, 64).bfloat16().requires_grad_()

    def run():
        y = x * 2
        wide = y.float().square().sum()
        with torch.no_grad():
            y.add_(1)
        return wide + F.silu(y).float().sum()

    assert_stock(run, [x], lean("norm"))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_loss_holds_narrow_logits(dtype, smoothing):
    hidden, head = torch.randn(64, 32, dtype=dtype), nn.Linear(32, 500).to(dtype)
    target, saved = torch.randint(0, 500, (64,)), lean("norm")

    def run():
        logits = head(hidden).float()
        return F.cross_entropy(logits.view(-1, 500), target, label_smoothing=smoothing)

    assert_stock(run, list(head.parameters()), saved)
    assert held(saved, "aten::_log_softmax") == 0
    assert held(saved, "source of a cast") == 64 * 500 * 2


def test_the_loss_holds_nothing_where_logits_are_rebuilt():
    hidden, head = torch.randn(64, 32).bfloat16(), nn.Linear(32, 500).bfloat16()
    target, saved = torch.randint(0, 500, (64,)), lean("conv")
    run = lambda: F.cross_entropy(head(hidden).float(), target)  # noqa: E731
    assert_stock(run, list(head.parameters()), saved)
    assert saved.kept_bytes < 64 * 500


def test_rebuilt_log_probabilities_take_the_place_of_their_logits():
    hidden, head = torch.randn(512, 8).bfloat16(), nn.Linear(8, 4096).bfloat16()
    target = torch.randint(0, 4096, (512,))

    def peak(context):
        def forward():
            with context():
                return F.cross_entropy(head(hidden).float(), target)

        forward().backward()  # tries the step
        return measure_step(forward).peak

    assert peak(lambda: lean("norm")) < 1.02 * peak(nullcontext)


def test_what_took_the_place_of_its_copy_is_read_again():
    reasons, found, norm = [], {}, partial(lean, "norm")
    for context in (nullcontext, norm) * 4:  # from the third pass on what was found is learned
        torch.manual_seed(len(reasons))
        x = torch.randn(64, 64).bfloat16().requires_grad_()
        with context():
            wide = x.sin().float()
            loss = wide.square().sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
        with context() as saved:  # reads the cast of the pass before
            loss = F.silu(wide).square().sum()
        loss.backward()
        found[context] = x.grad
        if saved is not None:
            reasons.append(saved.reasons)
            assert same_bits(found[norm], found[nullcontext])
    assert reasons == [[]] * 4


@pytest.mark.parametrize("goal", [{"peak": 0.985}, {"budget": 0.95}], ids=str)
def test_what_a_plan_holds_is_held_in_the_narrow_dtype(goal):
    hidden, head = torch.randn(64, 32).bfloat16(), nn.Linear(32, 500).bfloat16()
    other, x = nn.Linear(32, 2000), torch.randn(64, 32)
    target, saved = torch.randint(0, 500, (64,)), lean(**goal)
    run = lambda: F.cross_entropy(head(hidden).float(), target) + F.silu(other(x)).square().mean()  # noqa: E731
    for _ in range(2):
        assert_stock(run, [*head.parameters(), *other.parameters()], saved)
    assert held(saved, "aten::_log_softmax") == 0
    assert held(saved, "source of a cast") == 64 * 500 * 2
    assert saved.kept_bytes <= saved.plan.kept_bytes


def test_a_plan_buys_logits_by_what_their_narrow_copy_takes():
    """Each of both layers could be rebuilt; the logits' price brings 2 bytes a value, not 4."""
    first, head = nn.Linear(64, 512).bfloat16(), nn.Linear(512, 1024).bfloat16()
    x, target = torch.randn(128, 64).bfloat16(), torch.randint(0, 1024, (128,))
    saved = lean(budget=0.6)
    run = lambda: F.cross_entropy(head(F.silu(first(x))).float(), target)  # noqa: E731
    for _ in range(2):
        assert_stock(run, [*first.parameters(), *head.parameters()], saved)
    assert held(saved, "source of a cast") == 128 * 1024 * 2
    assert saved.plan.ratio <= 0.6


def test_logits_of_float32_are_no_narrow_ones():
    logits, target = torch.randn(64, 500, requires_grad=True), torch.randint(0, 500, (64,))
    assert_stock(lambda: F.cross_entropy(logits * 2, target), [logits], lean("norm"))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_dropout_holds_a_bit_a_value(dtype, p):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(p), nn.Linear(64, 64)).to(dtype)
    x, saved = torch.randn(64, 64, dtype=dtype), lean("norm")
    assert_stock(lambda: model(x).square().mean(), list(model.parameters()), saved)
    if 0 < p < 1:
        assert held(saved, "bits of a mask") == 64 * 64 // 8
        assert held(saved, "aten::mul") == 0


def test_dropout_holds_a_bit_a_value_where_the_compiler_watches():
    x = torch.randn(64, 64, requires_grad=True)
    for context in (nullcontext(), watched_by_the_compiler()):
        saved = lean("norm")
        with context:
            assert_stock(lambda: F.dropout(x * 2, 0.5).sum(), [x], saved)
        assert held(saved, "bits of a mask") == 64 * 64 // 8


def test_attention_holds_a_bit_for_each_weight_that_it_drops():
    q, saved = torch.randn(2, 4, 64, 32, requires_grad=True), lean("norm")
    assert_stock(lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.2).square().sum(), [q], saved)
    assert held(saved, "bits of a mask") == 2 * 4 * 64 * 64 // 8


def test_what_is_not_of_two_values_is_held_as_it_is():
    x = torch.randn(64, 64, requires_grad=True)
    for last in (2.0, float("nan"), -0.0):

        def run(last=last):
            mask = (torch.rand(64, 64) > 0.5).float()
            mask[-1, -1] = last
            return (x.exp() * (mask * 1)).sum()

        assert_stock(run, [x], lean("norm"))


@pytest.mark.parametrize("positions", [False, True], ids=["two values", "positions"])
def test_of_what_the_caller_holds_a_view_has_no_narrow_copy(positions):
    """It would add memory, and not see what the caller writes there."""
    of = torch.randn(64, 64, requires_grad=True)

    def run(context):
        x = torch.zeros(4, 16, 64, dtype=torch.int64 if positions else torch.float32)
        with context:
            if positions:
                loss = (of.gather(0, x.view(64, 64)) * torch.arange(64)).sum()
            else:
                with torch.no_grad():
                    x.mul_(1.5)
                loss = F.linear(x, of).mean()
            x.data.add_(1)
        loss.backward()
        found, of.grad = of.grad, None
        return found

    assert torch.equal(run(nullcontext()), run(lean("conv")))
