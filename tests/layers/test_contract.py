"""What every layer of `leannorm.nn` promises, asked of each row of the table in `layer_cases.py`."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from cases import DTYPES, lay_out
from contract import ALL, FIRST, assert_close, assert_equal, each, each_mode, randomized, step
from layer_cases import LAYERS

from leannorm import nn, use_backend

COUNTS = ("num_batches_tracked", "bn.num_batches_tracked", "batch_id")


def test_every_layer_has_a_row():
    assert {layer.name for layer in LAYERS} == set(nn.__all__)


def test_what_is_not_promised_is_said_on_a_page():
    pages = Path(__file__).parents[2] / "docs"
    for layer in LAYERS:
        for page, words in layer.without.values():
            assert words in " ".join((pages / page).read_text().split()), (layer.name, words)


@each("torch", ALL)
def test_it_is_torchs_layer_to_who_looks_trains_and_loads(case):
    """Its class, its words, its keys; three steps and an evaluation; checkpoints both ways."""
    ours, theirs = case.make(dtype=torch.float64), case.torchs(dtype=torch.float64)
    assert isinstance(ours, case.layer.kind)
    assert repr(ours).replace("leannorm.", "") == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    theirs.load_state_dict(randomized(case).state_dict())
    ours.load_state_dict(theirs.state_dict())
    for training in (True, True, True, False):
        inputs = case.inputs(torch.float64)
        found, want = (step(layer.train(training), inputs) for layer in (ours, theirs))
        assert_close(found, want, rtol=1e-9, atol=1e-10)
    theirs.load_state_dict(ours.state_dict())
    back = case.make(dtype=torch.float64)
    back.load_state_dict(theirs.state_dict())
    assert_equal(step(back.eval(), inputs), step(ours, inputs))


@each("copies", ALL)
def test_copies_compute_the_same_and_share_nothing(case):
    layer, inputs, file = randomized(case), case.inputs(), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(file, weights_only=False),
    ]
    before = copy.deepcopy(layer.state_dict())
    for training in (True, False):
        found = [step(twin.train(training), inputs) for twin in copies]
        assert_equal(layer.state_dict(), before)
        want = step(layer.train(training), inputs)
        before = copy.deepcopy(layer.state_dict())
        for got in found:
            assert_equal(got, want)
    assert all(repr(twin) == repr(layer) for twin in copies)


@each("modes", ALL)
def test_evaluation_moves_nothing_and_training_goes_on_as_if_it_had_not_been(case):
    layer, inputs, others = randomized(case), case.inputs(), case.inputs()
    alone, state = copy.deepcopy(layer), copy.deepcopy(layer.state_dict())
    first = step(layer.eval(), others)
    assert_equal(layer.state_dict(), state)
    assert_equal(step(layer, others), first)
    assert_equal(step(layer.train(), inputs), step(alone, inputs))
    # torch's instance norms do not count their batches
    uncounted = COUNTS if case.layer.name.startswith("Instance") else ()
    moved = {name for name, value in layer.state_dict().items() if not torch.equal(value, state[name])}
    assert moved == {name for name, _ in layer.named_buffers() if name not in uncounted}
    assert torch.equal(step(layer.eval(), others)["y"], first["y"]) == (not moved)


@each_mode("no_grad", FIRST)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_computes_the_same(case, training, context):
    layer, inputs = randomized(case).train(training), case.inputs()
    twin = copy.deepcopy(layer)
    want = step(twin, inputs)
    with context():
        y = layer(*inputs)
    assert not y.requires_grad
    assert torch.equal(y, want["y"])
    assert_equal(layer.state_dict(), twin.state_dict())


@each("dtypes", ALL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.sampled(of=2)
def test_every_dtype(case, dtype):
    """What float64 computes from the same numbers; each result in the dtype of what it belongs to."""
    layer, inputs = randomized(case).to(dtype), case.inputs(dtype)
    double = copy.deepcopy(layer).double()
    found, want = step(layer, inputs), step(double, [t.double() for t in inputs])
    state = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    for name, value in found.items():
        assert value.dtype == (state[name].dtype if name in state else dtype), name
    eps = torch.finfo(dtype).eps
    found, want = ({name: v.double() for name, v in results.items()} for results in (found, want))
    assert_close(found, want, rtol=16 * eps, atol=64 * eps)


@each("mixed dtypes", FIRST)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parameters_of_float32_take_any_dtype(case, dtype):
    layer = randomized(case)
    found = step(layer, case.inputs(dtype))
    assert found["y"].dtype == found["dx"].dtype == dtype
    assert all(found[name].dtype == torch.float32 for name, _ in layer.named_parameters())


LAYOUTS = ("channels_last", "sliced", "transposed", "offset", "expanded")
LAID_OUT = [
    (case, layout)
    for case in FIRST
    for layout in LAYOUTS[len(case.layer.shape) < 4 or 0 not in case.layer.empty :]
]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("case", "layout"), LAID_OUT, ids=str)
@pytest.mark.sampled(of=2)
def test_every_layout(case, layout, training):
    """The same numbers; out of contiguous comes contiguous, and out of channels_last channels_last."""
    assert_laid_out(case, layout, training)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", [case for case, layout in LAID_OUT if layout == "channels_last"], ids=str)
def test_channels_last_without_kernels(case, training):
    with use_backend("reference"):
        assert_laid_out(case, "channels_last", training)


def assert_laid_out(case, layout, training):
    layer, inputs = randomized(case).train(training), [lay_out(t, layout) for t in case.inputs()]
    twin = copy.deepcopy(layer)
    found = step(layer, inputs)
    assert_close(found, step(twin, [t.contiguous() for t in inputs]), rtol=1e-4, atol=1e-4)
    if layout in ("channels_last", "offset"):  # the others have gaps, or a layout of no name
        for name in ("y", "dx"):
            assert found[name].stride() == lay_out(found[name], layout).stride(), name


EMPTY = [(case, axis) for case in FIRST for axis in case.layer.empty]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("case", "axis"), EMPTY, ids=str)
def test_nothing_in_gives_nothing_out_and_moves_no_statistic(case, axis, training):
    layer, inputs = randomized(case).train(training), case.inputs()
    want = list(case.make()(*inputs).shape)
    want[axis] = 0
    before = copy.deepcopy(dict(layer.named_buffers()))
    found = step(layer, [t.narrow(axis, 0, 0) for t in inputs])
    assert found["y"].shape == torch.Size(want)
    assert found["dx"].shape == inputs[0].narrow(axis, 0, 0).shape
    for name, _ in layer.named_parameters():
        assert found[name].eq(0).all(), name
    for name, value in before.items():
        assert torch.equal(found[name], value), name


def reset(layer):
    torch.manual_seed(1)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return layer


@each("resets", ALL)
def test_a_reset_gives_the_state_of_a_new_layer(case):
    """And so do memory of a layer on meta that is filled, and one that is laid out otherwise."""
    last = torch.channels_last_3d if case.layer.name.endswith("3d") else torch.channels_last
    torch.manual_seed(1)
    want = case.make().state_dict()
    for layer in (randomized(case), case.make(device="meta").to_empty(device="cpu")):
        assert_equal(reset(layer).state_dict(), want)
        assert_equal(layer.to(memory_format=last).state_dict(), want)


@each("meta", ALL)
def test_on_meta_it_gives_shapes(case):
    inputs = case.inputs()
    want = case.make()(*inputs)
    for layer in (case.make(device="meta"), randomized(case).to("meta")):
        y = layer(*(t.to("meta") for t in inputs))
        assert (y.device.type, y.dtype, y.shape) == ("meta", want.dtype, want.shape)


@each_mode("devices", FIRST)
def test_a_default_device_changes_nothing(case, training):
    layer, inputs = randomized(case).train(training), case.inputs()
    twin = copy.deepcopy(layer)
    with torch.device("cpu"):
        found = step(layer, inputs)
    assert_equal(found, step(twin, inputs))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@each_mode("devices", FIRST)
def test_moved_to_a_gpu_it_computes_the_same(case, training):
    layer, inputs = randomized(case).double().train(training), case.inputs(torch.float64)
    moved = copy.deepcopy(layer).cuda()
    found = {name: v.cpu() for name, v in step(moved, [t.cuda() for t in inputs]).items()}
    assert_close(found, step(layer, inputs))
    assert_close(moved.cpu().state_dict(), layer.state_dict())
