"""Norms made without scale, shift or statistics, on either side: the same function, or an error."""

from __future__ import annotations

import copy
import itertools
import math
import zipfile

import h5py
import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interop_cases import FIXTURES
from onnx import helper, numpy_helper

from leannorm import interop, nn
from leannorm._errors import InputError
from leannorm.interop import CONVENTIONS

C = 4
ROLES = ("weight", "bias", "running_mean", "running_var")
IDENTITY = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}
EPS = 1e-3
LAYERS = {
    "batch": lambda: nn.BatchNorm1d(C, eps=EPS),
    "batch, torch's": lambda: torch.nn.BatchNorm1d(C, eps=EPS),
    "batch, no affine": lambda: nn.BatchNorm1d(C, eps=EPS, affine=False),
    "batch, no statistics": lambda: nn.BatchNorm1d(C, eps=EPS, track_running_stats=False),
    "sync": lambda: nn.SyncBatchNorm(C, eps=EPS),
    "sync, no affine": lambda: nn.SyncBatchNorm(C, eps=EPS, affine=False),
    "instance": lambda: nn.InstanceNorm1d(C, eps=EPS),
    "instance, affine": lambda: nn.InstanceNorm1d(C, eps=EPS, affine=True),
    "instance, all": lambda: nn.InstanceNorm1d(C, eps=EPS, affine=True, track_running_stats=True),
    "layer": lambda: nn.LayerNorm(C, eps=EPS),
    "layer, no bias": lambda: nn.LayerNorm(C, eps=EPS, bias=False),
    "layer, no affine": lambda: nn.LayerNorm(C, eps=EPS, elementwise_affine=False),
    "group": lambda: nn.GroupNorm(2, C, eps=EPS),
    "group, no affine": lambda: nn.GroupNorm(2, C, eps=EPS, affine=False),
    "rms": lambda: nn.RMSNorm(C, eps=EPS),
    "rms, no affine": lambda: nn.RMSNorm(C, eps=EPS, elementwise_affine=False),
}
FORMATS = ("torch", "paddle", "keras", "flax", "onnx", "caffe")
SUBSETS = [s for n in range(5) for s in itertools.combinations(ROLES, n)]


def randomized(layer):
    with torch.no_grad():
        for name, value in layer.state_dict().items():
            if value.is_floating_point():
                value.copy_(torch.rand_like(value) + (0.5 if "var" in name else -3))
    return layer


def named(kind, role, framework):
    if framework == "torch":
        return role
    table = CONVENTIONS[framework].names
    key = {"batch": "batch_norm", "sync": "batch_norm", "instance": "batch_norm", "rms": "rms_norm"}
    return {**table["batch_norm"], **table.get(key.get(kind, "norm"), {})}[role][0]


def of(layer):
    return {name: t for name, t in layer.state_dict().items() if name in ROLES}


def load(layer, source, framework, **given):
    """`interop.load`; after an error the layer is as it was."""
    before = copy.deepcopy(layer.state_dict())
    count = math.inf if CONVENTIONS[framework].biased_running_var else None
    momentum = None if getattr(layer, "momentum", None) is None else 0.5
    try:
        return interop.load(layer, source, framework, count=count, eps=EPS, momentum=momentum, **given)
    except InputError:
        assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
        raise


values = st.sampled_from(["random", "identity"])


@settings(deadline=None, max_examples=250, derandomize=True)
@given(
    framework=st.sampled_from(FORMATS),
    name=st.sampled_from(sorted(LAYERS)),
    subset=st.sampled_from(SUBSETS),
    kinds=st.fixed_dictionaries(dict.fromkeys(ROLES, values)),
    strict=st.booleans(),
)
def test_named_arrays(framework, name, subset, kinds, strict):
    layer, kind = randomized(LAYERS[name]()), name.partition(",")[0]
    if framework == "caffe" and (kind == "rms" or len({"weight", "bias"} & set(subset)) == 1):
        return  # it has no such layer; of one array without a name, below
    start, generator = of(layer), np.random.default_rng(len(subset))
    source = {
        role: np.full(C, IDENTITY[role]) if kinds[role] == "identity" else generator.random(C) + 0.5
        for role in subset
    }
    arrays = {named(kind, role, framework): value for role, value in source.items()}
    refused = [role for role in source if role not in start and kinds[role] == "random"]
    missing = [role for role in start if role not in source]
    if refused or (strict and missing):
        with pytest.raises(InputError) as caught:
            load(layer, arrays, framework, strict=strict)
        for role in refused:
            assert f"{named(kind, role, framework)} is not {IDENTITY[role]:g} everywhere" in str(caught.value)
        for role in missing if strict else ():
            assert f"missing: {role} " in str(caught.value)
        return
    with_stats = any(role in start for role in ROLES[2:])
    done = load(layer, arrays, framework, strict=strict)
    for role, tensor in of(layer).items():
        want = torch.full((C,), IDENTITY[role]) if role not in source else torch.from_numpy(source[role])
        if not subset:  # the checkpoint has no such layer
            want = start[role]
        torch.testing.assert_close(tensor, want.float(), msg=role)
    assert set(done.identity) == set(source) ^ set(start) if subset else not done.identity
    assert with_stats or not any("running" in role for role in done.loaded)


STATISTICS = ROLES[2:]
AFFINE = [s for s in SUBSETS if not set(s) & set(STATISTICS)]


def keras_layers(layer):
    """All that a layer of Keras may have, by which one of ours may have been made or written."""
    if isinstance(layer, torch.nn.RMSNorm):
        return [("weight",), ()] if layer.weight is None else [("weight",)]
    batch = isinstance(layer, torch.nn.modules.batchnorm._NormBase)
    tracks = batch and layer.running_mean is not None
    instance = isinstance(layer, torch.nn.InstanceNorm1d)
    statistics = [STATISTICS] if batch and (tracks or not instance) else []
    statistics += [()] if instance or not tracks else []
    return [(*affine, *more) for affine in AFFINE for more in statistics]


ONE = [(name, subset) for name, make in LAYERS.items() for subset in keras_layers(make())]


@pytest.mark.parametrize("form", ["list", "numbers"])
@pytest.mark.parametrize(("name", "subset"), ONE, ids=str)
def test_arrays_without_names_are_what_they_must_be_or_refused(name, subset, form):
    layer = randomized(LAYERS[name]())
    start, alike = of(layer), [s for s in keras_layers(layer) if len(s) == len(subset)]
    source = {role: np.random.default_rng(i).random(C) + 0.5 for i, role in enumerate(subset)}
    given = list(source.values()) if form == "list" else {str(i): v for i, v in enumerate(source.values())}
    if len(alike) > 1 or set(source) - set(start):
        words = r"may be .*\.keras file.*v\.path: v\.numpy" if len(alike) > 1 else "is not [01] everywhere"
        with pytest.raises(InputError, match=words):
            load(layer, given, "keras", strict=False)
    elif form == "numbers" and start and not source:  # no layer is there
        with pytest.raises(InputError, match="missing"):
            load(layer, given, "keras")
    else:
        load(layer, given, "keras")
        for role, tensor in of(layer).items():
            want = torch.from_numpy(source.get(role, np.full(C, IDENTITY[role])))
            torch.testing.assert_close(tensor, want.float(), msg=role)


NORMS = (
    "batch",
    "batch, no affine",
    "layer",
    "layer, no bias",
    "layer, no affine",
    "group",
    "rms",
    "rms, no affine",
)
parts = st.one_of(st.sampled_from(["linear", "linear, no bias"]), st.sampled_from(NORMS))


@settings(deadline=None, max_examples=300, derandomize=True)
@given(st.lists(st.tuples(parts, st.integers(0, 100)), min_size=1, max_size=4))
def test_a_list_of_a_network_is_what_it_must_be_or_refused(network):
    """Shapes are all the same, so that nothing but the counts could tell."""
    model, source = torch.nn.Sequential(), []
    for name, chosen in network:
        if name.startswith("linear"):
            model.append(torch.nn.Linear(C, C, bias=name == "linear"))
            choices = [("weight", "bias"), ("weight",)] if name == "linear" else [("weight",)]
        else:
            model.append(randomized(LAYERS[name]()))
            choices = keras_layers(model[-1])
        source.append(choices[chosen % len(choices)])
    arrays = [
        [
            np.random.default_rng(i).random((C, C) if "linear" in name and role == "weight" else C)
            for role in of_
        ]
        for i, ((name, _), of_) in enumerate(zip(network, source, strict=True))
    ]
    before = copy.deepcopy(model.state_dict())
    try:
        interop.load(
            model,
            list(itertools.chain(*arrays)),
            "keras",
            count=math.inf,
            eps=EPS,
            momentum=0.5,
            strict=False,
        )
    except InputError:
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
        assert any(
            len(s) != len(of(m)) or s != tuple(of(m)) for s, m in zip(source, model, strict=True)
        ) or any(not isinstance(m, torch.nn.Linear) or m.bias is not None for m in model)
        return
    for i, (layer, roles, values) in enumerate(zip(model, source, arrays, strict=True)):
        there = dict(zip(roles, values, strict=True))
        assert set(there) <= set(of(layer)), i
        for role, tensor in of(layer).items():
            if isinstance(layer, torch.nn.Linear):
                want = before[f"{i}.{role}"] if role not in there else torch.from_numpy(there[role].T)
            else:
                want = torch.from_numpy(there.get(role, np.full(C, IDENTITY[role])))
            torch.testing.assert_close(tensor, want.float(), msg=f"{i}.{role}")


@pytest.mark.parametrize("bias", [True, False])
def test_a_list_of_a_usual_network_is_loaded(bias):
    model = torch.nn.Sequential(
        torch.nn.Conv1d(3, C, 1, bias=bias), nn.BatchNorm1d(C), torch.nn.Linear(5, 2), torch.nn.LayerNorm(2)
    )
    arrays = list(interop.save(randomized(model), None, "keras", count=math.inf).values())
    other = copy.deepcopy(model)
    for tensor in other.parameters():
        tensor.data.zero_()
    interop.load(other, arrays, "keras", count=math.inf, eps=1e-5, momentum=0.9)
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in model.state_dict().items())
    # without one of them
    shorter = [array for i, array in enumerate(arrays) if i != 2 + bias]
    with pytest.raises(InputError, match=r"got \d+; .* may be"):
        interop.load(other, shorter, "keras", count=math.inf)


class Subsets(torch.nn.Module):
    """The norms that Keras saved and ran in fixtures/make_keras_subsets.py; all have scale and shift here."""

    def __init__(self):
        super().__init__()
        for at in ("gb", "g", "b", ""):
            for kind, norm in {
                "bn": nn.BatchNorm1d(6),
                "ln": nn.LayerNorm(6),
                "gn": nn.GroupNorm(2, 6),
            }.items():
                self.add_module(f"{kind}_{at}", norm)

    def forward(self, x):
        return {name: norm(x) for name, norm in self.named_children()}


def recorded():
    with np.load(FIXTURES / "keras_subsets.npz") as file:
        return {key: file[key] for key in file.files}


def weights_alone(folder):
    with zipfile.ZipFile(FIXTURES / "keras_subsets.keras") as archive:
        archive.extract("model.weights.h5", folder)
    return folder / "model.weights.h5"


def by_name():
    """As an error recommends: {v.path: v.numpy() for v in model.weights}."""
    told = recorded()
    return {str(told[key.replace("weight", "path")]): told[key] for key in told if key.startswith("weight")}


@pytest.mark.parametrize("form", ["keras_subsets.keras", "keras_subsets_legacy.h5", "names"])
@pytest.mark.parametrize("strict", [True, False])
def test_networks_of_keras_infer_the_same(form, strict):
    model, told = randomized(Subsets().double()), recorded()
    given = {"count": math.inf, "eps": 1e-3, "momentum": 0.99, "strict": strict}
    if form == "names":
        given["strict"] = False
    done = interop.load(model, by_name() if form == "names" else FIXTURES / form, "keras", **given)
    if form == "names":  # a norm without any tensor is not there
        assert [key for key in done.missing if key.startswith(("ln_.", "gn_."))]
        for norm in (model.ln_, model.gn_):
            norm.reset_parameters()
    else:
        assert done.missing == done.surplus == ()
    outputs = model.eval()(torch.from_numpy(told["x"]))
    for name, y in outputs.items():
        # Keras computes a batch norm in float32
        torch.testing.assert_close(y, torch.from_numpy(told[name]), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("strict", [True, False])
def test_files_of_keras_that_do_not_say_which_are_refused(strict, tmp_path):
    with pytest.raises(InputError) as caught:
        load(Subsets(), weights_alone(tmp_path), "keras", strict=strict)
    for name in ("bn_g", "bn_b", "ln_g", "ln_b", "gn_g", "gn_b"):
        assert f"{name} holds" in str(caught.value)
    assert "bn_gb holds" not in str(caught.value)
    told = recorded()
    with pytest.raises(InputError, match="may be"):
        load(
            Subsets(), [told[key] for key in sorted(told) if key.startswith("weight")], "keras", strict=strict
        )


def test_a_file_is_not_filled_where_it_does_not_say_which(tmp_path):
    template = tmp_path / "one.weights.h5"
    with h5py.File(template, "w") as file:
        group = file.create_group("vars")
        group["0"] = np.ones(C)
    model = LAYERS["layer, no bias"]()
    with pytest.raises(InputError, match="may be gamma or beta"):
        interop.save(model, tmp_path / "new.weights.h5", "keras", like=template)


@pytest.mark.parametrize(
    ("blobs", "words"), [(1, "may be 0 or 1: pass both arrays"), (3, "3 numbered arrays")]
)
def test_a_layer_of_caffe_with_one_array_may_be_scale_or_bias(blobs, words):
    with pytest.raises(InputError, match=words):
        load(LAYERS["layer"](), {"s": [np.ones(C)] * blobs}, "caffe", names={"": "s"})


def test_sums_of_caffe_without_their_weight_are_no_scale():
    blobs = {"bn": [np.ones(C), np.ones(C)], "scale": [np.ones(C), np.ones(C)]}
    with pytest.raises(InputError, match=r"weight has two arrays there, bn\.0 and scale\.0"):
        load(LAYERS["batch"](), blobs, "caffe", names={"": ("bn", "scale")}, strict=False)


@pytest.mark.parametrize("shift", ["given", "left out", "empty", "computed"])
def test_a_node_of_onnx_without_shift(shift, tmp_path):
    scale, beta = np.arange(1, C + 1, dtype=np.float32), np.full(C, 5, np.float32)
    inputs = {"given": ["n.b"], "left out": [], "empty": [""], "computed": ["doubled"]}[shift]
    nodes = [
        helper.make_node("Add", ["n.b", "n.b"], ["doubled"]),
        helper.make_node("LayerNormalization", ["x", "n.g", *inputs], ["y"], name="n", epsilon=EPS),
    ]
    info = [helper.make_tensor_value_info(v, onnx.TensorProto.FLOAT, None) for v in ("x", "y")]
    held = [numpy_helper.from_array(scale, "n.g"), numpy_helper.from_array(beta, "n.b")]
    if inputs in ([], [""]):
        nodes, held = nodes[1:], held[:1]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", info[:1], info[1:], held)), tmp_path / "n.onnx")
    model = torch.nn.ModuleDict({"n": randomized(LAYERS["layer"]())})
    if shift == "computed":
        with pytest.raises(InputError, match=r"missing: n\.bias"):
            interop.load(model, tmp_path / "n.onnx", "onnx")
        return
    interop.load(model, tmp_path / "n.onnx", "onnx")
    assert model.n.weight.tolist() == scale.tolist()
    assert model.n.bias.tolist() == [5.0 if shift == "given" else 0.0] * C


def test_a_scale_with_an_offset_is_set_to_its_own_identity():
    layer = nn.RMSNorm(C, eps=EPS, weight_offset=1.0)
    layer.weight.data.fill_(3)
    done = interop.load(layer, {"beta": np.zeros(C)}, "keras", eps=EPS, strict=False)
    assert layer.weight.tolist() == [0.0] * C
    assert done.missing == ("weight (looked for scale or 0)",)
