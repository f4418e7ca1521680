"""Networks for `lean()`: what rebuilds must be exact on, as data."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import stand_ins
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_eval_frame

from leannorm import functional, lean
from leannorm import nn as lnn
from leannorm.saving import log, recorded_pass

IMAGE, TOKENS = (4, 3, 14, 14), (3, 30, 32)


@contextmanager
def recording_in(module: Any) -> Iterator[None]:
    """Passes are recorded by this log."""
    before, recorded_pass.LOG = recorded_pass.LOG, module
    try:
        yield
    finally:
        recorded_pass.LOG = before


def without_nodes(monkeypatch) -> None:
    """`lean()` as it is where the C++ nodes are not built: the log is in Python."""
    monkeypatch.setattr(recorded_pass, "LOG", log)
    stand_ins.without_nodes(monkeypatch, "saving")


@contextmanager
def in_a_group(ranks: int = 2) -> Iterator[None]:
    """This process as one rank of a group that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def forget_trials() -> None:
    """As in a process in which no operator was called again yet."""
    recorded_pass.LOG.forget_trials()


def assert_trains_as_torch(train: Callable[..., list[Tensor]], settings: dict[str, Any]) -> None:
    """`train(context)` returns the gradients of some steps."""
    found = []
    for context in (nullcontext, lambda: lean(**settings)):
        torch.manual_seed(0)
        found.append(train(context))
    stock, ours = found
    assert len(stock) == len(ours)
    assert all(map(torch.equal, stock, ours))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class Overwrites(torch.autograd.Function):
    """A user's sine, whose backward pass writes into what it saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return x.cos_().mul_(g)


def of_one_that_overwrites(context) -> Tensor:
    """The gradient in this context if another reader of what `Overwrites` saved comes after it."""
    torch.manual_seed(0)
    x = torch.randn(64, 64, requires_grad=True)
    with context:
        y = x @ x
        loss = (F.relu(y).square() + Overwrites.apply(y)).sum()
    return torch.autograd.grad(loss, x)[0]


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Tensor], *children: nn.Module) -> None:
        super().__init__()
        self.function, self.children_ = function, nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.children_)


def around(
    *middle: nn.Module, channels: int = 16, norm: type[nn.Module] | None = nn.BatchNorm2d
) -> nn.Module:
    """Convolution, norm, what is tried, convolution: both sides keep tensors."""
    norms = [] if norm is None else [norm(16)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *norms, *middle, nn.Conv2d(channels, 4, 1))


def on_tokens(*middle: nn.Module, width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), *middle, nn.Linear(width, 8))


class SqueezeExcite(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.down, self.up, self.inplace = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1), inplace

    def forward(self, x: Tensor) -> Tensor:
        scale = F.silu(self.down(x.mean((2, 3), keepdim=True)), inplace=self.inplace)
        return x * self.up(scale).sigmoid()


class Residual(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.conv, self.bn, self.inplace = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), inplace

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        y = y.add_(x) if self.inplace else y + x
        return F.relu(y, inplace=self.inplace)


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dw, self.norm = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.LayerNorm(16)
        self.up, self.down, self.gamma = nn.Linear(16, 64), nn.Linear(64, 16), nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dw(x).permute(0, 2, 3, 1))
        y = self.gamma * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class DenseBlock(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(16 + 8 * i) for i in range(layers))
        self.convs = nn.ModuleList(nn.Conv2d(16 + 8 * i, 8, 3, padding=1) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(F.relu(norm(torch.cat(features, 1)), inplace=True)))
        return torch.cat(features, 1)


class Attention(nn.Module):
    def __init__(self, scale_by_hand: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.scale_by_hand = nn.Linear(32, 96), nn.Linear(32, 32), scale_by_hand

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        if self.scale_by_hand:
            y = ((q * 8**-0.5) @ k.transpose(-2, -1)).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(b, n, c))


class BiasedAttention(nn.Module):
    """With a learned bias for every pair of positions, taken from a table."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.table = nn.Linear(32, 32), nn.Parameter(torch.randn(59, 1))
        self.places = torch.arange(30)[:, None] - torch.arange(30) + 29

    def forward(self, x: Tensor) -> Tensor:
        bias = self.table[self.places.view(-1)].view(30, 30, 1).permute(2, 0, 1)
        return (self.q(x)[..., :8] @ x[..., :8].mT + bias).softmax(-1) @ x


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(False), nn.LayerNorm(32), nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class DiTBlock(nn.Module):
    """Both norms with a scale and a shift of the sample, or of the token, and gated branches."""

    def __init__(self, by_token: bool) -> None:
        super().__init__()
        self.by_token, self.modulation = by_token, nn.Linear(32, 192)
        self.attention, self.mlp = (
            Attention(False),
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
        )

    def forward(self, x: Tensor) -> Tensor:
        condition = x if self.by_token else x.mean(1)
        scale, shift, gate, scale2, shift2, gate2 = self.modulation(F.silu(condition)).chunk(6, dim=-1)
        y = self.attention(functional.ada_layer_norm(x, (32,), scale, shift))
        y, x = functional.add_ada_layer_norm(x, y, gate, (32,), scale2, shift2)
        return x + (gate2 if self.by_token else gate2[:, None]) * self.mlp(y)


class GatedBlock(nn.Module):
    """A gated norm, in front of a projection."""

    def __init__(self, norm_before_gate: bool) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(32, 128), nn.Linear(64, 32)
        self.norm = lnn.RMSNormGated(64, norm_before_gate=norm_before_gate)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.both(x).chunk(2, dim=-1)
        return x + self.out(self.norm(F.silu(y), gate))


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu, in place": lambda: nn.ReLU(inplace=True),
    "relu6": nn.ReLU6,
    "relu6, in place": lambda: nn.ReLU6(inplace=True),
    "hardtanh": nn.Hardtanh,
    "leaky_relu": nn.LeakyReLU,
    "leaky_relu, in place": lambda: nn.LeakyReLU(0.1, inplace=True),
    "elu": nn.ELU,
    "elu, in place": lambda: nn.ELU(inplace=True),
    "celu": nn.CELU,
    "celu, in place": lambda: nn.CELU(0.5, inplace=True),
    "selu": nn.SELU,
    "selu, in place": lambda: nn.SELU(inplace=True),
    "silu": nn.SiLU,
    "silu, in place": lambda: nn.SiLU(inplace=True),
    "gelu": nn.GELU,
    "gelu, tanh": lambda: nn.GELU("tanh"),
    "hardswish": nn.Hardswish,
    "hardswish, in place": lambda: nn.Hardswish(inplace=True),
    "hardsigmoid": nn.Hardsigmoid,
    "hardsigmoid, in place": lambda: nn.Hardsigmoid(inplace=True),
    "sigmoid": nn.Sigmoid,
    "sigmoid, in place": lambda: Apply(torch.sigmoid_),
    "tanh": nn.Tanh,
    "tanh, in place": lambda: Apply(torch.tanh_),
    "softplus": nn.Softplus,
    "mish": nn.Mish,
    "mish, in place": lambda: nn.Mish(inplace=True),
    "prelu": lambda: nn.PReLU(16),
    "dropout": lambda: nn.Dropout(0.3),
    "dropout2d": lambda: nn.Dropout2d(0.3),
    "squeeze and excite": lambda: SqueezeExcite(False),
    "squeeze and excite, in place": lambda: SqueezeExcite(True),
    "max_pool": lambda: nn.Sequential(nn.SiLU(), nn.MaxPool2d(2)),
    "avg_pool": lambda: nn.Sequential(nn.SiLU(), nn.AvgPool2d(2)),
    "channels_last on the way": lambda: Apply(lambda x: x.contiguous(memory_format=torch.channels_last)),
    "roll": lambda: Apply(lambda x: x.roll((1, -2), (2, 3))),
    "slice": lambda: Apply(lambda x: x[:, :, 1:-1, 2:]),
    "shuffle": lambda: Apply(lambda x: x.view(-1, 2, 8, 14, 14).transpose(1, 2).reshape(-1, 16, 14, 14)),
    "cast": lambda: Apply(lambda x: x.double().square().to(x.dtype)),
}
IMAGES: dict[str, Callable[[], nn.Module]] = {
    **{name: (lambda make=make: around(make())) for name, make in ACTIVATIONS.items()},
    "glu": lambda: around(nn.GLU(1), channels=8),
    "cat": lambda: around(Apply(lambda x: torch.cat([x, F.relu(x)], 1)), channels=32),
    "halves": lambda: around(Apply(lambda x: torch.cat([x.chunk(2, 1)[1], x.chunk(2, 1)[0].tanh()], 1))),
    "residual": lambda: around(Residual(False), Residual(False)),
    "residual, in place": lambda: around(Residual(True), Residual(True)),
    "layer scale": lambda: around(LayerScale(), LayerScale()),
    "dense block": lambda: around(DenseBlock(), nn.BatchNorm2d(40), nn.ReLU(), channels=40),
    "group norm": lambda: around(nn.SiLU(), norm=lambda c: nn.GroupNorm(4, c)),
    "instance norm": lambda: around(nn.SiLU(), norm=lambda c: nn.InstanceNorm2d(c, affine=True)),
    "instance norm, plain": lambda: around(nn.ReLU(), norm=nn.InstanceNorm2d),
    "batch norm, plain": lambda: around(nn.ReLU(), norm=lambda c: nn.BatchNorm2d(c, affine=False)),
    "batch norm, momentum": lambda: around(nn.ReLU(), norm=lambda c: nn.BatchNorm2d(c, 1e-3, None)),
    "batch norm, evaluation": lambda: around(nn.SiLU()).eval(),
    "leannorm batch norm": lambda: around(nn.SiLU(), norm=lnn.BatchNorm2d),
    "leannorm batch norm, evaluation": lambda: around(nn.SiLU(), norm=lnn.BatchNorm2d).eval(),
    "leannorm group norm with an activation": lambda: around(
        nn.Conv2d(16, 16, 1), norm=lambda c: lnn.GroupNormAct(4, c)
    ),
    "leannorm convolution and norm": lambda: around(lnn.ConvBatchNorm2d(16, 16, 3), nn.ReLU(True), norm=None),
}
SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: on_tokens(Attention(False)),
    "attention by hand": lambda: on_tokens(Attention(True)),
    "attention with a table of biases": lambda: on_tokens(BiasedAttention()),
    "transformer": lambda: nn.Sequential(*(TransformerBlock() for _ in range(3))),
    "torch's encoder": lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
    "torch's encoder, norm first": lambda: nn.TransformerEncoderLayer(
        32, 4, 64, 0.1, "gelu", norm_first=True, bias=False
    ),
    "torch's attention, with weights": lambda: on_tokens(
        Apply(lambda x, attention: attention(x, x, x)[0], nn.MultiheadAttention(32, 4, add_bias_kv=True))
    ),
    "linear layers in a row": lambda: on_tokens(
        *(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(5))
    ),
    "no bias": lambda: on_tokens(nn.Linear(32, 64, bias=False), nn.SiLU(), width=64),
    "added product": lambda: on_tokens(Apply(lambda x: torch.baddbmm(x, x, x.mT @ x, alpha=0.5, beta=2))),
    "three readers": lambda: on_tokens(
        Apply(lambda x, a, b: x + a(x) * b(x), nn.Linear(32, 32), nn.Linear(32, 32))
    ),
    "layer norm, no bias": lambda: on_tokens(nn.LayerNorm(32, bias=False), nn.GELU()),
    "layer norm, plain": lambda: on_tokens(nn.LayerNorm(32, elementwise_affine=False)),
    "layer norm, eps": lambda: on_tokens(nn.LayerNorm(32, eps=0.0123)),
    "layer norm, two axes": lambda: on_tokens(nn.LayerNorm((30, 32), eps=1e-6)),
    "rms norm": lambda: on_tokens(nn.RMSNorm(32)),
    "leannorm layer norm": lambda: on_tokens(lnn.LayerNorm(32), nn.GELU()),
    "leannorm rms norm, Llama's": lambda: on_tokens(lnn.RMSNorm(32, cast="before", weight_offset=1.0)),
    "leannorm, scale and shift of a sample": lambda: on_tokens(DiTBlock(False), DiTBlock(False)),
    "leannorm, scale and shift of a token": lambda: on_tokens(DiTBlock(True), DiTBlock(True)),
    "leannorm, gated": lambda: on_tokens(GatedBlock(True), GatedBlock(False)),
}


@contextmanager
def watched_by_the_compiler() -> Iterator[None]:
    """As torch.compile leaves a process in which it failed: each Python function starts through its hook."""
    before = set_eval_frame(False)  # watches, and compiles nothing
    try:
        yield
    finally:
        set_eval_frame(before)


def assert_as_stock(program, **settings):
    """`program(context)` returns what is to be equal bit for bit."""
    found = []
    for context in (nullcontext, lambda: lean(**settings)):
        torch.manual_seed(0)
        found.append([t.detach().clone() for t in program(context)])
    stock, ours = found
    assert len(stock) == len(ours)
    assert all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True))


def assert_network_as_stock(name: str, passes: int, **settings: Any) -> None:
    """Some passes in a row of one of the networks, on one input."""
    make = {**IMAGES, **SEQUENCES}[name]
    torch.manual_seed(1)
    x = torch.randn(TOKENS if name in SEQUENCES else IMAGE)
    torch.manual_seed(0)
    network = make()

    def program(context):
        ours = copy.deepcopy(network)
        for _ in range(passes):
            with context():
                loss = ours(x).square().mean()
            loss.backward()
        return [loss, *(p.grad for p in ours.parameters() if p.grad is not None), *ours.buffers()]

    assert_as_stock(program, **settings)


def in_threads(work: Callable[[int, dict[int, Any]], None], count: int) -> dict[int, Any]:
    """What `work(seed, results)` writes into the results, in threads at once."""
    results: dict[int, Any] = {}
    threads = [threading.Thread(target=work, args=(seed, results)) for seed in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
