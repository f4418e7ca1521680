"""Norms as people write them by hand, of forms that leannorm has."""

import torch
import torch.nn.functional as F
from torch import nn as stock


class Norm(stock.Module):
    """Weight and eps under the names of Hugging Face."""

    def __init__(self, size=16, eps=1e-6):
        super().__init__()
        self.weight = stock.Parameter(torch.ones(size))
        self.variance_epsilon = eps


class LlamaNorm(Norm):
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class GemmaNorm(Norm):
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x):
        output = self._norm(x.float())
        return (output * (1.0 + self.weight.float())).type_as(x)


class T5Norm(Norm):
    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class PowerNorm(Norm):
    def forward(self, x):
        wide = x.float()
        y = wide * torch.pow(wide.square().mean(-1, keepdim=True) + self.variance_epsilon, -0.5)
        return (y * self.weight.float()).to(x.dtype)


class Unweighted(stock.Module):
    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class CenteredNorm(Norm):
    """Layer norm with a weight alone, of Cohere."""

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        mean = hidden_states.mean(-1, keepdim=True)
        variance = (hidden_states - mean).pow(2).mean(-1, keepdim=True)
        hidden_states = (hidden_states - mean) * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight.to(torch.float32) * hidden_states).to(input_dtype)


class Biased(Norm):
    """Layer norm by `var`, with a bias and a division."""

    def __init__(self, size=16, eps=1e-6):
        super().__init__(size, eps)
        self.shift = stock.Parameter(torch.zeros(size))

    def forward(self, x):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        return (x - mean) / torch.sqrt(variance + self.variance_epsilon) * self.weight + self.shift


class ChannelNorm(Biased):
    """Over axis 1 of an image, of ViTDet."""

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.variance_epsilon)
        return self.weight[:, None, None] * x + self.shift[:, None, None]


class Permuted(stock.LayerNorm):
    """torch's, permuted there and back."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class PlusOne(stock.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class OneGroup(stock.GroupNorm):
    def __init__(self, size=16):
        super().__init__(1, size)


class GateBehind(Norm):
    def forward(self, hidden_states, gate):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        hidden_states = self.weight * hidden_states.to(input_dtype)
        return (hidden_states * F.silu(gate.to(torch.float32))).to(input_dtype)


class SigmoidBehind(Norm):
    def forward(self, x, gate):
        wide = x.float()
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (y * self.weight.float() * torch.sigmoid(gate.float())).to(x.dtype)


class GateBefore(Norm):
    """Of Mamba 2, over groups of the last axis."""

    groups = 2

    def forward(self, hidden_states, gate=None):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        if gate is not None:
            hidden_states = hidden_states * F.silu(gate.to(torch.float32))
        *first, last = hidden_states.shape
        parts = hidden_states.view(*first, self.groups, last // self.groups)
        parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * parts.view(*first, last).to(input_dtype)


class Frozen(stock.Module):
    """Batch norm by fixed statistics."""

    def __init__(self, size=16):
        super().__init__()
        self.register_buffer("weight", torch.rand(size) + 0.5)
        self.register_buffer("bias", torch.randn(size))
        self.register_buffer("running_mean", torch.randn(size))
        self.register_buffer("running_var", torch.rand(size) + 0.5)

    def forward(self, x):
        w, b, m, v = (
            t.reshape(1, -1, 1, 1) for t in (self.weight, self.bias, self.running_mean, self.running_var)
        )
        scale = w * (v + 1e-5).rsqrt()
        return x * scale + (b - m * scale)


ROWS, IMAGES = (2, 5, 16), (2, 16, 3, 5)
# the layer, the input's shape, how many inputs
KNOWN = {
    "Llama": (LlamaNorm, ROWS, 1),
    "Gemma": (GemmaNorm, ROWS, 1),
    "T5": (T5Norm, ROWS, 1),
    "power": (PowerNorm, ROWS, 1),
    "unweighted": (Unweighted, ROWS, 1),
    "centered": (CenteredNorm, ROWS, 1),
    "biased": (Biased, ROWS, 1),
    "channels": (ChannelNorm, IMAGES, 1),
    "permuted": (lambda: Permuted(16), IMAGES, 1),
    "plus one": (lambda: PlusOne(16), ROWS, 1),
    "one group": (OneGroup, IMAGES, 1),
    "gate behind": (GateBehind, ROWS, 2),
    "sigmoid behind": (SigmoidBehind, ROWS, 2),
    "gate before": (GateBefore, ROWS, 2),
    "parts": (GateBefore, ROWS, 1),
    "frozen": (Frozen, IMAGES, 1),
}


def made(name, dtype):
    """The layer with random parameters."""
    torch.manual_seed(0)
    layer = KNOWN[name][0]()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.2, 0.5)
    return layer.to(dtype)
