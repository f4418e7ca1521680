"""Networks saved and run by Paddle, Keras, Flax and ONNX themselves: the same numbers after loading."""

from __future__ import annotations

import math
import zipfile

import numpy as np
import pytest
import torch
from interop_cases import FILES, FIXTURES, Net, defaults, recorded, said

from leannorm import interop, nn
from leannorm.interop import CONVENTIONS
from leannorm.report.answers import allowed_error, largest_error

FRAMEWORKS = sorted(FILES)
DTYPES = [torch.float64, torch.float32]
LAYERS = 7
# Keras casts to float32 inside its batch norm, whatever its dtype; the others compute in float64 throughout.
# The wrong convention is never so near: 2e-2 in the variance, 1e-3 in eps, 1e-8 for float32 attributes.
ORACLE_ERROR = {"paddle": 1e-11, "keras": 1e-5, "flax": 1e-11, "onnx": 1e-11}


def loaded(framework, kinds, dtype, count):
    model = Net(kinds, dtype)
    interop.load(model, FIXTURES / FILES[framework], framework, count=count, **said(framework))
    return model


def assert_within_budget(framework, run, wanted, dtype):
    """`wanted`, the framework's own result, is the oracle; `run(kinds)` computes it with our norms and with
    torch's, whose error is the budget, with one rounding more for each of the network's layers."""
    ours, stock = (run(kinds).detach().double() for kinds in (nn, torch.nn))
    largest = wanted.abs().max().item()
    budget = allowed_error(largest_error(stock, wanted), dtype, largest, 2 * LAYERS)
    assert largest_error(ours, wanted) <= budget
    if dtype == torch.float64:
        assert budget < ORACLE_ERROR[framework]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_inference_is_the_frameworks_own(framework, dtype):
    told = recorded(framework)

    def run(kinds):
        return loaded(framework, kinds, dtype, math.inf).eval()(told["x"].to(dtype))

    assert_within_budget(framework, run, told["inferred"], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("result", ["trained", "mean", "var"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_training_step_is_the_frameworks_own(framework, result, dtype):
    told = recorded(framework)
    count = told["count"].item()

    def run(kinds):
        model = loaded(framework, kinds, dtype, count)
        output = model(told["x"].to(dtype))
        biased = model.bn.running_var * ((count - 1) / count)
        return {"trained": output, "mean": model.bn.running_mean, "var": biased}[result]

    assert_within_budget(framework, run, told[result], dtype)


def test_onnxruntime_infers_the_same():
    told = recorded("onnx")
    ours = loaded("onnx", nn, torch.float32, math.inf).eval()(told["x"].float()).detach().double()
    runtime = told["inferred_onnxruntime"].double()
    want = told["inferred"]
    budget = allowed_error(largest_error(runtime, want), torch.float32, want.abs().max().item(), 2)
    assert (ours - told["inferred"]).abs().max() <= budget


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_table_holds_the_frameworks_own_defaults(framework):
    told, table = defaults(framework), CONVENTIONS[framework]
    for name in told.keys() - {"version"}:
        assert table.attribute(getattr(table, name)) == table.attribute(told[name])


def test_torchs_row_holds_torchs_defaults():
    bn, table = torch.nn.BatchNorm2d(1), CONVENTIONS["torch"]
    assert (bn.momentum, bn.eps, torch.nn.LayerNorm(1).eps) == (table.momentum, table.eps, table.layer_eps)


def keras_weights(tmp_path):
    with zipfile.ZipFile(FIXTURES / "keras.keras") as archive:
        archive.extract("model.weights.h5", tmp_path)
    return tmp_path / "model.weights.h5"


def keras_list(_):
    with np.load(FIXTURES / "keras_list.npz") as file:
        return [file[name] for name in file.files]


@pytest.mark.parametrize("form", [keras_weights, keras_list, lambda _: FIXTURES / "keras_legacy.h5"])
def test_every_form_of_keras_holds_the_same(form, tmp_path):
    told = defaults("keras")
    wanted, got = loaded("keras", nn, torch.float64, math.inf), Net()
    said_for = {"eps": told["eps"], "momentum": told["momentum"]}
    interop.load(got, form(tmp_path), "keras", count=math.inf, **said_for)
    assert all(torch.equal(got.state_dict()[key], value) for key, value in wanted.state_dict().items())
    assert (got.bn.eps, got.bn.momentum, got.ln.eps) == (1e-3, 0.01, 1e-3)
    assert (wanted.bn.eps, wanted.bn.momentum, wanted.ln.eps) == (1e-3, 0.01, 1e-3)


@pytest.mark.parametrize(
    ("file", "framework", "layer"),
    [
        ("paddle_bfloat16.pdparams", "paddle", torch.nn.BatchNorm1d(4, dtype=torch.bfloat16)),
        ("flax_bfloat16.msgpack", "flax", torch.nn.RMSNorm(4, eps=1e-6, dtype=torch.bfloat16)),
    ],
)
def test_bfloat16_is_read_as_such(file, framework, layer):
    interop.load(layer, FIXTURES / file, framework, count=math.inf)
    wanted = torch.arange(1, 5) / 8
    assert all(torch.equal(t.float(), wanted) for t in layer.state_dict().values() if t.dim())


WRONG = {
    "variance not converted": ("var", {"count": math.inf}),
    "momentum of the new value": ("mean", {"momentum": 0.1}),
    "another eps": ("trained", {"eps": 1e-4}),
}


@pytest.mark.parametrize("mistake", WRONG)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_mistaken_convention_stands_out(framework, mistake):
    """What `ORACLE_ERROR` allows is far from the error of any convention mistaken."""
    result, wrong = WRONG[mistake]
    told, model = recorded(framework), Net()
    count = told["count"].item()
    arguments = {"count": count} | said(framework) | wrong
    interop.load(model, FIXTURES / FILES[framework], framework, **arguments)
    output = model(told["x"]).detach()
    biased = model.bn.running_var * ((count - 1) / count)
    got = {"trained": output, "mean": model.bn.running_mean, "var": biased}[result]
    assert (got - told[result]).abs().max() > 10 * ORACLE_ERROR[framework]
