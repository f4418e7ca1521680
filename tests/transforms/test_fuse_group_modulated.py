"""A group norm, a scale and a shift of every sample, and the activation behind them run in one pass, where
nothing can tell; so do a norm in each branch of an `if` and the activation behind that.

The blocks are written as diffusers writes its own; those run in `make conformance`.
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from test_fuse_modulated import assert_close, saved
from torch import nn as stock

import leannorm
from leannorm import convert
from leannorm.transforms.fusing import group_steps, steps

C = 8


class Resnet(stock.Module):
    """As diffusers' ResnetBlock2D behind its first convolution."""

    def __init__(self, how="scale_shift"):
        super().__init__()
        self.how, self.time_emb_proj = how, stock.Linear(C, 2 * C if how == "scale_shift" else C)
        self.norm2, self.conv2 = stock.GroupNorm(4, C, eps=1e-6), stock.Conv2d(C, C, 3, padding=1)
        self.nonlinearity = stock.SiLU()

    def forward(self, x, temb):
        hidden_states = x
        if self.time_emb_proj is not None:
            temb = self.time_emb_proj(self.nonlinearity(temb))[:, :, None, None]
        if self.how == "default":
            if temb is not None:
                hidden_states = hidden_states + temb
            hidden_states = self.norm2(hidden_states)
        elif self.how == "scale_shift":
            if temb is None:
                raise ValueError("temb should not be None")
            time_scale, time_shift = torch.chunk(temb, 2, dim=1)
            hidden_states = self.norm2(hidden_states)
            hidden_states = hidden_states * (1 + time_scale) + time_shift
        else:
            hidden_states = self.norm2(hidden_states)
        hidden_states = self.nonlinearity(hidden_states)
        return x + self.conv2(hidden_states)


class AdaGroupNorm(stock.Module):
    def __init__(self):
        super().__init__()
        self.num_groups, self.eps, self.linear = 4, 1e-5, stock.Linear(C, 2 * C)

    def forward(self, x, temb):
        emb = self.linear(temb)
        emb = emb[:, :, None, None]
        scale, shift = emb.chunk(2, dim=1)
        x = F.group_norm(x, self.num_groups, eps=self.eps)
        x = x * (1 + scale) + shift
        return x


class InOneLine(Resnet):
    def forward(self, x, temb):
        scale, shift = self.time_emb_proj(temb)[:, :, None, None].chunk(2, dim=1)
        return F.gelu(self.norm2(x) * (1 + scale) + shift, approximate="tanh")


class WithoutActivation(Resnet):
    def forward(self, x, temb):
        scale, shift = self.time_emb_proj(temb)[:, :, None, None].chunk(2, dim=1)
        y = self.norm2(x)
        y = y * (1 + scale) + shift
        return y + x


class OfAllSamples(Resnet):
    """One scale for the whole batch, and no shift."""

    def forward(self, x, temb):
        scale = self.time_emb_proj(temb)[:1, :C, None, None]
        return self.nonlinearity(self.norm2(x) * (1 + scale))


class AddedInPlace(Resnet):
    def forward(self, x, temb):
        scale, shift = self.time_emb_proj(temb)[:, :, None, None].chunk(2, dim=1)
        y = self.norm2(x) * (1 + scale) + shift
        y += x
        return y.mul_(2)


FUSED = [Resnet, AdaGroupNorm, InOneLine, WithoutActivation, OfAllSamples, AddedInPlace]


class WiderScale(Resnet):
    def forward(self, x, temb):
        scale = self.time_emb_proj(temb).double()[:, :C, None, None]
        return self.nonlinearity(self.norm2(x) * (1 + scale) + scale)


class OfPositions(Resnet):
    """As SpatialNorm: scale and shift are as large as the input."""

    def forward(self, x, temb):
        scale = self.conv2(x)
        return self.nonlinearity(self.norm2(x) * (1 + scale) + scale)


class Broadcast(Resnet):
    def forward(self, x, temb):
        scale = self.time_emb_proj(temb)[:, :1, None, None]
        return self.nonlinearity(self.norm2(x) * (1 + scale) + scale)


class Residual(Resnet):
    def forward(self, x, temb):
        scale = self.time_emb_proj(temb)[:, :C, None, None]
        return self.nonlinearity(self.norm2(x) * (1 + scale) + x)


class ReadBetween(Resnet):
    def forward(self, x, temb):
        scale = self.time_emb_proj(temb)[:, :C, None, None]
        y = self.norm2(x)
        z = y * (1 + scale) + scale
        return self.nonlinearity(z) + y


UNFUSED = [WiderScale, OfPositions, Broadcast, Residual, ReadBetween]


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(group_steps, "SMALL", 0)


@pytest.mark.parametrize(("samples", "one_pass"), [(409, 0), (410, 1)])
@pytest.mark.parametrize("cls", [Resnet, AdaGroupNorm])
def test_a_small_input_is_as_written(cls, samples, one_pass, fused, monkeypatch):
    monkeypatch.setattr(group_steps, "SMALL", 1 << 16)
    convert(block_of(cls), fuse="trace")(*given(samples=samples))
    assert len(fused) == one_pass


@pytest.fixture
def fused(monkeypatch):
    """The activations that ran with a modulated group norm."""
    calls, before = [], group_steps.modulated_group_norm

    def counting(norm, x, modulation, act):
        calls.append(act)
        return before(norm, x, modulation, act)

    for module in (group_steps, steps):
        monkeypatch.setattr(module, "modulated_group_norm", counting)
    return calls


def block_of(cls, *given):
    torch.manual_seed(0)
    block = cls(*given)
    with torch.no_grad():
        for p in block.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    return block


def given(dtype=torch.float32, samples=3, layout=torch.contiguous_format):
    generator = torch.Generator().manual_seed(1)
    x, temb = (torch.randn(s, generator=generator).to(dtype) for s in ((samples, C, 5, 4), (samples, C)))
    return [x.to(memory_format=layout), temb]


def results(block, *inputs):
    leaves = [t.clone().requires_grad_() for t in inputs]
    y = block(*leaves)
    up = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [*leaves, *block.parameters()], up, allow_unused=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cls", FUSED)
def test_computes_the_same_in_one_pass(cls, dtype, fused):
    block, inputs = block_of(cls).to(dtype), given(dtype)
    kinds, want = [type(m) for m in block.modules()], results(copy.deepcopy(block), *inputs)
    got = results(convert(block, fuse="trace"), *inputs)
    assert len(fused) == 1
    assert_close(got, want, torch.finfo(dtype).eps)
    for again in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(again(*inputs), got[0])
    convert(block, to="torch")
    assert [type(m) for m in block.modules()] == kinds
    assert all(torch.equal(g, w) for g, w in zip(results(block, *inputs), want, strict=True) if g is not None)


@pytest.mark.parametrize("cls", UNFUSED)
def test_what_is_not_that_is_as_written(cls, fused):
    block, inputs = block_of(cls), given()
    want = results(convert(copy.deepcopy(block), fuse=None), *inputs)
    got = results(convert(block, fuse="trace"), *inputs)
    assert not fused
    assert_close(got, want, torch.finfo(torch.float32).eps)


def test_a_norm_in_a_branch_and_the_activation_behind_it_are_one_pass():
    block, inputs = block_of(Resnet, "default"), given()
    held, want = saved(convert(copy.deepcopy(block), fuse=None), *inputs)
    less, got = saved(convert(block, fuse="trace"), *inputs)
    assert held - less == inputs[0].nbytes - block.norm2.bias.nbytes
    assert_close(got, want, torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keeps_the_input_alone(dtype):
    """As written: the norm's input, the product's and the activation's."""
    block, inputs = block_of(Resnet).to(dtype), given(dtype)
    held, _ = saved(convert(copy.deepcopy(block), fuse=None), *inputs)
    less, _ = saved(convert(block, fuse="trace"), *inputs)
    of_samples = 3 * inputs[1].numel() * 4  # the weight and the bias of every sample, and 1 + scale
    assert held - less >= 2 * inputs[0].nbytes - of_samples


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cls", [Resnet, AdaGroupNorm])
def test_rounds_no_more_than_the_written_does(cls, dtype, fused):
    block, inputs = block_of(cls).to(dtype), given(dtype)
    exact = results(copy.deepcopy(block).double(), *(t.double() for t in inputs))
    want = results(copy.deepcopy(block), *inputs)
    got = results(convert(block, fuse="trace"), *inputs)
    assert len(fused) == 1
    for g, w, e in zip(got, want, exact, strict=True):
        assert g.dtype == w.dtype
        limit = 2 * (w.double() - e).abs().max() + torch.finfo(dtype).eps * e.abs().max()
        assert (g.double() - e).abs().max() <= limit


@pytest.mark.parametrize(("samples", "one_pass"), [(1, 1), (3, 0), (0, 0)])
@pytest.mark.parametrize("cls", [Resnet, AdaGroupNorm])
def test_in_channels_last_one_sample_is_one_pass_and_several_are_as_written(cls, samples, one_pass, fused):
    block, inputs = block_of(cls), given(samples=samples, layout=torch.channels_last)
    want = results(copy.deepcopy(block), *inputs)
    got = results(convert(block, fuse="trace"), *inputs)
    assert len(fused) == one_pass
    assert got[0].stride() == want[0].stride()
    assert_close(got, want, torch.finfo(torch.float32).eps) if samples else None


@pytest.mark.parametrize("cls", [Resnet, AdaGroupNorm])
def test_second_derivatives_checkpoints_and_lean(cls, fused):
    block, inputs = block_of(cls).double(), given(torch.float64)
    original = copy.deepcopy(block)
    convert(block, fuse="trace")

    def second(block):
        leaves = [t.clone().requires_grad_() for t in inputs]
        first = torch.autograd.grad(block(*leaves).square().sum(), leaves, create_graph=True)
        loss = sum(g.square().sum() for g in first)
        return [*first, *torch.autograd.grad(loss, [*leaves, *block.parameters()], allow_unused=True)]

    assert_close(second(block), second(original), 4 * torch.finfo(torch.float64).eps)
    want = results(block, *inputs)
    with leannorm.lean() as kept:
        got = results(block, *inputs)
    assert kept is not None
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    again = results(Checkpointed(block), *inputs)
    assert all(torch.equal(g, w) for g, w in zip(again, want, strict=True))
    assert len(fused) >= 4


class Checkpointed(stock.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *inputs):
        return torch.utils.checkpoint.checkpoint(self.block, *inputs, use_reentrant=False)


@pytest.mark.parametrize("cls", [Resnet, AdaGroupNorm])
def test_transforms_autocast_and_compiled_graphs_compute_what_is_written(cls, fused):
    block, inputs = block_of(cls).eval(), given()
    original = copy.deepcopy(block)
    convert(block, fuse="trace")
    for run in (torch.func.vmap(block), torch.compile(block, fullgraph=True, backend="aot_eager")):
        several = [torch.stack([t, 2 * t]) for t in inputs] if not hasattr(run, "_orig_mod") else inputs
        want = torch.func.vmap(original)(*several) if several is not inputs else original(*inputs)
        torch.testing.assert_close(run(*several), want)
    fused.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = block(*inputs), original(*inputs)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)
    exported = torch.export.export(block, tuple(inputs))
    assert "leannorm" not in str(exported.graph)
    torch.testing.assert_close(exported.module()(*inputs), original(*inputs))
    assert not fused


def hooked(block, monkeypatch):
    block.norm2.register_forward_hook(lambda module, inputs, output: output + 1)


def replaced(block, monkeypatch):
    block.norm2 = stock.Conv2d(C, C, 1)


def other_act(block, monkeypatch):
    block.nonlinearity = stock.Tanh()


def patched_act(block, monkeypatch):
    block.nonlinearity.forward = lambda x: x * 2


@pytest.mark.parametrize("change", [hooked, replaced, other_act, patched_act])
@pytest.mark.parametrize("how", ["default", "scale_shift"])
def test_changes_after_the_conversion_take_effect(change, how, monkeypatch):
    block, inputs = block_of(Resnet, how), given()
    original = copy.deepcopy(block)
    convert(block, fuse="trace")
    for one in (block, original):
        torch.manual_seed(1)
        change(one, monkeypatch)
    torch.testing.assert_close(block(*inputs), original(*inputs))


def test_a_patched_function_takes_effect(monkeypatch, fused):
    block, inputs = convert(block_of(AdaGroupNorm), fuse="trace"), given()
    monkeypatch.setattr(F, "group_norm", lambda x, *_, **named: x * 3)
    torch.testing.assert_close(block(*inputs), block.unfused.forward(block, *inputs))
    assert not fused


class Mixed(Resnet):
    """Another way through the branches, in which the activation stands behind no norm."""

    def forward(self, x, temb):
        if temb is None:
            y = self.norm2(x)
        else:
            x = x * 2
            y = x - 1
        y = self.nonlinearity(y)
        return y


def test_the_way_without_a_norm_is_as_written():
    block, (x, temb) = block_of(Mixed), given()
    original = copy.deepcopy(block)
    convert(block, fuse="trace")
    assert hasattr(type(block), "unfused")
    assert torch.equal(block(x, temb), original(x, temb))
    torch.testing.assert_close(block(x, None), original(x, None))


@pytest.mark.parametrize("cls", [Resnet, AdaGroupNorm])
def test_on_the_meta_device_as_on_any(cls):
    """Where torch has no autocast, and asking for it is an error."""
    block = convert(block_of(cls), fuse="trace").to("meta")
    y = block(*(t.to("meta") for t in given()))
    assert y.device.type == "meta"
