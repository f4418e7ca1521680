"""A program as one file: a zip archive of one JSON text and the raw bytes of each storage.

Nothing in it is pickled. Reading parses JSON, copies numbers, and looks operators up in fixed lists. The last
part lists the size and the CRC-32 of every other part, and a file that does not match it is rejected. This
detects damage and edits, but not a forged list.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from leannorm._errors import InputError
from leannorm._files import replacing
from leannorm.program import codec
from leannorm.program.join import Joined
from leannorm.program.signature import Input, Signature

_TEXT, _PARTS = "program.json", "parts.json"
_FORMAT, _UNLISTED = "leannorm.program.2", "leannorm.program.1"  # the first format had no list of parts


def write(
    path: str | os.PathLike[str],
    joined: Joined,
    signature: Signature,
    structures: Mapping[str, pytree.TreeSpec],
) -> None:
    """Write the file; if anything fails, an existing file is unchanged."""
    memories: dict[int, tuple[str, torch.UntypedStorage]] = {}
    try:
        encoded = codec.encode_graph(joined.graph, joined.root)
    except codec.RefusedError as error:
        raise InputError(f"a program's file cannot hold {error}; give that part another name") from error
    text = {
        "format": _FORMAT,
        "variables": [_describe(n, t, memories) for n, t in joined.variables.items()],
        "graph": encoded,
        "results": {k: [codec.encode(v) for v in values] for k, values in joined.results.items()},
        "kinds": joined.kinds,
        "inputs": [
            i._replace(dtype=codec.encode(i.dtype), value=codec.encode(i.value)) for i in signature.inputs
        ],
        "structure": codec.encode_structure(signature.structure),
        "ranges": dict(signature.ranges),
        "structures": {k: codec.encode_structure(s) for k, s in structures.items()},
    }
    with replacing(path) as stream, zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(_TEXT, json.dumps(text), zipfile.ZIP_DEFLATED)
        for name, storage in memories.values():
            data: Any = torch.empty(0, dtype=torch.uint8).set_(storage.cpu()).numpy()
            with archive.open(name, "w", force_zip64=True) as entry:
                entry.write(memoryview(data))
        archive.writestr(_PARTS, json.dumps(_listed(archive)), zipfile.ZIP_DEFLATED)


def read(path: str | os.PathLike[str]) -> tuple[Joined, Signature, dict[str, pytree.TreeSpec]]:
    """Read a file written by `write`; raises `InputError` for any other file."""
    try:
        with zipfile.ZipFile(path) as archive:
            _check_parts(archive)
            text = json.loads(archive.read(_TEXT))
            if text["format"] != _FORMAT:
                raise codec.RefusedError(f"the format {text['format']!r}, not {_FORMAT!r}")
            return _build(text, archive)
    except FileNotFoundError:
        raise
    except codec.RefusedError as error:
        raise InputError(
            f"{os.fspath(path)} is refused: it has {error}; take the file as Program.save wrote it, or save "
            "the program again"
        ) from error
    except Exception as error:  # a damaged or foreign file may raise anything
        raise InputError(
            f"{os.fspath(path)} is not a whole file written by Program.save "
            f"({type(error).__name__}: {error}); save the program again"
        ) from error


def _listed(archive: zipfile.ZipFile) -> dict[str, list[int]]:
    """Size and CRC-32 of every part except the list itself."""
    return {i.filename: [i.file_size, i.CRC] for i in archive.infolist() if i.filename != _PARTS}


def _check_parts(archive: zipfile.ZipFile) -> None:
    """Compare the archive's parts with their list; reading a part compares its bytes with the CRC-32."""
    names = archive.namelist()
    if _PARTS not in names:
        if _TEXT not in names:
            raise KeyError(f"neither {_TEXT} nor {_PARTS} is in it")
        if json.loads(archive.read(_TEXT)).get("format") == _UNLISTED:
            raise codec.RefusedError(f"the format {_UNLISTED!r}, which had no checksums; this is {_FORMAT!r}")
        raise codec.RefusedError(f"no part {_PARTS}")
    saved, present = json.loads(archive.read(_PARTS)), _listed(archive)
    for name in sorted({*saved, *present}):
        if name not in present:
            raise codec.RefusedError(f"no part {name}")
        if name not in saved:
            raise codec.RefusedError(f"a part {name!r} that was not saved with it")
        if saved[name] != present[name]:
            raise codec.RefusedError(
                f"a part {name} that was changed since it was saved (its checksum differs)"
            )
    if len(names) != len(set(names)):
        raise codec.RefusedError("two parts of one name")


def _build(text: Any, archive: zipfile.ZipFile) -> tuple[Joined, Signature, dict[str, pytree.TreeSpec]]:
    root = torch.nn.Module()
    memories: dict[str, torch.UntypedStorage] = {}
    seen: dict[str, Tensor] = {}
    variables = {}
    for entry in text["variables"]:
        key = json.dumps([entry[k] for k in entry if k != "name"])
        if key not in seen:
            seen[key] = _variable(entry, archive, memories)
        variables[entry["name"]] = seen[key]
    graph = codec.decode_graph(text["graph"], root)
    nodes: dict[str, fx.Node] = {n.name: n for n in graph.nodes}
    for node in graph.nodes:
        if node.op == "get_attr" and node.target not in variables and node.target not in root._modules:
            raise codec.RefusedError(f"no variable {node.target!r}")
        if node.meta["branch"] not in ("shared", *text["results"]):
            raise codec.RefusedError(f"a branch {node.meta['branch']!r}")
    results = {k: [codec.decode(v, nodes) for v in text["results"][k]] for k in ("train", "infer")}
    inputs = []
    for name, sizes, dtype, value in text["inputs"]:
        inputs.append(Input(name, tuple(sizes), codec.decode(dtype, {}), codec.decode(value, {})))
    ranges = {k: (low, high) for k, (low, high) in text["ranges"].items()}
    signature = Signature(tuple(inputs), codec.decode_structure(text["structure"]), ranges)
    structures = {k: codec.decode_structure(text["structures"][k]) for k in results}
    return Joined(root, graph, variables, results, dict(text["kinds"])), signature, structures


def _describe(
    name: str, tensor: Tensor, memories: dict[int, tuple[str, torch.UntypedStorage]]
) -> dict[str, Any]:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise InputError(
            f"the variable {name} is {tensor.layout}, and a program's file holds dense tensors; densify it"
        )
    storage = tensor.untyped_storage()
    memory, _ = memories.setdefault(storage._cdata, (f"data/{len(memories)}", storage))
    parameter = isinstance(tensor, torch.nn.Parameter)
    return {
        "name": name,
        "memory": memory,
        "dtype": codec.encode(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset(),
        "parameter": parameter,
        "trained": parameter and tensor.requires_grad,
    }


def _variable(entry: Any, archive: zipfile.ZipFile, memories: dict[str, torch.UntypedStorage]) -> Tensor:
    name = entry["memory"]
    if name not in memories:
        data = torch.empty(archive.getinfo(name).file_size, dtype=torch.uint8)
        values: Any = data.numpy()
        rest = memoryview(values)
        stream: Any
        with archive.open(name) as stream:
            while read := stream.readinto(rest):
                rest = rest[read:]
            if len(rest) or stream.read(1):  # the checksum is verified at the end of the stream
                raise EOFError(f"{name} has another size than stated")
        memories[name] = data.untyped_storage()
    tensor = torch.empty(0, dtype=codec.decode(entry["dtype"], {})).set_(
        memories[name], entry["offset"], entry["shape"], entry["stride"]
    )
    return torch.nn.Parameter(tensor, bool(entry["trained"])) if entry["parameter"] else tensor
