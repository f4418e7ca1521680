"""Adapters on frozen quantized weights (QLoRA): gradients are stock's, adapters' inputs are rebuilt.

`pip install --no-deps bitsandbytes torchao`; with `-m conformance`.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leannorm import lean

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("ignore")]
WIDTH, INNER, TOKENS = 256, 640, 384


def four_bits(layer):
    bitsandbytes = pytest.importorskip("bitsandbytes", exc_type=ImportError)
    sizes = layer.in_features, layer.out_features
    made = bitsandbytes.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    made.load_state_dict(layer.state_dict())
    return made.to("cpu")  # quantizes


def eight_bits(layer):
    bitsandbytes = pytest.importorskip("bitsandbytes", exc_type=ImportError)
    sizes = layer.in_features, layer.out_features
    made = bitsandbytes.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
    made.load_state_dict(layer.state_dict())
    return made.to("cpu")


def of_torchao(layer):
    quantization = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    whole = nn.Sequential(layer.requires_grad_(False))
    quantization.quantize_(whole, quantization.Int8WeightOnlyConfig())
    return whole[0]


class Block(nn.Module):
    def __init__(self, quantized):
        super().__init__()
        sizes = (WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)
        self.gate, self.up, self.down = (quantized(nn.Linear(a, b, bias=False)) for a, b in sizes)
        self.norm, self.a, self.b = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, INNER)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y) + self.b(self.a(y))) * self.up(y))


def trained(make):
    """Gradients and bytes under each setting, stock first, of adapters on layers that `make` quantized."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(make) for _ in range(3))), torch.randn(TOKENS, WIDTH)
    parameters = [
        p for name, p in model.named_parameters() if name.split(".")[1] not in ("gate", "up", "down")
    ]
    found = []
    for setting in (None, {}, {"recompute": "conv"}, {"budget": 0.65}):
        saving = nullcontext() if setting is None else lean(**setting)
        for _ in range(2):
            model.zero_grad()
            with saving:
                loss = model(x).square().mean()
            loss.backward()
        found.append((saving, [p.grad.clone() for p in parameters]))
    return found


@pytest.mark.parametrize("quantized", [four_bits, eight_bits, of_torchao])
def test_adapters_on_quantized_weights(quantized):
    (_, stock), *others = trained(quantized)
    plain = trained(lambda layer: layer.requires_grad_(False))[1:]
    for (saving, gradients), (beside, _) in zip(others, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(gradients, stock, strict=True))
        assert saving.rebuilt_bytes > 0
        if quantized is not of_torchao:  # whose node saves the weight in floats, under stock too
            both, both_plain = (s.kept_bytes + s.rebuilt_bytes for s in (saving, beside))
            assert both <= 1.01 * both_plain, "a weight in floats is saved"
    assert others[0][0].rebuilt_bytes >= 0.99 * plain[0][0].rebuilt_bytes
