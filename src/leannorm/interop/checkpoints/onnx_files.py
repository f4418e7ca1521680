"""ONNX files: what an initializer is depends on the node that reads it, not on its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from leannorm._errors import InputError
from leannorm.interop.checkpoints.arrays import Checkpoint, optional, to_array, to_tensor
from leannorm.interop.checkpoints.conventions import CONVENTIONS

# the names of each operator's inputs after the first
OPERATORS: dict[str, tuple[str, ...]] = {
    "BatchNormalization": ("scale", "B", "input_mean", "input_var"),
    "LayerNormalization": ("Scale", "B"),
    "GroupNormalization": ("scale", "bias"),
    "InstanceNormalization": ("scale", "B"),
    "RMSNormalization": ("scale",),
    "Conv": ("W", "B"),
    "ConvTranspose": ("W", "B"),
    "Gemm": ("B", "C"),
    "MatMul": ("B",),
}


@dataclass(frozen=True)
class _Place:
    proto: Any
    transposed: bool = False


def _layer(node: Any, inputs: list[str]) -> str:
    """The layer's name: the common prefix of its parameters' names up to the last dot, or the node's name."""
    prefixes = {name.rpartition(".")[0] for name in inputs}
    shared = prefixes.pop() if len(prefixes) == 1 else ""
    name = shared if shared and "::" not in shared else node.name or node.output[0]
    return name.strip("/").replace("/", ".")


def _contents(model: Any, onnx: Any) -> tuple[dict[str, _Place], dict[str, dict[str, float]], frozenset[str]]:
    """The arrays by "layer.name", the norms' settings, and the keys of the inputs that a norm's node leaves
    out."""
    if not model.graph.node:
        raise InputError("it holds no graph; export the model anew")
    value_of = onnx.helper.get_attribute_value
    held = {proto.name: proto for proto in model.graph.initializer}
    for node in model.graph.node:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "Constant" and "value" in attributes:
            held[node.output[0]] = attributes["value"].t
        elif node.op_type == "Identity" and node.input[0] in held:
            held[node.output[0]] = held[node.input[0]]  # exporters share equal initializers this way
    places: dict[str, _Place] = {}
    settings: dict[str, dict[str, float]] = {}
    absent: set[str] = set()
    used = set()
    for node in model.graph.node:
        leaves = OPERATORS.get(node.op_type, ())
        inputs = {leaf: name for leaf, name in zip(leaves, node.input[1:], strict=False) if name in held}
        if not inputs:
            continue
        layer = _layer(node, list(inputs.values()))
        attributes = {attribute.name: value_of(attribute) for attribute in node.attribute}
        if node.op_type == "Gemm" and {attributes.get("alpha", 1.0), attributes.get("beta", 1.0)} != {1.0}:
            raise InputError(f"the Gemm {layer!r} scales its inputs; multiply alpha and beta into them first")
        for leaf, name in inputs.items():
            key = f"{layer}.{leaf}"
            if key in places:
                raise InputError(f"two nodes are called {layer!r}; give the nodes names of their own")
            places[key] = _Place(
                held[name], node.op_type == "Gemm" and leaf == "B" and attributes.get("transB", 0) == 1
            )
            used.add(held[name].name)
        if node.op_type.endswith("Normalization"):
            settings[layer] = {"eps": attributes.get("epsilon", CONVENTIONS["onnx"].eps)}
            given = dict(zip(leaves, node.input[1:], strict=False))
            absent |= {f"{layer}.{leaf}" for leaf in leaves if not given.get(leaf)}
        if node.op_type == "BatchNormalization":
            settings[layer]["momentum"] = attributes.get("momentum", CONVENTIONS["onnx"].momentum)
    types = onnx.TensorProto
    floats = (types.FLOAT, types.DOUBLE, types.FLOAT16, types.BFLOAT16)
    for proto in model.graph.initializer:
        # integers are shapes and axes, single values constants of the arithmetic
        if proto.name not in used and proto.data_type in floats and any(size > 1 for size in proto.dims):
            places[proto.name.replace("/", ".")] = _Place(proto)
    return places, settings, frozenset(absent)


def read(path: Path) -> Checkpoint:
    onnx = optional("onnx", "reading .onnx")
    places, settings, absent = _contents(onnx.load(path), onnx)
    tensors = {}
    for key, place in places.items():
        value = to_tensor(key, onnx.numpy_helper.to_array(place.proto))
        tensors[key] = value.T if place.transposed else value
    return Checkpoint(tensors, settings, absent)


def filled(template: Path, values: Mapping[str, Tensor]) -> bytes:
    onnx = optional("onnx", "writing .onnx")
    model = onnx.load(template)
    places, _, _ = _contents(model, onnx)
    written: dict[str, str] = {}
    for key, value in values.items():
        place = places[key]
        array = to_array(value.T if place.transposed else value)
        array = array.astype(onnx.helper.tensor_dtype_to_np_dtype(place.proto.data_type))
        proto = onnx.numpy_helper.from_array(array, place.proto.name)
        first = written.setdefault(place.proto.name or key, key)
        if first != key and place.proto != proto:
            raise InputError(
                f"{template} keeps {first} and {key} as one array, the model's differ; export it anew"
            )
        place.proto.CopyFrom(proto)
    content: bytes = model.SerializeToString()
    return content
