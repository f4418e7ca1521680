"""Calls that ran under global flags of their own are made again under these, whatever is set later."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leannorm import lean
from leannorm.autograd.nodes import NODES

pytestmark = pytest.mark.skipif(NODES is None, reason="the C++ nodes are not built")
onednn = torch.backends.mkldnn.flags


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize("last", [True, False])
def test_flags_that_take_turns_within_a_pass(setting, last):
    """oneDNN's convolutions have other bits than torch's own: each layer's are those of its forward pass."""
    x = torch.randn(4, 8, 24, 24)

    def train(context):
        torch.manual_seed(0)
        convs, seen = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(6)], []

        def forward(context, enabled):
            with context() as saved:
                h = x
                for i, conv in enumerate(convs):
                    with onednn(enabled=enabled(i)):
                        h = F.silu(conv(h))
                return h.square().mean(), saved

        _, alike = forward(context, lambda i: True)
        for turn in range(4):
            loss, saved = forward(context, lambda i, turn=turn: (i + turn) % 2 == 0)
            if saved is not None:
                assert saved.rebuilt_bytes == alike.rebuilt_bytes > 0
                assert saved.kept_bytes == alike.kept_bytes
                assert not saved.reasons
            with onednn(enabled=last):
                seen += torch.autograd.grad(loss, [p for conv in convs for p in conv.parameters()])
                assert torch.backends.mkldnn.enabled == last
        return seen

    assert all(map(torch.equal, train(nullcontext), train(lambda: lean(setting))))


def test_flags_are_as_before_when_a_rebuild_raises():
    weight = torch.randn(64, 64, requires_grad=True)
    torch.set_num_threads(2)
    try:
        for _ in range(3):
            with lean("norm"):
                torch.set_num_threads(1)
                h = torch.randn(64, 64) @ weight
                log, loss = h.norm(), F.relu(h).exp().sum()
                torch.set_num_threads(2)
            h.detach().numpy()[...] = 0
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                loss.backward()
            assert torch.get_num_threads() == 2
        assert log.requires_grad
    finally:
        torch.set_num_threads(1)


def test_more_flags_than_are_told_apart_are_kept():
    """Numbers of threads: each is one more set of flags."""
    before, weight = torch.get_num_threads(), torch.randn(64, requires_grad=True)

    def train(context):
        with context() as saved:
            h = torch.ones(32, 64) * weight
            for n in range(1, 301):
                torch.set_num_threads(n)
                h = torch.tanh(h * 1.5)
            loss = h.sum()
        return torch.autograd.grad(loss, weight)[0], saved

    try:
        stock, (ours, saved) = train(nullcontext)[0], train(lambda: lean("norm"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(stock, ours)
    assert saved.rebuilt_bytes > 0
