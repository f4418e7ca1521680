"""What every layer promises under torch's transforms: compiled, traced, mapped, differentiated twice."""

import copy

import pytest
import torch
from cases import lay_out
from contract import ALL, FIRST, IMAGES, KINDS, assert_close, assert_equal, each, each_mode, randomized, step
from torch import nn as stock
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap
from torch.utils._pytree import tree_leaves

from leannorm import nn, no_stats_update, use_backend

# a compiler takes its time: `IMAGES`, with all options of one layer, `KINDS` under transforms; `make
# conformance` has all
OPTIONS = [case for case in ALL if case.layer.name in ("BatchNorm2d", "InstanceNorm2d", "ConvBatchNorm2d")]
# layers of several autograd functions, for transforms of compiled code
FAMILIES = [
    case
    for case in KINDS
    if case.layer.name in ("BatchNorm2d", "GroupNormAct", "LayerNorm", "AdaLayerNorm", "ConvBatchNorm2d")
]


def assert_compiles(case, training, layout):
    torch._dynamo.reset()  # which compiles a forward a few times only, over all tests
    eager = randomized(case).train(training)
    traced = copy.deepcopy(eager)
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    inputs = [lay_out(t, layout) for t in case.inputs()]
    for _ in range(2):
        found, want = step(traced, inputs, compiled), step(eager, inputs)
        assert_close(found, want)
        for name in ("y", "dx"):
            assert found[name].stride() == want[name].stride()


@pytest.mark.sampled(of=5)
@each("compile", IMAGES + [case for case in OPTIONS if case not in FIRST], of=FIRST)
def test_training_compiles_to_one_graph(case):
    """Two steps are the eager ones, strides too; the statistics move inside the graph."""
    assert_compiles(case, True, "contiguous")


@pytest.mark.sampled(of=3)
@each("compile", KINDS, of=IMAGES)
def test_evaluation_compiles_to_one_graph(case):
    assert_compiles(case, False, "contiguous")


@pytest.mark.sampled(of=4)
@each("compile", [case for case in IMAGES if len(case.layer.shape) == 4])
def test_channels_last_compiles_to_one_graph(case):
    assert_compiles(case, True, "channels_last")


@pytest.mark.sampled(of=4)
@each_mode("compile", FAMILIES, of=IMAGES)
def test_compiles_without_kernels(case, training):
    """To the reference's operations, which the compiler sees one by one."""
    with use_backend("reference"):
        assert_compiles(case, training, "contiguous")


@each_mode("fx", ALL)
@pytest.mark.sampled(of=3)
def test_traces_to_one_node(case, training):
    """Of our function and not of torch's, in the mode that the layer had."""
    layer, inputs = randomized(case).train(training), case.inputs()
    twin = copy.deepcopy(layer)
    traced = torch.fx.symbolic_trace(stock.Sequential(layer) if len(inputs) == 1 else layer)
    nodes = [n.target.__module__ for n in traced.graph.nodes if n.op == "call_function"]
    assert len(nodes) == 1
    assert nodes[0].startswith("leannorm.")
    assert torch.equal(traced(*inputs), twin(*inputs))
    assert_equal(layer.state_dict(), twin.state_dict())


@each_mode("func", ALL)
@pytest.mark.parametrize("mapped", [True, False], ids=["inputs", "one input"])
@pytest.mark.sampled(of=3)
def test_an_ensemble_runs_under_vmap(case, training, mapped):
    layers = [randomized(case).train(training) for _ in range(3)]
    inputs = [case.inputs() for _ in layers] if mapped else [case.inputs()] * 3
    parameters, buffers = stack_module_state(layers)
    if not (parameters or buffers or mapped):
        return  # then nothing is

    def loss(p, b, *x):
        y = functional_call(layers[0], (p, b), x)
        return y.pow(3).sum(), y

    x = [torch.stack(each) if mapped else each[0] for each in zip(*inputs, strict=True)]
    places = (0, 0, *[0 if mapped else None] * len(x))
    grads, ys = vmap(grad(loss, has_aux=True), in_dims=places)(parameters, buffers, *x)
    for i, layer in enumerate(layers):
        y = layer(*inputs[i])
        torch.testing.assert_close(ys[i], y)
        assert_close({name: b[i] for name, b in buffers.items()}, dict(layer.named_buffers()))
        if parameters:
            alone = torch.autograd.grad(y.pow(3).sum(), layer.parameters())
            torch.testing.assert_close([g[i] for g in grads.values()], list(alone), rtol=1e-4, atol=1e-3)


@pytest.mark.sampled(of=4)
@each_mode("func", ALL)
def test_functional_derivatives_with_the_layers_own_buffers(case, training):
    """torch's layer refuses jvp and jacrev in training: it writes into captured buffers."""
    layer = randomized(case).double().train(training)
    x, *more = case.inputs(torch.float64)
    with torch.no_grad():
        tangent, c = torch.randn_like(x), torch.randn_like(copy.deepcopy(layer)(x, *more))

    def loss(x):
        return (layer(x, *more) * c).pow(3).sum()

    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    torch.testing.assert_close(grad(loss)(x), g.detach())
    torch.testing.assert_close(jacrev(loss)(x), g.detach())
    torch.testing.assert_close(jvp(loss, (x,), (tangent,))[1], (g.detach() * tangent).sum())
    (gg,) = torch.autograd.grad((g * tangent).sum(), leaf)
    if not training:
        h = hessian(loss)(x).reshape(x.numel(), x.numel())
        torch.testing.assert_close(h @ tangent.flatten(), gg.flatten())
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(b) for b in layer.buffers())


@each_mode("func", FIRST)
def test_an_input_that_a_transform_does_not_see(case, training):
    """A layer may be called inside a transform on what is a constant there."""
    layer, inputs = randomized(case).train(training), case.inputs()
    with torch.no_grad():
        total = copy.deepcopy(layer)(*inputs).square().sum()

    def loss(t):
        return (layer(*inputs) * t).square().sum()

    assert grad(loss)(torch.tensor(3.0)).item() == pytest.approx(6 * total.item(), rel=1e-4)
    torch.testing.assert_close(vmap(loss)(torch.ones(3)), total.expand(3))
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(b) for b in layer.buffers())


@pytest.mark.sampled(of=3)
@each_mode("func", FAMILIES, of=IMAGES)
def test_transforms_compile(case, training):
    """torch's compiler drops the backward pass of an autograd function under `torch.func.grad`."""
    layer = randomized(case).double().train(training)
    before = {name: b.clone() for name, b in layer.named_buffers()}
    x, *more = case.inputs(torch.float64)
    with torch.no_grad():
        tangent, c = torch.randn_like(x), torch.randn_like(copy.deepcopy(layer)(x, *more))

    def results(layer):
        def loss(p, x):
            return (functional_call(layer, p, (x, *more)) * c).pow(3).sum()

        p = {name: v.detach() for name, v in layer.named_parameters()}
        return [
            *tree_leaves(grad(loss, (0, 1))(p, x)),
            *tree_leaves(vmap(grad(loss), (None, 0))(p, torch.stack((x, 2 * x)))),
            *jvp(lambda x: loss(p, x), (x,), (tangent,)),
        ]

    compiled = torch.compile(results, fullgraph=True, backend="aot_eager")
    if training and before:  # torch's rule for what is compiled
        with pytest.raises(RuntimeError, match="would mutate a captured Tensor"):
            compiled(layer)
        with no_stats_update():
            torch.testing.assert_close(compiled(layer), results(layer))
        assert_equal(dict(layer.named_buffers()), before)
    else:
        torch.testing.assert_close(compiled(layer), results(layer))


@pytest.mark.sampled(of=4)
@each_mode("func", FAMILIES, of=IMAGES)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at it
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # torch 2.10 of the dispatcher
def test_transforms_of_compiled_layers(case, training):
    layer = randomized(case).double().train(training)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager")
    x, *more = case.inputs(torch.float64)
    for _ in range(2):  # compiled for the transform, then for a call without one
        found, want = (grad(lambda x, f=f: f(x, *more).pow(3).sum())(x) for f in (compiled, layer))
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(compiled(x, *more), layer(x, *more))


@pytest.mark.sampled(of=4)
@each_mode("func", FAMILIES, of=IMAGES)
def test_forward_mode_compiles(case, training):
    """Dual numbers made in compiled code, and made around it; nothing else needs a gradient."""
    layer = randomized(case).double().train(training).requires_grad_(False)
    x, *more = case.inputs(torch.float64)
    tangent = torch.randn_like(x)

    def inside(layer):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent), *more)).tangent

    with no_stats_update():
        want = inside(layer)
        torch.testing.assert_close(torch.compile(inside, backend="aot_eager")(layer), want)
        compiled = torch.compile(layer, backend="aot_eager")
        torch.testing.assert_close(compiled(x, *more), layer(x, *more))
        torch.testing.assert_close(inside(compiled), want)


@each_mode("func", FIRST)
def test_many_gradients_at_once(case, training):
    layer, inputs = randomized(case).train(training), [t.requires_grad_() for t in case.inputs()]
    y, leaves = layer(*inputs), [*inputs, *layer.parameters()]
    many = torch.randn(3, *y.shape)
    found = torch.autograd.grad(y, leaves, many, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(y, leaves, one, retain_graph=True) for one in many]
    torch.testing.assert_close(list(found), [torch.stack(g) for g in zip(*alone, strict=True)])


@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_many_gradients_at_once_without_the_kernels(backend):
    """torch's own norms have no rule for it, and neither has `unflatten`."""
    for layer, shape in (
        (nn.BatchNorm2d(8), (4, 8, 32, 32)),
        (nn.GroupNorm(2, 8), (4, 8, 32, 32)),
        (nn.LayerNorm(64), (128, 64)),
        (nn.RMSNorm(64), (128, 64)),
    ):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        layer = layer.double()
        with use_backend(backend):
            y, leaves = layer(x), [x, *layer.parameters()]
            many = torch.randn(3, *y.shape)
            found = torch.autograd.grad(y, leaves, many, is_grads_batched=True, retain_graph=True)
            alone = [torch.autograd.grad(y, leaves, one, retain_graph=True) for one in many]
        torch.testing.assert_close(list(found), [torch.stack(g) for g in zip(*alone, strict=True)])


@pytest.mark.sampled(of=4)
@each_mode("double backward", ALL)
def test_first_and_second_derivatives(case, training):
    """Of the inputs and of every parameter."""
    layer = randomized(case).double().train(training)
    names = [name for name, _ in layer.named_parameters()]
    buffers = {name: b.clone() for name, b in layer.named_buffers()}
    inputs = case.inputs(torch.float64)

    def function(*leaves):
        fresh = {name: b.clone() for name, b in buffers.items()}
        parameters = dict(zip(names, leaves[len(inputs) :], strict=True))
        return functional_call(layer, (parameters, fresh), leaves[: len(inputs)])

    leaves = [t.detach().requires_grad_() for t in (*inputs, *layer.parameters())]
    assert gradcheck(function, leaves, fast_mode=True)
    assert gradgradcheck(function, leaves, fast_mode=True)
