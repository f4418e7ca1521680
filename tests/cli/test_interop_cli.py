"""`leannorm convert-checkpoint`: from the framework's file to one of another, and what it says on the way."""

from __future__ import annotations

import json
import re

import pytest
import torch
from interop_cases import FIXTURES, Net

from leannorm import interop
from leannorm.cli import main

MODEL = ["--model", "interop_cases:Net"]
KERAS = [str(FIXTURES / "keras.keras")]
FLAX = [str(FIXTURES / "flax.msgpack")]


def test_keras_to_torch(tmp_path, capsys):
    output, numbers = tmp_path / "net.pt", tmp_path / "numbers.json"
    arguments = [*KERAS, str(output), *MODEL, "--from", "keras", "--count", "48", "--json", str(numbers)]
    assert main(["convert-checkpoint", *arguments]) == 0
    wanted = Net()
    interop.load(wanted, FIXTURES / "keras.keras", "keras", count=48)
    got = torch.load(output, weights_only=True)
    assert all(torch.equal(got[key], value) for key, value in wanted.state_dict().items())
    printed = capsys.readouterr().out
    assert "make bn with eps=0.001, momentum=0.01: net.pt does not hold it" in printed
    assert "14 tensors converted" in printed
    said = json.loads(numbers.read_text())
    assert said["settings"]["bn"] == {"eps": 0.001, "momentum": 0.01}
    assert said["loaded"]["fc.weight"] == "fc.0"
    assert said["notes"] == []


def test_between_two_others_and_what_stays_open_is_said(tmp_path, capsys):
    output = tmp_path / "net.pdparams"
    arguments = [*FLAX, str(output), *MODEL, "--from", "flax", "--to", "paddle", "--to-names", "bn=norm"]
    assert main(["convert-checkpoint", *arguments]) == 0
    printed = capsys.readouterr().out
    assert not re.search("pass |count=|eps=|momentum=", printed.replace("make ", ""))
    for words in (
        "was loaded as it is",
        "give --count N*H*W",
        "give --eps as the flax",
        "was saved as it is",
        "default is 0.99",
        "default is 1e-06",
    ):
        assert words in printed
    model = Net()
    interop.load(model, output, "paddle", names={"bn": "norm"}, count=48)


BAD_USAGE = {
    "no such file": (["no.h5", "o.pt", *MODEL, "--from", "keras"], "there is no file"),
    "unknown source": ([*KERAS, "o.pt", *MODEL, "--from", "mxnet"], "--from must be one of torch"),
    "unknown target": ([*KERAS, "o.pt", *MODEL, "--from", "keras", "--to", "x"], "--to must be one of"),
    "a typing error": ([*KERAS, "o.pt", *MODEL, "--from", "pytoch"], "(did you mean pytorch or torch?)"),
    "no output": ([*KERAS, *MODEL, "--from", "keras"], "name the file to write once: OUTPUT or -o FILE"),
    "two outputs": ([*KERAS, "o.pt", "-o", "p.pt", *MODEL, "--from", "keras"], "name the file to write once"),
    "no source": ([*KERAS, "o.pt", *MODEL], "--from"),
    "names": ([*KERAS, "o.pt", *MODEL, "--from", "keras", "--names", "bn"], "--names must be HERE=THERE"),
    "no folder": ([*KERAS, "nowhere/o.pt", *MODEL, "--from", "keras"], "there is no folder"),
    "no template": ([*FLAX, "o.onnx", *MODEL, "--from", "flax", "--to", "onnx"], "give --like one that"),
    "names of no layer": ([*KERAS, "o.pt", *MODEL, "--from", "keras", "--names", "x=y"], "--names must map"),
    "names of no layer, there": (
        [*FLAX, "o.pdparams", *MODEL, "--from", "flax", "--to", "paddle", "--to-names", "x=y"],
        "--to-names must map",
    ),
    "only read": ([*FLAX, "o.pt", *MODEL, "--from", "flax", "--to", "caffe"], "--to caffe cannot be written"),
    "no model": ([*KERAS, "o.pt", "--model", "Net", "--from", "keras"], "name a model as timm:NAME"),
    "no such package": (
        [*KERAS, "o.pt", "--model", "nowhere:Net", "--from", "keras"],
        "cannot import 'nowhere'",
    ),
    "no such name": (
        [*KERAS, "o.pt", "--model", "interop_cases:No", "--from", "keras"],
        "has no callable 'No'",
    ),
    "not a model": (
        [*KERAS, "o.pt", "--model", "builtins:dict", "--from", "keras"],
        "made a dict, not a torch.nn.Module",
    ),
}


@pytest.mark.parametrize("case", BAD_USAGE)
def test_bad_usage_is_one_line_and_leaves_no_file(case, tmp_path, monkeypatch, capsys):
    arguments, words = BAD_USAGE[case]
    monkeypatch.chdir(tmp_path)
    assert main(["convert-checkpoint", *arguments]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert err.count("\n") == 1
    assert "Traceback" not in out + err
    assert list(tmp_path.iterdir()) == []


def test_a_misfit_has_a_line_for_each_tensor(capsys):
    assert main(["convert-checkpoint", *KERAS, "o.pt", *MODEL, "--from", "flax"]) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.endswith("where the layers have other names, give --names HERE=THERE:")
    assert len(rest) > 1
    assert all(re.match("  (missing|surplus): ", line) for line in rest)


def test_the_output_is_an_option_too_and_tf_is_tensorflow(tmp_path, capsys):
    arguments = [*KERAS, "-o", str(tmp_path / "net.pt"), *MODEL, "--from"]
    assert main(["convert-checkpoint", *arguments, "keras"]) == 0
    assert "14 tensors converted" in capsys.readouterr().out
    assert main(["convert-checkpoint", *arguments, "tf"]) == 0


def test_pytorch_is_torch(tmp_path):
    torch.save(Net().state_dict(), tmp_path / "in.pt")
    arguments = [str(tmp_path / "in.pt"), str(tmp_path / "out.safetensors"), *MODEL, "--from", "pytorch"]
    assert main(["convert-checkpoint", *arguments]) == 0
