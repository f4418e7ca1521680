"""`fuse="trace"`: an addition and the layer or RMS norm behind it run in one pass, where nothing can tell."""

import copy
import pickle

import pytest
import torch
from formula_cases import GateBehind, GemmaNorm, LlamaNorm
from torch import nn as stock

from leannorm import convert, nn
from leannorm.transforms.fusing import row_steps


class Block(stock.Module):
    """A pre-norm block."""

    def __init__(self, norm=LlamaNorm):
        super().__init__()
        self.norm, self.other = norm(16), norm(16)
        self.branch = stock.Linear(16, 16)


def kept_by_name(self, x):
    residual = x
    hidden = self.branch(x)
    hidden = residual + hidden
    residual = hidden
    hidden = self.norm(hidden)
    return residual + self.branch(hidden)


def another_name(self, x):
    x = x + self.branch(x)
    y = self.norm(x)
    return x + self.branch(y)


def post_norm(self, x):
    x = self.branch(x) + x
    x = self.norm(x)
    return x


def in_a_branch(self, x):
    for _ in range(2):
        if x.dim() == 3:
            total = x + self.branch(x)
            a = b = None
            a = total
            b = total
            x = total
            y = self.norm(total)
            x = y + a + b + x
    return x


def two(self, x):
    total = self.branch(x) + x
    y = self.norm(total)
    total = total + y
    kept = total
    total = self.other(total)
    return kept * total


FUSED = {kept_by_name: 1, another_name: 1, post_norm: 1, in_a_branch: 0, two: 2}


def in_place(self, x):
    x = self.branch(x)
    x += 1
    return self.norm(x)


def read_between(self, x):
    x = x + self.branch(x)
    y = x * 2
    return self.norm(x) + y


def another_input(self, x):
    y = x + self.branch(x)
    z = self.norm(x)
    return y + z


def with_alpha(self, x):
    y = torch.add(x, self.branch(x), alpha=2)
    y = self.norm(y)
    return y


UNFUSED = [in_place, read_between, another_input, with_alpha]


@pytest.fixture
def fused(monkeypatch):
    """The number of additions that ran in a norm's pass."""
    calls, before = [], row_steps._added_and_normalized

    def counting(a, b, norm, *modulation):
        found = before(a, b, norm, *modulation)
        calls.extend([norm] * (found is not None))
        return found

    monkeypatch.setattr(row_steps, "_added_and_normalized", counting)
    return calls


def block_of(forward, norm=LlamaNorm):
    torch.manual_seed(0)
    cls = type("Written", (Block,), {"forward": forward, "__module__": __name__, "__qualname__": "Written"})
    globals()["Written"] = cls  # for pickle
    return cls(norm)


def results(block, x):
    leaf = x.clone().requires_grad_()
    y = block(leaf)
    up = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    return [y.detach(), *torch.autograd.grad(y, [leaf, *block.parameters()], up, allow_unused=True)]


def assert_close(got, want, dtype):
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if g is not None:
            assert (g - w).abs().max() <= 16 * torch.finfo(dtype).eps * w.abs().max()


@pytest.mark.parametrize("norm", [LlamaNorm, GemmaNorm, stock.LayerNorm, stock.RMSNorm])
@pytest.mark.parametrize("forward", FUSED, ids=lambda f: f.__name__)
def test_computes_the_same_in_fewer_passes(forward, norm, fused):
    block, x = block_of(forward, norm), torch.randn(2, 3, 16)
    original, kinds = copy.deepcopy(block), [type(m) for m in block.modules()]
    want, plain = results(original, x), results(convert(copy.deepcopy(block)), x)
    got = results(convert(block, fuse="trace"), x)
    assert len(fused) == FUSED[forward] or (forward is in_a_branch and len(fused) == 2)
    assert_close(got, want, torch.float32)
    assert torch.equal(got[0], plain[0])
    for again in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(again(x), got[0])
    convert(block, to="torch")
    assert [type(m) for m in block.modules()] == kinds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("norm", [LlamaNorm, GemmaNorm, stock.LayerNorm, stock.RMSNorm])
def test_rounds_as_the_two_do(norm, dtype, fused):
    block, x = block_of(kept_by_name, norm).to(dtype), torch.randn(2, 3, 16).to(dtype)
    plain, trace = (convert(copy.deepcopy(block), fuse=fuse) for fuse in ("certain", "trace"))
    assert torch.equal(trace(x), plain(x))
    own_code = dtype == torch.float64 and norm in (LlamaNorm, GemmaNorm)
    assert len(fused) == (not own_code)


@pytest.mark.parametrize("forward", UNFUSED, ids=lambda f: f.__name__)
def test_what_is_not_that_is_as_written(forward, fused):
    block, x = block_of(forward), torch.randn(2, 3, 16)
    want = results(convert(copy.deepcopy(block)), x)
    got = results(convert(block, fuse="trace"), x)
    assert not fused
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True) if g is not None)


def hooked(block):
    block.norm.register_forward_hook(lambda module, inputs, output: output + 1)


def replaced(block):
    block.norm = stock.Linear(16, 16)


def patched(block):
    block.norm.forward = lambda x: x * 2


def other_eps(block):
    block.norm.variance_epsilon = 0.5


def wide_weight(block):
    block.norm.weight = stock.Parameter(torch.ones(3, 16))


@pytest.mark.parametrize(
    "change", [hooked, replaced, patched, other_eps, wide_weight], ids=lambda f: f.__name__
)
def test_changes_after_the_conversion_take_effect(change, fused):
    torch.manual_seed(0)
    block, x = block_of(kept_by_name), torch.randn(2, 3, 16)
    original = copy.deepcopy(block)
    convert(block, fuse="trace")
    for one in (block, original):
        torch.manual_seed(1)
        change(one)
    torch.testing.assert_close(block(x), original(x))
    assert not fused


def test_sums_of_other_shapes_and_dtypes_are_formed_first(fused):
    class Broadcast(Block):
        def forward(self, x, other):
            y = x + other
            y = self.norm(y)
            return y

    block = Broadcast()
    original = copy.deepcopy(block)
    convert(block, fuse="trace")
    x = torch.randn(2, 3, 16)
    for other in (torch.randn(16), 1.0, torch.randn(2, 3, 16).double(), torch.randn(2, 3, 16).bfloat16()):
        torch.testing.assert_close(block(x, other), original(x, other))
    assert not fused
    block(x, x)
    assert len(fused) == 1


def test_a_gated_norm_has_no_addition_in_its_pass(fused):
    block = block_of(another_name)
    block.norm = GateBehind(16)
    convert(block, fuse="trace")
    with pytest.raises(TypeError, match="gate"):
        block(torch.randn(2, 3, 16))
    assert not fused


def test_compiles_as_one_graph():
    block, x = block_of(kept_by_name, nn.RMSNorm), torch.randn(2, 3, 16)
    want = block(x)
    convert(block, fuse="trace")
    torch.testing.assert_close(torch.compile(block, fullgraph=True, backend="aot_eager")(x), want)
