"""Converted models go to ONNX as stock ones do, by both exporters: the same norms, the same numbers.

A sample on every run; 40 architectures of timm and torchvision with `-m conformance` (`make conformance`).
"""

import re
from collections import Counter

import numpy as np
import pytest
import torch
from export_cases import PUBLISHED, SMALL, Case, error_of, state

onnx, onnxruntime = (pytest.importorskip(n) for n in ("onnx", "onnxruntime"))
pytest.importorskip("onnxscript")

EXPORTERS = {"dynamo": True, "torchscript": False}
SAMPLE = [
    *((exporter, Case("mixed", lean=True)) for exporter in EXPORTERS),
    *((exporter, Case("own")) for exporter in EXPORTERS),
    ("dynamo", Case("rms")),  # TorchScript's has no RMS norm
    *(("torchscript", Case(f"timm:test_{n}")) for n in ("resnet", "convnext", "efficientnet_gn")),
    ("torchscript", Case("torchvision:mobilenet_v3_small", lean=True)),
    ("dynamo", Case("timm:test_resnet")),
]
WHOLE = [Case(name, lean=i % 2 == 1) for i, name in enumerate(PUBLISHED)]
CLOSE = 1e-5  # of the largest output

# what the exporters say of themselves, and of what stock models do too
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "You are using the legacy TorchScript-based ONNX export:DeprecationWarning",
        "The feature will be removed:DeprecationWarning",
        ".*treespec:FutureWarning",
        ":torch.jit.TracerWarning",
        "ONNX Preprocess - Removing mutation from node",
        "ONNX export mode is set to TrainingMode.EVAL, but operator 'instance_norm'",
        "Constant folding - Only steps=1 can be constant folded",
    )
]


def exported(model, x, path, exporter):
    """The operators of the graph, and what onnxruntime makes of x; None where the exporter fails."""
    try:
        torch.onnx.export(model, (x,), path, dynamo=EXPORTERS[exporter], verbose=False)
    except (torch.onnx.OnnxExporterError, torch.onnx.errors.OnnxExporterError):
        return None
    graph = onnx.load(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert {function.domain for function in graph.functions} <= {"pkg.onnxscript.torch_lib.common"}
    return Counter(f"{n.domain}::{n.op_type}".removeprefix("::") for n in graph.graph.node), y


def norms(operators):
    return {name: n for name, n in operators.items() if re.search("Normalization", name)}


def compare(case, exporter, tmp_path):
    model, x = case.build()
    with torch.no_grad():
        expected = model(x)
    before = state(model)
    result = exported(model, x, tmp_path / "ours.onnx", exporter)
    assert state(model) == before
    stock = None if case.name == "own" else exported(*case.build(False), tmp_path / "stock.onnx", exporter)
    if case.name != "own" and stock is None:
        print(f"{case.name} {exporter}: the exporter fails on the stock model")
        if result is None:
            return None
    operators, y = result
    if stock is not None:  # a contiguous output may spare what follows a reshape
        assert operators <= stock[0]
        assert norms(operators) == norms(stock[0])
    error = error_of(torch.from_numpy(np.array(y)), expected)
    print(f"{case.name} {exporter}: error {error:.1e}, {sum(operators.values())} nodes, {norms(operators)}")
    assert error <= CLOSE
    return operators


@pytest.mark.sampled(of=5)
@pytest.mark.parametrize(("exporter", "case"), SAMPLE, ids=str)
def test_the_graph_is_that_of_the_stock_model(case, exporter, tmp_path):
    operators = compare(case, exporter, tmp_path)
    wanted = {
        "mixed": {f"{kind}Normalization" for kind in ("Batch", "Instance", "Layer")},
        "own": {"BatchNormalization", "LayerNormalization"},
        "timm:test_efficientnet_gn": {"InstanceNormalization"},
        "timm:test_convnext": {"LayerNormalization"},
    }.get(case.name, set())
    assert wanted <= norms(operators or {}).keys()


@pytest.mark.conformance
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_published_networks(case, exporter, tmp_path):
    compare(case, exporter, tmp_path)


def test_small_networks_hold_every_kind_of_layer():
    layers = {type(m).__name__ for name in SMALL for m in Case(name).build()[0].modules()}
    from leannorm import nn

    families = ("BatchNorm2d", "GroupNorm", "InstanceNorm2d", "LayerNorm", "RMSNorm", "ConvBatchNorm2d")
    assert {*families, "BatchNormAct2d", "BatchNormOp", "SyncBatchNorm"} <= layers & set(nn.__all__)
