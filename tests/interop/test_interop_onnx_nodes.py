"""ONNX's own published node tests of BatchNormalization and LayerNormalization: all outputs and backends."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from interop_cases import FIXTURES

from leannorm import functional, use_backend
from leannorm._types import Rows
from leannorm.interop import CONVENTIONS
from leannorm.ops.select import backends, pick

TABLE = CONVENTIONS["onnx"]
NODES = json.loads((FIXTURES / "onnx_nodes.json").read_text())
SIDES = ("in", "out")
SERVING = [name for name, reasons in backends(torch.zeros(2, 3)).items() if not reasons]


def batch_norm(attributes, x, scale, bias, mean, var):
    eps = attributes.get("epsilon", TABLE.eps)
    momentum = TABLE.torch_momentum(attributes.get("momentum", TABLE.momentum))
    if not attributes.get("training_mode", 0):
        return (functional.batch_norm(x, mean, var, scale, bias, False, momentum, eps),)
    count = x.numel() / x.shape[1]
    mean, unbiased = mean.clone(), var * (count / (count - 1))
    y = functional.batch_norm(x, mean, unbiased, scale, bias, True, momentum, eps)
    return y, mean, unbiased * ((count - 1) / count)


def layer_norm(attributes, x, scale, bias):
    eps = attributes.get("epsilon", TABLE.eps)
    start = attributes.get("axis", -1) % x.dim()
    y = functional.layer_norm(x, x.shape[start:], scale, bias, eps)
    _, _, mean, rstd = pick(x).row_forward(
        (x, None, None, None, None, scale, bias), Rows(start, x.dim(), eps, False)
    )
    return y, mean, rstd


OPERATORS = {"BatchNormalization": batch_norm, "LayerNormalization": layer_norm}


@pytest.mark.parametrize("backend", SERVING)
@pytest.mark.parametrize("node", NODES, ids=lambda node: node["name"])
def test_onnxs_published_node_tests(node, backend):
    with np.load(FIXTURES / "onnx_nodes.npz") as file:
        data = {key: torch.from_numpy(file[key]) for key in file.files}
    name = node["name"]
    inputs, outputs = (
        [data[key] for key in sorted(data) if key.startswith(f"{name}/{side}")] for side in SIDES
    )
    with use_backend(backend):
        got = OPERATORS[node["op"]](node["attributes"], *inputs)
    for ours, theirs in zip(got, outputs, strict=True):
        # the tolerances that ONNX publishes with these cases
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-7)


def test_all_of_them_are_here():
    assert [sum(node["op"] == name for node in NODES) for name in OPERATORS] == [4, 19]
