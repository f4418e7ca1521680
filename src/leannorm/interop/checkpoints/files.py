"""Reading checkpoint files without running code from them, and writing the formats with a free layout."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leannorm._errors import InputError, LeannormError, MissingDependencyError
from leannorm.interop.checkpoints import keras_files, onnx_files
from leannorm.interop.checkpoints.arrays import Checkpoint, flat, from_mapping, optional, to_tensor


class _PickledDtype:
    """Replaces numpy.dtype while unpickling: numpy's own unpickling trusts its input, this one does not."""

    def __init__(self, code: str, *_: object) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1] if state[1] in "<>" else "="


class _PickledArray:
    """Replaces numpy.ndarray while unpickling: checks shape, dtype and bytes against each other."""

    def __init__(self, *_: object) -> None:
        self.array: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        numbers = np.dtype(dtype.order + dtype.code)
        if numbers.kind not in "fiub":
            raise pickle.UnpicklingError(f"arrays of {numbers} are not numbers")
        self.array = np.frombuffer(data, numbers).reshape(shape, order="F" if fortran else "C")

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        if self.array is None:
            raise pickle.UnpicklingError("an array without contents")
        return self.array.astype(dtype or self.array.dtype)


_HARMLESS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "tuple"): tuple,
    ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
    ("numpy", "dtype"): _PickledDtype,
    ("numpy", "ndarray"): _PickledArray,
    ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(
                f"it asks to run {module}.{name}, and only arrays in plain containers are read"
            )
        return _HARMLESS[module, name]


def read_pickle(path: Path) -> Checkpoint:
    with path.open("rb") as file:
        content = _ArrayUnpickler(file).load()
    return _of_mapping(content)


def _of_mapping(content: Any) -> Checkpoint:
    if not isinstance(content, Mapping):
        raise InputError(f"it must hold a mapping of names to arrays, got {type(content).__name__}")
    return from_mapping(content)


def read_msgpack(path: Path) -> Checkpoint:
    """`flax.serialization.to_bytes`: arrays are extension type 1, (shape, dtype, bytes)."""
    msgpack = optional("msgpack", "reading Flax's .msgpack")

    def extension(code: int, data: bytes) -> Tensor:
        if code not in (1, 3):
            raise InputError(f"it holds an entry of extension type {code}, which is no array")
        shape, dtype, buffer = msgpack.unpackb(data, raw=False)
        if dtype == "bfloat16":
            array = np.frombuffer(buffer, np.uint16).reshape(shape)
            return torch.from_numpy(array.copy()).view(torch.bfloat16)
        return to_tensor("", np.frombuffer(buffer, np.dtype(dtype)).reshape(shape))

    def whole(tree: dict[str, Any]) -> Any:
        if "__msgpack_chunked_array__" not in tree:
            return tree
        shape, chunks = tree["shape"], tree["chunks"]
        return torch.cat([chunks[str(i)] for i in range(len(chunks))]).reshape(
            [shape[str(i)] for i in range(len(shape))]
        )

    return from_mapping(msgpack.unpackb(path.read_bytes(), ext_hook=extension, object_hook=whole, raw=False))


def read_safetensors(path: Path) -> Checkpoint:
    return from_mapping(optional("safetensors.torch", "reading .safetensors").load_file(path))


def read_torch(path: Path) -> Checkpoint:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its message advises running what the file asks for
        raise InputError(
            "it is no file of torch.save, or holds more than tensors in plain containers"
        ) from error
    return _of_mapping(content)


def _msgpacked(tree: Any) -> bytes:
    msgpack = optional("msgpack", "writing Flax's .msgpack")

    def array(value: Tensor) -> Any:
        name = str(value.dtype).removeprefix("torch.")
        data = value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return msgpack.ExtType(1, msgpack.packb((tuple(value.shape), name, data), use_bin_type=True))

    packed: bytes = msgpack.packb(tree, default=array, use_bin_type=True)
    return packed


def _safetensors(tree: dict[str, Any]) -> bytes:
    # safetensors rejects tensors that share memory, as tied parameters do
    copies = {key: value.clone(memory_format=torch.contiguous_format) for key, value in flat(tree).items()}
    data: bytes = optional("safetensors.torch", "writing .safetensors").save(copies)
    return data


def _torch(tree: dict[str, Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return buffer.getvalue()


WRITERS: dict[str, Callable[[Any], bytes]] = {
    ".pdparams": partial(pickle.dumps, protocol=4),
    ".msgpack": _msgpacked,
    ".safetensors": _safetensors,
    ".pt": _torch,
    ".pth": _torch,
    ".bin": _torch,
}

# formats whose layout only their framework can make: a copy of such a file is filled with the model's values
TEMPLATES: dict[str, Callable[[Path, Mapping[str, Tensor]], bytes]] = {
    ".h5": keras_files.filled,
    ".hdf5": keras_files.filled,
    ".keras": keras_files.filled_archive,
    ".onnx": onnx_files.filled,
}

READERS: dict[str, Callable[[Path], Checkpoint]] = {
    ".pdparams": read_pickle,
    ".h5": keras_files.read,
    ".hdf5": keras_files.read,
    ".keras": keras_files.read_archive,
    ".msgpack": read_msgpack,
    ".onnx": onnx_files.read,
    ".safetensors": read_safetensors,
    ".pt": read_torch,
    ".pth": read_torch,
    ".bin": read_torch,
}


def read(path: Path) -> Checkpoint:
    """Read the file by its suffix; any defect raises an InputError that names the file."""
    if path.suffix not in READERS:
        raise InputError(f"{path} must end in one of {', '.join(READERS)}; or pass its arrays as a mapping")
    try:
        return READERS[path.suffix](path)
    except MissingDependencyError:
        raise
    except LeannormError as error:
        raise InputError(f"{path}: {error}") from error
    except FileNotFoundError:
        raise InputError(f"there is no file {str(path)!r}; check the path") from None
    except Exception as error:  # a hostile or truncated file may raise anything in its parser
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{path} is damaged, or no {path.suffix} file: {type(error).__name__}: {reason}"
        ) from error
