"""How many pairs of a norm and an activation a model computes as one, and whether it computes the same."""

from __future__ import annotations

import copy

import torch

from leannorm.autograd.by_python import call_of


def fused(outputs: torch.Tensor) -> int:
    """How many calls of a norm, of those that led to these outputs, computed an activation too."""
    seen, left, count = set(), [outputs.grad_fn], 0
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            call = call_of(node) if hasattr(node, "_saved_how") else getattr(node, "call", node)
            count += getattr(getattr(call, "norm", None), "act", "identity") != "identity"
            left += [function for function, _ in node.next_functions]
    return count


def count(model, x=None):
    """The pairs that a forward pass computes as one."""
    model = copy.deepcopy(model).train()
    with nodes_of_python():
        return fused(model(torch.randn(3, 4, 5, 5) if x is None else x))


def nodes_of_python():
    """Nodes under hooks of saved tensors are Python's, which say their activation."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def results(model, x):
    """Outputs, gradients and buffers after a step of training and an evaluation, from the same start."""
    leaf = x.clone().requires_grad_()
    y = model.train()(leaf)
    gradients = torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()], materialize_grads=True)
    with torch.no_grad():
        return [y, *gradients, *model.buffers(), model.eval()(x)]


def assert_same(model, original, x):
    for got, want in zip(results(model, x), results(original, x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
