"""LayerNorm and RMSNorm as layers: torch's checkpoints and repr, and life under torch's transforms."""

import copy
import pickle

import pytest
import torch
from torch import nn as stock
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap

from leannorm import functional, nn

PAIRS = [
    (nn.LayerNorm, stock.LayerNorm, {"normalized_shape": 6}),
    (nn.LayerNorm, stock.LayerNorm, {"normalized_shape": (4, 6), "eps": 1e-3, "bias": False}),
    (nn.LayerNorm, stock.LayerNorm, {"normalized_shape": [6], "elementwise_affine": False}),
    (nn.LayerNorm, stock.LayerNorm, {"normalized_shape": 6, "dtype": torch.float64}),
    (nn.RMSNorm, stock.RMSNorm, {"normalized_shape": 6}),
    (nn.RMSNorm, stock.RMSNorm, {"normalized_shape": (4, 6), "eps": 1e-3}),
    (nn.RMSNorm, stock.RMSNorm, {"normalized_shape": 6, "elementwise_affine": False}),
]
LAYERS = [(nn.LayerNorm, {}), (nn.LayerNorm, {"dim": 1}), (nn.RMSNorm, {}), (nn.RMSNorm, {"dim": 1})]
# torch's tracer instantiates every autograd.Function that it meets, and warns itself against it
compiles = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
layers = pytest.mark.parametrize(("layer", "options"), LAYERS, ids=["layer", "layer1", "rms", "rms1"])


def randomized(module):
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p))
    return module


@pytest.mark.parametrize(("layer", "torchs", "arguments"), PAIRS)
def test_stands_in_for_torchs(layer, torchs, arguments):
    ours, theirs = randomized(layer(**arguments)), torchs(**arguments)
    assert isinstance(ours, torchs)
    assert repr(ours) == repr(theirs)
    theirs.load_state_dict(ours.state_dict())
    back = layer(**arguments)
    back.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4, 6, dtype=arguments.get("dtype"))
    torch.testing.assert_close(back(x), theirs(x))
    assert torch.equal(back(x), ours(x))


def test_dim_is_shown_and_loads_a_channels_last_layers_checkpoint():
    layer, last = nn.LayerNorm(6, dim=1), randomized(stock.LayerNorm(6))
    assert "dim=1" in repr(layer)
    layer.load_state_dict(last.state_dict())
    x = torch.randn(2, 6, 3, 3)
    torch.testing.assert_close(layer(x), last(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


@layers
def test_copies_and_moves(layer, options):
    original, x = randomized(layer(6, **options)), torch.randn(2, 6, 6, 6)
    want = original(x)
    for copied in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert torch.equal(copied(x), want)
    assert original.to(memory_format=torch.channels_last).double()(x.double()).dtype == torch.float64
    on_meta = layer(6, device="meta", **options)
    assert on_meta(x.to("meta")).shape == x.shape
    emptied = on_meta.to_empty(device="cpu")
    emptied.reset_parameters()
    assert torch.equal(emptied(x), layer(6, **options)(x))


def test_a_stock_layer_may_become_ours_by_its_class():
    layer = stock.LayerNorm(6)
    layer.__class__ = nn.LayerNorm
    assert layer(torch.randn(2, 6)).shape == (2, 6)


@compiles
@layers
@pytest.mark.parametrize("channels_last", [False, True])
def test_compiles_without_a_graph_break(layer, options, channels_last):
    module, x = randomized(layer(6, **options)), torch.randn(2, 6, 6, 6)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    results = []
    for function in (module, compiled):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        results.append([y, *torch.autograd.grad(y.pow(3).sum(), [leaf, *module.parameters()])])
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)
        assert traced.stride() == eager.stride()


@compiles
def test_add_layer_norm_compiles():
    def block(x, residual, weight):
        y, r = functional.add_layer_norm(x, residual, (6,), weight)
        return y + r

    x, residual, weight = (torch.randn(s, requires_grad=True) for s in ((4, 6), (4, 6), (6,)))
    results = []
    for function in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        y = function(x, residual, weight)
        results.append([y, *torch.autograd.grad(y.pow(3).sum(), (x, residual, weight))])
    torch.testing.assert_close(results[1], results[0])


@layers
def test_traces_to_one_node(layer, options):
    model = stock.Sequential(stock.Linear(6, 6), randomized(layer(6, **options)))
    traced = torch.fx.symbolic_trace(model)
    norms = [n for n in traced.graph.nodes if getattr(n.target, "__module__", "").startswith("leannorm")]
    assert [n.op for n in norms] == ["call_function"]
    x = torch.randn(2, 6, 6)
    assert torch.equal(traced(x), model(x))


@layers
def test_an_ensemble_runs_under_vmap(layer, options):
    models, x = [randomized(layer(6, **options)) for _ in range(3)], torch.randn(2, 6, 6)
    parameters, buffers = stack_module_state(models)

    def loss(p, b, x):
        y = functional_call(models[0], (p, b), (x,))
        return y.pow(3).sum(), y

    grads, ys = vmap(grad(loss, has_aux=True), in_dims=(0, 0, None))(parameters, buffers, x)
    for i, model in enumerate(models):
        y = model(x)
        torch.testing.assert_close(ys[i], y)
        alone = torch.autograd.grad(y.pow(3).sum(), model.parameters())
        torch.testing.assert_close([g[i] for g in grads.values()], list(alone))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, on first jvp
@layers
def test_functional_derivatives(layer, options):
    module, x = randomized(layer(6, **options)).double(), torch.randn(1, 6, 6, dtype=torch.float64)
    with torch.random.fork_rng():
        tangent, c = torch.randn_like(x), torch.randn_like(x)

    def loss(x):
        return (module(x) * c).pow(3).sum()

    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    torch.testing.assert_close(jacrev(loss)(x), g.detach())
    torch.testing.assert_close(jvp(loss, (x,), (tangent,))[1], (g.detach() * tangent).sum())
    (gg,) = torch.autograd.grad((g * tangent).sum(), leaf)
    h = hessian(loss)(x).reshape(x.numel(), x.numel())
    torch.testing.assert_close(h @ tangent.flatten(), gg.flatten())
