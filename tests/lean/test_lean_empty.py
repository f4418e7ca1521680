"""Tensors without elements, such as the cache of a language model before its first tokens."""

from __future__ import annotations

import pytest
import torch

from leannorm import lean

pytestmark = pytest.mark.usefixtures("log")
EMPTY = {
    "a list": lambda: torch.tensor([]),
    "a factory": lambda: torch.empty(0, 64),
    "zeros": lambda: torch.zeros(0, 64),
}


def step(context, cache):
    x = torch.randn(64, 64, generator=torch.manual_seed(0), requires_grad=True)
    with context:
        loss = cache(x.sin()).exp().cos().sum()
    loss.backward()
    return x.grad


def cached(make):
    """What a cache gives its first layer: it is replaced at once, so that the empty tensor is gone."""

    def cache(x):
        keys = make()
        keys = torch.cat([keys, x], dim=-2)
        return keys

    return cache


@pytest.mark.parametrize("make", EMPTY.values(), ids=EMPTY)
def test_what_is_put_behind_an_empty_tensor_is_rebuilt(make):
    expected = step(torch.enable_grad(), cached(make))
    for _ in range(3):
        saved = lean("norm")
        assert torch.equal(step(saved, cached(make)), expected)
    assert saved.kept_bytes == 64 * 64 * 4  # x, and nothing else
    assert not saved.reasons


def test_an_empty_tensor_may_grow_later():
    """It is copied: what is written into its memory later is not read."""
    keys = torch.empty(0, 64)

    def cache(x):
        whole = torch.cat([keys, x], dim=-2)
        keys.resize_(4, 64).fill_(7.0)
        return whole

    expected = step(torch.enable_grad(), cache)
    keys.resize_(0, 64)
    assert torch.equal(step(lean("norm"), cache), expected)
