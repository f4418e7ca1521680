"""`lean(head=True)`: memory that is edited or freed before logits are read."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import leannorm
from leannorm.saving import lean

H, V = 12, 300
X = torch.ones(7, H, dtype=torch.float64).cumsum(0)


def test_a_weight_that_was_edited_meanwhile_is_an_error():
    layer = nn.Linear(H, V, dtype=torch.float64)
    with lean(head=True):
        logits = layer(X)
    with torch.no_grad():
        layer.weight.mul_(2)
    for read in (Tensor.sum, lambda y: y.logsumexp(-1)):
        with pytest.raises(leannorm.InputError, match="edited in place since"):
            read(logits)


def test_a_weight_that_was_freed_meanwhile_is_an_error():
    layer = nn.Linear(H, V, dtype=torch.float64)
    with lean(head=True):
        logits = layer(X)
    memory = layer.weight.untyped_storage()
    size = memory.nbytes()
    memory.resize_(0)
    with pytest.raises(leannorm.InputError, match="was freed by then"):
        logits.logsumexp(-1)
    memory.resize_(size)


@pytest.mark.parametrize("edited", [0, 1])
def test_a_sum_of_two_layers_of_which_one_is_edited(edited):
    layers, found = [nn.Linear(H, V, dtype=torch.float64) for _ in range(2)], []
    for context in (nullcontext(), lean(head=True)):
        with context:
            parts = [layer(X) for layer in layers]
            half, other = (parts[0] + parts[1]) * 0.5, parts[1] + parts[0]
            parts[edited].mul_(2)
            found.append((half.sum() + other.logsumexp(-1).sum() + parts[edited].sum()).detach())
    assert torch.equal(*found)
