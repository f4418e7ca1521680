"""Several modulations of one norm are a pass each, and its own output is not made."""

import copy

import pytest
import torch
from test_fuse_group_modulated import C, block_of, given, results
from test_fuse_modulated import saved
from torch import nn as stock

from leannorm import convert
from leannorm.transforms.fusing import row_steps


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(row_steps, "SMALL", 0)


@pytest.fixture
def fused(monkeypatch):
    """What each modulation gave; None where it was computed as written."""
    calls, before = [], row_steps._modulated
    monkeypatch.setattr(row_steps, "_modulated", lambda *a: calls.append(before(*a)) or calls[-1])
    return calls


class Twice(stock.Module):
    """As SD35AdaLayerNormZeroX."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = stock.Linear(C, 4 * C), stock.LayerNorm(C, elementwise_affine=False)

    def forward(self, x, temb):
        x = x.flatten(2).mT
        shift, scale, shift2, scale2 = self.linear(temb).chunk(4, dim=1)
        norm_hidden_states = self.norm(x)
        x = norm_hidden_states * (1 + scale[:, None]) + shift[:, None]
        norm_hidden_states2 = norm_hidden_states * (1 + scale2[:, None]) + shift2[:, None]
        return torch.cat([x, norm_hidden_states2])


class ReadOnce(Twice):
    """The last one takes the norm's name."""

    def forward(self, x, temb):
        x = x.flatten(2).mT
        shift, scale, shift2, scale2 = self.linear(temb).chunk(4, dim=1)
        y = self.norm(x)
        z = y * (1 + scale[:, None]) + shift[:, None]
        y = y * (1 + scale2[:, None]) + shift2[:, None]
        return z + y


class OfTheFirst(Twice):
    """What the first makes is the second's shift."""

    def forward(self, x, temb):
        x = x.flatten(2).mT
        shift, scale, _, scale2 = self.linear(temb).chunk(4, dim=1)
        y = self.norm(x)
        first = y * (1 + scale[:, None]) + shift[:, None]
        second = y * (1 + scale2[:, None]) + first
        return first + second


class ReadAfter(Twice):
    def forward(self, x, temb):
        x = x.flatten(2).mT
        shift, scale, shift2, scale2 = self.linear(temb).chunk(4, dim=1)
        y = self.norm(x)
        first = y * (1 + scale[:, None]) + shift[:, None]
        second = y * (1 + scale2[:, None]) + shift2[:, None]
        return first + second + y


@pytest.mark.parametrize("cls", [ReadOnce, OfTheFirst, ReadAfter])
def test_what_is_not_that_is_as_written(cls, fused):
    block, inputs = block_of(cls), given()
    want = results(convert(copy.deepcopy(block), fuse=None), *inputs)
    got = results(convert(block, fuse="trace"), *inputs)
    assert not fused
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_a_small_input_is_as_written(fused, monkeypatch):
    monkeypatch.setattr(row_steps, "SMALL", 1 << 17)
    block = convert(block_of(Twice), fuse="trace")
    block(*given())
    assert not fused
    block(*given(samples=820))
    assert len(fused) == 2


def test_on_the_meta_device_as_on_any():
    """Where torch has no autocast, and asking for it is an error."""
    block = convert(block_of(Twice), fuse="trace").to("meta")
    assert block(*(t.to("meta") for t in given())).device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_modulations_of_one_norm_keep_its_input_alone(dtype, fused):
    block, inputs = block_of(Twice).to(dtype), given(dtype)
    exact = results(copy.deepcopy(block).double(), *(t.double() for t in inputs))
    want, kinds = results(copy.deepcopy(block), *inputs), [type(m) for m in block.modules()]
    held, _ = saved(convert(copy.deepcopy(block), fuse=None), *inputs)
    less, _ = saved(convert(block, fuse="trace"), *inputs)
    fused.clear()
    got = results(block, *inputs)
    assert len(fused) == 2
    assert all(y is not None for y in fused)
    assert less < held
    for g, w, e in zip(got, want, exact, strict=True):
        assert g.dtype == w.dtype
        limit = 2 * (w.double() - e).abs().max() + 4 * torch.finfo(dtype).eps * e.abs().max()
        assert (g.double() - e).abs().max() <= limit
    block.norm.register_forward_hook(lambda module, inputs, output: output * 2)
    fused.clear()
    assert not torch.equal(block(*inputs), got[0])
    assert not fused
    block.norm._forward_hooks.clear()
    convert(block, to="torch")
    assert [type(m) for m in block.modules()] == kinds
    assert all(torch.equal(g, w) for g, w in zip(results(block, *inputs), want, strict=True))
