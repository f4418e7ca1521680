"""Converted models under TorchScript's tracer and compiler, and under torch.fx's quantization."""

import copy
import pickle
import warnings
from collections import Counter

import pytest
import torch
from export_cases import IMAGE, Case, error_of, state, unsettle
from torch import nn as stock
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx, prepare_qat_fx

import leannorm
from leannorm import nn

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max"),
    pytest.mark.filterwarnings("ignore:_aminmax is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]
CASES = [
    Case("convolutional"),
    Case("convolutional", lean=True),
    Case("grouped"),
    Case("rows"),
    Case("rms"),
    Case("timm:test_resnet"),
]


def traced(model, x):
    """The trace, and what its tracer warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = torch.jit.trace(model, x)
    return result, Counter(str(w.message)[:60] for w in caught if w.category is torch.jit.TracerWarning)


@pytest.mark.parametrize("case", [*CASES, Case("own")], ids=str)
def test_a_trace_with_gradients(case):
    model, x = case.build()
    model, x = model.double(), x.double().requires_grad_()
    expected, before = model(x), state(model)
    result, warned = traced(model, x)
    assert state(model) == before
    assert "leannorm::" not in str(result.inlined_graph)
    assert "PythonOp" not in str(result.inlined_graph)
    y = result(x)
    assert error_of(y, expected) <= 1e-5
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    gradients = [torch.autograd.grad(v.square().sum(), leaves, allow_unused=True) for v in (y, expected)]
    mine, theirs = (torch.cat([g.flatten() for g in of if g is not None]) for of in gradients)
    assert error_of(mine, theirs) <= 1e-9
    if case.name != "own":
        assert warned <= traced(*case.build(False))[1]


def test_a_trace_of_training_holds_our_operator():
    model = leannorm.convert(stock.Sequential(stock.Conv2d(3, 4, 3), stock.BatchNorm2d(4), stock.ReLU()))
    other, x = copy.deepcopy(model), torch.randn(4, *IMAGE)
    result = torch.jit.trace(other, x, check_trace=False)
    assert "leannorm::tracked_batch_norm" in str(result.inlined_graph)
    model(x)  # as the tracer has run it
    for run in (model, result):
        run(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(other.get_parameter(name).grad, parameter.grad), name
    for name, buffer in model.named_buffers():
        assert torch.equal(other.get_buffer(name), buffer), name


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.BatchNorm2d(4), lambda: nn.SyncBatchNorm(4), lambda: nn.BatchNormAct2d(4),
        lambda: nn.InstanceNorm2d(4), lambda: nn.GroupNorm(2, 4), lambda: nn.LayerNorm(4),
        lambda: nn.RMSNorm(4), lambda: nn.ConvBatchNorm2d(4, 4, 1), lambda: nn.BatchNormOp(4),
    ],
)  # fmt: skip
def test_script_says_in_one_line_what_to_do(layer):
    model = stock.Sequential(stock.Conv2d(3, 4, 1), layer())
    before = state(model)
    with pytest.raises(leannorm.InputError, match=r'leannorm.convert\(model, to="torch"\) first') as raised:
        torch.jit.script(model)
    assert "\n" not in str(raised.value)
    assert state(model) == before


def test_script_compiles_what_was_taken_back():
    model, x = Case("convolutional").build()
    expected = model(x)
    scripted = torch.jit.script(leannorm.convert(model, to="torch"))
    assert error_of(scripted(x), expected) <= 1e-5


def nodes(prepared):
    """Every node as what it calls: modules by their class, all else by its name."""
    return [
        type(prepared.get_submodule(n.target)).__name__ if n.op == "call_module" else (n.op, str(n.target))
        for n in prepared.graph.nodes
    ]


QUANTIZED = {
    "static": lambda model, x: prepare_fx(model, get_default_qconfig_mapping(), (x,)),
    "training": lambda model, x: prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping(), (x,)),
}


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize(
    "case",
    [
        Case("convolutional"), Case("grouped"), Case("rows"),
        Case("timm:test_resnet"), Case("timm:test_efficientnet_gn"), Case("timm:test_convnext"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.sampled(of=3)
def test_quantization_sees_what_it_sees_in_the_stock_model(case, kind):
    (model, x), (theirs, _) = case.build(), case.build(False)
    model.train(kind == "training")
    classes, tensors = [type(m) for m in model.modules()], state(model)[0]
    prepared, wanted = QUANTIZED[kind](model, x), QUANTIZED[kind](theirs, x)
    if kind == "static":
        assert sum("Observer" in n for n in nodes(prepared)) > 2
        assert state(model)[0] == tensors
    assert [type(m) for m in model.modules()] == classes
    assert nodes(prepared) == nodes(wanted)
    if kind != "training":
        assert error_of(prepared(x), wanted(x)) <= 1e-5


def test_a_quantized_model_runs():
    (model, x), (theirs, _) = Case("convolutional").build(), Case("convolutional").build(False)
    y, expected = [], []
    for source, out in ((model, y), (theirs, expected)):
        prepared = prepare_fx(source, get_default_qconfig_mapping(), (x,))
        prepared(x)
        out.append(convert_fx(prepared)(x))
    assert torch.equal(y[0], expected[0])


def test_quantization_sees_the_pair_in_our_own_layer():
    layer, x = nn.ConvBatchNorm2d(3, 4, 3).eval(), torch.randn(2, *IMAGE)
    unsettle(layer)
    model = stock.Sequential(layer, stock.ReLU()).eval()
    pair = stock.Sequential(
        layer.conv, leannorm.convert(copy.deepcopy(layer.bn), to="torch"), stock.ReLU()
    ).eval()
    prepared, wanted = (prepare_fx(m, get_default_qconfig_mapping(), (x,)) for m in (model, pair))
    assert nodes(prepared) == nodes(wanted)
    outside = nn.ConvBatchNorm2d(3, 4, 3, eps_mode="outside").eval()  # no pair computes it
    prepared = prepare_fx(outside, get_default_qconfig_mapping(), (x,))
    assert torch.equal(prepared(x), outside(x))


def test_a_layer_as_torchs_shares_everything_and_changes_nothing():
    model, _ = Case("timm:test_convnext").build()
    layer = next(m for m in model.modules() if type(m) is nn.LayerNorm and m.dim == 1)
    before = state(model)
    twin = layer.as_torch
    assert type(twin).__module__ == "timm.layers.norm"
    assert twin.weight is layer.weight
    assert state(model) == before
    assert type(pickle.loads(pickle.dumps(layer))) is nn.LayerNorm
