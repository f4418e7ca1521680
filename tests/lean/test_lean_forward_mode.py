"""Forward-mode AD within a pass: its tensors have no memory to read, or stand for another's."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from lean_cases import assert_as_stock, forget_trials
from torch import nn
from torch.func import jvp, linearize, vmap


@pytest.fixture(autouse=True)
def nothing_remembered():
    forget_trials()


def of_dual_numbers(f, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


PARTS = {
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "linearize": lambda f, x: linearize(f, x)[1](torch.ones_like(x)),
    "dual numbers": of_dual_numbers,
    "vmap of jvp": lambda f, x: vmap(lambda a: jvp(f, (a,), (torch.ones_like(a),))[1])(x),
    "jvp of jvp": lambda f, x: jvp(lambda a: jvp(f, (a,), (a,))[1], (x,), (torch.ones_like(x),))[1],
    "vmap": lambda f, x: vmap(f)(x),
}
SETTINGS = [{}, {"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.8}, {"verify": True}]


@pytest.mark.filterwarnings("ignore:leannorm. budget=0.8 is out of reach")  # of so few tensors
@pytest.mark.sampled(of=3)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's own, by linearize
@pytest.mark.filterwarnings(
    "ignore:leannorm. an output of"
)  # a tracer, as linearize's, lets no value be read
@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_a_derivative_within_a_pass(part, setting, is_small, monkeypatch):
    """Without lean() this trains; under it the process once ended, as an address of no memory was read."""
    monkeypatch.setenv("LEANNORM_SMALL_BYTES", str(1 << 30 if is_small else -1))

    def program(context):
        network = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))
        x = torch.randn(512, 64, requires_grad=True)
        gradients = []
        for _ in range(2):
            with context() as saved:
                h = F.silu(F.layer_norm(x, (64,)))
                loss = (F.silu(PARTS[part](network, h)) * h).sum()
            if saved is not None and not is_small:
                assert saved.rebuilt_bytes > 0
            loss.backward()
            gradients += [
                x.grad.clone(),
                *(p.grad.clone() for p in network.parameters() if p.grad is not None),
            ]
        return gradients

    assert_as_stock(program, **setting)
