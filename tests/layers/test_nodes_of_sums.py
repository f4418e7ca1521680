"""The autograd node in C++ of a row norm behind a sum, which returns that sum too, or with a scale."""

import pytest
import torch
from test_nodes import built, compare, in_python
from torch.autograd.graph import Node

from leannorm import functional
from leannorm.autograd import fast


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


PLACES = [((4, 5, 6), 1, (6,)), ((4, 5, 6), 1, (4, 6)), ((4, 5, 6), 1, (4, 5, 6)), ((4, 6), 1, (4, 6))]
PLACES += [((4, 5, 2, 3), 2, (4, 2, 3))]
PARTS = {
    "weight and bias": ("shift", "weight", "bias"),
    "weight": ("shift", "weight"),
    "weight, no shift": ("weight",),
    "bias": ("shift", "bias"),
    "bias, no shift": ("bias",),
    "of a sum, no shift": ("branch", "weight", "bias"),
    "of a gated sum": ("branch", "gate", "shift"),
    "of a gated sum, weight and bias": ("branch", "gate", "shift", "weight", "bias"),
}
MIXES = [("float32", "float32"), ("float64", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]


@built
@pytest.mark.sampled(of=8)
@pytest.mark.parametrize(("x_dtype", "dtype"), MIXES)
@pytest.mark.parametrize(("shape", "axes", "of_scale"), PLACES, ids=str)
@pytest.mark.parametrize("parts", PARTS)
def test_a_scale_with_all_that_may_come_with_it(parts, shape, axes, of_scale, x_dtype, dtype, monkeypatch):
    kept, names = shape[-axes:], ("x", "scale", *PARTS[parts])
    sizes = {"x": shape, "branch": shape, "weight": kept, "bias": kept}
    dtypes = {"x": getattr(torch, x_dtype), "branch": getattr(torch, x_dtype)}
    function = functional.add_ada_layer_norm if "branch" in names else functional.ada_layer_norm

    def told():
        found = []
        for frozen in (None, *names):
            torch.manual_seed(0)
            given = {
                name: torch.randn(sizes.get(name, of_scale))
                .to(dtypes.get(name, getattr(torch, dtype)))
                .requires_grad_(name != frozen)
                for name in names
            }
            leaves = [v for v in given.values() if v.requires_grad]
            how = {"shift": None, **({"gate": None} if "branch" in names else {}), **given}
            made = function(how.pop("x"), normalized_shape=kept, **how)
            made = made if isinstance(made, tuple) else (made,)
            assert in_python(made[0].grad_fn) is (fast.NODES is None)
            for used in (made, made[-1:]):  # of a sum, that alone too
                dy = [torch.randn(v.shape).to(v.dtype) for v in used]
                found += torch.autograd.grad(used, leaves, dy, retain_graph=True, allow_unused=True)
            found += [v.detach() for v in made]
        return found

    compare(told, monkeypatch)
