"""`lean()` beside everything else that hooks into autograd, and what it must leave as it found it."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import threading
import warnings

import lean_cases
import pytest
import torch
import torch.nn.functional as F
from test_lean import Stock, assert_same, step
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from leannorm.report.memory import measure_step
from leannorm.saving import lean, make_lean, unmake_lean

SETTINGS = [{"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.4}]
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


def gradients(model, losses):
    """Of each loss in turn, added up as an optimizer would see them."""
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


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
        assert context.kept_bytes < context.rebuilt_bytes * 3

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpoint_inside(self, setting, reentrant):
        def run(context):
            model = network()
            with context:
                x = model[:3](IMAGE)
                loss = model[4:](checkpoint(model[3], x, use_reentrant=reentrant)).square().mean()
            return gradients(model, [loss])

        assert_same(run(lean(**setting)), run(Stock()))

    def test_checkpoint_outside(self, setting):
        def run(make_context):
            model = network()

            def part(x):
                with make_context():
                    return model[:4](x)

            losses = [
                model[4:](checkpoint(part, IMAGE, use_reentrant=False)).square().mean() for _ in range(2)
            ]
            return gradients(model, losses)

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
    def test_freed_without_the_garbage_collector(self, setting, inplace):
        model = network(inplace)
        step(model, IMAGE, lean(**setting))
        for backward in (True, False):
            gc.collect()
            gc.disable()
            try:
                with lean(**setting) as saved:
                    x = IMAGE.clone().requires_grad_()
                    y = model(x)
                    loss = y.square().mean()
                assert saved._ledger.alive()
                if backward:
                    loss.backward()
                del x, y, loss
                assert not saved._ledger.alive()
            finally:
                gc.enable()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("inplace", [False, True])
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


class TestEditsInPlace:
    def test_of_what_is_held(self):
        model = network()
        with lean():
            z = model[0](IMAGE)
            loss = model[1:](z).sum()
        with torch.no_grad():
            z.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_of_a_weight(self):
        model = network()
        with lean():
            loss = model(IMAGE).sum()
        with torch.no_grad():
            model[0].weight.add_(1), model[-1].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_of_a_norms_bias_which_stock_does_not_need_either(self):
        def run(context):
            model = network()
            with context:
                loss = model(IMAGE).square().mean()
            with torch.no_grad():
                model[1].bias.add_(1)
            return gradients(model, [loss])

        assert_same(run(lean()), run(Stock()))

    def test_without_autograd_before_it_was_saved(self):
        def run(context):
            model = network()
            with context:
                y = model[1](model[0](IMAGE))
                with torch.no_grad():
                    y.mul_(2)
                loss = model[2:](y).square().mean()
            return gradients(model, [loss])

        assert_same(run(lean()), run(Stock()))

    def test_of_a_view(self):
        def run(context):
            model = network()
            with context:
                y = model[:3](IMAGE)
                y[:, 0] = 0
                loss = model[3:](y).square().mean()
            return gradients(model, [loss])

        assert_same(run(lean()), run(Stock()))


def test_frozen_parameters():
    def run(context, frozen):
        model = network()
        for i in frozen:
            model[i].requires_grad_(False)
        with context:
            loss = model(IMAGE).square().mean()
        return gradients(model, [loss])

    for frozen in [(0,), (1,), (0, 1), (0, 1, 2, 3)]:
        assert_same(run(lean("conv"), frozen), run(Stock(), frozen))


def test_frozen_bias():
    def run(context):
        model = network()
        nn.init.uniform_(model[1].bias)
        model[1].bias.requires_grad_(False)
        with context:
            loss = model(IMAGE).square().mean()
        return gradients(model, [loss])

    assert_same(run(lean("conv")), run(Stock()))


def test_no_grad_and_inference():
    model = network()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), lean() as saved:
            y = model(IMAGE)
        assert saved.kept_bytes == saved.rebuilt_bytes == 0
        assert not y.requires_grad


def test_error_in_the_forward_pass_leaves_no_hooks():
    with pytest.raises(ZeroDivisionError), lean():
        1 / 0  # noqa: B018
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


class TestMakeLean:
    @pytest.mark.parametrize("setting", SETTINGS)
    def test_is_lean_and_is_undone(self, setting):
        model = network()
        state = list(model.state_dict())
        assert make_lean(model, **setting) is model
        model(IMAGE).mean().backward()
        held = [measure_step(lambda m=m: m(IMAGE).mean()).held for m in (model, network())]
        assert held[0] < 0.75 * held[1]
        assert list(model.state_dict()) == state
        assert unmake_lean(model) is model
        assert not model._forward_hooks
        assert not model._forward_pre_hooks

    def test_gradients(self):
        ours, stock = make_lean(network(), "conv"), network()
        for i in range(2):
            for model in (ours, stock):
                model.zero_grad()
                model(IMAGE + i).square().mean().backward()
            assert_same(*({n: p.grad for n, p in m.named_parameters()} for m in (ours, stock)))

    def test_again_replaces(self):
        model = make_lean(make_lean(network()), "conv")
        assert len(model._forward_hooks) == 1
        with pytest.raises(ValueError, match="recompute"):
            make_lean(model, "nonsense")
        assert len(model._forward_hooks) == 1

    def test_copies_and_files(self):
        model = make_lean(network())
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(file, weights_only=False),
        ):
            other(IMAGE).sum().backward()
            unmake_lean(other)
            assert not other._forward_hooks
        assert len(model._forward_hooks) == 1

    def test_error_in_the_forward_pass(self):
        model = make_lean(network())
        with pytest.raises(RuntimeError):
            model(torch.randn(1, 7, 3, 3))
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        model(IMAGE).sum().backward()


def test_compiled_code_is_left_alone():
    model = network()
    expected = step(copy.deepcopy(model), IMAGE, Stock())[0]

    def inside(x):
        with lean():
            return model(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for function in (
            torch.compile(inside, backend="aot_eager", fullgraph=True),
            torch.compile(make_lean(network()), backend="aot_eager", fullgraph=True),
        ):
            y = function(IMAGE)
            y.square().mean().backward()
            assert torch.allclose(y, expected["output"], atol=1e-5)
        compiled = torch.compile(network(), backend="aot_eager", fullgraph=True)
        with lean():
            y = compiled(IMAGE)
        y.square().mean().backward()
        assert torch.allclose(y, expected["output"], atol=1e-5)


def test_function_transforms_are_left_alone():
    model = make_lean(nn.Sequential(nn.Linear(32, 32), nn.GELU()))
    x = torch.randn(64, 32)
    slope = torch.func.grad(lambda x: model(x).sum())(x)
    y = x.clone().requires_grad_()
    model(y).sum().backward()
    assert torch.allclose(slope, y.grad)


def test_saves_what_the_loss_needs_too():
    with lean() as saved:
        x = torch.randn(64, 64, requires_grad=True)
        loss = F.mse_loss(F.gelu(F.layer_norm(x, (64,))), torch.zeros(64, 64))
    loss.backward()
    assert saved.rebuilt_bytes > 0


@pytest.mark.parametrize("setting", ["norm", "conv"])
def test_fake_tensors_are_counted_as_real_ones(setting):
    def counted(mode):
        with mode:
            model = nn.Sequential(
                network(), nn.MaxPool2d(2), nn.Flatten(2), nn.Linear(49, 32), nn.LayerNorm(32), nn.GELU()
            )
            with lean(setting) as saved:
                loss = model(torch.randn(lean_cases.IMAGE)).square().mean()
            loss.backward()
        return saved.kept_bytes, saved.rebuilt_bytes

    assert counted(FakeTensorMode()) == counted(contextlib.nullcontext())


def test_a_weight_that_was_freed_is_told_from_one_that_is_there():
    model = network()
    with lean("conv"):
        loss = model(IMAGE).sum()
    model[0].weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="freed since the forward pass"):
        loss.backward()
