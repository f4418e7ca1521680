"""leannorm's own norms under `lean()` and other hooks: gradients of stock's bits, and stock's errors."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import save_on_cpu

from leannorm import lean, nn

pytestmark = pytest.mark.filterwarnings("ignore:leannorm. budget=0.3 is out of reach")
NORMS = {
    "batch": lambda: nn.BatchNorm2d(8),
    "evaluation": lambda: nn.BatchNorm2d(8).eval(),
    "frozen": lambda: nn.BatchNorm2d(8).eval().requires_grad_(False),
    "no affine": lambda: nn.BatchNorm2d(8, affine=False),
    "group": lambda: nn.GroupNorm(2, 8),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
    "layer": lambda: nn.LayerNorm(6),
    "no bias": lambda: nn.LayerNorm(6, bias=False),
    "rms": lambda: nn.RMSNorm(6),
}
CONTEXTS = {
    "plain": lean,
    "norm": lambda: lean("norm"),
    "conv": lambda: lean("conv"),
    "budget": lambda: lean(budget=0.3),
    "held": lambda: lean("conv", held=save_on_cpu()),
    "verify": lambda: lean("conv", verify=True),
    "save_on_cpu": save_on_cpu,
}


def edit(layer, but_bias=False):
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if not (but_bias and name == "bias"):
                p.mul_(2)


def once(net, loss, x, leaves):
    return torch.autograd.grad(loss, leaves)


def twice(net, loss, x, leaves):
    return torch.autograd.grad(loss, leaves, retain_graph=True) + torch.autograd.grad(loss, leaves)


def penalty(net, loss, x, leaves):
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), leaves, allow_unused=True)


def of_later_weights(net, loss, x, leaves):
    """What was edited is not read by stock's backward pass of these."""
    edit(net[1])
    return torch.autograd.grad(loss, [net[6].weight, net[3].weight])


def of_edited_weights(net, loss, x, leaves):
    edit(net[3]), edit(net[4], but_bias=True)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        torch.autograd.grad(loss, leaves)
    return ()


@pytest.mark.parametrize("backward", [once, twice, penalty, of_later_weights, of_edited_weights])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.sampled(of=3)
def test_each_backward_pass(norm, context, backward):
    if context == "save_on_cpu" and backward is of_edited_weights:
        pytest.skip("torch's copies tell no version")
    conv, made = torch.nn.Conv2d, NORMS[norm]
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        conv(3, 8, 1), made(), torch.nn.ReLU(True), conv(8, 8, 1), made(), torch.nn.SiLU(), conv(8, 4, 1)
    ).double()
    for _ in range(4):  # the first passes try each kind of step, later ones are packed in C++
        x, found = torch.randn(4, 3, 6, 6, dtype=torch.double, requires_grad=True), []
        for around in (nullcontext, CONTEXTS[context]):
            model = copy.deepcopy(net)
            with around() as saved:
                loss = model(x).square().mean()
            leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
            found.append(backward(model, loss, x, leaves))
        for stock, ours in zip(*found, strict=True):
            assert (stock is None and ours is None) or torch.equal(stock, ours)
    if context not in ("save_on_cpu", "budget", "plain"):
        assert saved.rebuilt_bytes > 0
