"""Norms with a scale, a gate, an activation or an offset leave as torch's operators, by every exporter.

A graph may hold nothing of ours, and computes what we compute: in eager torch, in `torch.jit`, in
onnxruntime (a sample of them on every run, all with `-m conformance`). TorchScript's exporter to ONNX knows
no RMS norm, of torch's either.
"""

import re

import numpy as np
import pytest
import torch
from export_cases import error_of, unsettle
from test_export_program import Function, ours
from torch import nn as stock

import leannorm
from leannorm import functional as F
from leannorm import nn
from leannorm.ops.activation import ACTIVATIONS

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "You are using the legacy TorchScript-based ONNX export:DeprecationWarning",
        "The feature will be removed:DeprecationWarning",
        ".*treespec:FutureWarning",
        ".torch.jit:DeprecationWarning",
        ":torch.jit.TracerWarning",
        "Constant folding - Only steps=1 can be constant folded",
    )
]

C = 8
N, L = 2, 5
WEIGHT, BIAS = torch.rand(C) + 0.5, torch.randn(C)


def tokens():
    return torch.randn(N, L, C)


def sample():
    return torch.randn(N, C) * 0.3


def token():
    return torch.randn(N, L, C) * 0.3


def channel():
    return torch.randn(C) * 0.3


def one():
    return torch.randn(N, 1, C) * 0.3


def image():
    return torch.randn(N, C, 4, 3)


def low():
    return torch.randn(N, L, C).bfloat16()


def ada(x, scale, shift):
    return F.ada_layer_norm(x, (C,), scale, shift)


LAYER_NORMS = {
    "ada_layer_norm of a sample": (ada, tokens, sample, sample),
    "ada_layer_norm of a token": (ada, tokens, token, token),
    "ada_layer_norm of one row": (ada, tokens, one, one),
    "ada_layer_norm of a channel": (ada, tokens, channel, channel),
    "ada_layer_norm of a sample's image": (ada, lambda: torch.randn(N, 3, L, C), sample, sample),
    "ada_layer_norm without shift": (lambda x, s: F.ada_layer_norm(x, (C,), s, None), tokens, sample),
    "ada_layer_norm with weight": (
        lambda x, s, t: F.ada_layer_norm(x, (C,), s, t, 1e-6, WEIGHT, BIAS), tokens, sample, sample,
    ),
    "ada_layer_norm of two axes": (
        lambda x, s: F.ada_layer_norm(x, (L, C), s, s), tokens, lambda: torch.randn(N, L, C) * 0.3,
    ),
    "add_ada_layer_norm": (
        lambda x, b, g, s, t: F.add_ada_layer_norm(x, b, g, (C,), s, t), tokens, tokens, sample, one, one,
    ),
    "add_ada_layer_norm without gate": (
        lambda x, b, s, t: F.add_ada_layer_norm(x, b, None, (C,), s, t), tokens, tokens, token, token,
    ),
    **{
        f"group_norm_act {act}": (lambda x, a=act: F.group_norm_act(x, 2, WEIGHT, BIAS, act=a), image)
        for act in ACTIVATIONS
    },
    "layer_norm of heads": (
        lambda x: F.layer_norm(x[:, :, 1], (C,), WEIGHT, BIAS), lambda: torch.randn(N, L, 3, 2, C),
    ),
    "nn.AdaLayerNorm": (nn.AdaLayerNorm(C), tokens, sample, sample),
    "nn.AdaLayerNorm with weight": (nn.AdaLayerNorm(C, elementwise_affine=True), tokens, one, one),
    "nn.GroupNormAct": (nn.GroupNormAct(2, C), image),
}  # fmt: skip
RMS_NORMS = {
    "ada_rms_norm": (lambda x, s: F.ada_rms_norm(x, (C,), s), tokens, sample),
    "ada_rms_norm with all": (
        lambda x, s, t: F.ada_rms_norm(x, (C,), s, 1e-6, WEIGHT, t), tokens, token, token,
    ),
    "add_ada_rms_norm": (
        lambda x, b, g, s: F.add_ada_rms_norm(x, b, g, (C,), s, weight=WEIGHT), tokens, tokens, one, sample,
    ),
    **{
        f"gated_rms_norm {act}, gate {'behind' if first else 'before'}, cast {cast}": (
            lambda x, g, a=act, f=first, c=cast: F.gated_rms_norm(x, g, (C,), WEIGHT, 1e-6, a, f, cast=c),
            tokens,
            tokens,
        )
        for act, first, cast in (
            ("silu", True, "after"), ("silu", False, "after"), ("silu", True, "before"),
            ("silu", False, "before"), ("gelu", True, "after"), ("identity", False, "after"),
        )
    },
    "rms_norm with offset": (lambda x: F.rms_norm(x, (C,), WEIGHT, weight_offset=1.0), tokens),
    "rms_norm cast before": (lambda x: F.rms_norm(x, (C,), WEIGHT, cast="before"), tokens),
    "rms_norm cast before with offset": (
        lambda x: F.rms_norm(x, (C,), WEIGHT, weight_offset=0.5, cast="before"), tokens,
    ),
    "rms_norm of heads": (
        lambda x: F.rms_norm(x[:, :, 1], (C,), WEIGHT, cast="before"), lambda: torch.randn(N, L, 3, 2, C),
    ),
    "add_rms_norm with offset": (
        lambda x, r: F.add_rms_norm(x, r, (C,), WEIGHT, weight_offset=1.0, cast="before"), tokens, tokens,
    ),
    "nn.AdaRMSNorm": (nn.AdaRMSNorm(C), tokens, sample, sample),
    "nn.RMSNormGated": (nn.RMSNormGated(C), tokens, tokens),
    "nn.RMSNormGated before": (nn.RMSNormGated(C, norm_before_gate=False, act="relu"), tokens, tokens),
    "nn.RMSNorm of Gemma": (nn.RMSNorm(C, weight_offset=1.0), tokens),
    "nn.RMSNorm of Llama": (nn.RMSNorm(C, cast="before"), tokens),
}  # fmt: skip
LOW = {
    "ada_layer_norm, bfloat16": (ada, low, sample, lambda: sample().bfloat16()),
    "add_ada_rms_norm, bfloat16": (lambda x, b, s: F.add_ada_rms_norm(x, b, s, (C,), s), low, low, sample),
    "gated_rms_norm, bfloat16": (
        lambda x, g: F.gated_rms_norm(x, g, (C,), WEIGHT.bfloat16(), cast="before"), low, low,
    ),
    "rms_norm of Llama, bfloat16": (lambda x: F.rms_norm(x, (C,), WEIGHT.bfloat16(), cast="before"), low),
    "rms_norm of Llama, wide weight": (lambda x: F.rms_norm(x, (C,), WEIGHT, cast="before"), low),
    "rms_norm of Gemma, bfloat16": (
        lambda x: F.rms_norm(x, (C,), WEIGHT.bfloat16(), weight_offset=1.0), low,
    ),
    "group_norm_act, bfloat16": (
        lambda x: F.group_norm_act(x, 2, WEIGHT, BIAS), lambda: image().bfloat16(),
    ),
}  # fmt: skip
ALL = {**LAYER_NORMS, **RMS_NORMS, **LOW}


def case(name):
    """The function or layer as a module with parameters that matter, its inputs, and what they give."""
    torch.manual_seed(0)
    call, *makes = ALL[name]
    model = call if isinstance(call, stock.Module) else Function(call)
    unsettle(model.eval())
    given = tuple(make() for make in makes)
    with torch.no_grad():
        expected = model(*given)
    return model, given, expected if isinstance(expected, tuple) else (expected,)


def compare(found, expected):
    found = found if isinstance(found, (tuple, list)) else (found,)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert error_of(mine, theirs) <= max(1e-5, 2 * torch.finfo(theirs.dtype).eps)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.sampled(of=3)
def test_it_leaves_as_torchs(name):
    model, given, expected = case(name)
    exported = torch.export.export(model, given)
    assert not ours(exported)
    traced = torch.jit.trace(model, given)
    assert "leannorm::" not in str(traced.inlined_graph)
    assert "PythonOp" not in str(traced.inlined_graph)
    for run in (exported.module(), traced):
        compare(run(*given), expected)
        leaves = [x.clone().requires_grad_() for x in given]
        out = [run(*leaves), model(*leaves)]
        first = [y[0] if isinstance(y, (tuple, list)) else y for y in out]
        up = torch.randn(first[0].shape).to(first[0].dtype)
        mine, theirs = (torch.autograd.grad(y, leaves, up) for y in first)
        for g, w in zip(mine, theirs, strict=True):
            budget = 64 if g.dtype == torch.float32 else 4
            assert error_of(g, w) <= budget * torch.finfo(g.dtype).eps


@pytest.mark.parametrize(
    "name", ["ada_layer_norm of a sample", "gated_rms_norm silu, gate behind, cast after"]
)
def test_a_size_may_be_free(name):
    model, given, _ = case(name)
    sizes = tuple({1: torch.export.Dim("length")} if x.dim() == 3 else {} for x in given)
    dynamic = (sizes,) if isinstance(model, Function) else sizes
    run = torch.export.export(model, given, dynamic_shapes=dynamic).module()
    more = tuple(torch.cat([x, x.flip(1)], 1) if x.dim() == 3 else x for x in given)
    compare(run(*more), (model(*more),))


SAMPLE = {
    "ada_layer_norm of a sample",
    "ada_layer_norm with weight",
    "add_ada_layer_norm",
    "group_norm_act silu",
    "layer_norm of heads",
    "add_ada_rms_norm",
    "gated_rms_norm silu, gate before, cast before",
    "rms_norm cast before with offset",
}
BY_ONNX = [
    pytest.param(exporter, name, marks=[] if name in SAMPLE else pytest.mark.conformance)
    for exporter, names in (("dynamo", [*LAYER_NORMS, *RMS_NORMS]), ("torchscript", LAYER_NORMS))
    for name in names
]


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize(("exporter", "name"), BY_ONNX)
def test_onnxruntime_computes_the_same(exporter, name, tmp_path):
    onnx, onnxruntime = (pytest.importorskip(n) for n in ("onnx", "onnxruntime"))
    pytest.importorskip("onnxscript")
    model, given, expected = case(name)
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, given, path, dynamo=exporter == "dynamo", verbose=False)
    graph = onnx.load(path)
    assert {f.domain for f in graph.functions} <= {"pkg.onnxscript.torch_lib.common"}
    nodes = {node.op_type for node in graph.graph.node} | {n.op_type for f in graph.functions for n in f.node}
    assert not [n for n in nodes if re.search("ATen|leannorm", n)]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    named = {slot.name: x.numpy() for slot, x in zip(session.get_inputs(), given, strict=True)}
    compare([torch.from_numpy(np.array(y)) for y in session.run(None, named)], expected)


class LlamaRMSNorm(stock.Module):
    """By its formula, as the norms that `convert` reads are."""

    def __init__(self):
        super().__init__()
        self.weight = stock.Parameter(torch.ones(C))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_norm_read_by_its_formula_leaves_as_its_own_code(exporter, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model, x = stock.Sequential(stock.Linear(C, C), LlamaRMSNorm()), tokens()
    unsettle(leannorm.convert(model.eval()))
    with torch.no_grad():
        expected = model(x)
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, (x,), path, dynamo=exporter == "dynamo", verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    compare(torch.from_numpy(y), (expected,))
