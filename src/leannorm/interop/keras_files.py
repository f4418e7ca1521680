"""Keras' files: .weights.h5 (numbered arrays), older .h5 (named ones), .keras (the first kind, zipped)."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from leannorm.interop.arrays import Checkpoint, optional, to_array, to_tensor

WEIGHTS, CONFIG = "model.weights.h5", "config.json"
STATISTICS = ("moving_mean", "moving_variance")
NORMS = ("BatchNormalization", "LayerNormalization", "GroupNormalization", "RMSNormalization")


def _norms(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Dotted name and description of every norm layer in a saved model's architecture."""
    for layer in config.get("config", {}).get("layers", ()):
        name = prefix + str(layer["config"]["name"])
        if layer["class_name"] in NORMS:
            yield name, layer
        yield from _norms(layer, f"{name}.")


def _texts(group: Any, attribute: str) -> list[str]:
    """A list of names; HDF5 holds 64 KiB an attribute, so that Keras spreads long ones over several."""
    found = [attribute] if attribute in group.attrs else []
    while f"{attribute}{len(found)}" in group.attrs:
        found.append(f"{attribute}{len(found)}")
    values = [value for name in found for value in group.attrs[name]]
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
                # the group is called by the layer's class, its attribute holds the layer's name
                own = content["vars"].attrs.get("name", layer) if "vars" in content else layer
                yield from _numbered(content, f"{prefix}{own}.")
        else:
            yield from _numbered(child, f"{prefix}{name}.")


def _datasets(file: Any, config: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every array's place in the open file by "layer.name", and the norms' settings where they are stated."""
    if "model_config" in file.attrs:
        config = json.loads(file.attrs["model_config"])
    root = file.get("model_weights", file)
    named = "layer_names" in root.attrs or "layer_names0" in root.attrs
    places = dict(_named(root) if named else _numbered(root))
    settings = {}
    for name, layer in _norms(config or {}):
        stated = layer["config"]
        settings[name] = {
            ours: float(stated[theirs])
            for ours, theirs in (("eps", "epsilon"), ("momentum",) * 2)
            if theirs in stated
        }
        affine = [leaf for leaf, flag in (("gamma", "scale"), ("beta", "center")) if stated.get(flag, True)]
        leaves = [*affine, *(STATISTICS if layer["class_name"] == NORMS[0] else ())]
        numbers = [
            key for key in places if key.rpartition(".")[0] == name and key.rpartition(".")[2].isdigit()
        ]
        if len(numbers) == len(leaves):
            places |= {f"{name}.{leaf}": places.pop(f"{name}.{i}") for i, leaf in enumerate(leaves)}
    return places, settings


def _checkpoint(content: bytes, config: Mapping[str, Any] | None = None) -> Checkpoint:
    with optional("h5py", "reading Keras' .h5 and .keras").File(io.BytesIO(content), "r") as file:
        places, settings = _datasets(file, config)
        return Checkpoint({key: to_tensor(key, place[()]) for key, place in places.items()}, settings)


def _filled(content: bytes, values: Mapping[str, Tensor], config: Mapping[str, Any] | None = None) -> bytes:
    buffer = io.BytesIO(content)
    with optional("h5py", "writing Keras' .h5 and .keras").File(buffer, "r+") as file:
        places, _ = _datasets(file, config)
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
