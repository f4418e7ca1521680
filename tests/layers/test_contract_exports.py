"""What every layer promises of exporters: as the whole model, in its first and last place, and twice."""

import copy
import io

import numpy as np
import pytest
import torch
from contract import ALL, KINDS, assert_close, each_mode, randomized, step
from lean_cases import in_a_group
from torch import nn as stock

from leannorm import InputError, nn

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        ".*treespec:FutureWarning",
        ".torch.jit:DeprecationWarning",
        ":torch.jit.TracerWarning",
        "You are using the legacy TorchScript-based ONNX export:DeprecationWarning",
        "The feature will be removed:DeprecationWarning",
        "ONNX Preprocess - Removing mutation from node",
        "ONNX export mode is set to TrainingMode",
        "It is recommended that constant folding be turned off",
        "Exporting a model while it is in training mode",
    )
]


class First(stock.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, *others):
        return self.layer(x, *others).tanh()


class Last(First):
    def forward(self, x, *others):
        return self.layer(x.tanh(), *others)


class Twice(First):
    def forward(self, x, *others):
        return self.layer(self.layer(x, *others).tanh(), *others)


PLACES = {"alone": lambda layer: layer, "first": First, "last": Last, "twice": Twice}
each_place = pytest.mark.parametrize("place", PLACES)


def placed(case, training, place):
    if place == "twice" and case.layer.name.startswith("Conv"):
        pytest.skip("its output has other channels than its input")
    return PLACES[place](randomized(case)).train(training), case.inputs()


def saved_and_loaded(model, inputs):
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, inputs), file)
    file.seek(0)
    return torch.export.load(file).module()


WRITERS = {
    "strict": lambda model, inputs: torch.export.export(model, inputs, strict=True).module(),
    "not strict": lambda model, inputs: torch.export.export(model, inputs).module(),
    "pt2": saved_and_loaded,
    "trace": lambda model, inputs: torch.jit.trace(model, inputs, check_trace=False),
}


@each_place
@pytest.mark.parametrize("writer", WRITERS)
@each_mode("exports", KINDS, of=ALL)
@pytest.mark.sampled(of=8)
def test_graphs_for_torch(case, training, writer, place):
    """A step of the graph is one of the model: output, gradients, statistics. Writing it moves none."""
    model, inputs = placed(case, training, place)
    other = copy.deepcopy(model)
    torch._dynamo.reset()
    graph = WRITERS[writer](model, tuple(inputs))
    before = other.state_dict()
    for name, value in model.state_dict().items():
        if writer != "trace":  # a tracer runs the model once, as it is
            assert torch.equal(value, before[name]), name
    for name, value in graph.state_dict().items():
        value.copy_(before[name])
    found, wanted = step(graph, inputs), step(other, inputs)
    unread = wanted.keys() - found.keys()  # strict=True leaves out what a graph does not read
    assert all(writer == "strict" and name.endswith(("num_batches_tracked", "batch_id")) for name in unread)
    wanted = {name: value for name, value in wanted.items() if name in found}
    assert_close({name: found[name] for name in wanted}, wanted, rtol=1e-4, atol=1e-4)


@pytest.fixture
def runtime():
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    return pytest.importorskip("onnxruntime")


def by_onnx(runtime, file, inputs):
    session = runtime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    assert len(names) == len(inputs)
    (y,) = session.run(None, {n: v.numpy() for n, v in zip(names, inputs, strict=True)})
    return torch.from_numpy(np.array(y))


MODES = torch.onnx.TrainingMode
IN_ONNX = [case for case in KINDS if case.layer.name != "BatchNormOp"]
IN_ONNX_TOO = [case for case in ALL if case.layer.name != "BatchNormOp"]


@each_place
@each_mode("exports", IN_ONNX, of=IN_ONNX_TOO)
@pytest.mark.sampled(of=4)
def test_onnx_by_torchscripts_exporter(case, training, place, runtime):
    """In training, too, where its graph normalizes by the statistics of the batch."""
    model, inputs = placed(case, training, place)
    before = {name: v.clone() for name, v in model.state_dict().items()}
    file = io.BytesIO()
    torch.onnx.export(model, tuple(inputs), file, dynamo=False, training=MODES.PRESERVE)
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    torch.testing.assert_close(by_onnx(runtime, file, inputs), model(*inputs).detach(), rtol=1e-4, atol=1e-5)


@each_mode("exports", IN_ONNX, of=IN_ONNX_TOO)
@pytest.mark.sampled(of=8)
def test_onnx_by_the_new_exporter(case, training, runtime):
    model, inputs = placed(case, training, "alone")
    before = {name: v.clone() for name, v in model.state_dict().items()}
    file = io.BytesIO()
    torch.onnx.export(model, tuple(inputs), dynamo=True, verbose=False).save(file)
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    torch.testing.assert_close(by_onnx(runtime, file, inputs), model(*inputs).detach(), rtol=1e-4, atol=1e-5)


def test_a_model_in_training_goes_to_onnx_in_evaluation_by_default(runtime):
    layer, x, file = nn.BatchNorm1d(4), torch.randn(6, 4) + 3, io.BytesIO()
    torch.onnx.export(layer, (x,), file, dynamo=False)
    assert layer.training
    torch.testing.assert_close(by_onnx(runtime, file, [x]), layer.eval()(x).detach())


def test_what_onnx_cannot_hold_is_an_error():
    x, mask = torch.randn(6, 4, 5), torch.ones(6, 5, dtype=torch.bool)

    def export(model, *inputs):
        torch.onnx.export(model, inputs, io.BytesIO(), dynamo=False, training=MODES.PRESERVE)

    with pytest.raises(InputError, match="a batch with mask= or lengths= cannot be exported"):
        export(nn.BatchNorm1d(4), x, mask)
    with pytest.raises(InputError, match="group_size=2 cannot be exported"):
        export(nn.BatchNorm1d(4, group_size=2), x)
    with pytest.raises(InputError, match="group_size=2 cannot be exported"):  # whose statistics are a batch's
        export(nn.BatchNorm1d(4, group_size=2, track_running_stats=False).eval(), x)
    refused = "several ranks cannot be exported to ONNX, got a sync"
    with in_a_group(), pytest.raises(InputError, match=refused):
        export(nn.SyncBatchNorm(4), x)
