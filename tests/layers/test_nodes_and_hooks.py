"""What hooks of saved tensors see of autograd nodes in C++: the same as of the functions in Python."""

from __future__ import annotations

import weakref

import pytest
import torch
from test_nodes import built, compare, each_layer, error_of, gradients, in_python, of
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from leannorm.autograd import fast


@built
@each_layer
def test_hooks_of_saved_tensors(name, monkeypatch):
    """They see the same tensors in the same order, and what they give back is used."""

    def told():
        layer, x, dy = of(name)
        seen, packed, read = [], [], []
        with saved_tensors_hooks(
            lambda t: packed.append(t.detach() + 1) or len(packed) - 1, lambda i: packed[i]
        ):
            shifted = layer(x)
        with saved_tensors_hooks(
            lambda t: seen.append(t.detach().clone()) or t, lambda t: read.append(1) or t
        ):
            y = layer(x)
        torch.autograd.backward([y, shifted], [dy, dy])
        assert in_python(y.grad_fn) == (fast.NODES is None)
        return [len(read), *seen, *packed, *gradients(layer, x)]

    compare(told, monkeypatch)


@built
@each_layer
def test_a_hook_that_returns_other_layouts(name, monkeypatch):
    def told():
        layer, x, dy = of(name)
        with saved_tensors_hooks(lambda t: t, lambda t: t.mT.contiguous().mT if t.dim() > 1 else t):
            y = layer(x)
        y.backward(dy)
        return gradients(layer, x)

    compare(told, monkeypatch)


@built
@each_layer
@pytest.mark.parametrize("fails", ["first", "last", "unpack"])
def test_a_hook_that_raises(name, fails, monkeypatch):
    """Its error is raised, and nothing of the call stays alive."""

    def told():
        layer, x, dy = of(name)
        x, count = x * 1, []
        with saved_tensors_hooks(lambda t: count.append(1) or t, lambda t: t):
            layer(x)
        last, packed = len(count), []

        def pack(t):
            packed.append(1)
            if len(packed) == {"first": 1, "last": last}.get(fails):
                raise RuntimeError("of a hook")
            return t.detach()

        def unpack(t):
            if fails == "unpack":
                raise RuntimeError("of a hook")
            return t

        def step(x):
            with saved_tensors_hooks(pack, unpack):
                y = layer(x)
            y.backward(dy)

        error, gone = error_of(lambda x=x: step(x)), weakref.ref(x)
        del x
        return [error, len(packed), gone() is None]

    compare(told, monkeypatch)


@built
@each_layer
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_node(name, reentrant, monkeypatch):
    """Its first pass has nodes in C++, the one that it repeats in the backward pass has those in Python."""

    def told():
        layer, x, dy = of(name)
        y = checkpoint(lambda x: layer(x * 1).sin(), x, use_reentrant=reentrant)
        y.backward(dy)
        return gradients(layer, x)

    compare(told, monkeypatch)
