"""Small models, compiled with inductor's graphs and our partition, then run node by node: no code is made.

What a partition does to gradients and to what is held shows as well there, in a tenth of the time.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import leannorm


def run_by_nodes(model, options=None, dynamic=None):
    """The model, compiled without code: `options` as for `torch.compile`, or torch's own partition."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import compile_fx  # noqa: F401  (registers what graphs are made of)
    from torch._inductor.decomposition import select_decomp_table

    ours = None if options is None else options["custom_partitioner_fn"]

    def partition(module, inputs, **arguments):
        return (ours or min_cut_rematerialization_partition)(module, inputs, compiler="inductor", **arguments)

    def run(module, inputs):
        return make_boxed_func(module)

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=run, bw_compiler=run, partition_fn=partition, decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )  # fmt: skip
    return torch.compile(model, backend=backend, dynamic=dynamic)


class Ran(NamedTuple):
    """One training step: all gradients, all buffers after it, bytes that the backward pass was given."""

    gradients: dict
    buffers: dict
    saved: int


def step(model, run, x):
    """A step of `run`, which is the model in some form; the same random numbers every time."""
    torch.manual_seed(3)
    model.zero_grad()
    x = x.clone().requires_grad_(x.is_floating_point())
    out = run(x)
    saved = saved_bytes(out, {*model.parameters(), *model.buffers(), x})
    out.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
    return Ran(gradients, {k: v.clone() for k, v in model.named_buffers()}, saved)


def saved_bytes(out, there):
    """Bytes of the storages that compiled code saved, without what is there anyway."""
    node = out.grad_fn
    if not hasattr(node, "saved_tensors"):
        return 0
    known = {t.untyped_storage().data_ptr() for t in there}
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in node.saved_tensors
        if t is not None
    }
    return sum(nbytes for pointer, nbytes in storages.items() if pointer not in known)


@cache
def known(name, form):
    """A step of a model of `MODELS` in float64: "eager", or "compiled" as torch partitions it."""
    model, x = made(name)
    return step(model, run_by_nodes(model) if form == "compiled" else model, x)


def made(name):
    """A model of `MODELS` and its input, in float64."""
    make, x = MODELS[name]
    torch.manual_seed(0)
    return make().double(), x.double() if x.is_floating_point() else x


def assert_same(ours, eager, rtol=1e-9):
    for mine, theirs in ((ours.gradients, eager.gradients), (ours.buffers, eager.buffers)):
        assert mine.keys() == theirs.keys()
        largest = max((float(v.abs().max()) for v in theirs.values() if v is not None), default=0.0)
        for name, value in theirs.items():
            if value is None:
                assert mine[name] is None, name
            else:
                torch.testing.assert_close(mine[name], value, rtol=rtol, atol=rtol * largest)


class Residual(nn.Module):
    def __init__(self, width=8, norm=nn.BatchNorm2d, act=nn.ReLU):
        super().__init__()
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms, self.act = nn.ModuleList(norm(width) for _ in range(2)), act()

    def forward(self, x):
        y = self.act(self.norms[0](self.a(x)))
        return self.act(self.norms[1](self.b(y)) + x)


class Gated(nn.Module):
    """A transformer's block: RMS norm, attention, gated feed-forward, two residual sums."""

    def __init__(self, width=16, dropout=0.0):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        n, tokens, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(n, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, tokens, width)
        x = x + self.dropout(self.out(y))
        y = self.norms[1](x)
        return x + self.dropout(self.down(F.silu(self.gate(y)) * self.up(y)))


class Squeezed(nn.Module):
    """Squeeze-and-excite with a hard swish, pooling and a concatenation."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.squeeze, self.excite = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)

    def forward(self, x):
        y = F.hardswish(self.norm(self.first(x)))
        y = y * torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return torch.cat([F.max_pool2d(y, 2), F.avg_pool2d(y, 2)], 1)


class Scaled(nn.Module):
    """A buffer that the forward pass edits, before or after it was used."""

    def __init__(self, width, first=False):
        super().__init__()
        self.linear, self.first = nn.Linear(width, width), first
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x):
        if self.first:
            self.scale.mul_(0.5)
            return self.linear(x).relu() * self.scale
        c = self.scale.view(2, -1).view(-1) * 1.5
        y = F.gelu(self.linear(x) * c) * c.tanh()
        self.scale.mul_(0.5)
        return y


def images(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


MODELS = {
    "residual blocks": (lambda: nn.Sequential(*(Residual() for _ in range(3))), images(2, 8, 12, 12)),
    "leannorm's norms": (
        lambda: leannorm.convert(nn.Sequential(*(Residual(act=nn.SiLU) for _ in range(2)))),
        images(2, 8, 12, 12),
    ),
    "group norm": (
        lambda: nn.Sequential(*(Residual(norm=lambda c: nn.GroupNorm(2, c), act=nn.SiLU) for _ in range(2))),
        images(2, 8, 12, 12),
    ),
    "transformer": (lambda: nn.Sequential(*(Gated() for _ in range(3))), images(2, 24, 16)),
    "transformer with dropout": (
        lambda: nn.Sequential(*(Gated(dropout=0.2) for _ in range(2))),
        images(2, 24, 16),
    ),
    "leannorm's transformer": (
        lambda: leannorm.convert(nn.Sequential(*(Gated() for _ in range(2)))),
        images(2, 24, 16),
    ),
    "gelu": (
        lambda: nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16), nn.GELU("tanh")
        ),
        images(32, 16),
    ),
    "squeeze and excite": (Squeezed, images(4, 3, 14, 14)),
    "three dimensions": (
        lambda: nn.Sequential(
            nn.Conv3d(1, 4, 3), nn.InstanceNorm3d(4, affine=True), nn.LeakyReLU(inplace=True),
            nn.Conv3d(4, 4, 3), nn.InstanceNorm3d(4, affine=True), nn.LeakyReLU(inplace=True),
        ),
        images(2, 1, 9, 9, 9),
    ),
}  # fmt: skip
