"""`mymodel.py:make`: a model by a file's path, for every command that takes one."""

import sys

import pytest

from leannorm.cli import main
from leannorm.cli.models import made_by, model_named

TEXT = """
from dataclasses import dataclass

import torch
from mylayers_of_files import Block

@dataclass
class Size:
    channels: "int" = 4

def make():
    return torch.nn.Sequential(Block(3, Size().channels, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())

def batches():
    return [torch.randn(4, 3, 8, 8) for _ in range(2)]
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file beside another that it imports, neither of them in the working directory."""
    folder = tmp_path / "some:where"
    folder.mkdir()
    (folder / "mylayers_of_files.py").write_text("from torch.nn import Conv2d as Block\n")
    path = folder / "mymodel.py"
    path.write_text(TEXT)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    before, found_in = {*sys.modules}, [*sys.path]
    yield path
    sys.path[:] = found_in
    for name in {*sys.modules} - before:
        if "mymodel" in name or "of_files" in name or str(folder) in name:
            del sys.modules[name]


INPUT = ["--input", "2x3x8x8"]
COMMANDS = {
    "profile": lambda model: ["profile", model, *INPUT, "--steps", "1"],
    "fit": lambda model: ["fit", model, "--input", "3x8x8", "--memory", "10MB"],
    "doctor": lambda model: ["doctor", model, *INPUT, "--fail-on", "error"],
    "doctor, data": lambda model: [
        "doctor",
        model,
        "--data",
        model.replace("make", "batches"),
        "--fail-on",
        "error",
    ],
    "check": lambda model: ["check", model, *INPUT, "--steps", "1"],
    "fold": lambda model: ["fold", model, *INPUT],
    "fork": lambda model: ["fork", model, *INPUT],
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_every_command_takes_a_file(arguments, file, capsys):
    assert main(arguments(f"{file}:make")) == 0, capsys.readouterr().err


def test_a_path_from_the_working_directory(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert len(model_named("mymodel.py:make")) == 3
    assert len(model_named("./mymodel.py:make")) == 3
    assert len(made_by("mymodel.py:batches")) == 2


def test_a_file_is_run_once_and_may_have_the_name_of_another_module(file):
    other = file.with_name("profile.py")  # as one of Python's own
    other.write_text("import torch\nclass Model(torch.nn.Identity): pass\n")
    one, two = (model_named(f"{other}:Model") for _ in range(2))
    assert type(one) is type(two)
    import profile

    assert not hasattr(profile, "Model")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nowhere.py:make", "there is no file 'nowhere.py'; name a model as"),
        ("{file}:missing", "has no callable 'missing'"),
        ("{file}:", "name a model as"),
        ("{broken}:make", "was imported and raised ZeroDivisionError"),
    ],
)
def test_what_is_wrong_is_said(spec, words, file, capsys):
    broken = file.with_name("mymodel_broken.py")
    broken.write_text("1 / 0\n")
    assert main(["profile", spec.format(file=file, broken=broken), *INPUT]) == 2
    assert words in capsys.readouterr().err
    assert "mymodel_broken" not in sys.modules
