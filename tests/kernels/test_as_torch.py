"""torch's norms from their saved statistics, with what follows, on Triton, interpreted."""

import pytest
import torch
from kernel_cases import EVERY
from leannorm.saving.recipes import norms_on_gpu

from leannorm import nn
from leannorm.autograd.nodes import NODES
from leannorm.ops.backends import TRITON, triton

pytestmark = pytest.mark.skipif(not triton.INTERPRETED, reason="runs on the interpreter")
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
LAYOUTS = torch.contiguous_format, torch.channels_last


def eighths(shape, dtype=F32):
    """Numbers whose products and sums float32 has exactly, so that only what is stored is rounded."""
    return (torch.randint(-40, 40, shape) / 8).to(dtype)


def powers(count):
    return torch.tensor([0.5, 1.0, 2.0])[torch.randint(3, (count,))]


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64])
@pytest.mark.parametrize("form", LAYOUTS, ids=str)
def test_norm_addition_and_activation_are_rounded_one_by_one(dtype, form):
    shape, channels = (3, 5, 7, 6), (1, 5, 1, 1)
    x, added = (eighths(shape, dtype).contiguous(memory_format=form) for _ in range(2))
    mean, rstd, weight = eighths((5,)), powers(5), powers(5)
    bias = eighths((5,)) + torch.randint(-9, 9, (5,)) / 1024  # digits that 16 bits have no room for
    of = [t.view(channels).double() for t in (mean, rstd, weight, bias)]
    m, s, *_ = of
    for w, b in ((weight, bias), (None, None)):
        exact = (x.double() - m) * s * (1 if w is None else of[2]) + (0 if b is None else of[3])
        normed = exact.to(dtype)
        for residual, act in ((None, "identity"), (None, "relu"), (added, "identity"), (added, "relu6")):
            stock = normed if residual is None else normed + residual
            stock = {"identity": stock, "relu": stock.relu(), "relu6": stock.clamp(0, 6)}[act]
            y = TRITON.channel_as_torch(
                x, mean.to(stock_statistics(dtype)), rstd, w, b, residual, act, False, True
            )
            assert torch.equal(y, stock)
            assert y.stride() == x.stride()
        if w is not None and dtype.itemsize == 2:  # else the test could not fail
            assert not torch.equal((exact + added.double()).to(dtype), normed + added)


def stock_statistics(dtype):
    return F64 if dtype is F64 else F32


@pytest.mark.parametrize("kept", [12, 7, 5000])
@pytest.mark.parametrize(("dtype", "into"), [(F32, F32), (F32, BF16), (F32, F16), (BF16, BF16), (F64, F32)])
def test_rows_are_normalized_and_cast(dtype, into, kept):
    mean, rstd = eighths((4, 3, 1)), powers(12).view(4, 3, 1)
    weight, bias = powers(kept), eighths((kept,)) + 1 / 1024
    lying = eighths((4, 3, kept), dtype), eighths((3, 4, kept), dtype).transpose(0, 1)
    for x in (*lying, eighths((4, 3, kept + 4), dtype)[..., :kept]):
        for w, b in ((weight, bias), (weight, None), (None, None)):
            stock = (x.double() - mean.double()) * rstd.double()
            stock = stock * (1 if w is None else w.double()) + (0 if b is None else b.double())
            y = TRITON.row_as_torch(x, mean, rstd, w, b, kept, into)
            assert y.is_contiguous()
            assert torch.equal(y, stock.to(dtype if dtype is F64 else F32).to(into))


@pytest.mark.parametrize("form", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [F32, F16])
def test_another_order_of_operations_is_told_apart(dtype, form, monkeypatch):
    """The kernel serves where torch's numbers are its own: a norm that rounds otherwise is found out."""

    def stock(x, weight, bias, mean, rstd, eps=0.0):
        w, b, m, s = (t.view(-1, 1, 1) for t in (weight, bias, mean, rstd))
        return orders[0](x.to(F32), w, b, m, s).to(x.dtype)

    orders = [lambda x, w, b, m, s: w * (x - m) * s + b]  # as the interpreter, which fuses nothing
    monkeypatch.setattr(norms_on_gpu, "batch_norm", stock)
    monkeypatch.setattr(norms_on_gpu, "_SAMPLE", (1, 256, 32, 32))
    kind = "relu", False, form, dtype, F32, F32, F32, torch.device("cpu")
    assert norms_on_gpu._channels_agree(*kind)
    for other in (
        lambda x, w, b, m, s: (x - m) * s * w + b,
        lambda x, w, b, m, s: x * (s * w) + (b - m * (s * w)),
        lambda x, w, b, m, s: (w * (x - m) * s + b).nan_to_num(),
        lambda x, w, b, m, s: w * (x - m) * s + b + 0.0,  # 0.0 for -0.0
    ):
        orders[0] = other
        assert not norms_on_gpu._channels_agree(*kind)


@pytest.mark.parametrize("act", norms_on_gpu.EXACT)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_leannorms_own_norm_is_rounded_one_by_one(dtype, act, monkeypatch):
    """Also where 16 bits round to -0.0, of which the activation is torch's."""
    monkeypatch.setattr(norms_on_gpu, "_SAMPLE", (1, 64, 32, 32))
    kind = act, True, torch.contiguous_format, dtype, F32, F32, F64, torch.device("cpu")
    assert norms_on_gpu._channels_agree(*kind)
    if act != "identity":  # else the test could not fail
        signed = norms_on_gpu._keeps_sign(act, dtype, torch.device("cpu"))
        monkeypatch.setattr(norms_on_gpu, "_keeps_sign", lambda *_: not signed)
        assert not norms_on_gpu._channels_agree(*kind)


def test_a_layer_norm_of_other_arithmetic_is_told_apart(monkeypatch):
    def stock(x, shape, weight, bias, eps):
        mean, rstd = x.mean(-1, keepdim=True), (x.var(-1, keepdim=True) + eps).rsqrt()
        return orders[0](x, weight, bias, mean, rstd), mean, rstd

    orders = [lambda x, w, b, m, s: w * (s * (x - m)) + b]
    kind = BF16, F32, F32, F32, F32, torch.device("cpu")
    assert not norms_on_gpu._rows_agree(*kind)  # torch's kernel for a CPU
    monkeypatch.setattr(torch, "native_layer_norm", stock)
    assert norms_on_gpu._rows_agree(*kind)
    orders[0] = lambda x, w, b, m, s: x * (s * w) + (b - m * (s * w))
    assert not norms_on_gpu._rows_agree(*kind)


@pytest.mark.skipif(NODES is None, reason="the nodes in C++ are not built")
@pytest.mark.parametrize("kernels", EVERY[1:2], indirect=True)
def test_lean_may_watch_operators_and_launches_stay_in_cpp(kernels, monkeypatch):
    """A profiler is to see operators; what `lean()` watches is not the whole call."""
    from leannorm.ops.backends.triton import tape

    asked, real = [], tape._Tape.__call__
    monkeypatch.setattr(tape._Tape, "__call__", lambda *given: asked.append(1) or real(*given))
    layer, x = nn.GroupNorm(2, 4), torch.randn(2, 4, 6, 6)

    def calls():
        asked.clear()
        layer(x).sum().backward()
        return len(asked)

    for _ in range(3):
        quiet = calls()
    NODES.watch_edits()
    try:
        assert calls() == quiet
    finally:
        NODES.stop_watching()
