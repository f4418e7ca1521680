"""A layer or RMS norm and `* (1 + scale) + shift` behind it run in one pass, where nothing can tell.

The blocks are written as diffusers writes its own; those run in `make conformance`.
"""

import copy
import pickle

import pytest
import torch
from formula_cases import LlamaNorm
from torch import nn as stock

from leannorm import convert
from leannorm.transforms.fusing import row_steps

C = 16


class Block(stock.Module):
    def __init__(self, norm=stock.LayerNorm):
        super().__init__()
        self.norm, self.other = norm(C), norm(C)
        self.branch, self.linear, self.silu = stock.Linear(C, C), stock.Linear(C, 4 * C), stock.SiLU()


def in_one_line(self, x, emb):
    shift, scale, gate, _ = self.linear(self.silu(emb)).chunk(4, dim=1)
    x = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
    return x * gate[:, None]


def indexed_behind(self, x, emb):
    scale, shift, _, _ = torch.chunk(self.linear(emb), 4, dim=1)
    return self.norm(x) * (1 + scale)[:, None, :] + shift[:, None, :]


def in_two_lines(self, x, emb):
    shift, scale, _, gate = self.linear(emb).chunk(4, dim=1)
    hidden = self.norm(x)
    hidden = hidden * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
    return gate.unsqueeze(1) * self.branch(hidden)


def returned(self, x, emb):
    shift, scale, _, _ = self.linear(emb[:, None]).chunk(4, dim=-1)
    normed = self.norm(x)
    return normed * (1.0 + scale) + shift


def without_shift(self, x, emb):
    scale, gate, _, _ = self.linear(emb).chunk(4, dim=1)
    x = self.norm(x) * (1 + scale[:, None])
    return x + gate[:, None]


def of_each_token(self, x, emb):
    scale, shift, _, _ = self.linear(x + emb[:, None]).chunk(4, dim=-1)
    return self.branch(self.norm(x) * (1 + scale) + shift)


def in_float32(self, x, emb):
    scale, shift, _, _ = self.linear(emb).chunk(4, dim=1)
    scale, shift = scale.float()[:, None], shift.float()[:, None]
    return (self.other(self.norm(x.float()) * (1 + scale) + shift)).type_as(x)


def behind_a_sum(self, x, emb):
    shift, scale, _, gate = self.linear(emb).chunk(4, dim=1)
    x = x + gate.unsqueeze(1) * self.branch(x)
    hidden = self.norm(x)
    hidden = hidden * (1 + scale[:, None]) + shift[:, None]
    return x + hidden


def behind_a_sum_that_nobody_reads(self, x, emb):
    shift, scale, _, _ = self.linear(emb).chunk(4, dim=1)
    x = x + self.branch(x)
    x = self.norm(x)
    x = x * (1 + scale[:, None]) + shift[:, None]
    return x


FUSED = [
    in_one_line, indexed_behind, in_two_lines, returned, without_shift, of_each_token, in_float32,
    behind_a_sum, behind_a_sum_that_nobody_reads,
]  # fmt: skip


def read_twice(self, x, emb):
    shift, scale, shift2, scale2 = self.linear(emb).chunk(4, dim=1)
    normed = self.norm(x)
    y = normed * (1 + scale[:, None]) + shift[:, None]
    return y, normed * (1 + scale2[:, None]) + shift2[:, None]


def by_itself(self, x, emb):
    y = self.norm(x)
    y = y * (1 + y) + y
    return y


def another_factor(self, x, emb):
    shift, scale, _, _ = self.linear(emb).chunk(4, dim=1)
    return self.norm(x) * (2 + scale[:, None]) + shift[:, None]


def kept_between(self, x, emb):
    shift, scale, _, _ = self.linear(emb).chunk(4, dim=1)
    y = self.norm(x)
    z = y
    y = y * (1 + scale[:, None]) + shift[:, None]
    return y, z


def shift_is_the_sum(self, x, emb):
    scale = self.linear(emb).chunk(4, dim=1)[0]
    r = x + self.branch(x)
    y = self.norm(r)
    y = y * (1 + scale[:, None]) + r
    return y


def of_rows_as_torch_broadcasts(self, x, emb):
    """(3, C) with x (2, 3, C): torch's scale is a token's, ours would be a sample's."""
    scale = self.linear(emb).chunk(4, dim=1)[0]
    scale = torch.cat([scale, scale[:1]])
    return self.norm(x) * (1 + scale) + scale


def of_one_channel(self, x, emb):
    scale = emb[:, None, :1]
    return self.norm(x) * (1 + scale) + scale


def number(self, x, emb):
    scale = 0.5
    return self.norm(x) * (1 + scale) + scale


def wider(self, x, emb):
    scale = emb.double()[:, None]
    return self.norm(x) * (1 + scale) + scale


def of_two_shapes(self, x, emb):
    scale = emb[:, None]
    return self.norm(x) * (1 + scale) + x


UNFUSED = [
    read_twice, by_itself, another_factor, kept_between, shift_is_the_sum, of_rows_as_torch_broadcasts,
    of_one_channel, number, wider, of_two_shapes,
]  # fmt: skip


@pytest.fixture
def fused(monkeypatch):
    """The norms that ran with their modulation."""
    calls, before = [], row_steps._modulated

    def counting(norm, *given):
        found = before(norm, *given)
        calls.extend([norm] * (found is not None))
        return found

    monkeypatch.setattr(row_steps, "_modulated", counting)
    return calls


def block_of(forward, norm=stock.LayerNorm):
    torch.manual_seed(0)
    cls = type(
        "Modulated", (Block,), {"forward": forward, "__module__": __name__, "__qualname__": "Modulated"}
    )
    globals()["Modulated"] = cls  # for pickle
    block = cls(norm)
    with torch.no_grad():
        for p in block.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    return block


def given(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 3, C), (2, C))]


def results(block, x, emb):
    leaves = [t.clone().requires_grad_() for t in (x, emb)]
    out = block(*leaves)
    y = torch.cat([out[0], out[1]]) if isinstance(out, tuple) else out
    up = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [*leaves, *block.parameters()], up, allow_unused=True)]


def assert_close(got, want, eps):
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if g is not None:
            assert (g.dtype, g.shape) == (w.dtype, w.shape)
            assert (g - w).abs().max() <= 32 * eps * w.abs().max().clamp(min=1e-3)


def plain(size):
    return stock.LayerNorm(size, elementwise_affine=False, eps=1e-6)


@pytest.mark.parametrize("norm", [stock.LayerNorm, plain, stock.RMSNorm, LlamaNorm])
@pytest.mark.parametrize("forward", FUSED, ids=lambda f: f.__name__)
def test_computes_the_same_in_one_pass(forward, norm, fused):
    block, inputs = block_of(forward, norm), given()
    kinds, want = [type(m) for m in block.modules()], results(copy.deepcopy(block), *inputs)
    convert(copy.deepcopy(block), fuse="certain")(*inputs)
    assert not fused
    got = results(convert(block, fuse="trace"), *inputs)
    assert len(fused) == 1
    assert_close(got, want, torch.finfo(torch.float32).eps)
    for again in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(again(*inputs), got[0])
    convert(block, to="torch")
    assert [type(m) for m in block.modules()] == kinds
    assert all(torch.equal(g, w) for g, w in zip(results(block, *inputs), want, strict=True) if g is not None)


@pytest.mark.parametrize("forward", UNFUSED, ids=lambda f: f.__name__)
def test_what_is_not_that_is_as_written(forward, fused):
    block, inputs = block_of(forward), given()
    want = results(convert(copy.deepcopy(block), fuse=None), *inputs)
    got = results(convert(block, fuse="trace"), *inputs)
    assert not fused
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True) if g is not None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", [stock.LayerNorm, stock.RMSNorm])
@pytest.mark.parametrize("forward", [in_one_line, behind_a_sum], ids=lambda f: f.__name__)
def test_rounds_no_more_than_the_written_does(forward, norm, dtype, fused):
    block, inputs = block_of(forward, norm).to(dtype), given(dtype)
    exact = results(copy.deepcopy(block).double(), *(t.double() for t in inputs))
    want = results(copy.deepcopy(block), *inputs)
    got = results(convert(block, fuse="trace"), *inputs)
    assert len(fused) == 1
    for g, w, e in zip(got, want, exact, strict=True):
        if g is not None:
            assert g.dtype == w.dtype
            limit = 2 * (w.double() - e).abs().max() + torch.finfo(dtype).eps * e.abs().max()
            assert (g.double() - e).abs().max() <= limit


def test_a_llama_norm_with_a_wide_weight_keeps_its_dtype(fused):
    block = block_of(in_one_line, LlamaNorm).bfloat16()
    block.norm.float()
    want = copy.deepcopy(block)(*given(torch.bfloat16))
    got = convert(block, fuse="trace")(*given(torch.bfloat16))
    assert got.dtype == want.dtype == torch.float32
    assert not fused


def hooked(block):
    block.norm.register_forward_hook(lambda module, inputs, output: output + 1)


def replaced(block):
    block.norm = stock.Linear(C, C)


def patched(block):
    block.norm.forward = lambda x: x * 2


def other_eps(block):
    block.norm.eps = block.norm.variance_epsilon = 0.5


@pytest.mark.parametrize("change", [hooked, replaced, patched, other_eps], ids=lambda f: f.__name__)
@pytest.mark.parametrize("norm", [stock.LayerNorm, LlamaNorm])
def test_changes_after_the_conversion_take_effect(change, norm):
    block, inputs = block_of(in_two_lines, norm), given()
    original = copy.deepcopy(block)
    convert(block, fuse="trace")
    for one in (block, original):
        torch.manual_seed(1)
        change(one)
    torch.testing.assert_close(block(*inputs), original(*inputs))


def test_autocast_has_torchs_dtypes(fused):
    block, inputs = block_of(in_one_line), given()
    original = copy.deepcopy(block)
    convert(block, fuse="trace")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = block(*inputs), original(*inputs)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)
    assert not fused


@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")
def test_exported_graphs_have_torchs_norms_and_compiled_ones_ours(fused):
    block, inputs = block_of(in_one_line).eval(), given()
    want = block(*inputs)
    convert(block, fuse="trace")
    exported = torch.export.export(block, tuple(inputs))
    assert "leannorm" not in str(exported.graph)
    torch.testing.assert_close(exported.module()(*inputs), want)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), want)


@pytest.mark.parametrize("norm", [stock.LayerNorm, LlamaNorm])
def test_on_the_meta_device_as_on_any(norm):
    """Where torch has no autocast, and asking for it is an error."""
    block = convert(block_of(in_one_line, norm), fuse="trace").to("meta")
    assert block(*(t.to("meta") for t in given())).device.type == "meta"


class Resnet(stock.Module):
    """Group norm and SiLU, as in diffusers' UNets."""

    def __init__(self):
        super().__init__()
        self.norm1, self.conv1 = stock.GroupNorm(4, 8), stock.Conv2d(8, 8, 3, padding=1)
        self.nonlinearity = stock.SiLU()

    def forward(self, x):
        hidden = self.norm1(x)
        hidden = self.nonlinearity(hidden)
        return x + self.conv1(hidden)


def saved(block, *given):
    """Bytes kept for the backward pass, and the results."""
    sizes = {}

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    leaves = [t.clone().requires_grad_() for t in given]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(*leaves)
    return sum(sizes.values()), [
        y.detach(),
        *torch.autograd.grad(y.square().sum(), [*leaves, *block.parameters()]),
    ]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_group_norm_and_its_activation_are_one_pass(layout, dtype):
    torch.manual_seed(0)
    block, x = Resnet().to(dtype), torch.randn(2, 8, 6, 5).to(dtype).to(memory_format=layout)
    exact = saved(copy.deepcopy(block).double(), x.double())[1]
    held, want = saved(convert(copy.deepcopy(block), fuse=None), x)
    less, got = saved(convert(block, fuse="trace"), x)
    assert held - less == x.nbytes - block.norm1.bias.nbytes  # silu's input is computed again, with the bias
    for g, w, e in zip(got, want, exact, strict=True):
        limit = 2 * (w.double() - e).abs().max() + 8 * torch.finfo(dtype).eps * e.abs().max()
        assert (g.double() - e).abs().max() <= limit
    block.nonlinearity.register_forward_hook(lambda *_: None)
    assert saved(block, x)[0] == held
