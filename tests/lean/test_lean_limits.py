"""`lean()` at its edges: edits in place, frozen parameters, hooks on a model, compiled and fake tensors."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import io
import os
import pickle
import warnings
import weakref

import lean_cases
import pytest
import torch
import torch.nn.functional as F
from test_lean import Stock, assert_same, step
from test_lean_composes import IMAGE, SETTINGS, gradients, network
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import leannorm
from leannorm.report.memory import measure_step
from leannorm.saving import lean, make_lean, unmake_lean

pytestmark = pytest.mark.filterwarnings("ignore:leannorm. budget=.* is out of reach")


class TestEditsInPlace:
    def test_of_what_is_held(self):
        model = network()
        with lean("norm"):
            z = model[0](IMAGE)
            loss = model[1:](z).sum()
        with torch.no_grad():
            z.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_of_a_weight(self):
        model = network()
        with lean("norm"):
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

        assert_same(run(lean("norm")), run(Stock()))

    def test_without_autograd_before_it_was_saved(self):
        def run(context):
            model = network()
            with context:
                y = model[1](model[0](IMAGE))
                with torch.no_grad():
                    y.mul_(2)
                loss = model[2:](y).square().mean()
            return gradients(model, [loss])

        assert_same(run(lean("norm")), run(Stock()))

    def test_of_a_view(self):
        def run(context):
            model = network()
            with context:
                y = model[:3](IMAGE)
                y[:, 0] = 0
                loss = model[3:](y).square().mean()
            return gradients(model, [loss])

        assert_same(run(lean("norm")), run(Stock()))


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
        with mode(), lean("norm") as saved:
            y = model(IMAGE)
        assert saved.kept_bytes == saved.rebuilt_bytes == 0
        assert not y.requires_grad


def test_error_in_the_forward_pass_leaves_no_hooks():
    with pytest.raises(ZeroDivisionError), lean("norm"):
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
        assert not model._forward_pre_hooks
        assert "forward" not in model.__dict__

    def test_gradients(self):
        ours, stock = make_lean(network(), "conv"), network()
        for i in range(2):
            for model in (ours, stock):
                model.zero_grad()
                model(IMAGE + i).square().mean().backward()
            assert_same(*({n: p.grad for n, p in m.named_parameters()} for m in (ours, stock)))

    def test_again_replaces(self):
        model = make_lean(make_lean(network(), "norm"), "conv")
        assert len(model._forward_pre_hooks) == 1
        with pytest.raises(ValueError, match="recompute"):
            make_lean(model, "nonsense")
        assert len(model._forward_pre_hooks) == 1

    def test_copies_and_files(self):
        model = make_lean(network(), "norm")
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
            assert not other._forward_pre_hooks
            other(IMAGE)
        assert len(model._forward_pre_hooks) == 1

    def test_whoever_looks_at_forward_sees_the_models_own(self):
        model, x = make_lean(network(), "norm"), IMAGE
        own = type(model).forward
        assert inspect.signature(model.forward) == inspect.signature(own.__get__(model))
        assert model.forward.__code__ is own.__code__
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "leannorm: lean.. was entered inside compiled code")
            exported = torch.export.export(model.eval(), (x,)).module()
        assert torch.equal(exported(x), model(x))
        assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))
        model.forward = lambda *inputs, run=model.forward: run(*inputs)  # as other libraries wrap it
        assert torch.equal(unmake_lean(model)(x), exported(x))

    def test_freed_with_its_last_reference(self):
        gc.collect()
        gc.disable()
        try:
            model = make_lean(nn.Sequential(nn.Linear(4, 4)), "norm")
            model(torch.randn(2, 4))
            seen = weakref.ref(model)
            del model
            assert seen() is None
        finally:
            gc.enable()

    def test_error_in_the_forward_pass(self):
        model = make_lean(network(), "norm")
        with pytest.raises(RuntimeError):
            model(torch.randn(1, 7, 3, 3))
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        model(IMAGE).sum().backward()


def test_compiled_code_is_left_alone():
    model = network()
    expected = step(copy.deepcopy(model), IMAGE, Stock())[0]

    def inside(x):
        with lean("norm"):
            return model(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for function in (
            torch.compile(inside, backend="aot_eager", fullgraph=True),
            torch.compile(make_lean(network(), "norm"), backend="aot_eager", fullgraph=True),
        ):
            y = function(IMAGE)
            y.square().mean().backward()
            assert torch.allclose(y, expected["output"], atol=1e-5)
        compiled = torch.compile(network(), backend="aot_eager", fullgraph=True)
        with lean("norm"):
            y = compiled(IMAGE)
        y.square().mean().backward()
        assert torch.allclose(y, expected["output"], atol=1e-5)


class Breaks(nn.Module):
    """A frame that torch's compiler leaves to Python, which runs what it calls eagerly."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            torch._dynamo.graph_break()
            x = F.gelu(y) + x
        return x


HOOKS = {
    "planned": (-1, {"budget": 0.5}),
    "small": (1 << 30, {}),
    "held": (-1, {"held": (torch.clone, torch.clone)}),
    "verify": (-1, {"verify": True}),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.filterwarnings("ignore:leannorm", "ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:Using .torch.compile.module")
def test_hooks_are_not_compiled_where_a_graph_breaks(kind, monkeypatch, with_and_without_nodes):
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    most, setting = HOOKS[kind]
    monkeypatch.setenv("LEANNORM_SMALL_BYTES", str(most))
    model, x = Breaks(), torch.randn(64, 64)
    compiled = torch.compile(model, backend="aot_eager")
    clear_compilation_metrics()

    def gradients_of(around):
        with around:
            loss = compiled(x).square().mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    stock = gradients_of(contextlib.nullcontext())
    for _ in range(3):
        assert all(map(torch.equal, gradients_of(lean(**setting)), stock))
    files = {metrics.co_filename for metrics in get_compilation_metrics()}
    assert __file__ in files
    assert not [name for name in files if name and name.startswith(os.path.dirname(leannorm.__file__))]


class HasLean(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.saving = network(), lean("conv")

    def forward(self, x):
        with self.saving:
            return self.layers(x)


def test_a_copy_of_a_lean_object_has_its_settings_and_no_passes():
    def gradients_of(model):
        return torch.autograd.grad(model(IMAGE).square().mean(), list(model.parameters()))

    model = HasLean()
    stock = torch.autograd.grad(model.layers(IMAGE).square().mean(), list(model.parameters()))
    gradients_of(model)
    kept = model.saving.kept_bytes
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not copied.saving.records
        assert all(map(torch.equal, gradients_of(copied), stock))
        assert copied.saving.kept_bytes == kept


@pytest.mark.filterwarnings("ignore:leannorm. lean.. was entered under a torch.func transform")
def test_function_transforms_are_left_alone():
    model = make_lean(nn.Sequential(nn.Linear(32, 32), nn.GELU()), "norm")
    x = torch.randn(64, 32)
    slope = torch.func.grad(lambda x: model(x).sum())(x)
    y = x.clone().requires_grad_()
    model(y).sum().backward()
    assert torch.allclose(slope, y.grad)


def test_saves_what_the_loss_needs_too():
    with lean("norm") as saved:
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


def linear_network():
    return nn.Sequential(nn.Linear(14, 64), nn.SiLU(), nn.Linear(64, 4))


def wide_network():
    return nn.Sequential(nn.Linear(14, 512), nn.SiLU(), nn.Linear(512, 4))


@pytest.mark.parametrize("make", [network, linear_network, wide_network])
def test_a_weight_that_was_freed_is_told_from_one_that_is_there(make):
    model = make()
    stock = torch.autograd.grad(model(IMAGE).sum(), list(model.parameters()))
    with lean("conv") as saved:
        loss = model(IMAGE).sum()
    assert saved.rebuilt_bytes
    model[0].weight.untyped_storage().resize_(0)
    if make is not wide_network:  # small weights are copied
        assert all(map(torch.equal, torch.autograd.grad(loss, list(model.parameters())), stock))
        return
    with pytest.raises(RuntimeError, match=r"freed .*the forward pass"):
        loss.backward()


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.norm, self.factor = nn.LayerNorm(8), factor

    def forward(self, x):
        return self.norm(x) * self.factor


@pytest.mark.parametrize("copied", [copy.copy, lambda model: model._replicate_for_data_parallel()])
@pytest.mark.parametrize("undone", ["model", "twin", "gone"])
def test_a_shallow_copy_is_lean_by_itself(undone, copied):
    model, x = make_lean(Times(1.0), "norm"), torch.randn(4, 8)
    want = torch.nn.functional.layer_norm(x, (8,))
    twin, third = copied(model), copied(model)
    for m, factor in ((twin, 2.0), (third, 3.0)):
        m.factor, m.norm = factor, model.norm
    if undone == "gone":
        m = twin = third = None
        model = copied(model)
        gc.collect()
        assert torch.equal(model.forward(x), want)
        assert torch.equal(copy.deepcopy(model)(x), want)
        return
    unmake_lean(model if undone == "model" else twin)
    for m, factor in ((model, 1.0), (twin, 2.0), (third, 3.0)):
        assert torch.equal(m(x), want * factor)
    assert ("forward" in vars(model), "forward" in vars(twin)) == (undone == "twin", undone == "model")
    unmake_lean(twin if undone == "model" else model)
    assert torch.equal(third.forward(x), want * 3)
    assert not unmake_lean(third)._forward_pre_hooks
