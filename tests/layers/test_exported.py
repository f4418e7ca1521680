"""Our functions as operators of torch: what each declares is what it does, and an export shows one node."""

import copy

import pytest
import torch

from leannorm import nn
from leannorm.functional.door import AsOperators

C = 4


def vectors(*names):
    return {n: torch.rand(C) + 0.5 for n in names}


def tracked(training):
    v = vectors("mean", "var", "weight", "bias")
    count = torch.tensor(3) if training else None
    affine = v["weight"].requires_grad_(), v["bias"].requires_grad_()
    return v["mean"], v["var"], count, *affine, training, 0.1, 1e-5


def x():
    return torch.randn(3, C, 5, 6, requires_grad=True)


def weight(*shape):
    return torch.randn(shape, requires_grad=True)


CALLS = {
    "tracked_batch_norm": lambda: (x(), *tracked(True), [4], "relu", torch.randn(3, C, 5, 6)),
    "tracked_batch_norm evaluation": lambda: (x(), *tracked(False), [4], "identity", None),
    "batch_norm_act": lambda: (x(), *tracked(True)[:2], *tracked(True)[3:], "silu", None),
    "conv_batch_norm": lambda: (
        torch.randn(3, 2, 5, 6, requires_grad=True), weight(C, 2, 3, 3), None, *tracked(True)[:5],
        [1, 1], [], "same", [1, 1], 1, "zeros", True, None, 1e-5, "inside",
    ),
    "layer_norm": lambda: (x(), [6], weight(6), weight(6), 1e-5, None),
    "layer_norm masked": lambda: (x(), [6], weight(6), weight(6), 1e-5, None, torch.rand(3, C, 5) < 0.5),
    "rms_norm": lambda: (x(), [C], weight(C), None, 1),
    "add_layer_norm": lambda: (x(), x(), [6], weight(6), None, 1e-5, None),
    "add_rms_norm": lambda: (x(), x(), [6], None, 1e-5, None),
    "group_norm": lambda: (x(), 2, weight(C), weight(C), 1e-5),
    "layer_instance_norm": lambda: (x(), *tracked(True)[:2], None, None, True, 0.1, 1e-5, 4, C),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    operator = getattr(torch.ops.leannorm, name.split()[0]).default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, CALLS[name](), test_utils=checks)


LAYERS = {
    "tracked_batch_norm": lambda: nn.BatchNorm2d(C, momentum=None),
    "conv_batch_norm": lambda: nn.ConvBatchNorm2d(C, 5, 3, padding_mode="reflect", padding=1),
    "layer_norm": lambda: nn.LayerNorm(6),
    "rms_norm": lambda: nn.RMSNorm(6),
    "group_norm": lambda: nn.GroupNorm(2, C),
    "layer_instance_norm": lambda: nn.InstanceNorm2d(C, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_an_export_shows_one_node_that_does_what_the_layer_does(name):
    layer = LAYERS[name]()
    other = copy.deepcopy(layer)
    batch = torch.export.Dim("batch", min=2)
    with AsOperators():
        exported = torch.export.export(layer, (x(),), dynamic_shapes=({0: batch},))
    nodes = [n.target for n in exported.graph.nodes if n.op == "call_function"]
    assert [str(n) for n in nodes] == [f"leannorm.{name}.default"]
    given = torch.randn(5, C, 5, 6)
    y, expected = exported.module()(given), other(given)
    assert torch.equal(y, expected)
    y.square().sum().backward(), expected.square().sum().backward()
    for mine, theirs in zip(layer.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    for mine, theirs in zip(layer.buffers(), other.buffers(), strict=True):
        assert torch.equal(mine, theirs)
