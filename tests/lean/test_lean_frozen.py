"""Frozen weights and adapters beside them (LoRA): what needs no gradient is not held for one."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from test_lean_narrow import RMSNorm, assert_stock, held
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.architectures import import_torchvision
from leannorm import freeze, lean

TOKENS, WIDTH, RANK = 128, 64, 8
ROWS = TOKENS * WIDTH * 2  # bytes of a tensor of bfloat16


class LoRA(nn.Module):
    """A frozen linear layer, and a product of two narrow ones beside it, after dropout."""

    def __init__(self, inputs, outputs, p=0.1):
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).bfloat16().requires_grad_(False)
        self.down = nn.Linear(inputs, RANK, bias=False).bfloat16()
        self.up = nn.Linear(RANK, outputs, bias=False).bfloat16()
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        return self.base(x) + self.up(self.down(self.dropout(x))) * 2.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(WIDTH).bfloat16().requires_grad_(False)
        self.gate, self.up, self.down = LoRA(WIDTH, 256), LoRA(WIDTH, 256), LoRA(256, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def test_a_frozen_layer_holds_no_input_and_its_adapter_a_bit_a_value():
    """Of the adapter: bits of its mask, and what its second factor reads. Of the frozen layer: nothing."""
    norm, layer = RMSNorm(WIDTH).bfloat16().requires_grad_(False), LoRA(WIDTH, WIDTH)
    x, saved = torch.randn(TOKENS, WIDTH).bfloat16().requires_grad_(), lean("norm")
    assert_stock(lambda: layer(norm(x * 2)).square().mean(), [x, *trained(layer)], saved)
    source, mask, inner, rsqrt = ROWS, TOKENS * WIDTH // 8, TOKENS * RANK * 2, TOKENS * 4
    output = ROWS  # of the loss
    loss = 4
    copied = norm.weight.nbytes  # which may be edited before the backward pass, as plain PyTorch allows
    assert saved.kept_bytes <= source + mask + inner + rsqrt + output + loss + copied + 16
    assert saved.kept_bytes + saved.rebuilt_bytes >= 5 * ROWS


def test_frozen_weights_are_not_counted():
    model = nn.Sequential(nn.Linear(WIDTH, 512), nn.SiLU(), nn.Linear(512, WIDTH)).requires_grad_(False)
    x, saved = torch.randn(16, WIDTH, requires_grad=True), lean("norm")
    assert_stock(lambda: model(x).square().mean(), [x], saved)
    assert saved.kept_bytes + saved.rebuilt_bytes < model[0].weight.nbytes


def test_frozen_weights_are_not_moved():
    moved = []
    hooks = saved_tensors_hooks(lambda t: moved.append(t.shape) or t.clone(), lambda t: t)
    model = nn.Sequential(nn.Linear(WIDTH, 512), nn.SiLU(), nn.Conv1d(512, 8, 3)).requires_grad_(False)
    x = torch.randn(4, WIDTH, requires_grad=True)
    run = lambda: model[2](model[1](model[0](x)).T[None]).square().mean()  # noqa: E731
    assert_stock(run, [x], lean("norm", held=hooks))
    assert moved, "the activations are"
    assert not {(512, WIDTH), (WIDTH, 512), (8, 512, 3)} & {tuple(shape) for shape in moved}


def test_frozen_weights_do_not_make_a_pass_large(monkeypatch):
    model = nn.Sequential(nn.Linear(WIDTH, 512), nn.SiLU(), nn.Linear(512, WIDTH)).requires_grad_(False)
    x = torch.randn(16, WIDTH, requires_grad=True)
    monkeypatch.setenv("LEANNORM_SMALL_BYTES", str(model[0].weight.nbytes))
    for _ in range(2):
        with lean("norm") as saved:
            loss = model(x).square().mean()
        loss.backward()
    assert saved.rebuilt_bytes == 0
    assert "is kept as it is" in saved.reasons[0]


def test_a_budget_reaches_what_adapters_read():
    """Gate and up are sums of a frozen product and an adapter's, scaled by a number: from the norm."""
    model = nn.Sequential(*(Block() for _ in range(3)))
    x = torch.randn(4, TOKENS, WIDTH).bfloat16().requires_grad_()
    for _ in range(2):
        saved = lean(budget=0.25)
        assert_stock(lambda: model(x * 1).square().mean(), trained(model), saved)
        assert not [reason for reason in saved.reasons if "lowers no peak" not in reason]
    sums = held(saved, "aten::add")
    assert sums < 3 * 2 * 4 * TOKENS * 256 * 2
    assert saved.kept_bytes <= 0.26 * (saved.kept_bytes + saved.rebuilt_bytes)


LAYERS = {
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), (TOKENS, WIDTH)),
    "conv1d": (lambda: nn.Conv1d(8, 32, 3, padding=1), (4, 8, 64)),
    "conv2d": (lambda: nn.Conv2d(8, 32, 3, padding=1), (4, 8, 16, 16)),
    "conv2d, reflected": (lambda: nn.Conv2d(8, 32, 3, padding=1, padding_mode="reflect"), (4, 8, 16, 16)),
}


@pytest.mark.parametrize("weight", ["weight", "frozen weight"])
@pytest.mark.parametrize("name", LAYERS)
def test_products_with_a_frozen_bias_are_rebuilt(name, weight):
    """The graph has no edge to a frozen bias; the layer's call has it, and a step keeps a copy."""
    make, shape = LAYERS[name]
    layer, x, saved = make(), torch.randn(shape, requires_grad=True), lean("conv")
    layer.bias.requires_grad_(False)
    layer.weight.requires_grad_(weight == "weight")

    def run():
        y = layer(x * 1)
        return F.silu(y).square().sum() + y.exp().sum()

    stock = [x, *trained(layer)]
    assert_stock(run, stock, saved)
    if weight == "frozen weight" or name == "linear":
        operator = "aten::addmm" if name == "linear" else "aten::convolution"
        assert not held(saved, operator)
        assert any(r.node == operator and r.rebuilt for r in saved.records)


def test_a_frozen_bias_may_be_edited_before_the_backward_pass():
    """Stock saves no bias: the gradient is that of the forward pass."""
    layer, x = nn.Linear(WIDTH, WIDTH).requires_grad_(False), torch.randn(TOKENS, WIDTH, requires_grad=True)

    def gradient(context):
        x.grad = None
        layer.bias.data.fill_(0.5)
        with context:
            loss = F.silu(layer(x * 1)).sum()
        layer.bias.data.fill_(7.0)
        loss.backward()
        return x.grad

    assert torch.equal(gradient(lean("conv")), gradient(torch.enable_grad()))


@pytest.mark.parametrize("number", [2.0, 3, 0.1, float("inf"), True], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("divided", [False, True])
def test_a_multiple_by_a_number_is_rebuilt(number, dtype, divided):
    """torch saves the number past all hooks."""
    x, saved = torch.randn(2 * TOKENS, WIDTH, dtype=dtype, requires_grad=True), lean("norm")

    def run():
        y = F.silu(x)
        return torch.exp((y / number if divided else y * number).sigmoid()).sum()

    assert_stock(run, [x], saved)
    assert held(saved, "aten::sigmoid") == 0


def test_a_scalar_tensor_that_is_edited_is_no_number():
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    scale = torch.tensor(2.0, dtype=torch.float64)

    def run():
        scale.fill_(2.0)
        y = F.silu(x) * scale
        scale.data.fill_(3.0)
        return torch.exp(y.sigmoid()).sum()

    assert_stock(run, [x], lean("norm"))


def gradients(model, x, saving):
    model.zero_grad()
    with saving:
        loss = model(x).square().mean()
    loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.filterwarnings("ignore")
def test_a_frozen_batch_norm_of_torchvision():
    """`x * scale + bias`: no node saves the bias. The ReLU behind it is rebuilt from one product."""
    import_torchvision()
    norms = pytest.importorskip("torchvision.ops.misc")
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(4):
        norm = norms.FrozenBatchNorm2d(64)
        for buffer in norm.buffers():
            buffer.uniform_(0.5, 2.0)
        model.append(nn.Conv2d(64, 64, 1, bias=False)).append(norm).append(nn.ReLU(inplace=True))
    x = torch.randn(2, 64, 32, 32)

    stock, saving = gradients(model, x, nullcontext()), lean("conv")
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, x, saving), stock, strict=True))
    assert saving.rebuilt_bytes >= 2 * x.nbytes
    model[1].bias.add_(1)  # another shift is another call's
    stock = gradients(model, x, nullcontext())
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x, saving), stock, strict=True))
    with saving:
        loss = model(x).square().mean()
    model[1].bias.add_(1)  # between the passes: the copy is used, as stock's graph holds its own
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), stock, strict=True))


# of three bottlenecks: held under lean(), "conv" and budget=0.25
FROZEN = {"torchvision's": (1.0, 0.74, 0.38), "ours": (0.86, 0.49, 0.25)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("norms", FROZEN)
def test_a_frozen_bottleneck_of_torchvision(norms):
    import_torchvision()
    resnet, norm = pytest.importorskip("torchvision.models.resnet"), None
    if norms == "torchvision's":
        norm = pytest.importorskip("torchvision.ops.misc").FrozenBatchNorm2d
    torch.manual_seed(0)
    model = nn.Sequential(*(resnet.Bottleneck(256, 64, norm_layer=norm) for _ in range(3)))
    if norm is None:
        freeze(model)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    model.train()
    x = torch.randn(2, 256, 16, 16)

    stock = gradients(model, x, nullcontext())
    for setting, most in zip(({}, {"recompute": "conv"}, {"budget": 0.25}), FROZEN[norms], strict=True):
        saving = lean(**setting)
        for _ in range(2):
            for a, b in zip(gradients(model, x, saving), stock, strict=True):
                assert a is b is None or torch.equal(a, b), setting
        assert saving.kept_bytes / (saving.kept_bytes + saving.rebuilt_bytes) <= most, setting
