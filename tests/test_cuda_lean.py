"""What only a GPU can show of the hooks in C++: they serve CUDA's tensors without Python."""

from __future__ import annotations

import copy

import lean_cases
import pytest
import torch
from test_cuda import pytestmark, repeatable, same_twice, step  # noqa: F401
from test_lean import assert_same
from torch import nn

from leannorm.autograd.nodes import NODES
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
    device._used.clear()  # another test may have used a second stream, for which the hooks are in Python
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
    assert len(asked) <= (name == "attention" and dtype == torch.bfloat16), asked
