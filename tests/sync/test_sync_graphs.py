"""Graphs that tracers below autograd write of statistics of several ranks.

The sum over the ranks is one operator in them, which has all derivatives.
"""

import pytest
import torch
import torch.distributed as dist
from functorch.compile import aot_module, nop
from ranks import ranks
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from leannorm import nn

TRACERS = ({}, {"tracing_mode": "fake"}, {"tracing_mode": "symbolic"}, {"pre_dispatch": True})
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def layer_and_batch(rank):
    torch.manual_seed(0)
    layer = nn.SyncBatchNorm(4).double()
    with torch.no_grad():
        layer.weight.uniform_(0.5, 1.5), layer.bias.normal_()
    torch.manual_seed(rank + 1)
    return layer, torch.randn(3 + rank, 4, 5, dtype=torch.float64, requires_grad=True)


def graph_of_make_fx(rank, forces):
    layer, x = layer_and_batch(rank)
    parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())

    def run(parameters, buffers, x):
        buffers = {name: b.clone() for name, b in buffers.items()}
        y = functional_call(layer, {**parameters, **buffers}, (x,))
        return torch.autograd.grad(y.sin().sum(), x, create_graph=True)[0] if forces else y, buffers

    def told(run):
        y, moved = run(parameters, buffers, x)
        first = torch.autograd.grad(y.sin().sum(), [x, *parameters.values()], create_graph=True)
        second = torch.autograd.grad(first[0].sin().sum(), [x, *parameters.values()], allow_unused=True)
        of_parameters = [torch.zeros_like(layer.bias) if g is None else g for g in (*first[1:], *second[1:])]
        for g in of_parameters:
            dist.all_reduce(g)  # a rank has a share, and which one is nobody's business
        return [y, *moved.values(), first[0], second[0], *of_parameters]

    wanted = told(run)
    for tracer in TRACERS:
        graph = make_fx(run, **tracer)(parameters, buffers, x)
        ours = {str(n.target) for n in graph.graph.nodes if "leannorm" in str(n.target)}
        assert ours == {"leannorm.add_up_over_ranks.default"}
        torch.testing.assert_close(told(graph), wanted, **CLOSE)


@pytest.mark.parametrize("forces", [False, True])
def test_graphs_of_make_fx(forces):
    ranks(2, graph_of_make_fx, forces)


def graph_of_aot_autograd(rank):
    layer, x = layer_and_batch(rank)
    state = {name: v.clone() for name, v in layer.state_dict().items()}

    def told(call):
        layer.load_state_dict(state)
        y = call(x)
        gradients = torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()])
        return [y, *gradients, *(b.clone() for b in layer.buffers())]

    torch.testing.assert_close(told(aot_module(layer, nop)), told(layer), **CLOSE)


def test_aot_autograd_by_hand():
    ranks(2, graph_of_aot_autograd)
