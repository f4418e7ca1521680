"""Layer and RMS norm with a mask: padded rows are not read, get 0, and have no part in any gradient."""

import copy
import itertools
import re

import pytest
import torch

import leannorm
from leannorm import functional as F
from leannorm import nn
from leannorm._types import KeptByRowNorm, Rows, RowTensors
from leannorm.ops.select import pick

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
# shape, normalized axes; rows are lines, lie side by side, lie apart, are longer than a tile
SHAPES = [
    ((4, 9, 40), (2, 3)),
    ((4, 24, 50), (1, 2)),
    ((3, 5, 6, 7), (2, 4)),
    ((3, 24, 9, 11), (1, 2)),
    ((2, 5, 2100), (2, 3)),
]
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "channels_last": lambda x: (
        x.contiguous(memory_format=torch.channels_last)
        if x.dim() == 4
        else x.movedim(1, -1).contiguous().movedim(-1, 1)
    ),
}
TOLERANCE = {F64: 1e-11, F32: 1e-5, BF16: 0.05}


class Case:
    """A row norm of an input with `padding` in the rows that are no data, and of its data alone."""

    def __init__(
        self, shape, axes, rms, dtype=F64, layout="contiguous", padding=float("nan"), residual=False
    ):
        torch.manual_seed(0)
        self.start, self.stop = axes
        self.rms, self.dtype, self.shape = rms, dtype, shape
        self.mask = torch.rand(shape[: axes[0]] + shape[axes[1] :]) < 0.6

        def made():
            v = LAYOUTS[layout](torch.randn(shape, dtype=F64).to(dtype) * 2 + 1)
            return v.masked_fill_(~self.kept_mask(), padding)

        self.x, self.dy = made(), made()
        self.residual = made() if residual else None
        self.weight, self.bias = (
            torch.randn(shape[axes[0] : axes[1]], dtype=F64).to(dtype) for _ in range(2)
        )

    def kept_mask(self):
        mask = self.mask
        for _ in range(self.start, self.stop):
            mask = mask.unsqueeze(self.start)
        return mask

    def rows(self, v):
        """The normalized axes last."""
        length = self.stop - self.start
        return v.movedim(tuple(range(self.start, self.stop)), tuple(range(-length, 0)))

    def run(self, x, residual, weight, bias, of_rows, mask=None):
        shape, dim = weight.shape, None
        if not of_rows and self.stop < x.dim():
            dim = self.start
        if residual is not None:
            if self.rms:
                return F.add_rms_norm(x, residual, shape, weight, 1e-5, dim=dim, mask=mask)
            return F.add_layer_norm(x, residual, shape, weight, bias, dim=dim, mask=mask)
        if self.rms:
            return (F.rms_norm(x, shape, weight, 1e-5, dim=dim, mask=mask),)
        return (F.layer_norm(x, shape, weight, bias, dim=dim, mask=mask),)

    def gradients(self, x, residual, dtype, of_rows, mask=None):
        leaves = [
            None if t is None else t.detach().to(dtype).requires_grad_()
            for t in (x, residual, self.weight, None if self.rms else self.bias)
        ]
        found = self.run(*leaves, of_rows, mask)
        dy = self.rows(self.dy)[self.mask] if of_rows else self.dy
        torch.autograd.backward(found, [dy.to(dtype)] * len(found))
        return found, [None if t is None else t.grad for t in leaves]


def close(got, want, tolerance):
    scale = max(want.abs().max().item(), 1.0) if want.numel() else 1.0
    assert got.shape == want.shape
    assert (got.double() - want).abs().max().item() <= tolerance * scale if want.numel() else True


KINDS = list(itertools.product((False, True), (False, True)))


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("padding", [float("nan"), float("inf")])
@pytest.mark.parametrize(("rms", "residual"), KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_as_the_rows_that_are_data(dtype, layout, rms, residual, padding, backend):
    for shape, axes in SHAPES:
        case = Case(shape, axes, rms, dtype, layout, padding, residual)
        packed = [None if t is None else case.rows(t)[case.mask] for t in (case.x, case.residual)]
        wanted, grads = case.gradients(*packed, F64, True)
        with leannorm.use_backend(backend):
            found, ours = case.gradients(case.x, case.residual, dtype, False, case.mask)
        tolerance = TOLERANCE[dtype]
        for got, want in zip((*found, *ours[:2]), (*wanted, *grads[:2]), strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                close(case.rows(got)[case.mask], want, tolerance)
                assert (case.rows(got)[~case.mask] == 0).all()
        for got, want in zip(ours[2:], grads[2:], strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                close(got, want, 10 * tolerance)


@pytest.mark.parametrize(("shape", "axes"), SHAPES)
@pytest.mark.parametrize(("name", "layout"), [("reference", "contiguous"), *(("cpu", of) for of in LAYOUTS)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_all_valid_is_no_mask_bit_for_bit(name, shape, axes, layout, dtype):
    if name in leannorm.backends() and leannorm.backends()[name]:
        name = "reference"  # the kernels are not built
    case = Case(shape, axes, False, dtype, layout, 1.0)
    with leannorm.use_backend(name):
        kernels = pick(case.x)
    valid = torch.ones_like(case.kept_mask())
    rows = Rows(*axes, 1e-5, False)
    given = RowTensors(case.x, case.residual, weight=case.weight, bias=case.bias), rows
    plain, masked = kernels.row_forward(*given), kernels.row_forward(*given, valid)
    assert all(map(torch.equal, plain, masked))
    both = (KeptByRowNorm(case.x, *plain[2:], case.weight, of) for of in (None, valid))
    assert all(map(torch.equal, *(kernels.row_backward(case.dy, None, kept, rows) for kept in both)))
    with leannorm.use_backend(name):
        y = case.run(case.x, None, case.weight, case.bias, False, case.mask | True)[0]
    assert torch.equal(y, plain[0])


def test_threads_do_not_change_the_bits():
    case = Case((64, 200, 96), (2, 3), False, F32)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            (y,), grads = case.gradients(case.x, None, F32, False, case.mask)
            found.append([y, *(g for g in grads if g is not None)])
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))


def test_lengths_are_a_mask():
    x, lengths = torch.randn(3, 7, 8), torch.tensor([7, 0, 3])
    mask = torch.arange(7) < lengths[:, None]
    want = F.layer_norm(x, (8,), mask=mask)
    for same in (lengths, lengths.int(), [7, 0, 3]):
        assert torch.equal(F.layer_norm(x, (8,), lengths=same), want)
    assert torch.equal(F.layer_norm(x, (8,), mask=mask[..., None]), want)
    assert torch.equal(nn.LayerNorm(8)(x, lengths=lengths), want)
    assert torch.equal(
        nn.RMSNorm(8, eps=1e-5)(x, mask=mask), F.rms_norm(x, (8,), None, 1e-5, lengths=lengths)
    )
    channels = x.transpose(1, 2).contiguous()
    assert torch.equal(F.layer_norm(channels, (8,), dim=1, lengths=lengths).transpose(1, 2) == 0, want == 0)
    heads = torch.randn(2, 3, 4, 8)
    assert torch.equal(
        F.rms_norm(heads, (8,), mask=mask[:2, :3, None]) == 0, ~mask[:2, :3, None, None].expand_as(heads)
    )


@pytest.mark.parametrize("eps", [1e-5, 0.0])
@pytest.mark.parametrize(("rms", "residual"), KINDS)
def test_gradients_of_both_orders(rms, residual, eps):
    torch.manual_seed(0)
    mask = torch.tensor([[True, False, True], [False, False, False]])
    names = ["input", "residual"][: 1 + residual] + ["weight"] + ["bias"] * (not rms)
    shapes = {"input": (2, 3, 4), "residual": (2, 3, 4), "weight": (4,), "bias": (4,)}
    function = {
        (False, False): F.layer_norm,
        (False, True): F.add_layer_norm,
        (True, False): F.rms_norm,
        (True, True): F.add_rms_norm,
    }[rms, residual]

    def run(*given):
        return function(**dict(zip(names, given, strict=True)), normalized_shape=(4,), eps=eps, mask=mask)

    given = [torch.randn(shapes[name], dtype=F64, requires_grad=True) for name in names]
    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)


def test_only_the_sum_is_used():
    x, r = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(2))
    mask = torch.tensor([[True, False, True], [False, False, True]])
    F.add_layer_norm(x, r, (4,), mask=mask)[1].sum().backward()
    assert torch.equal(x.grad, mask[..., None].float().expand_as(x))


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_compiled_lean_checkpoint_and_autocast(kind):
    torch.manual_seed(0)
    norm, act, last = kind(64), torch.nn.SiLU(), torch.nn.Linear(64, 64)
    x, lengths = torch.randn(8, 100, 64), torch.tensor([100, 3, 0, 50, 77, 99, 100, 1])
    mask = torch.arange(100) < lengths[:, None]

    def run(x, mask):
        return last(act(norm(x * 1.5, mask=mask))).square().sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    found = {}
    for how in ("plain", "compiled", "lean", "checkpoint"):
        leaf, m = x.clone().requires_grad_(), mask.clone()
        if how == "lean":
            with leannorm.lean(verify=True) as saved:
                y = run(leaf, m)
            assert saved.rebuilt_bytes > 0
        elif how == "checkpoint":
            y = torch.utils.checkpoint.checkpoint(run, leaf, m, use_reentrant=False)
        else:
            y = (compiled if how == "compiled" else run)(leaf, m)
        norm.zero_grad()
        y.backward()
        found[how] = [leaf.grad, *(p.grad for p in norm.parameters())]
    for how, grads in found.items():
        assert all(map(torch.equal, grads, found["plain"])), how
    with torch.autocast("cpu", BF16):
        assert (norm(x, mask=mask)[~mask] == 0).all()


def test_lean_sees_an_edit_of_the_mask():
    """Whoever edits the mask before the backward pass gets torch's error, not another gradient."""
    norm, mask = nn.LayerNorm(64), torch.rand(8, 100) < 0.5
    x = torch.randn(8, 100, 64, requires_grad=True)
    y = norm(x * 2, mask=mask).square().sum()
    mask.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize(("rms", "residual"), KINDS)
def test_operators_by_opcheck(rms, residual):
    if leannorm.backends()["cpu"]:
        return
    case = Case((3, 4, 8), (2, 3), rms, F32, residual=residual, padding=1.0)
    valid = case.kept_mask().contiguous()
    given = case.x, case.residual, case.weight, None if rms else case.bias, 2, 3, 1e-5, rms, 0.0, False, valid
    torch.library.opcheck(torch.ops.leannorm.row_forward.default, given)
    _, _, mean, rstd = torch.ops.leannorm.row_forward.default(*given)
    back = case.dy, None, case.x, mean, rstd, case.weight, 2, 3, rms, True, not rms, 0.0, valid
    torch.library.opcheck(torch.ops.leannorm.row_backward.default, back)


@pytest.mark.parametrize("function", [F.layer_norm, F.rms_norm])
def test_under_functorch(function):
    x, mask = torch.randn(3, 4, 5, dtype=F64), torch.tensor([True, False, True, True])
    grad = torch.func.vmap(torch.func.grad(lambda v: function(v, (5,), mask=mask).square().sum()))(x)
    leaf = x.clone().requires_grad_()
    function(leaf, (5,), mask=mask).square().sum().backward()
    torch.testing.assert_close(grad, leaf.grad)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["mask", "lengths"])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_exported_and_traced_calls_keep_their_mask(kind, how):
    norm, x = kind(8).requires_grad_(False), torch.randn(3, 5, 8)
    masks = torch.rand(2, 3, 5) < 0.5
    values = {"mask": list(masks), "lengths": [torch.tensor([5, 0, 2]), torch.tensor([1, 3, 0])]}[how]
    program = torch.export.export(norm, (x,), {how: values[0]}).module()
    traced = torch.jit.trace(
        lambda x, v: kind.forward(norm, x, **{how: v}), (x, values[0]), check_trace=False
    )
    for value in values:
        want = norm(x, **{how: value})
        torch.testing.assert_close(program(x, **{how: value}), want)
        torch.testing.assert_close(traced(x, value), want)
        bad = x.masked_fill(want == 0, float("nan"))
        torch.testing.assert_close(program(bad, **{how: value}), want)


def test_a_copy_and_a_pickle_know_the_keyword():
    norm, x, mask = nn.LayerNorm(8), torch.randn(2, 3, 8), torch.rand(2, 3) < 0.5
    assert torch.equal(copy.deepcopy(norm)(x, mask=mask), norm(x, mask=mask))


X = torch.zeros(2, 3, 4)
BAD = {
    "both": ({"mask": torch.ones(2, 3) > 0, "lengths": [1, 2]}, "twice"),
    "dtype": ({"mask": torch.ones(2, 3)}, "mask must be a bool tensor.*mask.bool()"),
    "shape": ({"mask": torch.ones(3, 2) > 0}, r"mask must broadcast.*\(2, 3\).*got \(3, 2\)"),
    "of elements": ({"mask": torch.ones(2, 3, 4) > 0}, "mask must broadcast"),
    "device": ({"mask": torch.ones(2, 3, device="meta") > 0}, "mask must be on the input's device"),
    "negative": ({"lengths": [-1, 2]}, "lengths must be from 0 to 3.*got -1"),
    "too long": ({"lengths": [4, 2]}, "lengths must be from 0 to 3.*got 4"),
    "count": ({"lengths": [1, 2, 3]}, r"one value a sample, shape \(2,\)"),
    "floating": ({"lengths": torch.tensor([1.0, 2.0])}, "lengths must be integers"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    given, said = BAD[name]
    with pytest.raises(leannorm.InputError, match=re.compile(said, re.S)):
        F.layer_norm(X, (4,), **given)


def test_lengths_of_rows_with_three_indices_are_ambiguous():
    with pytest.raises(leannorm.InputError, match=r"lengths are for rows of two indices.*pass mask"):
        F.rms_norm(torch.zeros(2, 3, 4, 5), (5,), lengths=[1, 2])
