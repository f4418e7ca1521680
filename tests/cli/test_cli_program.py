"""`leannorm fork` and `leannorm fold` as they are typed, with their exit statuses."""

import json
import os

import pytest
import torch

from leannorm import program
from leannorm.cli import main

NETWORK = "program_cases:small"


# torch's own, from torch.export.load in 2.10
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_fork_then_fold(tmp_path, capsys):
    out, picture, numbers = tmp_path / "net.pt2", tmp_path / "net.svg", tmp_path / "n.json"
    given = [
        "fork",
        NETWORK,
        "--input",
        "4x3x8x8",
        "-o",
        str(out),
        "--draw",
        str(picture),
        "--json",
        str(numbers),
    ]
    assert main(given) == 0
    text = capsys.readouterr().out
    assert "shared (1 operators)" in text
    assert "training branch" in text
    assert "(batch=2.., 3, 8, 8) float32" in text
    assert picture.read_text().startswith("<svg")
    assert json.loads(numbers.read_text())["operators"]["shared"] == 1
    loaded = program.Program.load(out)
    x = torch.randn(7, 3, 8, 8)
    expected = loaded.infer(x)

    folded = tmp_path / "folded.pt2"
    assert main(["fold", str(out), "-o", str(folded), "--json", str(numbers)]) == 0
    assert "1 folded, 0 skipped; largest output difference" in capsys.readouterr().out
    result = torch.export.load(folded).module()(x)
    torch.testing.assert_close(result, expected)
    assert json.loads(numbers.read_text())["folded"] == [{"norm": "1", "into": ["0"]}]


def test_fold_a_model(tmp_path, capsys):
    folded, numbers = tmp_path / "folded.pt2", tmp_path / "numbers.json"
    options = ["--input", "4x3x8x8", "-o", str(folded), "--json", str(numbers)]
    assert main(["fold", NETWORK, *options]) == 0
    assert "folded 1 into 0" in " ".join(capsys.readouterr().out.split())
    assert folded.exists()
    assert json.loads(numbers.read_text())["decided"] == []


@pytest.mark.parametrize(
    ("command", "option", "name"), [("fold", "-o", "net.pt2"), ("fork", "--draw", "net.svg")]
)
def test_a_file_is_not_written_in_place(command, option, name, tmp_path):
    """A second link to the old file shows it: it still has the old content, whenever writing stops."""
    path, old = tmp_path / name, tmp_path / "old"
    path.write_text("what was there before")
    os.link(path, old)
    assert main([command, NETWORK, "--input", "4x3x8x8", option, str(path)]) == 0
    assert old.read_text() == "what was there before"
    assert path.stat().st_size > len(old.read_text())


def test_a_fold_that_is_interrupted_leaves_the_old_file(tmp_path, monkeypatch, capsys):
    from torch.export.pt2_archive._package import PT2ArchiveWriter

    write, written = PT2ArchiveWriter.write_bytes, []

    def interrupted(self, name, data):
        written.append(name)
        if len(written) == 1:  # then torch closes the archive
            raise KeyboardInterrupt
        write(self, name, data)

    path = tmp_path / "folded.pt2"
    path.write_text("what was there before")
    monkeypatch.setattr(PT2ArchiveWriter, "write_bytes", interrupted)
    assert main(["fold", NETWORK, "--input", "4x3x8x8", "-o", str(path)]) == 130
    assert "no file was left half-written" in capsys.readouterr().err
    assert path.read_text() == "what was there before"
    assert list(tmp_path.iterdir()) == [path]


def test_paths_of_written_files_are_no_markup(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in ("[a]", "x["):  # "x[/a].svg" is a file in the second
        (tmp_path / folder).mkdir()
    names = {"-o": "net[b].pt2", "--draw": "x[/a].svg", "--json": "[a]/n:smile:.json"}
    options = [part for pair in names.items() for part in pair]
    assert main(["fork", NETWORK, "--input", "4x3x8x8", *options]) == 0
    told = capsys.readouterr().out
    for word, name in zip(("program", "picture", "numbers"), names.values(), strict=True):
        assert f"{word}: {name}" in told
    assert main(["fold", "net[b].pt2", "-o", "x[/a].pt2", "--json", "[a].json"]) == 0
    told = capsys.readouterr().out
    assert "folded model: x[/a].pt2" in told
    assert "numbers: [a].json" in told


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["fork", "nonsense"], "name a model as timm:NAME"),
        (["fork", NETWORK, "--input", "4xa"], "an input is written as its sizes"),
        (["fold", NETWORK, "--input", "4x3"], "does not take --input 4x3: "),
        (["fold", __file__], "is not a whole file written by Program.save"),
    ],
    ids=["model", "sizes", "shape", "file"],
)
@pytest.mark.filterwarnings("ignore")
def test_bad_usage_is_one_line(given, message, capsys):
    assert main(given) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
