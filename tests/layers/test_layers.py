"""The batch-norm layers as torch.nn's stand-ins: checkpoints, modes, transforms, whole models, bad input."""

import copy
import pickle

import pytest
import torch
from torch import nn as stock
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap

from leannorm import nn
from leannorm._errors import DtypeError, InputError

SHAPES = {"1d": (6, 4), "1dl": (6, 4, 5), "2d": (6, 4, 3, 5), "3d": (6, 4, 2, 3, 2)}
PAIRS = {
    "1d": (nn.BatchNorm1d, stock.BatchNorm1d),
    "1dl": (nn.BatchNorm1d, stock.BatchNorm1d),
    "2d": (nn.BatchNorm2d, stock.BatchNorm2d),
    "3d": (nn.BatchNorm3d, stock.BatchNorm3d),
}
ARGUMENTS = [
    {},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None},
    {"momentum": 0.7, "eps": 1e-2},
    {"affine": False, "track_running_stats": False},
]
kinds = pytest.mark.parametrize("kind", list(PAIRS))
arguments = pytest.mark.parametrize("argument", ARGUMENTS, ids=str)
# torch's tracer instantiates every autograd.Function that it meets, and warns itself against it
compiles = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@kinds
@arguments
def test_stands_in_for_torchs(kind, argument):
    ours, theirs = (layer(4, **argument) for layer in PAIRS[kind])
    assert isinstance(ours, type(theirs))
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for training in (True, True, True, False):
        ours.train(training)
        theirs.train(training)
        x = torch.randn(SHAPES[kind]) * 2 + 1
        torch.testing.assert_close(ours(x), theirs(x))
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
    theirs.load_state_dict(ours.state_dict())
    back = PAIRS[kind][0](4, **argument)
    back.load_state_dict(theirs.state_dict())
    assert torch.equal(back.eval()(x), ours(x))


def test_flag_turned_off_later_behaves_as_torchs():
    """Buffers that are there are used in evaluation and left alone in training."""
    ours, theirs = nn.BatchNorm2d(4), stock.BatchNorm2d(4)
    x = torch.randn(6, 4, 3, 5) + 2
    for layer in (ours, theirs):
        layer(x)
        layer.track_running_stats = False
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    assert ours.num_batches_tracked == theirs.num_batches_tracked == 1


def test_a_version_1_checkpoint_loads():
    old = stock.BatchNorm2d(4).state_dict()
    del old["num_batches_tracked"]
    old._metadata[""]["version"] = 1
    layer = nn.BatchNorm2d(4)
    layer(torch.randn(2, 4, 3, 3))
    layer.load_state_dict(old)
    assert layer.num_batches_tracked in (0, 1)  # torch keeps the layer's own count
    reference = stock.BatchNorm2d(4)
    reference(torch.randn(2, 4, 3, 3))
    reference.load_state_dict(old)
    assert layer.num_batches_tracked == reference.num_batches_tracked


@kinds
def test_resets_copies_and_moves(kind):
    layer, x = PAIRS[kind][0](4), torch.randn(SHAPES[kind]) + 3
    layer(x)
    want = layer.eval()(x)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied(x), want)
    assert copy.deepcopy(layer).double()(x.double()).dtype == torch.float64
    assert copy.deepcopy(layer).bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    on_meta = PAIRS[kind][0](4, device="meta")
    assert on_meta(x.to("meta")).shape == x.shape
    emptied = on_meta.to_empty(device="cpu")
    emptied.reset_parameters()
    assert torch.equal(emptied(x), PAIRS[kind][0](4)(x))
    layer.reset_running_stats()
    assert (layer.running_mean.sum(), layer.running_var.sum(), layer.num_batches_tracked) == (0, 4, 0)
    assert layer.to(memory_format=torch.channels_last) is layer


def test_cumulative_average_is_over_all_batches():
    layer = nn.BatchNorm1d(3, momentum=None)
    batches = [torch.randn(8, 3) * 2 + i for i in range(10)]
    for batch in batches:
        layer(batch)
    torch.testing.assert_close(layer.running_mean, torch.stack([b.mean(0) for b in batches]).mean(0))
    torch.testing.assert_close(layer.running_var, torch.stack([b.var(0) for b in batches]).mean(0))


@compiles
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("channels_last", [False, True])
def test_compiles_without_a_graph_break(training, momentum, channels_last):
    x = torch.randn(6, 4, 3, 5)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    eager = nn.BatchNorm2d(4, momentum=momentum).train(training)
    traced = copy.deepcopy(eager)
    results = []
    for layer, function in (
        (eager, eager),
        (traced, torch.compile(traced, fullgraph=True, backend="aot_eager")),
    ):
        for _ in range(2):
            leaf = x.clone().requires_grad_()
            y = function(leaf)
            grads = torch.autograd.grad(y.pow(3).sum(), [leaf, layer.weight, layer.bias])
        results.append([y, *grads, *layer.buffers()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


def test_traces_to_one_node():
    model = stock.Sequential(stock.Conv2d(3, 4, 3), nn.BatchNorm2d(4), stock.ReLU())
    traced = torch.fx.symbolic_trace(model)
    norms = [n for n in traced.graph.nodes if getattr(n.target, "__module__", "").startswith("leannorm")]
    assert [n.op for n in norms] == ["call_function"]
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(traced(x), model(x))


def test_an_ensemble_runs_under_vmap():
    models, x = [nn.BatchNorm2d(4) for _ in range(3)], torch.randn(6, 4, 3, 5)
    for model in models:
        stock.init.normal_(model.weight)
    parameters, buffers = stack_module_state(models)

    def loss(p, b, x):
        y = functional_call(models[0], (p, b), (x,))
        return y.pow(3).sum(), y

    grads, ys = vmap(grad(loss, has_aux=True), in_dims=(0, 0, None))(parameters, buffers, x)
    for i, model in enumerate(models):
        y = model(x)
        torch.testing.assert_close(ys[i], y)
        torch.testing.assert_close(buffers["running_mean"][i], model.running_mean)
        assert buffers["num_batches_tracked"][i] == 1
        alone = torch.autograd.grad(y.pow(3).sum(), model.parameters())
        torch.testing.assert_close([g[i] for g in grads.values()], list(alone), rtol=1e-5, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, on first jvp
@pytest.mark.parametrize("training", [True, False])
def test_functional_derivatives_with_the_layers_own_buffers(training):
    """torch's layer refuses jvp and jacrev in training: it writes into captured buffers."""
    layer, x = nn.BatchNorm2d(2).double().train(training), torch.randn(3, 2, 1, 2, dtype=torch.float64)
    tangent, c = torch.randn_like(x), torch.randn_like(x)

    def loss(x):
        return (layer(x) * c).pow(3).sum()

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
    assert layer.num_batches_tracked == (4 if training else 0)


CONSTANTS = [
    (lambda: nn.BatchNorm2d(4), (2, 4, 3, 3)),
    (lambda: nn.BatchNorm2d(4).eval(), (2, 4, 3, 3)),
    (lambda: nn.GroupNorm(2, 4), (2, 4, 3, 3)),
    (lambda: nn.InstanceNorm2d(4, track_running_stats=True), (2, 4, 3, 3)),
    (lambda: nn.LayerNorm(6), (2, 6)),
    (lambda: nn.RMSNorm(6), (2, 6)),
    (lambda: nn.ConvBatchNorm2d(4, 4, 1), (2, 4, 3, 3)),
]


@pytest.mark.parametrize(("make", "shape"), CONSTANTS)
def test_an_input_that_a_transform_does_not_see(make, shape):
    """A layer may be called inside a transform on what is a constant there."""
    layer, x = make(), torch.randn(shape)
    with torch.no_grad():
        total = copy.deepcopy(layer)(x).square().sum()
    assert grad(lambda t: (layer(x) * t).square().sum())(torch.tensor(3.0)).item() == pytest.approx(
        6 * total.item(), rel=1e-4
    )
    ones = vmap(lambda t: (layer(x) * t).square().sum())(torch.ones(3))
    torch.testing.assert_close(ones, total.expand(3))
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(b) for b in layer.buffers())


def wrong(kind):
    return torch.randn(SHAPES["2d" if kind.startswith("1d") else "1d"])


BAD = [
    (lambda kind: wrong(kind), InputError, r"expected .*D input \(got"),
    (lambda kind: torch.ones(SHAPES[kind], dtype=torch.long), DtypeError, "floating point"),
    (lambda kind: torch.randn(6, 5, *SHAPES[kind][2:]), InputError, "one entry per channel"),
    (
        lambda kind: torch.randn(1, 4, *(1 for _ in SHAPES[kind][2:])),
        InputError,
        "more than 1 value",
    ),
    (
        lambda kind: torch.randn(SHAPES[kind], device="meta"),
        InputError,
        "device meta, got cpu",
    ),
]


@kinds
@pytest.mark.parametrize(("make", "kind_of_error", "message"), BAD, ids=[b[2] for b in BAD])
def test_bad_input_says_the_rule_and_changes_nothing(kind, make, kind_of_error, message):
    layer = PAIRS[kind][0](4)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(kind_of_error, match=message):
        layer(make(kind))
    for a, b in zip(before.values(), layer.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": 0.0}, "eps must be positive, got 0"),
        ({"eps": -1e-5}, "eps must be positive, got -1e-05"),
        ({"momentum": 1.1}, "momentum must be in .0, 1. or None"),
        ({"momentum": -0.1}, "momentum must be in"),
    ],
)
def test_bad_arguments(change, message):
    layer, x = nn.BatchNorm2d(4, **change), torch.randn(SHAPES["2d"])
    with pytest.raises(ValueError, match=message):
        layer(x)
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"act": "tanh"}, "act must be one of identity, relu"),
        ({"residual": torch.randn(6, 4, 1, 1)}, "residual must have the input's shape"),
        ({"running_var": None}, "both be given or both be None"),
        ({"running_mean": torch.zeros(3)}, "running_mean must have one entry per channel"),
        ({"weight": torch.ones(4, dtype=torch.int32)}, "weight must be floating point"),
        ({"running_mean": None, "running_var": None}, "evaluation needs running_mean"),
        ({"residual": torch.ones(SHAPES["2d"], dtype=torch.long)}, "residual must be floating point"),
        ({"residual": torch.ones(SHAPES["2d"], device="meta")}, "residual must be on the input's device"),
        ({"momentum": None, "training": True}, "momentum=None .* needs a count"),
        ({"running_var": torch.ones(1).expand(4), "training": True}, "running_var is updated in place"),
        ({"running_var": torch.ones(4, requires_grad=True), "training": True}, "and need no gradient"),
    ],
)
def test_bad_arguments_of_the_function(change, message):
    from leannorm import functional

    good = {"running_mean": torch.zeros(4), "running_var": torch.ones(4), "act": "relu"}
    with pytest.raises(InputError, match=message):
        functional.batch_norm_act(torch.randn(SHAPES["2d"]), **(good | change))
    assert torch.equal(good["running_mean"], torch.zeros(4))


def swap(model):
    for child in model.children():
        for theirs, ours in ((stock.BatchNorm1d, nn.BatchNorm1d), (stock.BatchNorm2d, nn.BatchNorm2d)):
            if type(child) is theirs:
                child.__class__ = ours
        swap(child)
    return model


def test_a_whole_model_trains_the_same_in_float64():
    def block(i, o):
        return [stock.Conv2d(i, o, 3, padding=1, bias=False), stock.BatchNorm2d(o), stock.ReLU(inplace=True)]

    theirs = stock.Sequential(*block(3, 8), *block(8, 8), stock.AdaptiveAvgPool2d(1), stock.Flatten())
    theirs.append(stock.BatchNorm1d(8)).append(stock.Linear(8, 2)).double()
    ours = swap(copy.deepcopy(theirs))
    for _ in range(3):
        x = torch.randn(8, 3, 12, 12, dtype=torch.float64)
        for model in (theirs, ours):
            model.zero_grad()
            model(x).square().sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
    assert [type(m).__module__.split(".")[0] for m in ours if "BatchNorm" in repr(m)] == ["leannorm"] * 3
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    theirs.load_state_dict(ours.state_dict())
