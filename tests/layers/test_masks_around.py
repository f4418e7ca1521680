"""Masked norms under what surrounds a layer: compilers, checkpoints, transforms, exports, `lean()`."""

import copy
import pickle
import warnings

import pytest
import torch
from test_masks import F64, assert_padding_is_zero, laid_out, mask_of, packed, randomized, with_junk
from torch import nn as torch_nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import leannorm
from leannorm import functional, nn
from leannorm._errors import InputError

SHAPE = (4, 3, 5, 6)


def made(act="silu", **of):
    return randomized(nn.BatchNormAct2d(3, act=act, **of))


def step(layer, call, x, dy, **masking):
    """Forward and backward: the output, every gradient and buffer."""
    leaf = x.detach().requires_grad_()
    y = call(leaf, **masking)
    y.backward(dy)
    gradients = [leaf.grad, *(p.grad for p in layer.parameters())]
    return [y.detach(), *gradients, *(b.clone() for b in layer.buffers())]


def given(kind="random"):
    torch.manual_seed(0)
    mask = mask_of(SHAPE, kind)
    return (
        with_junk(torch.randn(SHAPE), mask, torch.nan),
        with_junk(torch.randn(SHAPE), mask, torch.nan),
        mask,
    )


def assert_same(got, want):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fill", ["zero", "normalize"])
def test_compiled_as_eager(fill, training):
    x, dy, mask = given()
    x, dy = (x, dy) if fill == "zero" else (x.nan_to_num(1.0), dy.nan_to_num(1.0))
    layer = made().train(training)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    want = step(layer, layer, x, dy, mask=mask, fill=fill)
    assert_same(step(twin, compiled, x, dy, mask=mask, fill=fill), want)


@pytest.mark.parametrize("training", [True, False])
def test_transforms_compile(training):
    x, dy, mask = given()
    layer = made().train(training)

    def loss(x):
        return (layer(x, mask=mask) * dy.nan_to_num(1.0)).sum()

    with leannorm.no_stats_update():  # compiled transforms may not write to captured buffers
        found = torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(found, torch.func.grad(loss)(x))


def test_compiled_with_lengths_and_residual():
    x, dy, _ = given()
    lengths, residual = torch.tensor([6, 2, 0, 4]), torch.randn(SHAPE)
    x, dy, layer = x.nan_to_num(0.5), dy.nan_to_num(0.5), made()
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    want = step(layer, lambda v, **k: layer(v, residual, **k), x, dy, lengths=lengths)
    assert_same(step(twin, lambda v, **k: compiled(v, residual, **k), x, dy, lengths=lengths), want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_repeats_it_and_moves_statistics_once(reentrant):
    x, dy, mask = given()
    layer = made()
    twin = copy.deepcopy(layer)

    def call(v, mask):
        return checkpoint(lambda v: twin(v, mask=mask), v, use_reentrant=reentrant)

    for one, other in zip(
        step(twin, call, x, dy, mask=mask), step(layer, layer, x, dy, mask=mask), strict=True
    ):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
        assert one.isfinite().all()


def test_autocast_and_copies():
    x, _, mask = given()
    layer = made()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with torch.autocast("cpu", torch.bfloat16):
            y = twin(x.bfloat16(), mask=mask)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), layer(x, mask=mask), atol=0.05, rtol=0.02)


def test_transforms_of_torch_func():
    x, _, mask = given()
    x, weight, bias = x.nan_to_num(3.0).double(), torch.rand(3, dtype=F64), torch.rand(3, dtype=F64)

    def loss(x, weight):
        y = functional.batch_norm_act(x, None, None, weight, bias, True, mask=mask, act="silu")
        return (y * torch.arange(y.numel(), dtype=F64).view(SHAPE)).sum()

    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    want = torch.autograd.grad(loss(*leaves), leaves)
    assert_same(torch.func.grad(loss, argnums=(0, 1))(x, weight), want)
    tangent = torch.randn(SHAPE, dtype=F64)
    _, along = torch.func.jvp(lambda v: loss(v, weight), (x,), (tangent,))
    torch.testing.assert_close(along, (want[0] * tangent).sum())
    samples = torch.stack((x, x * 2))
    each = torch.func.vmap(lambda v, m: functional.batch_norm(v, None, None, training=True, mask=m))
    masks = torch.stack((mask, ~mask))
    for one, v, m in zip(each(samples, masks), samples, masks, strict=True):
        torch.testing.assert_close(one, functional.batch_norm(v, None, None, training=True, mask=m))


class Network(torch_nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x, mask):
        return self.norm(x, mask=mask)


NORMS = {
    "BatchNorm2d": lambda: randomized(nn.BatchNorm2d(3)),
    "BatchNormAct2d": made,
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(3),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(3, track_running_stats=True),
}


@pytest.mark.parametrize("name", NORMS)
def test_exported_in_evaluation(name):
    """As torch's own operators, which keep the mask."""
    x, _, mask = given()
    model = Network(NORMS[name]())
    model(x.nan_to_num(2.0), mask)
    model.eval()
    want = model(x, mask)
    exported = torch.export.export(model, (x, mask))
    torch.testing.assert_close(exported.module()(x, mask), want)
    other = mask_of(SHAPE, "lengths")
    clean = with_junk(x.nan_to_num(2.0), other, torch.nan)
    torch.testing.assert_close(exported.module()(clean, other), model(clean, other))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(model, (x, mask), check_trace=False)
    torch.testing.assert_close(traced(clean, other), model(clean, other))


def test_lengths_exported_in_evaluation():
    class OfLengths(torch_nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = randomized(nn.BatchNorm1d(3)).eval()

        def forward(self, x, lengths):
            return self.norm(x, lengths=lengths)

    model, x, lengths = OfLengths().eval(), torch.randn(4, 3, 9), torch.tensor([3, 9, 0, 1])
    exported = torch.export.export(model, (x, torch.tensor([1, 2, 3, 4])))
    torch.testing.assert_close(exported.module()(x, lengths), model(x, lengths))


@pytest.mark.parametrize("name", NORMS)
def test_not_exported_in_training(name):
    """No operator of a graph has a mask: never the unmasked norm in its place."""
    x, _, mask = given()
    model = Network(NORMS[name]())
    before = copy.deepcopy(model.state_dict())
    for export in (lambda: torch.export.export(model, (x, mask)), lambda: torch.jit.trace(model, (x, mask))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            with pytest.raises(Exception, match="with mask= or lengths= cannot be exported or traced"):
                export()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_forked_programs_have_no_masks():
    x, _, mask = given()
    with pytest.raises(Exception, match="with mask= or lengths= cannot be exported or traced"):
        leannorm.program.fork(Network(made()), (x, mask))


def test_modes_are_told_of_the_mask():
    told = []

    class Heard(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            told.append((func, kwargs or {}))
            return func(*args, **(kwargs or {}))

    x, _, mask = given()
    with Heard():
        y = functional.batch_norm(x, None, None, training=True, mask=mask)
    assert [kwargs["mask"] is mask for func, kwargs in told if func is functional.batch_norm] == [True]
    assert_padding_is_zero([y], mask)


class Subclass(torch.Tensor):
    pass


def test_a_subclass_is_not_told_torchs_function_of_a_masked_call():
    x, _, mask = given()
    y = functional.batch_norm(x.as_subclass(Subclass), None, None, training=True, mask=mask)
    assert_padding_is_zero([y.as_subclass(torch.Tensor)], mask)
    torch.testing.assert_close(
        y.as_subclass(torch.Tensor), functional.batch_norm(x, None, None, training=True, mask=mask)
    )


@pytest.mark.parametrize("act", ["identity", "relu", "silu"])
@pytest.mark.parametrize("recompute", ["norm", "conv"])
def test_lean_rebuilds_it_as_without_a_mask(recompute, act):
    """A masked norm between convolutions: gradients are the same bits, and what is counted is held."""
    torch.manual_seed(1)
    convs = [torch_nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 16), (16, 16), (16, 4))]
    norms = [randomized(nn.BatchNormAct2d(16, act=act)) for _ in range(2)]
    x, mask = torch.randn(8, 3, 32, 32), mask_of((8, 3, 32, 32), "random")
    parameters = [p for m in (*convs, *norms) for p in m.parameters()]

    def forward(mask):
        y = x
        for conv, norm in zip(convs, norms, strict=False):
            y = norm(conv(y), mask=mask)
        return convs[-1](y).square().mean()

    want = torch.autograd.grad(forward(mask), parameters)
    with leannorm.lean(recompute=recompute, verify=True) as saved:
        loss = forward(mask)
    assert all(map(torch.equal, torch.autograd.grad(loss, parameters), want))
    assert not saved.reasons
    kept = []
    for given in (None, mask):
        with leannorm.lean(recompute=recompute) as saved:
            loss = forward(given)
        kept.append(saved.kept_bytes)
        del loss
    assert kept[0] < kept[1] <= kept[0] + 4 * mask.nbytes


# ------------------------------------------------------------------ instance norm

INSTANCE = {3: "InstanceNorm1d", 4: "InstanceNorm2d", 5: "InstanceNorm3d"}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", ["random", "lengths", "empty samples"])
@pytest.mark.parametrize(
    "shape", [(5, 3, 40), (4, 6, 5, 9), (3, 70, 2, 4, 5), (2, 3, 20000), (3, 4, 150, 130)], ids=str
)
def test_instance_norm_is_each_samples_packed_norm(shape, kind, last, backend):
    torch.manual_seed(2)
    mask = mask_of(shape, kind)
    x, dy = laid_out(torch.randn(shape, dtype=F64), last), torch.randn(shape, dtype=F64)
    layer = randomized(
        getattr(nn, INSTANCE[len(shape)])(shape[1], affine=True, track_running_stats=True)
    ).double()
    twin = copy.deepcopy(layer)
    with leannorm.use_backend(backend):
        bad = [laid_out(with_junk(v, mask, torch.nan), last).requires_grad_() for v in (x, dy)]
        y = layer(bad[0], mask=mask)
        got = torch.autograd.grad(y, [bad[0], layer.weight, layer.bias], bad[1])
    assert_padding_is_zero([y, got[0]], mask)
    means, variances, dweight, dbias = [], [], 0, 0
    for i in range(shape[0]):
        values = packed(x[i : i + 1], mask[i : i + 1]).requires_grad_()  # (positions, C)
        if len(values) < 2:
            assert_padding_is_zero([torch.where(mask[i], 0.0, y[i])[None]], mask[i : i + 1])
            continue
        want = torch.nn.functional.batch_norm(values, None, None, twin.weight, twin.bias, True, 0.1, twin.eps)
        grads = torch.autograd.grad(
            want, [values, twin.weight, twin.bias], packed(dy[i : i + 1], mask[i : i + 1])
        )
        torch.testing.assert_close(packed(y[i : i + 1], mask[i : i + 1]), want)
        torch.testing.assert_close(packed(got[0][i : i + 1], mask[i : i + 1]), grads[0])
        dweight, dbias = dweight + grads[1], dbias + grads[2]
        means.append(values.detach().mean(0)), variances.append(values.detach().var(0))
    if "empty" not in kind:
        torch.testing.assert_close(got[1], dweight)
        torch.testing.assert_close(got[2], dbias)
    torch.testing.assert_close(layer.running_mean, 0.1 * torch.stack(means).mean(0))
    torch.testing.assert_close(layer.running_var, 0.9 + 0.1 * torch.stack(variances).mean(0))


def test_instance_norm_without_a_batch_axis():
    x, mask = torch.randn(3, 9), torch.arange(9) < 5
    layer = nn.InstanceNorm1d(3)
    want = layer(x[None], mask=mask[None])[0]
    for masking in ({"mask": mask}, {"lengths": 5}, {"lengths": [5]}, {"lengths": torch.tensor(5)}):
        assert torch.equal(layer(x, **masking), want)
    with pytest.raises(InputError, match="mask must broadcast"):
        layer(x, mask=mask[None, None, :])


@pytest.mark.parametrize("fill", ["zero", "normalize"])
def test_instance_norm_has_gradients_of_any_order(fill):
    mask = mask_of((3, 2, 5), "random")
    x = torch.randn(3, 2, 5, dtype=F64, requires_grad=True)
    weight = torch.randn(2, dtype=F64, requires_grad=True)

    def call(x, weight):
        return functional.instance_norm(x, weight=weight, mask=mask, fill=fill)

    assert torch.autograd.gradcheck(call, (x, weight))
    assert torch.autograd.gradgradcheck(call, (x, weight))


def test_instance_norm_in_evaluation():
    x, _, mask = given()
    layer = nn.InstanceNorm2d(3, track_running_stats=True)
    layer(x.nan_to_num(1.0))
    y = layer.eval()(x, mask=mask)
    assert_padding_is_zero([y], mask)
    torch.testing.assert_close(packed(y, mask), packed(layer(x.nan_to_num(1.0)), mask))
