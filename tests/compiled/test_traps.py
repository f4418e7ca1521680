"""What compiled code gets wrong silently, or could: edited buffers, random numbers, what may run once."""

import math

import pytest
import torch
from compiling import Residual, Scaled, assert_same, images, run_by_nodes, saved_bytes, step
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import leannorm

LEANEST = {"budget": 0.01}


@pytest.mark.parametrize("goal", [{}, LEANEST], ids=["norm", "leanest"])
@pytest.mark.parametrize("first", [True, False])
def test_what_reads_an_edited_buffer_reads_what_the_forward_pass_read(first, goal):
    """Torch's own partition computes it again from the edited buffer: a gradient off by a half and more."""
    ran = []
    for options in (None, leannorm.compile_options(**goal)):
        torch.manual_seed(0)
        model = Scaled(8, first).double()
        ran.append(
            step(model, model if options is None else run_by_nodes(model, options), images(4, 8).double())
        )
    assert_same(ran[1], ran[0])


def test_statistics_and_counters_move_once():
    torch.manual_seed(0)
    model = nn.Sequential(Residual(), Residual()).double()
    step(model, run_by_nodes(model, leannorm.compile_options(**LEANEST)), images(2, 8, 6, 6).double())
    counters = [int(b) for name, b in model.named_buffers() if "num_batches" in name]
    assert counters == [1] * 4


CALLS = []


@torch.library.custom_op("compiled_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    CALLS.append("counted")
    return x.clone()


@counted.register_fake
def _(x):
    return torch.empty_like(x)


counted.register_autograd(lambda ctx, grad: grad)


class Opaque(nn.Module):
    """An operator of which nothing is known, in the middle of what is cheap to run again."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        y = counted(self.a(x).relu())
        return self.b(y.sigmoid() * y)


def test_an_unknown_operator_runs_once():
    model, x = Opaque().double(), images(32, 16).double()
    options = leannorm.compile_options(**LEANEST)
    ours = step(model, run_by_nodes(model, options), x)
    CALLS.clear()
    torch.manual_seed(3)
    assert_same(ours, step(model, model, x))
    CALLS.clear()
    compiled = run_by_nodes(model, leannorm.compile_options(**LEANEST))
    step(model, compiled, x)
    step(model, compiled, x)
    assert CALLS == ["counted"] * 2


def test_collectives_run_once():
    """Over two ranks that are not there: what counts is what stands in the backward graph."""
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as collectives
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            mean = collectives.all_reduce(self.linear(x).detach(), "sum", dist.group.WORLD) / 2
            return (self.linear(x) * mean.sigmoid()).relu() * mean

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model, seen = Summed(), []
        options = leannorm.compile_options(**LEANEST)
        partition = options["custom_partitioner_fn"]

        def spied(*args, **kwargs):
            seen.append(partition(*args, **kwargs))
            return seen[-1]

        step(model, run_by_nodes(model, {"custom_partitioner_fn": spied}), images(16, 8))
    finally:
        dist.destroy_process_group()
    ((forward, backward),) = seen
    sent = torch.ops._c10d_functional.all_reduce.default
    assert forward.graph.find_nodes(op="call_function", target=sent)
    assert not backward.graph.find_nodes(op="call_function", target=sent)


class Checkpointed(nn.Module):
    def __init__(self, dropout=0.0, **how):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 16))
            for _ in range(2)
        )
        self.how = how

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False, **self.how)
        return x


def _keeps_products(context, operator, *args, **kwargs):
    must = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if must else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_checkpoint_of_the_user_s_stays_and_draws_the_same_numbers(dropout):
    x = images(64, 16).double()
    model = Checkpointed(dropout).double()
    reference = step(model, run_by_nodes(model) if dropout else model, x)
    ours = step(model, run_by_nodes(model, leannorm.compile_options("norm")), x)
    assert_same(ours, reference)
    inside = 64 * 64 * 8
    assert ours.saved < 2 * inside  # a hidden layer's activations: none of the two blocks' is saved


def test_a_policy_of_the_user_s_wins():
    """The leanest plan would compute products again; the policy saves them."""
    x, how = (
        images(64, 16).double(),
        {"context_fn": lambda: create_selective_checkpoint_contexts(_keeps_products)},
    )
    model = Checkpointed(**how).double()
    eager = step(model, model, x)
    ours = step(model, run_by_nodes(model, leannorm.compile_options(**LEANEST)), x)
    assert_same(ours, eager)
    assert ours.saved >= 2 * 64 * 64 * 8  # the first product of each block


@pytest.mark.parametrize("goal", [{}, LEANEST, {"peak": 0.3}], ids=str)
def test_random_numbers_are_drawn_once_under_every_plan(goal):
    """Where the input is ones, a dropout's gradient is its output, whatever was drawn."""

    def drop(x):
        hidden = F.dropout(x.sin() / x.detach().sin(), 0.5).exp()
        return F.dropout(hidden.log(), 0.2)

    x = torch.ones(64, 64, dtype=torch.float64, requires_grad=True)
    out = run_by_nodes(drop, leannorm.compile_options(**goal))(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient * math.tan(1), out)
    assert 0.5 < float((out == 0).double().mean()) < 0.7


def test_saved_bytes_are_told():
    """The measure of these tests: what a compiled function of x saves."""
    x = torch.randn(100, requires_grad=True)
    assert saved_bytes(run_by_nodes(lambda x: x.exp())(x), {x}) == 400
