"""Keras' files: .weights.h5 (numbered arrays), older .h5 (named arrays), .keras (a zipped .weights.h5)."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from leannorm.interop.checkpoints.arrays import Checkpoint, optional, to_array, to_tensor

WEIGHTS, CONFIG = "model.weights.h5", "config.json"
STATISTICS = ("moving_mean", "moving_variance")
NORMS = ("BatchNormalization", "LayerNormalization", "GroupNormalization", "RMSNormalization")


def _norms(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The dotted name and the configuration of every norm layer in a saved model's configuration."""
    for layer in config.get("config", {}).get("layers", ()):
        name = prefix + str(layer["config"]["name"])
        if layer["class_name"] in NORMS:
            yield name, layer
        yield from _norms(layer, f"{name}.")


def _h5py() -> Any:
    return optional("h5py", "reading and writing Keras' .h5 and .keras")


def _refuse_damaged_heaps(content: bytes) -> None:
    """Raises for a damaged global heap: on an entry of size 0 the HDF5 library loops forever.

    A heap is a signature, its size, and entries; an entry is a number, a size and that many bytes. Number 0
    is the free space at the end. Source: HDF5 File Format Specification 3.0, section III.E.
    """
    signature = b"GCOL\x01\0\0\0"
    start = content.find(signature)
    while start >= 0:
        at, end = start + 16, start + int.from_bytes(content[start + 8 : start + 16], "little")
        while at + 16 <= end:
            number, size = content[at : at + 2], int.from_bytes(content[at + 8 : at + 16], "little")
            step = size if number == b"\0\0" else 16 + -(-size // 8) * 8
            if step < 16 or at + step > min(end, len(content)):
                raise ValueError(f"the text at byte {at} is {size} bytes long")
            at += step
        start = content.find(signature, start + 1)


def _attribute(group: Any, name: str) -> Any:
    """An attribute's value. The HDF5 library may crash on lists of anything except text, and Keras writes
    none."""
    dtype = group.attrs.get_id(name).dtype
    if dtype.kind == "O" and _h5py().check_string_dtype(dtype) is None:
        raise ValueError(f"the attribute {name} is neither text nor numbers")
    return group.attrs[name]


def _texts(group: Any, attribute: str) -> list[str]:
    """A list of names. An HDF5 attribute holds at most 64 KiB, so Keras splits long lists into several."""
    parts = [attribute] if attribute in group.attrs else []
    while f"{attribute}{len(parts)}" in group.attrs:
        parts.append(f"{attribute}{len(parts)}")
    values = [value for name in parts for value in _attribute(group, name)]
    return [value.decode() if isinstance(value, bytes) else str(value) for value in values]


def _named(group: Any) -> Iterator[tuple[str, Any]]:
    for layer in _texts(group, "layer_names"):
        weights = _texts(group[layer], "weight_names")
        parents = {weight.rpartition("/")[0] for weight in weights}
        for weight in weights:
            parent, _, leaf = weight.rpartition("/")
            inner = parent.rpartition("/")[2]
            # one parent: a layer; several: a model used as a layer, its own layers inside
            name = layer if len(parents) == 1 else f"{layer}.{inner}"
            yield f"{name}.{leaf.partition(':')[0]}", group[layer][weight]


def _numbered(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, child in group.items():
        if name in ("optimizer", "seed_generator"):
            continue  # state of the training run, not of the model
        if name == "vars":
            yield from ((f"{prefix}{index}", child[index]) for index in child)
        elif name == "layers":
            for layer, content in child.items():
                # the group is named after the layer's class; its attribute holds the layer's name
                own = layer
                if "vars" in content and "name" in content["vars"].attrs:
                    own = _attribute(content["vars"], "name")
                yield from _numbered(content, f"{prefix}{own}.")
        else:
            yield from _numbered(child, f"{prefix}{name}.")


def _datasets(
    file: Any, config: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any], frozenset[str]]:
    """Every dataset of the open file by "layer.name", the norms' settings that the file states, and the keys
    of the tensors that, according to the file, a norm was made without."""
    if "model_config" in file.attrs:
        config = json.loads(_attribute(file, "model_config"))
    root = file.get("model_weights", file)
    named = "layer_names" in root.attrs or "layer_names0" in root.attrs
    places = dict(_named(root) if named else _numbered(root))
    settings, absent = {}, set()
    for name, layer in _norms(config or {}):
        stated = layer["config"]
        settings[name] = {
            ours: float(stated[theirs])
            for ours, theirs in (("eps", "epsilon"), ("momentum", "momentum"))
            if theirs in stated
        }
        if layer["class_name"] == "RMSNormalization" or stated.get("rms_scaling"):
            continue  # always one array
        without = {
            leaf for leaf, flag in (("gamma", "scale"), ("beta", "center")) if not stated.get(flag, True)
        }
        absent |= {f"{name}.{leaf}" for leaf in without}
        affine = [leaf for leaf in ("gamma", "beta") if leaf not in without]
        leaves = [*affine, *(STATISTICS if layer["class_name"] == NORMS[0] else ())]
        numbers = [
            key for key in places if key.rpartition(".")[0] == name and key.rpartition(".")[2].isdigit()
        ]
        if len(numbers) == len(leaves):
            places |= {f"{name}.{leaf}": places.pop(f"{name}.{i}") for i, leaf in enumerate(leaves)}
    return places, settings, frozenset(absent)


def _checkpoint(content: bytes, config: Mapping[str, Any] | None = None) -> Checkpoint:
    _refuse_damaged_heaps(content)
    with _h5py().File(io.BytesIO(content), "r") as file:
        places, settings, absent = _datasets(file, config)
        return Checkpoint({key: to_tensor(key, place[()]) for key, place in places.items()}, settings, absent)


def _filled(content: bytes, values: Mapping[str, Tensor], config: Mapping[str, Any] | None = None) -> bytes:
    buffer = io.BytesIO(content)
    with _h5py().File(buffer, "r+") as file:
        places, _, _ = _datasets(file, config)
        for key, value in values.items():
            places[key][...] = to_array(value)
    return buffer.getvalue()


def read(path: Path) -> Checkpoint:
    return _checkpoint(path.read_bytes())


def filled(template: Path, values: Mapping[str, Tensor]) -> bytes:
    return _filled(template.read_bytes(), values)


def read_archive(path: Path) -> Checkpoint:
    with zipfile.ZipFile(path) as archive:
        return _checkpoint(archive.read(WEIGHTS), json.loads(archive.read(CONFIG)))


def filled_archive(template: Path, values: Mapping[str, Tensor]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(template) as archive, zipfile.ZipFile(buffer, "w") as result:
        for member in archive.namelist():
            content = archive.read(member)
            if member == WEIGHTS:
                content = _filled(content, values, json.loads(archive.read(CONFIG)))
            result.writestr(archive.getinfo(member), content)
    return buffer.getvalue()
