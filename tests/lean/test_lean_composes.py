"""`lean()` beside everything else that hooks into autograd, and what it must leave as it found it."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import threading
from functools import partial

import lean_cases
import pytest
import torch
from test_lean import Stock, assert_same, step
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from leannorm.report.memory import measure_step
from leannorm.saving import lean, reasons

pytestmark = pytest.mark.filterwarnings(
    "ignore:leannorm. budget=.* is out of reach",
    "ignore:leannorm. saved-tensor hooks were there first",
    "ignore:A saved_tensors_hooks context:FutureWarning",  # torch 2.15, of selective checkpoints
)

SETTINGS = [{}, {"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.4}]
IMAGE = torch.randn(lean_cases.IMAGE, generator=torch.Generator().manual_seed(0))


def network(inplace=False):
    """Norms, activations with and without their own output, a residual, a gate: all that is rebuilt."""
    torch.manual_seed(0)
    return lean_cases.around(
        nn.SiLU(inplace),
        lean_cases.Residual(inplace),
        lean_cases.SqueezeExcite(inplace),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace),
    )


def saves_products(context, operator, *args, **kwargs):
    kept = operator.overloadpacket in (torch.ops.aten.convolution, torch.ops.aten.addmm)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "reentrant": {"use_reentrant": True},
    "plain": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, saves_products),
    },
}
_RESPECTS = "respect_saved_tensors_hooks"
if _RESPECTS in inspect.signature(checkpoint).parameters:
    CHECKPOINTS |= {f"{_RESPECTS}={v}": {"use_reentrant": False, _RESPECTS: v} for v in (True, False)}


def gradients(model, losses):
    """Of each loss in turn, added up as an optimizer would see them."""
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@contextlib.contextmanager
def outputs_of(model):
    """The storages of what its layers give within, weakly."""
    made = []
    note = lambda _, given, y: made.append(StorageWeakRef(y.untyped_storage()))  # noqa: E731
    handles = [layer.register_forward_hook(note) for layer in model.modules()]
    yield made
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("setting", SETTINGS)
class TestSameAsStock:
    def test_retain_graph(self, setting):
        model = network()

        def twice(context):
            with context:
                loss = model(IMAGE).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            return {n: p.grad for n, p in model.named_parameters()}

        stock = copy.deepcopy(twice(Stock()))
        model.zero_grad()
        assert_same(twice(lean(**setting)), stock)

    def test_part_of_the_graph_then_all_of_it(self, setting):
        model, stock_model = network(), network()

        def run(model, context):
            with context:
                y = model[:3](IMAGE)
                loss = model[3:](y).square().mean()
            first = torch.autograd.grad(loss, y, retain_graph=True)[0]
            loss.backward()
            return {"first": first, **{n: p.grad for n, p in model.named_parameters()}}

        assert_same(run(model, lean(**setting)), run(stock_model, Stock()))

    def test_double_backward(self, setting):
        def run(context):
            model, x = network(), IMAGE.clone().requires_grad_()
            with context:
                y = model(x).square().mean()
                (slope,) = torch.autograd.grad(y, x, create_graph=True)
                penalty = slope.square().sum()
            return gradients(model, [penalty + y])

        assert_same(run(lean(**setting)), run(Stock()))

    def test_several_forward_passes_before_one_backward(self, setting):
        def run(make_context):
            model, losses = network(), []
            for i in range(3):
                with make_context():
                    losses.append(model(IMAGE + i).square().mean())
            return gradients(model, [torch.stack(losses).sum()])

        assert_same(run(lambda: lean(**setting)), run(Stock))

    def test_one_context_for_many_steps(self, setting):
        context, model, stock_model = lean(**setting), network(), network()
        for i in range(3):
            ours, stock = step(model, IMAGE + i, context)[0], step(stock_model, IMAGE + i, Stock())[0]
            assert_same(ours, stock)
        assert context.kept_bytes < context.rebuilt_bytes * 3 or not setting  # whose plan goes by time

    @pytest.mark.parametrize("kind", CHECKPOINTS)
    def test_checkpoint_inside(self, setting, kind):
        def run(context):
            model = network()
            with context:
                x = model[:3](IMAGE)
                loss = model[4:](checkpoint(model[3], x, **CHECKPOINTS[kind])).square().mean()
            return gradients(model, [loss])

        lean_cases.forget_trials()  # a trial is none of the checkpoint's calls
        assert_same(run(context := lean(**setting)), run(Stock()))
        assert context.rebuilt_bytes > 0

    @pytest.mark.parametrize("kind", [kind for kind in CHECKPOINTS if kind != "reentrant"])
    def test_checkpoint_outside(self, setting, kind):
        def run(make_context):
            model = network()

            def part(x):
                with make_context():
                    return model[:4](x)

            losses = [
                model[4:](checkpoint(part, IMAGE, **CHECKPOINTS[kind])).square().mean() for _ in range(2)
            ]
            return gradients(model, losses)

        lean_cases.forget_trials()
        assert_same(run(lambda: lean(**setting)), run(Stock))

    def test_offload_around(self, setting):
        def run(make_context):
            model, packed = network(), []
            hooks = saved_tensors_hooks(lambda t: packed.append(t.shape) or t.detach().clone(), lambda t: t)
            with hooks, make_context():
                loss = model(IMAGE).square().mean()
            return gradients(model, [loss]), packed

        (ours, packed), (stock, expected) = run(lambda: lean(**setting)), run(torch.enable_grad)
        assert_same(ours, stock)
        assert packed == expected

    @pytest.mark.filterwarnings("ignore:leannorm. other saved-tensor hooks")
    def test_offload_within(self, setting):
        def run(context):
            model = network()
            with context:
                x = model[:2](IMAGE)
                with save_on_cpu():
                    x = model[2:4](x)
                loss = model[4:](x).square().mean()
            return gradients(model, [loss])

        assert_same(run(lean(**setting)), run(Stock()))

    def test_lean_within_lean(self, setting):
        def run(outer, inner):
            model = network()
            with outer:
                x = model[:3](IMAGE)
                with inner:
                    x = model[3:5](x)
                loss = model[5:](x).square().mean()
            return gradients(model, [loss])

        assert_same(run(lean(**setting), lean("conv")), run(Stock(), Stock()))

    def test_gradient_accumulation_with_a_scaler(self, setting):
        def run(make_context):
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            for i in range(4):
                with make_context(), torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(IMAGE + i).float().square().mean()
                scaler.scale(loss).backward()
                if i % 2:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
            return dict(model.state_dict())

        assert_same(run(lambda: lean(**setting)), run(Stock))

    def test_backward_under_autocast(self, setting):
        def run(context):
            model = network()
            with context:
                loss = model(IMAGE).square().mean()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return gradients(model, [loss])

        assert_same(run(lean(**setting)), run(Stock()))

    def test_threads(self, setting):
        stock = step(network(), IMAGE, Stock())[0]
        results, models = {}, [network() for _ in range(3)]

        def work(i):
            results[i] = step(models[i], IMAGE, lean(**setting))[0]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 3
        for ours in results.values():
            assert_same(ours, stock)

    def test_user_function(self, setting):
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                y = x * 2
                ctx.save_for_backward(x, y)
                return y

            @staticmethod
            def backward(ctx, g):
                x, y = ctx.saved_tensors
                assert torch.equal(x * 2, y)
                return g * 2

        def run(context):
            model = network()
            with context:
                loss = model[3:](Double.apply(model[:3](IMAGE))).square().mean()
            return gradients(model, [loss])

        assert_same(run(lean(**setting)), run(Stock()))

    def test_entered_late(self, setting):
        def run(context):
            model = network()
            x = model[:2](IMAGE)
            with context:
                loss = model[2:](x).square().mean()
            return gradients(model, [loss])

        assert_same(run(lean(**setting)), run(Stock()))

    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.sampled(of=2)
    def test_freed_without_the_garbage_collector(self, setting, inplace):
        model = network(inplace)
        step(model, IMAGE, lean(**setting))
        for backward in (True, False):
            gc.collect()
            gc.disable()
            try:
                with lean(**setting), outputs_of(model) as outputs:
                    x = IMAGE.clone().requires_grad_()
                    y = model(x)
                    loss = y.square().mean()
                assert not all(storage.expired() for storage in outputs)
                if backward:
                    loss.backward()
                del x, y, loss
                assert all(storage.expired() for storage in outputs)
            finally:
                gc.enable()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.sampled(of=2)
def test_memory_is_never_above_stock(setting, inplace):
    model, x = network(inplace), torch.randn(16, 3, 24, 24)
    step(model, x, lean(**setting))
    step(model, x, lean(**setting))

    def measure(context):
        model.zero_grad()

        def forward():
            with context:
                return model(x).square().mean()

        return measure_step(forward)

    stock, ours = measure(torch.enable_grad()), measure(lean(**setting))
    activation = 16 * 16 * 24 * 24 * 4
    assert ours.held < stock.held
    assert ours.peak <= stock.peak + activation


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x):
        return x + self.inner(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_what_a_checkpoint_puts_out_is_said(setting, reentrant):
    blocks, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(64, 64, requires_grad=True)
    for _ in range(3):
        with lean(**setting) as saved:
            y = x
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=reentrant)
            loss = y.square().mean()
        loss.backward()
        if not setting:  # its plan goes by time
            continue
        if "budget" in setting:  # the log repeats what ran in the checkpoint
            assert saved.kept_bytes <= 0.4 * (saved.kept_bytes + saved.rebuilt_bytes)
            continue
        assert saved.reasons[-1].endswith(reasons.Why.CHECKPOINTED.sentence)
        assert {one.why for one in saved.records if one.why} == {reasons.Why.CHECKPOINTED.sentence}


def test_within_a_checkpoint_it_says_that_it_does_nothing_or_is_at_work():
    block, x, passes = Block(), torch.randn(64, 64, requires_grad=True), []

    def lean_block(y):
        passes.append(lean("norm"))
        with passes[-1]:
            return block(y)

    checkpoint(lean_block, x, use_reentrant=False).square().mean().backward()
    assert [saved.reasons for saved in passes] == [[reasons.HOOKS_AROUND]] * 2  # and in the second run
    passes.clear()
    checkpoint(lean_block, x, use_reentrant=True).square().mean().backward()
    assert not passes[0].records
    assert passes[1].rebuilt_bytes > 0
