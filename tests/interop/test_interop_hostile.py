"""Checkpoint files that are damaged or mean harm: a clear error, nothing run, nothing loaded."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile

import numpy as np
import pytest
import torch
from interop_cases import FILES, FIXTURES, Net

from leannorm import interop
from leannorm._errors import InputError

EVERY = {"paddle": "paddle.pdparams", "keras": "keras_legacy.h5", "flax": "flax.msgpack", "onnx": "net.onnx"}
EVERY |= {f"{framework} {name}": name for framework, name in FILES.items()}


def unchanged_after(path, source, words):
    model = Net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(InputError, match=words):
        interop.load(model, path, source)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


class Harm:
    def __init__(self, act):
        self.act = act

    def __reduce__(self):
        return self.act


HARM = {
    "os.system": (os.system, ("touch harmed",)),
    "eval": (eval, ("open('harmed', 'w')",)),
    "open": (open, ("harmed", "w")),
    "getattr": (getattr, (int, "real")),
    "numpy.load": (np.load, ("harmed.npy",)),
}


@pytest.mark.parametrize("act", HARM)
@pytest.mark.parametrize("suffix", [".pdparams", ".pt"])
def test_a_pickle_that_asks_to_run_something_runs_nothing(act, suffix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"net{suffix}"
    content = {"bn.weight": Harm(HARM[act])}
    path.write_bytes(pickle.dumps(content)) if suffix == ".pdparams" else torch.save(content, path)
    unchanged_after(path, "paddle", f"net{suffix}")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


ARRAYS = {
    "objects": np.array([Harm((print, ("harmed",))), None], dtype=object),
    "text": np.array(["a", "b"]),
    "records": np.zeros(2, dtype=[("a", "f4")]),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_pickled_arrays_must_be_numbers(kind, tmp_path, capsys):
    (tmp_path / "net.pdparams").write_bytes(pickle.dumps({"bn.weight": ARRAYS[kind]}))
    unchanged_after(tmp_path / "net.pdparams", "paddle", "net.pdparams is damaged")
    assert capsys.readouterr().out == ""


def test_a_pickled_array_whose_shape_lies(tmp_path):
    honest = pickle.dumps({"bn.weight": np.arange(4.0)}, protocol=2)
    lying = honest.replace(b"K\x04\x85", b"K\x05\x85")
    assert lying != honest
    (tmp_path / "net.pdparams").write_bytes(lying)
    unchanged_after(tmp_path / "net.pdparams", "paddle", "net.pdparams is damaged")


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_every_protocol_that_paddle_writes_is_read(protocol, tmp_path):
    wanted = {"weight": np.array([1.0, 2.0]), "bias": ("bias", np.array([[3.0, 4.0]], dtype=">f4")[0])}
    (tmp_path / "net.pdparams").write_bytes(pickle.dumps(wanted, protocol=protocol))
    layer = torch.nn.LayerNorm(2)
    interop.load(layer, tmp_path / "net.pdparams", "paddle")
    assert (layer.weight.tolist(), layer.bias.tolist()) == ([1, 2], [3, 4])


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.7, 0.99])
@pytest.mark.parametrize("name", sorted(set(EVERY.values())))
def test_a_truncated_file(name, fraction, tmp_path):
    content = (FIXTURES / name).read_bytes()
    path = tmp_path / name
    path.write_bytes(content[: int(len(content) * fraction)])
    source = next(key.partition(" ")[0] for key, value in EVERY.items() if value == name)
    unchanged_after(path, source, name)


# single flipped bits at which the HDF5 library alone does not return, or crashes the process
FATAL = [(2104, 7), (2217, 1), (2168, 6), (2192, 6), (2192, 1), (15817, 1)]


@pytest.mark.parametrize(("byte", "bit"), FATAL)
def test_flipped_bits_that_the_hdf5_library_cannot_take(byte, bit, tmp_path):
    with zipfile.ZipFile(FIXTURES / "keras.keras") as archive:
        content = bytearray(archive.read("model.weights.h5"))
    content[byte] ^= 1 << bit
    (tmp_path / "net.weights.h5").write_bytes(content)
    unchanged_after(tmp_path / "net.weights.h5", "keras", r"net\.weights\.h5 is damaged")


@pytest.mark.parametrize("name", sorted(set(EVERY.values())))
def test_a_file_of_another_format_under_this_ending(name, tmp_path):
    shutil.copy(FIXTURES / "make_paddle.py", tmp_path / name)
    source = next(key.partition(" ")[0] for key, value in EVERY.items() if value == name)
    unchanged_after(tmp_path / name, source, f"{name} is damaged|does not fit the model")


def test_a_pt_file_of_something_else_says_so_and_gives_no_advice_to_trust_it(tmp_path):
    torch.save([torch.ones(3)], tmp_path / "list.pt")
    unchanged_after(tmp_path / "list.pt", "torch", "must hold a mapping of names to arrays, got list")
    torch.save(Harm(HARM["eval"]), tmp_path / "net.pt")
    with pytest.raises(InputError, match=r"net.pt: it is no file of torch.save") as caught:
        interop.load(Net(), tmp_path / "net.pt", "torch")
    assert "weights_only" not in str(caught.value)


def test_other_shapes_are_no_matter_of_names(tmp_path):
    wrong = {key: torch.zeros(value.numel() + 1) for key, value in Net().state_dict().items()}
    with pytest.raises(InputError, match="shape") as caught:
        interop.load(Net(), wrong, "torch")
    assert "names=" not in str(caught.value)
