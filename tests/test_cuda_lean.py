"""What only a GPU can show of the hooks in C++: they serve CUDA's tensors without Python."""

from __future__ import annotations

import copy

import lean_cases
import pytest
import torch
from leannorm.saving.recipes import norms_on_gpu
from leannorm.saving.recipes.fused_norm_act import same_bits
from test_cuda import pytestmark, repeatable, same_twice, step  # noqa: F401
from test_lean import assert_same
from torch import nn

from leannorm.autograd.nodes import NODES
from leannorm.ops.backends import TRITON
from leannorm.saving import device, lean, packing, values

BLOCKS = {
    "batch norm": (lambda: lean_cases.around(nn.ReLU(), nn.SiLU()), lean_cases.IMAGE),
    "layer norm": (lambda: lean_cases.on_tokens(nn.LayerNorm(32), nn.GELU()), lean_cases.TOKENS),
    "RMS norm": (lambda: lean_cases.on_tokens(nn.RMSNorm(32), nn.GELU()), lean_cases.TOKENS),
    "attention": (lambda: lean_cases.on_tokens(lean_cases.Attention(False)), lean_cases.TOKENS),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 8, 3)),
        lean_cases.IMAGE,
    ),
}


@pytest.mark.skipif(NODES is None, reason="the hooks in C++ are not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize("name", BLOCKS)
def test_later_passes_are_packed_and_rebuilt_in_cpp(name, setting, dtype, monkeypatch):
    make, shape = BLOCKS[name]
    device.streams_used.clear()  # with the second stream of another test the hooks would be Python's
    model = make().cuda().to(dtype)
    for _ in range(6):
        x = torch.randn(shape, device="cuda", dtype=dtype)
        step(model, x, lean(setting), False)
    stock = same_twice(copy.deepcopy(model), x, False)
    asked, pack, unpack = [], packing.Packing._pack, values.Value.read

    def packed(self, tensor, *given):
        asked.append((str(tensor.grad_fn), tensor.dtype, tensor.shape))
        return pack(self, tensor, *given)

    def rebuilt(value, *given):
        asked.append((value.name,))
        return unpack(value, *given)

    monkeypatch.setattr(packing.Packing, "_pack", packed)
    monkeypatch.setattr(values.Value, "read", rebuilt)
    ours = step(model, x, lean(setting), False)
    assert_same({key: ours[key] for key in stock}, stock)
    asked = [one for one in asked if "ToCopy" not in one[0]]  # the loss's own cast is held in fewer bytes
    assert not asked


FORMS = torch.contiguous_format, torch.channels_last
DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_batch_norm_and_what_follows_in_one_pass(dtype, form):
    """torch's bits, and no other way is taken."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    x, added = (
        (3 * torch.randn(4, 37, 23, 29, device="cuda")).to(dtype).contiguous(memory_format=form)
        for _ in range(2)
    )
    mean, rstd, weight, bias = (torch.randn(37, device="cuda", dtype=wide) for _ in range(4))
    norms_on_gpu._checked.clear()
    for w, b in ((weight, bias), (None, None)):
        y = torch.batch_norm_elemt(x, w, b, mean, rstd, 0.0)
        for act in norms_on_gpu.EXACT:
            stock = norms_on_gpu.ACTIVATIONS[act]
            assert same_bits(norms_on_gpu.norm_act(x, w, b, mean, rstd, act), stock(y))
            ours = norms_on_gpu.norm_act(x, added, w, b, mean, rstd, act)
            assert same_bits(ours, stock(y + added))
    assert norms_on_gpu._checked
    assert all(norms_on_gpu._checked.values())


@pytest.mark.parametrize("into", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_norm_and_a_cast_in_one_pass(dtype, into):
    """torch's bits; in one pass but where what is cast has been rounded to 16 bits before."""
    norms_on_gpu._checked.clear()
    for kept in (768, 333):
        lying = torch.randn(50, 7, kept, device="cuda", dtype=dtype)
        weight, bias = (torch.randn(kept, device="cuda", dtype=dtype) for _ in range(2))
        for x in (lying, lying.transpose(0, 1)):
            for w, b in ((weight, bias), (weight, None), (None, None)):
                y, mean, rstd = torch.native_layer_norm(x, (kept,), w, b, 1e-5)
                ours = norms_on_gpu.layer_norm_cast(x, w, b, mean, rstd, (kept,), into, 1e-5)
                assert same_bits(ours, y.to(into))
    if into is dtype or dtype is torch.float32:
        assert all(norms_on_gpu._checked.values())


@pytest.mark.skipif(NODES is None, reason="the hooks in C++ are not built")
def test_sums_behind_batch_norms_are_rebuilt_in_one_pass(monkeypatch):
    """Also those that work in place, as torchvision's, without being compared in each pass."""
    device.streams_used.clear()
    model = nn.Sequential(*(Residual() for _ in range(4))).cuda()
    ran = []
    for _ in range(4):
        x = torch.randn(8, 16, 32, 32, device="cuda")
        step(model, x, lean("conv"), True)  # in float32 the norms are cuDNN's
    stock = same_twice(copy.deepcopy(model), x, True)
    monkeypatch.setattr(TRITON, "channel_as_torch", lambda *given: ran.append(given[5]) or whole(*given))
    whole = type(TRITON).channel_as_torch.__get__(TRITON)
    ours = step(model, x, lean("conv"), True)
    assert_same({key: ours[key] for key in stock}, stock)
    assert sum(added is not None for added in ran) == 2  # each second one


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x):
        y = self.norm(self.conv(x))
        y += x
        return y.relu_()
