"""RMS norm as Llama and Gemma write it: which number is rounded when, and what comes back."""

import pytest
import torch
from cases import DTYPES
from torch.library import opcheck

import leannorm
from leannorm import functional, nn
from leannorm._errors import InputError
from leannorm._types import KeptByRowNorm, Rows
from leannorm.ops.backends import REFERENCE
from leannorm.ops.select import pick

FORMS = [(0.0, "before"), (1.0, "after"), (1.0, "before"), (0.25, "after")]
FORM = pytest.mark.parametrize(("offset", "cast"), FORMS, ids=str)
DTYPE = pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
PLACES = [((3, 5, 24), None), ((2, 24, 3, 5), 1), ((7, 8192), None)]


def llama(x, weight, rstd):
    """transformers' LlamaRMSNorm, from the root on."""
    wide = x.to(rstd.dtype) * rstd
    return weight * wide.to(x.dtype)


def gemma(x, weight, rstd):
    """transformers' GemmaRMSNorm, from the root on."""
    return ((x.to(rstd.dtype) * rstd) * (1.0 + weight.to(rstd.dtype))).type_as(x)


def rstd_of(x, eps=1e-6):
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def served(x, residual=None):
    """rstd as the backend at hand computes it."""
    return pick(x).row_forward(
        (x, residual, None, None, None, None, None), Rows(x.dim() - 1, x.dim(), 1e-6, True)
    )[3]


@DTYPE
@pytest.mark.parametrize("n", [1, 7, 64, 333, 4096])
@pytest.mark.parametrize("formula", [llama, gemma])
def test_it_is_the_formula_to_the_bit_from_the_root_on(formula, dtype, n):
    """The sum of squares has no order that is fixed; all behind it has."""
    x, weight = (torch.randn(65, n) * 3).to(dtype), torch.randn(n).to(dtype)
    how = {"cast": "before"} if formula is llama else {"weight_offset": 1.0}
    got = functional.rms_norm(x, (n,), weight, 1e-6, **how)
    assert torch.equal(got, formula(x, weight, served(x)))
    if dtype == torch.float64:  # there is nothing more exact to compare with
        return
    if dtype == torch.float32:  # torch's own root is off by more than two roundings
        plain = formula(x.double(), weight.double(), rstd_of(x.double()))
    else:
        plain = formula(x, weight, rstd_of(x)).double()
    assert ((got - plain).abs() <= 2 * torch.finfo(dtype).eps * plain.abs()).all()


def test_the_two_orders_of_rounding_differ():
    """Else the test above could not fail."""
    x, weight = torch.randn(64, 256).bfloat16(), torch.randn(256).bfloat16()
    before, after = (functional.rms_norm(x, (256,), weight, 1e-6, cast=c) for c in ("before", "after"))
    assert (before != after).float().mean() > 0.05


def test_the_sum_with_the_offset_is_not_rounded():
    x, weight = torch.randn(64, 256).bfloat16(), (torch.rand(256) / 100).bfloat16()
    got = functional.rms_norm(x, (256,), weight, 1e-6, weight_offset=1.0)
    rounded = functional.rms_norm(x, (256,), 1 + weight, 1e-6)
    assert (got != rounded).any()


@pytest.mark.parametrize("x_dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("w_dtype", [*DTYPES, torch.float64], ids=str)
def test_before_has_torchs_promotion_in_any_mix(x_dtype, w_dtype):
    """Value, dtype and gradients; a wider weight widens the output, as in Llama under autocast."""
    x = (torch.randn(9, 40) * 2).to(x_dtype).requires_grad_()
    weight = torch.randn(40).to(w_dtype).requires_grad_()
    got = functional.rms_norm(x, (40,), weight, 1e-6, cast="before")
    want = llama(x, weight, served(x.detach()))
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    dy = torch.randn(9, 40, dtype=got.dtype)
    grads = torch.autograd.grad(got, (x, weight), dy)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = torch.autograd.grad(llama(*wide, rstd_of(wide[0])), wide, dy.double())
    for g, w, like in zip(grads, exact, (x, weight), strict=True):
        assert g.dtype == like.dtype
        # of the rounded normalized value's dtype, of the gradient's own, and float32 for sums
        unit = torch.finfo(like.dtype).eps + 64 * torch.finfo(torch.float32).eps
        assert (g.double() - w).abs().max() <= 2 * unit * w.abs().max()


@FORM
@DTYPE
@pytest.mark.parametrize(("shape", "dim"), PLACES, ids=str)
def test_values_and_gradients_are_the_references(offset, cast, dtype, shape, dim):
    start = 1 if dim == 1 else len(shape) - 1
    x, residual, dy, dtotal = (torch.randn(shape).to(dtype) for _ in range(4))
    weight = torch.randn(shape[start]).to(dtype).requires_grad_()
    x.requires_grad_(), residual.requires_grad_()
    y, total = functional.add_rms_norm(
        x, residual, (shape[start],), weight, 1e-6, dim=dim, weight_offset=offset, cast=cast
    )
    alone = functional.rms_norm(
        total.detach(), (shape[start],), weight, 1e-6, dim=dim, weight_offset=offset, cast=cast
    )
    assert torch.equal(alone, y)
    grads = torch.autograd.grad((y, total), (x, residual, weight), (dy, dtotal))
    rows = Rows(start, start + 1, 1e-6, True, offset)
    t, w = total.detach().double(), weight.detach().double()
    mean, rstd = REFERENCE.row_moments(t, rows)
    exact = REFERENCE.row_normalize(t, mean, rstd, w, None, rows)
    kept = KeptByRowNorm(t, mean, rstd, w)
    dx, dw, _ = REFERENCE.row_backward(dy.double(), dtotal.double(), kept, rows)
    for g, e in zip((y, *grads), (exact, dx, dx, dw), strict=True):
        unit = torch.finfo(dtype).eps * 2 + (0 if dtype == torch.float64 else 1e-5)
        assert (g.double() - e).abs().max() <= max(unit, 1e-12) * e.abs().max()


def test_without_a_weight_there_is_nothing_to_add_to():
    x = torch.randn(4, 8)
    assert torch.equal(
        functional.rms_norm(x, (8,), weight_offset=1.0, cast="before"), functional.rms_norm(x, (8,))
    )


@FORM
def test_kept_are_the_input_and_one_statistic_a_row(offset, cast):
    kept = []
    x, weight = torch.randn(6, 32).bfloat16().requires_grad_(), torch.nn.Parameter(torch.ones(32).bfloat16())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        functional.rms_norm(x, (32,), weight, weight_offset=offset, cast=cast)
    assert sorted(t.numel() for t in kept) == [6, 32, 6 * 32]
    assert {t.data_ptr() for t in kept} >= {x.data_ptr(), weight.data_ptr()}


@FORM
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_compiles_exports_and_is_an_operator(offset, cast):
    layer = nn.RMSNorm(8, 1e-6, weight_offset=offset, cast=cast)
    torch.nn.init.normal_(layer.weight)
    layer.to(torch.bfloat16)
    x = torch.randn(3, 8).bfloat16()
    want = layer(x)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), want)
    exported = torch.export.export(layer, (x,))
    assert not any("leannorm" in str(n.target) for n in exported.graph.nodes)
    assert torch.equal(exported.module()(x), want)
    assert torch.equal(torch.jit.trace(layer, x)(x), want)
    weight = layer.weight.detach().float()
    given = (x, [8], weight, 1e-6, None, offset, cast)
    opcheck(torch.ops.leannorm.rms_norm.default, given, test_utils=("test_schema", "test_faketensor"))
    given = (x, x, *given[1:])
    opcheck(torch.ops.leannorm.add_rms_norm.default, given, test_utils=("test_schema", "test_faketensor"))


def test_a_new_layer_changes_no_scale():
    for offset in (0.0, 1.0, 0.25):
        layer = nn.RMSNorm(8, weight_offset=offset)
        assert torch.equal(layer.weight, torch.full((8,), 1 - offset))
    swapped = torch.nn.RMSNorm(8)
    swapped.__class__ = nn.RMSNorm
    assert (swapped.weight_offset, swapped.cast) == (0.0, "after")


BAD = [
    ({"weight_offset": float("nan")}, "finite"),
    ({"weight_offset": float("inf")}, "finite"),
    ({"weight_offset": "1"}, "finite"),
    ({"weight_offset": None}, "finite"),
    ({"cast": "first"}, "'before' or 'after'"),
    ({"cast": None}, "'before' or 'after'"),
]


@pytest.mark.parametrize(("how", "rule"), BAD, ids=str)
def test_bad_input_is_named(how, rule):
    x = torch.randn(2, 6)
    for call in (
        lambda: functional.rms_norm(x, (6,), **how),
        lambda: functional.add_rms_norm(x, x, (6,), **how),
        lambda: nn.RMSNorm(6, **how),
    ):
        with pytest.raises(InputError, match=rule) as raised:
            call()
        assert "got" in str(raised.value)


def test_a_graph_that_leaves_checks_both_words_too():
    class Net(torch.nn.Module):
        def forward(self, x):
            return functional.rms_norm(x, (6,), cast="first")

    with pytest.raises(Exception, match="'before' or 'after'"):
        torch.export.export(Net(), (torch.randn(2, 6),))


def test_convert_leaves_what_torch_has_no_class_for():
    """A plain RMS norm in its place would compute something else."""
    model = torch.nn.Sequential(
        nn.RMSNorm(8),
        nn.RMSNorm(8, weight_offset=1.0),
        nn.RMSNorm(8, cast="before"),
        nn.RMSNormGated(8),
        nn.AdaLayerNorm(8),
        nn.GroupNormAct(2, 8),
    )
    before = [type(layer) for layer in model]
    with pytest.warns(UserWarning, match="torch has no such layer"):
        leannorm.convert(model, to="torch")
    assert [type(layer) for layer in model] == [torch.nn.RMSNorm, *before[1:]]
    leannorm.convert(model)
    assert [type(layer) for layer in model] == before
