"""Scaled dot product attention: its output is computed again where that is allowed; dropout holds bits."""

import gc
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from test_lean_narrow import assert_stock, held
from torch import nn

from leannorm import lean

BATCH, TOKENS, HEADS, DEPTH = 2, 72, 4, 16
OPERATOR = (
    "aten::_scaled_dot_product_flash_attention_for_cpu"  # as its outputs are named where it is recorded
)
MASK = torch.rand(TOKENS, TOKENS) > 0.3
MASK.fill_diagonal_(True)
CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "mask": {"attn_mask": MASK},
    "added mask": {"attn_mask": torch.randn(TOKENS, TOKENS)},
    "mask of each head": {"attn_mask": MASK.expand(BATCH, HEADS, TOKENS, TOKENS)},
    "few keys": {"enable_gqa": True},
}


class Attention(nn.Module):
    def __init__(self, dtype, **call):
        super().__init__()
        width, self.keys = HEADS * DEPTH, 2 if call.get("enable_gqa") else HEADS
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, self.keys * DEPTH), nn.Linear(width, self.keys * DEPTH)
        masked = "attn_mask" in call and call["attn_mask"].is_floating_point()
        self.call = {**call, "attn_mask": call["attn_mask"].to(dtype)} if masked else call
        self.to(dtype)

    def forward(self, x):
        def heads(y):
            return y.view(BATCH, TOKENS, -1, DEPTH).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        y = F.scaled_dot_product_attention(q, k, v, **self.call)
        return x + self.out(y.transpose(1, 2).reshape(BATCH, TOKENS, -1))


def tokens(dtype):
    return torch.randn(BATCH, TOKENS, HEADS * DEPTH, dtype=dtype, requires_grad=True)


def held_output(saved):
    """Bytes of the outputs that are kept; the statistics of the softmax are, in any case."""
    outputs = [r for r in saved.records if r.node == OPERATOR and len(r.shape) == 4]
    assert outputs
    return sum(r.bytes for r in outputs if not r.rebuilt)


# the sum behind attention is rebuilt where nothing tells the size of x * 1, and held where a plan holds that
@pytest.mark.filterwarnings("ignore:leannorm. more is kept than the plan", "ignore:.*is out of reach")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_the_output_is_computed_again(call, dtype):
    model, x = Attention(dtype, **CALLS[call]), tokens(dtype)
    for _ in range(2):
        saved = lean(budget=0.01)
        assert_stock(lambda: model(x * 1).float().square().sum(), [x, *model.parameters()], saved)
        expected = (
            "more is kept than the plan",
            "out of reach",
            "lowers no peak",
            "no node made it",
        )  # a bool mask as floats
        assert not [reason for reason in saved.reasons if not any(map(reason.__contains__, expected))]
        assert [r for r in saved.records if r.node == OPERATOR and r.rebuilt]
        assert held_output(saved) == 0


def test_what_one_layer_holds_of_it():
    """The statistics of the softmax; queries, keys, values and the output follow from the layer's input."""
    model, x, saved = Attention(torch.float32), tokens(torch.float32), lean(overhead=10.0)
    assert_stock(lambda: model(x.sin()).sum(), [x, *model.parameters()], saved)
    assert saved.kept_bytes <= x.nbytes + BATCH * HEADS * TOKENS * 4


@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize(("keys", "rebuilt"), [(256, True), (257, False)])
def test_of_few_keys_it_costs_little(keys, rebuilt, setting):
    q = torch.randn(1, 2, 64, 16, requires_grad=True)
    k = torch.randn(1, 2, keys, 16, requires_grad=True)
    saved = lean(setting)
    assert_stock(lambda: F.scaled_dot_product_attention(q, k, k).exp().sum(), [q, k], saved)
    assert (held_output(saved) == 0) == (rebuilt and setting == "conv")


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_its_dropout_holds_bits(p):
    """torch's fused kernel for the CPU has no dropout: weights are made, and their mask is of two values.

    The output is a third product in a row, and is held.
    """
    model, x, saved = Attention(torch.float32, dropout_p=p), tokens(torch.float32), lean(overhead=10.0)
    assert_stock(lambda: model(x.sin()).sum(), [x, *model.parameters()], saved)
    assert held(saved, "bits of a mask") == BATCH * HEADS * TOKENS * TOKENS // 8
    assert saved.kept_bytes <= 2 * x.nbytes + BATCH * HEADS * TOKENS * TOKENS // 8


def test_queries_that_are_edited_before_the_backward_pass():
    """The node keeps them: autograd's error, as in stock."""
    q = torch.randn(BATCH, HEADS, TOKENS, DEPTH, requires_grad=True)
    with lean(overhead=10.0):
        y = q * 2
        loss = F.scaled_dot_product_attention(y, q, q).square().sum()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_output_that_is_edited_unseen_is_held():
    q = torch.randn(BATCH, HEADS, TOKENS, DEPTH, requires_grad=True)

    def run():
        y = F.scaled_dot_product_attention(q * 2, q, q)
        early = y.square().sum()
        y.data.mul_(3)
        return early + y.exp().sum() + y.square().sum()

    with torch.enable_grad():
        run()
    assert_stock(run, [q], lean(overhead=10.0))


@pytest.mark.filterwarnings("ignore:leannorm. most of what this pass saved was freed")
def test_a_graph_that_is_dropped_is_freed():
    """The node keeps its own output, whose rebuild must not lead back to the node."""
    q = torch.randn(BATCH, HEADS, TOKENS, DEPTH, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        with lean(overhead=10.0):
            y = F.scaled_dot_product_attention(q.sin(), q, q)
            y.grad_fn.metadata["note"] = note = nn.Identity()
            dropped = weakref.ref(note)
            del y, note
        assert dropped() is None
    finally:
        gc.enable()


class OfKeysWiderThanValues(nn.Module):
    """As DeepSeek's heads: torch computes it by products, a mask and a softmax; no node keeps the mask."""

    def __init__(self, attend, **call):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, HEADS * depth) for depth in (24, 24, 16))
        self.attend, self.call, self.is_causal = attend, {"attention_mask": None, **call}, True

    def forward(self, x):
        q, k, v = (f(x).view(BATCH, TOKENS, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + self.attend(self, q, k, v, **self.call)[0].flatten(2)


def of_transformers(*given, **call):
    module = pytest.importorskip("transformers.integrations.sdpa_attention")
    return module.sdpa_attention_forward(*given, **call)


def sdpa_attention_forward(module, query, key, value, attention_mask, is_causal=True):
    """Others' function of this name: its variables do not say what it calls."""
    window = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(-5)
    return F.scaled_dot_product_attention(query, key, value, window).transpose(1, 2), None


MASKED = {
    "causal": (of_transformers, {}),
    "causal, scaled": (of_transformers, {"scaling": 0.3}),
    "a mask is given": (of_transformers, {"attention_mask": MASK}),
    "not causal": (of_transformers, {"is_causal": False}),
    "in others' function": (sdpa_attention_forward, {"is_causal": True}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", MASKED)
def test_attention_weights_behind_a_causal_mask(case, dtype, monkeypatch):
    attend, call = MASKED[case]
    module = sys.modules.get("transformers.integrations.sdpa_attention")
    if attend is sdpa_attention_forward and module is not None:
        monkeypatch.setattr(module, "sdpa_attention_forward", attend)
    model, x = OfKeysWiderThanValues(attend, **call).to(dtype), tokens(dtype)
    for _ in range(3):
        saved = lean("conv")
        assert_stock(lambda: model(x * 1).float().square().sum(), [x, *model.parameters()], saved)
        (weights,) = [r for r in saved.records if r.node == "aten::_safe_softmax"]
        assert weights.rebuilt, saved.reasons
