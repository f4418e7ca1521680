"""What every layer promises of graphs that tracers below autograd write: they have its derivatives.

`make_fx` in all its modes, AOTAutograd by hand, functionalization, torch.func on a graph and in one, backward
passes inside of a graph, as force fields are trained.
"""

import pytest
import torch
from contract import ALL, KINDS, each_mode, randomized
from functorch.compile import aot_module, nop
from torch.func import functional_call, functionalize, grad, hessian, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

TRACERS = {
    "real": {},
    "fake": {"tracing_mode": "fake"},
    "symbolic": {"tracing_mode": "symbolic"},
    "pre_dispatch": {"pre_dispatch": True},
    "pre_dispatch, symbolic": {"pre_dispatch": True, "tracing_mode": "symbolic"},
}
# of a layer's second derivative of nothing, as a bias in front of a norm has it, only rounding is left
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
each_tracer = pytest.mark.parametrize("tracer", TRACERS)
each_way = pytest.mark.parametrize("way", ["forward", "forces"])


def weighed(y):
    return (y.sin() * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)).sum()


class Traced:
    """A layer as a function of all its tensors: of the output, or of what an energy's gradient is."""

    def __init__(self, case, training):
        self.layer = randomized(case).double().train(training)
        self.parameters = {k: v.detach().clone().requires_grad_() for k, v in self.layer.named_parameters()}
        self.buffers = {k: v.detach().clone() for k, v in self.layer.named_buffers()}
        self.inputs = [t.requires_grad_() for t in case.inputs(torch.float64)]
        self.arguments = self.parameters, self.buffers, *self.inputs
        self.leaves = tree_leaves((self.parameters, self.inputs))

    def forward(self, parameters, buffers, *inputs):
        buffers = {name: b.clone() for name, b in buffers.items()}
        return functional_call(self.layer, {**parameters, **buffers}, inputs), buffers

    def forces(self, parameters, buffers, *inputs):
        y, buffers = self.forward(parameters, buffers, *inputs)
        return torch.autograd.grad(weighed(y), inputs[0], create_graph=True)[0], buffers

    def told(self, run):
        """The output, the buffers, and all first and second derivatives of the leaves."""
        y, buffers = run(*self.arguments)
        first = torch.autograd.grad(weighed(y), self.leaves, create_graph=True, allow_unused=True)
        squares = sum(g.square().sum() for g in first if g is not None)
        second = torch.autograd.grad(squares, self.leaves, allow_unused=True)
        return [y, *buffers.values(), *first, *second]


def ours(graph):
    return [str(n.target) for n in graph.graph.nodes if "leannorm" in str(n.target)]


def assert_same(found, wanted):
    """A derivative that one does not have is zero in the other."""
    for mine, right in zip(found, wanted, strict=True):
        if mine is not right:
            torch.testing.assert_close(*(torch.zeros(()) if v is None else v for v in (mine, right)), **CLOSE)


@each_tracer
@each_way
@each_mode("graphs", KINDS, of=ALL)
@pytest.mark.sampled(of=12)
def test_a_graph_of_make_fx(case, training, way, tracer):
    of = Traced(case, training)
    function = getattr(of, way)
    act = getattr(of.layer, "activation", "")
    if (way, tracer, act) == ("forces", "pre_dispatch, symbolic", "relu"):
        pytest.skip("torch itself cannot run such a graph of a ReLU")
    graph = make_fx(function, **TRACERS[tracer])(*of.arguments)
    assert not ours(graph)
    assert_same(of.told(graph), of.told(function))


def by_functions(of):
    return make_fx(functionalize(of.forward))(*of.arguments)


def without_gradients(of):
    with torch.no_grad():
        return make_fx(of.forward)(*of.arguments)


def of_detached(of):
    parameters = {name: p.detach() for name, p in of.parameters.items()}
    return make_fx(of.forward)(parameters, of.buffers, *(x.detach() for x in of.inputs))


@pytest.mark.parametrize("write", [by_functions, without_gradients, of_detached])
@each_mode("graphs", KINDS, of=ALL)
@pytest.mark.sampled(of=6)
def test_graphs_written_otherwise(case, training, write):
    of = Traced(case, training)
    graph = write(of)
    assert not ours(graph)
    assert_same(of.told(graph), of.told(of.forward))


@each_mode("graphs", KINDS, of=ALL)
@pytest.mark.sampled(of=3)
def test_aot_autograd_by_hand(case, training):
    of, graphs = Traced(case, training), []

    def keep(graph, arguments):
        graphs.append(graph)
        return nop(graph, arguments)

    state = {name: v.clone() for name, v in of.layer.state_dict().items()}

    def told(call):
        of.layer.load_state_dict(state)
        y = call(*of.inputs)
        gradients = torch.autograd.grad(weighed(y), [*of.layer.parameters(), *of.inputs])
        return [y, *(b.clone() for b in of.layer.buffers()), *gradients]

    assert_same(told(aot_module(of.layer, keep)), told(of.layer))
    assert len(graphs) == 2
    assert not [name for graph in graphs for name in ours(graph)]


@pytest.mark.parametrize("create_graph", [True, False])
@each_mode("double backward", KINDS, of=ALL)
@pytest.mark.sampled(of=4)
def test_the_backward_pass_of_an_eager_call_in_a_graph(case, training, create_graph):
    """By nodes in C++ and in Python: the graph has the incoming gradient as its input."""
    of = Traced(case, training)
    y, _ = of.forward(*of.arguments)
    dy = torch.randn_like(y, requires_grad=True)

    def pull(create_graph):
        return lambda dy: torch.autograd.grad(y, of.leaves, dy, retain_graph=True, create_graph=create_graph)

    graph = make_fx(pull(create_graph))(dy)
    assert not ours(graph)
    found, wanted = (sum(map(weighed, run(dy))) for run in (graph, pull(True)))
    assert_same(torch.autograd.grad(found, dy), torch.autograd.grad(wanted, dy))


TRANSFORMS = {
    "grad": lambda f, x: grad(lambda x: weighed(f(x)))(x),
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),))[1],
    "hessian": lambda f, x: hessian(lambda x: weighed(f(x)))(x),
    "vmap": lambda f, x: vmap(f)(torch.stack((x, x + 1))),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@each_mode("graphs", KINDS, of=ALL)
@pytest.mark.sampled(of=6)
def test_transforms_of_a_graph_and_in_one(case, training, transform):
    of = Traced(case, training)
    if transform == "vmap" and any(of.layer.training and "mean" in name for name in of.buffers):
        pytest.skip("vmap cannot write what it has mapped into statistics that it has not")
    parameters = {name: p.detach() for name, p in of.parameters.items()}
    x, *others = (t.detach() for t in of.inputs)
    graph = make_fx(of.forward)(parameters, of.buffers, x, *others)

    def run(forward, x):
        return TRANSFORMS[transform](lambda x: forward(parameters, of.buffers, x, *others)[0], x)

    wanted = run(of.forward, x)
    torch.testing.assert_close(run(graph, x), wanted, **CLOSE)
    inside = make_fx(lambda x: run(of.forward, x))(x)
    torch.testing.assert_close(inside(x), wanted, **CLOSE)


def test_what_is_not_traced_is_as_it_was():
    """Fake tensors alone, and a mode of the user, write no graph: kernels stay kernels."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from leannorm import nn
    from leannorm.ops.modes import recording

    assert not recording()
    with FakeTensorMode():
        assert not recording()
        y = nn.LayerNorm(4)(torch.randn(3, 4, requires_grad=True))
        assert type(y.grad_fn).__name__.startswith("RowNorm")
    inside = []
    make_fx(lambda x: inside.append(recording()) or x)(torch.ones(1))
    assert inside == [True]
