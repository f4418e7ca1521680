"""The autograd node in C++ of a row norm behind a sum, which returns that sum too."""

import pytest
import torch
from test_nodes import built, compare, in_python
from torch.autograd.graph import Node

from leannorm import functional


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("uses", ["both", "sum", "norm"])
@pytest.mark.parametrize("function", ["add_layer_norm", "add_rms_norm"])
def test_both_results_of_a_sum_have_a_gradient(function, uses, dtype, monkeypatch):
    def told():
        found = []
        for needed in ((True, True, True), (True, False, True), (False, True, False)):
            torch.manual_seed(0)
            x, residual, weight = (torch.randn(size).to(dtype) for size in ((5, 7, 6), (5, 7, 6), (6,)))
            leaves = [
                v.requires_grad_(is_needed)
                for v, is_needed in zip((x, residual, weight), needed, strict=True)
            ]
            y, r = getattr(functional, function)(x, residual, (6,), weight)
            assert isinstance(y.grad_fn, Node)
            assert y.grad_fn is r.grad_fn
            used = y.float() * r.float() if uses == "both" else r.float() if uses == "sum" else y.float()
            used.square().sum().backward()
            found += [y.detach(), r.detach(), *(v.grad for v in leaves)]
        return found

    compare(told, monkeypatch)


@built
def test_a_sum_and_its_norm_have_gradients_of_second_order():
    x, residual, weight = (
        torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((3, 4), (3, 4), (4,))
    )
    of = lambda *tensors: functional.add_rms_norm(*tensors[:2], (4,), tensors[2])  # noqa: E731
    assert not in_python(of(x, residual, weight)[0].grad_fn)
    assert torch.autograd.gradcheck(of, (x, residual, weight))
    assert torch.autograd.gradgradcheck(of, (x, residual, weight))
