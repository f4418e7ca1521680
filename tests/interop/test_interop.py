"""interop.load and save: round trips, names, what stays open, and checkpoints that do not fit."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from interop_cases import FILES, FIXTURES, Net, said
from test_interop_frameworks import keras_weights
from torch.utils._pytree import tree_leaves

from leannorm import interop, nn
from leannorm._errors import InputError, MissingDependencyError
from leannorm.interop import CONVENTIONS, ConventionWarning

WRITABLE = ["torch", "paddle", "keras", "tensorflow", "flax", "onnx"]
# the conventions' own eps and momentum are these of the model, so that nothing stays open
AGREE = {"eps": 1e-5, "momentum": 0.9}


def randomized(model):
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.normal_(generator=generator)
            if name.endswith("var"):
                tensor.abs_().add_(0.5)
    return model


def assert_same(one, other, keys=None):
    for key, value in one.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(other.state_dict()[key], value, rtol=1e-15, atol=0, msg=key)


def agreeing(framework):
    table = CONVENTIONS[framework]
    return {"eps": 1e-5, "momentum": 0.9 if table.momentum_weighs_old else 0.1}


@pytest.mark.parametrize("count", [math.inf, 48, {"bn": 48}], ids=str)
@pytest.mark.parametrize("framework", WRITABLE)
def test_what_is_saved_loads_again(framework, count):
    if framework == "torch":
        count = None  # its variance is ours
    model, other = randomized(Net()), Net()
    mapping = interop.save(model, None, framework, count=count)
    interop.load(other, mapping, framework, count=count, **agreeing(framework))
    assert_same(model, other)


@pytest.mark.parametrize("framework", WRITABLE)
def test_what_is_saved_does_not_change_as_training_goes_on(framework):
    def values(saved):
        return [torch.as_tensor(value).tolist() for value in tree_leaves(saved)]

    model = randomized(Net())
    saved = interop.save(model, None, framework, count=None if framework == "torch" else 8)
    before = values(saved)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(1)
    assert values(saved) == before


def test_keras_takes_the_saved_list():
    model, other = randomized(Net()), Net()
    arrays = list(interop.save(model, None, "keras", count=math.inf).values())
    with np.load(FIXTURES / "keras_list.npz") as file:
        assert [a.shape for a in arrays] == [file[name].shape for name in file.files]
    interop.load(other, arrays, "keras", count=math.inf, **AGREE)
    assert_same(model, other)


@pytest.mark.parametrize(
    ("framework", "suffix"),
    [
        ("torch", ".pt"),
        ("torch", ".pth"),
        ("torch", ".bin"),
        ("torch", ".safetensors"),
        ("paddle", ".pdparams"),
        ("paddle", ".safetensors"),
        ("flax", ".msgpack"),
        ("flax", ".safetensors"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_files_of_free_form_come_back(framework, suffix, dtype, tmp_path):
    model, other = randomized(Net(dtype=dtype)), Net(dtype=dtype)
    count = None if framework == "torch" else math.inf
    interop.save(model, tmp_path / f"net{suffix}", framework, count=count)
    interop.load(other, tmp_path / f"net{suffix}", framework, count=count, **agreeing(framework))
    assert all(torch.equal(other.state_dict()[key], value) for key, value in model.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == [f"net{suffix}"]


TEMPLATES = {
    "keras.keras": ("keras", lambda _: FIXTURES / "keras.keras"),
    "weights.h5": ("keras", keras_weights),
    "legacy.h5": ("keras", lambda _: FIXTURES / "keras_legacy.h5"),
    "net.onnx": ("onnx", lambda _: FIXTURES / "net.onnx"),
}


@pytest.mark.parametrize("form", TEMPLATES)
def test_files_of_a_framework_are_filled_after_one_of_its_own(form, tmp_path):
    framework, template = TEMPLATES[form]
    model, other = randomized(Net(dtype=torch.float32)), Net(dtype=torch.float32)
    interop.save(model, tmp_path / form, framework, count=math.inf, like=template(tmp_path))
    interop.load(other, tmp_path / form, framework, count=math.inf, **AGREE)
    assert_same(model, other)


def test_names_map_modules_and_what_is_inside():
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 3), nn.BatchNorm1d(3)))
    wanted = randomized(copy.deepcopy(model))
    names = {"0": "stage/block", "0.1": "stage/norm"}
    mapping = interop.save(wanted, None, "flax", names=names, count=math.inf)
    assert sorted(mapping["params"]["stage"]) == ["block", "norm"]
    done = interop.load(model, mapping, "flax", names=names, count=math.inf, **AGREE)
    assert_same(wanted, model)
    assert done.loaded["0.1.running_var"] == "stage.norm.var"


def test_a_wrapped_models_state_dict():
    model = randomized(Net())
    wrapped = {f"module.{key}": value for key, value in model.state_dict().items()}
    other = Net()
    interop.load(other, wrapped, "torch", names={"": "module"})
    assert_same(model, other)


def test_caffes_sums_are_divided_by_their_weight():
    model = nn.BatchNorm2d(3)
    blobs = {
        "bn1": [np.array([10.0, 20, 30]), np.array([40.0, 50, 60]), np.array([10.0])],
        "scale1": [np.array([1.0, 2, 3]), np.array([4.0, 5, 6])],
    }
    interop.load(model, blobs, "caffe", names={"": ("bn1", "scale1")}, momentum=0.9)
    assert model.running_mean.tolist() == [1, 2, 3]
    assert model.running_var.tolist() == [4, 5, 6]
    assert (model.weight.tolist(), model.bias.tolist()) == ([1, 2, 3], [4, 5, 6])
    blobs["bn1"][2][:] = 0
    interop.load(model, blobs, "caffe", names={"": ("bn1", "scale1")}, momentum=0.9)
    assert model.running_var.tolist() == [0, 0, 0]


def test_keras_depthwise_kernels_in_both_forms():
    conv = torch.nn.Conv2d(2, 6, 3, groups=2, bias=False)
    depthwise = np.random.default_rng(0).normal(size=(3, 3, 2, 3)).astype(np.float32)
    interop.load(conv, {"depthwise_kernel": depthwise}, "keras")
    assert torch.equal(conv.weight[5, 0], torch.from_numpy(depthwise[:, :, 1, 2]))
    grouped = depthwise.reshape(3, 3, 1, 6)
    other = torch.nn.Conv2d(2, 6, 3, groups=2, bias=False)
    interop.load(other, {"kernel": grouped}, "keras")
    assert torch.equal(conv.weight, other.weight)


def test_tied_and_shared_tensors_need_one_key():
    model = torch.nn.Module()
    model.embedding, model.head = torch.nn.Embedding(5, 5), torch.nn.Linear(5, 5, bias=False)
    model.again = model.embedding
    table = torch.rand(5, 5)
    model.head.weight = model.embedding.weight
    interop.load(model, {"embedding.weight": table}, "paddle")
    assert torch.equal(model.head.weight, table)
    with pytest.raises(InputError, match=r"one tensor here, embedding\.weight and head\.weight differ"):
        interop.load(model, {"embedding.weight": table, "head.weight": table}, "paddle")


def test_parameters_of_a_models_own_are_copied_as_they_are():
    class Vit(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pos = torch.nn.Parameter(torch.zeros(1, 3, 3))
            self.register_buffer("index", torch.arange(3))
            self.norm = nn.LayerNorm(3)

    model, pos = Vit(), torch.rand(1, 3, 3)
    mapping = {"pos": pos, "norm": {"gamma": torch.ones(3), "beta": torch.ones(3)}}
    interop.load(model, mapping, "keras", eps=1e-3)
    assert torch.equal(model.pos, pos)
    assert (model.norm.bias.sum(), model.norm.eps) == (3, 1e-3)


def test_version_1_checkpoints_lack_the_counter():
    model = nn.BatchNorm2d(2)
    old = {k: v for k, v in randomized(nn.BatchNorm2d(2)).state_dict().items() if "num" not in k}
    assert interop.load(model, old, "torch").missing == ()


def bn_values(framework="keras", size=2, **changes):
    role = CONVENTIONS[framework].names["batch_norm"]
    values = {"weight": 1.0, "bias": 0.0, "running_mean": 2.0, "running_var": 3.0} | changes
    return {role[k][0]: np.full(size, v) for k, v in values.items() if v is not None}


# what stays open → words of the warning
OPEN = {
    "nothing": ({"source": "paddle", "count": 8}, None),
    "kept on purpose": ({"source": "paddle", "count": math.inf}, None),
    "unbiased source": ({"source": "torch"}, None),
    "count": ({"source": "paddle"}, "biased in paddle.*pass count=N"),
    "eps": (
        {"source": "keras", "count": 8, "momentum": 0.9},
        "keras's default is 0.001, here '' has 1e-05; pass eps=",
    ),
    "momentum": ({"source": "flax", "count": 8}, r"default is 0.99 \(torch writes it 0.01\).*pass momentum="),
}


@pytest.mark.parametrize("case", OPEN)
def test_what_the_checkpoint_leaves_open_is_said(case):
    arguments, words = OPEN[case]
    model, values = nn.BatchNorm1d(2), bn_values(arguments["source"])
    if words is None:
        assert interop.load(model, values, **arguments).notes == ()
        return
    with pytest.warns(ConventionWarning, match=words):
        done = interop.load(model, values, **arguments)
    assert len(done.notes) == 1


def test_the_eps_of_rms_norm_is_asked_for_and_set():
    layer = torch.nn.RMSNorm(2)
    with pytest.warns(ConventionWarning, match="flax's default is 1e-06, here '' has None; pass eps="):
        interop.load(layer, {"scale": [1.0, 2.0]}, "flax")
    interop.load(layer, {"scale": [1.0, 2.0]}, "flax", eps=1e-6)
    assert (layer.eps, layer.weight.tolist()) == (1e-6, [1, 2])


def test_two_collections_of_flax_that_hold_one_name():
    twice = {"params": {"scale": [1.0, 2.0]}, "batch_stats": {"scale": [1.0, 2.0]}}
    with pytest.raises(InputError, match="two collections hold 'scale'"):
        interop.load(torch.nn.RMSNorm(2), twice, "flax", eps=1e-6)


def test_statistics_are_converted_in_float64_and_cast_once():
    model = nn.BatchNorm1d(2)
    interop.load(model, bn_values(), "keras", count=7, eps=1e-3, momentum=0.99)
    assert model.running_var.tolist() == [3.5, 3.5]
    assert (model.eps, model.momentum) == (1e-3, 0.01)


def test_not_strict_leaves_the_missing_and_passes_over_the_surplus():
    model = nn.BatchNorm1d(2)
    values = bn_values(weight=None) | {"renorm_mean": np.zeros(2)}
    done = interop.load(model, values, "keras", count=math.inf, eps=1e-3, momentum=0.9, strict=False)
    assert done.surplus == ("renorm_mean",)
    assert "weight (looked for gamma or 0)" in done.missing
    assert (model.weight.tolist(), model.running_mean.tolist()) == ([1, 1], [2, 2])


def changed(**changes):
    return lambda: bn_values(**changes)


# name → (checkpoint, arguments, words of the error)
MISFITS = {
    "unknown source": (changed(), {"source": "mxnet"}, "source must be one of torch, .*got 'mxnet'"),
    "missing key": (changed(bias=None), {}, "missing: bias"),
    "surplus key": (lambda: bn_values() | {"debias": np.zeros(2)}, {}, "surplus: debias"),
    "all at once": (
        lambda: bn_values(bias=None, running_var=-1.0) | {"debias": np.zeros(2)},
        {},
        "negative variance, -1\n.*missing: bias.*\n.*surplus: debias",
    ),
    "wrong shape": (changed(size=3), {}, r"running_mean has shape \(2,\), moving_mean gives \(3,\)"),
    "wrong shape, not strict": (changed(size=3), {"strict": False}, r"moving_var\w* gives \(3,\)"),
    "NaN mean": (changed(running_mean=math.nan), {}, r"moving_mean \(for running_mean\) holds NaN"),
    "NaN variance": (changed(running_var=math.nan), {"strict": False}, "moving_variance .* holds NaN"),
    "infinite variance": (changed(running_var=math.inf), {}, "moving_variance .* holds NaN or infinity"),
    "negative variance": (changed(running_var=-0.5), {}, "moving_variance .* negative variance, -0.5"),
    "too large": (changed(weight=1e300), {}, "gamma does not fit weight's torch.float32"),
    "not an array": (lambda: bn_values() | {"note": "hello"}, {}, "'note' must be an array of numbers"),
    "complex": (lambda: bn_values() | {"gamma": np.ones(2) * 1j}, {}, "'gamma' must be an array of numbers"),
    "twice": (lambda: bn_values() | {"a/b": np.ones(2), "a.b": np.ones(2)}, {}, "holds 'a.b' twice"),
    "a list too short": (lambda: [np.ones(2)] * 3, {}, "one array for each of the model's 4 tensors .*got 3"),
    "numbers short": (
        lambda: {f"{i}": np.ones(2) for i in range(3)},
        {"strict": False},
        "3 numbered arrays, the model 4: gamma, beta, moving_mean, moving_variance",
    ),
    "no checkpoint": (lambda: 3, {}, "must be a path, a mapping.*got int"),
    "a list from paddle": (lambda: [np.ones(2)] * 4, {"source": "paddle"}, "must be a path, a mapping"),
    "count of 1": (changed(), {"count": 1}, "count must be above 1"),
    "count NaN": (changed(), {"count": math.nan}, "count must be above 1"),
    "count of no layer": (changed(), {"count": {"bn": 8}}, r"count must name layers.*got \['bn'\]"),
    "count for torch": (lambda: bn_values("torch"), {"source": "torch"}, "count is for frameworks"),
    "momentum beyond 1": (changed(), {"momentum": 1.5}, "momentum must be in"),
    "eps of zero": (changed(), {"eps": 0.0}, "eps must be positive"),
    "names of no module": (changed(), {"names": {"norm": "bn"}}, r"names must map modules.*\['norm'\]"),
    "no such file": (lambda: "missing.msgpack", {}, "there is no file 'missing.msgpack'"),
    "unknown ending": (lambda: "net.ckpt", {}, "must end in one of .pdparams, .h5"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_misfit_is_named_and_the_model_unchanged(case):
    checkpoint, changes, words = MISFITS[case]
    model = randomized(nn.BatchNorm1d(2))
    before, settings = copy.deepcopy(model.state_dict()), (model.eps, model.momentum)
    arguments = {"source": "keras", "count": 8, "eps": 1e-3, "momentum": 0.5} | changes
    with pytest.raises(InputError, match=f"(?s){words}"):
        interop.load(model, checkpoint(), **arguments)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert (model.eps, model.momentum) == settings


def test_layers_that_have_no_rule_are_named():
    with pytest.raises(InputError, match=r"missing: weight_ih_l0 \(no rule for LSTM"):
        interop.load(torch.nn.LSTM(2, 2), {}, "paddle")
    with pytest.raises(InputError, match=r"no rule how paddle writes 'weight_ih_l0 \(LSTM\)'"):
        interop.save(torch.nn.LSTM(2, 2), None, "paddle")


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(2, device="meta"), torch.nn.LazyBatchNorm1d()])
def test_layers_without_memory_are_named(layer):
    with pytest.raises(InputError, match="weight has no memory yet"):
        interop.load(layer, bn_values(), "keras")


BAD_SAVES = {
    "unknown target": ("net.pt", {"target": "mxnet"}, "target must be one of"),
    "caffe": ("net.pt", {"target": "caffe"}, "cannot be written"),
    "unknown ending": ("net.ckpt", {}, "must end in one of"),
    "no template": ("net.onnx", {"target": "onnx"}, "pass like="),
    "template of another kind": (
        "net.onnx",
        {"target": "onnx", "like": FIXTURES / "keras.keras"},
        "pass like=",
    ),
    "template of another network": (
        "net.keras",
        {"target": "keras", "like": FIXTURES / "keras.keras"},
        "(?s)not of the same network.*missing: weight.*surplus: bn.gamma",
    ),
    "no folder": ("nowhere/net.pt", {}, "there is no folder"),
}


@pytest.mark.parametrize("case", BAD_SAVES)
def test_a_bad_save_leaves_no_file(case, tmp_path):
    name, changes, words = BAD_SAVES[case]
    arguments = {"target": "paddle", "count": 8 if changes.get("target") != "caffe" else None} | changes
    with pytest.raises(InputError, match=words):
        interop.save(nn.BatchNorm1d(2), tmp_path / name, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_saving_without_a_count_says_so():
    with pytest.warns(ConventionWarning, match="was saved as it is"):
        interop.save(nn.BatchNorm1d(2), None, "flax")


@pytest.mark.parametrize(
    ("package", "file", "source"),
    [
        ("h5py", "keras.keras", "keras"),
        ("msgpack", "flax.msgpack", "flax"),
        ("onnx", "net.onnx", "onnx"),
        ("safetensors.torch", "net.safetensors", "torch"),
    ],
)
def test_a_missing_reader_is_a_sentence(package, file, source, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    name = package.partition(".")[0]
    with pytest.raises(MissingDependencyError, match=rf"needs the package {name}.*leannorm\[interop\]"):
        interop.load(Net(), FIXTURES / file, source)


@pytest.mark.parametrize("framework", sorted(FILES))
def test_loading_keeps_memory_dtype_and_gradients(framework):
    model = Net(dtype=torch.float16)
    before = {key: value.data_ptr() for key, value in model.state_dict().items()}
    interop.load(model, FIXTURES / FILES[framework], framework, count=48, **said(framework))
    assert {key: value.data_ptr() for key, value in model.state_dict().items()} == before
    assert all(p.requires_grad and p.dtype == torch.float16 for p in model.parameters())
