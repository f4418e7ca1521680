"""What a layer is called in files of nested models, and which arrays in them are no parameters."""

from __future__ import annotations

import h5py
import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from leannorm import interop, nn
from leannorm._errors import InputError
from leannorm.interop.checkpoints.files import read

# places in the .weights.h5 of a functional model that holds a sequential one; names as attributes of "vars"
NESTED = {
    "layers/functional/layers/batch_normalization/vars": ("norm", 4),
    "layers/functional/layers/dropout/seed_generator/vars": ("seed_generator", 1),
    "layers/functional/vars": ("inner", 0),
    "layers/dense/vars": ("head", 2),
    "blocks/dense/vars": ("dense_7", 2),
    "optimizer/vars": ("adam", 3),
}


def test_a_nested_models_weights(tmp_path):
    path = tmp_path / "net.weights.h5"
    with h5py.File(path, "w") as file:
        for place, (name, arrays) in NESTED.items():
            group = file.create_group(place)
            group.attrs["name"] = name
            for index in range(arrays):
                group[str(index)] = np.ones(2)
    layers = {key.rpartition(".")[0] for key in read(path).tensors}
    # an attribute of a subclassed model keeps its own name: there the layer's is counted up by Keras
    assert layers == {"inner.norm", "head", "blocks.dense"}


def test_a_nested_models_weights_of_before_keras_3(tmp_path):
    path = tmp_path / "net.h5"
    with h5py.File(path, "w") as file:
        # HDF5 holds 64 KiB an attribute: Keras numbers the parts of a longer list
        file.attrs["layer_names0"], file.attrs["layer_names1"] = ["inner"], ["bn_1"]
        weights = {"inner": ["norm/gamma:0", "norm/beta:0", "fc/kernel:0"], "bn_1": ["bn_1/gamma:0"]}
        for layer, names in weights.items():
            group = file.create_group(layer)
            group.attrs["weight_names"] = [name.encode() for name in names]
            for name in names:
                group[name] = np.ones(2)
    found = sorted(read(path).tensors)
    assert found == ["bn_1.gamma", "inner.fc.kernel", "inner.norm.beta", "inner.norm.gamma"]


class Exported(torch.nn.Module):
    """What `onnx_model` holds, under the names that torch's exporter gives."""

    def __init__(self):
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        self.fc, self.proj = torch.nn.Linear(3, 2), torch.nn.Linear(2, 4, bias=False)


def onnx_model(path, **gemm):
    """Equal vectors shared through Identity, a transposed weight, a constant node, and shapes."""
    rng = np.random.default_rng(0)
    values = {
        "bn1.weight": np.array([1, 2, 3.0]), "bn1.bias": np.zeros(3), "bn1.running_mean": rng.normal(size=3),
        "bn1.running_var": np.ones(3), "fc.weight": rng.normal(size=(2, 3)), "fc.bias": rng.normal(size=2),
        "slope": np.array(0.1), "shape": np.array([-1, 3]),
    }  # fmt: skip
    values = {k: v.astype(np.float32 if v.dtype.kind == "f" else np.int64) for k, v in values.items()}
    projection = rng.normal(size=(2, 4)).astype(np.float32)
    shared = ["weight", "bias", "running_mean", "running_var"]
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["r"]),
        helper.make_node("BatchNormalization", ["r", *(f"bn1.{s}" for s in shared)], ["a"], name="/bn1/BN"),
        *(helper.make_node("Identity", [f"bn1.{s}"], [f"bn2.{s}"]) for s in shared),
        helper.make_node("BatchNormalization", ["a", *(f"bn2.{s}" for s in shared)], ["b"], epsilon=0.5),
        helper.make_node("Gemm", ["b", "fc.weight", "fc.bias"], ["c"], transB=1, **gemm),
        helper.make_node("Constant", [], ["p"], value=numpy_helper.from_array(projection)),
        helper.make_node("MatMul", ["c", "p"], ["d"], name="/proj"),
        helper.make_node("Mul", ["d", "slope"], ["y"]),
    ]
    info = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in ("x", "y")]
    held = [numpy_helper.from_array(value, name) for name, value in values.items()]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", info[:1], info[1:], held)), path)
    return {k: torch.from_numpy(v) for k, v in values.items()} | {"proj": torch.from_numpy(projection)}


def test_an_exported_onnx_file(tmp_path):
    values = onnx_model(tmp_path / "net.onnx")
    model = Exported()
    interop.load(model, tmp_path / "net.onnx", "onnx", count=float("inf"))
    for name in ("bn1", "bn2"):
        assert torch.equal(getattr(model, name).weight, values["bn1.weight"])
        assert torch.equal(getattr(model, name).running_mean, values["bn1.running_mean"])
    assert torch.equal(model.fc.weight, values["fc.weight"])
    assert torch.equal(model.proj.weight, values["proj"].T)
    assert (model.bn1.eps, model.bn2.eps, model.bn1.momentum) == (1e-5, 0.5, 0.1)


def test_a_filled_onnx_file(tmp_path):
    onnx_model(tmp_path / "net.onnx")
    model, other, own = Exported(), Exported(), tmp_path / "own.onnx"
    model.bn2.load_state_dict(model.bn1.state_dict())
    interop.save(model, own, "onnx", count=float("inf"), like=tmp_path / "net.onnx")
    interop.load(other, own, "onnx", count=float("inf"))
    assert all(torch.equal(other.state_dict()[k], v) for k, v in model.state_dict().items())
    model.bn2.bias.data += 1
    with pytest.raises(InputError, match=r"keeps bn1\.B and bn2\.B as one array, the model's differ"):
        interop.save(model, own, "onnx", count=float("inf"), like=tmp_path / "net.onnx")
    interop.load(other, own, "onnx", count=float("inf"))  # the first file is still whole


def test_a_scaled_gemm_is_refused(tmp_path):
    onnx_model(tmp_path / "net.onnx", alpha=0.5)
    with pytest.raises(InputError, match="the Gemm 'fc' scales its inputs"):
        interop.load(Exported(), tmp_path / "net.onnx", "onnx")
