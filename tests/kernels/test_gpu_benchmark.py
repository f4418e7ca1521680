"""`benchmarks.gpu` as far as a CPU goes: the whole path at tiny sizes, its refusals, its arithmetic."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.gpu import page
from benchmarks.gpu.blocks import BLOCKS
from benchmarks.gpu.report import OutOfTimeError, Report
from benchmarks.gpu.shapes import Case, errors, launches, make_set, moved, ours, torchs
from leannorm.cli import main
from leannorm.report.timing import device_seconds, sets_past_the_cache

ROOT = Path(__file__).parents[2]
triton = importlib.util.find_spec("triton")


def run(*arguments, folder, **environment):
    command = [sys.executable, "-W", "error", "-m", "benchmarks.gpu", *arguments, "--out", str(folder)]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=250)


@pytest.mark.conformance  # half a minute of a script that no layer needs
@pytest.mark.skipif(triton is None, reason="Triton is not installed")
def test_smoke(tmp_path):
    done = run("--smoke", folder=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "gpu-smoke.json").read_text())
    assert found["wrong"] == []
    assert {row["backend"] for row in found["rows"] if row["side"] == "ours"} == {"triton"}
    kinds = {(row["case"], row["side"], row["direction"]) for row in found["rows"]}
    norms = "batch norm + relu", "batch norm + add + relu", "layer norm", "RMS norm"
    modern = "AdaLN", "AdaLN of a token", "gated residual + AdaLN", "gated RMS norm", "RMS norm, 1 + w"
    for case in (*norms, *modern, "RMS norm of heads", "group norm + silu"):
        assert {(case, side, "backward") for side in ("ours", "torch", "compile")} <= kinds
    for case in ("batch norm + relu", "batch norm + relu, contiguous", "group norm + silu", "AdaLN"):
        assert {(case, "plain", direction) for direction in ("forward", "backward")} <= kinds
    steps = {(row["network"], row["setting"]) for row in found["steps"]}
    for network in ("resnet50", "vit"):
        for setting in ("stock", "convert", "norm", "convert + conv", "compile"):
            assert (network, setting) in steps
    for network in BLOCKS:
        for setting in ("stock", "norm", "convert + norm", "checkpoint"):
            assert (network, setting) in steps
    assert found["torch"] == torch.__version__
    assert not list(tmp_path.glob("*.part"))
    reported(found, tmp_path)


def reported(found, folder):
    """The page of these results has all of them, and its plots are pictures."""
    done = run("--report", folder=folder)
    assert done.returncode == 0, done.stderr
    page, *plots = (Path(line) for line in done.stdout.split())
    words = page.read_text()
    for row in found["rows"]:
        cells = f"| {row['case']} | {'x'.join(map(str, row['shape']))} | {row['direction']} |"
        line = next(line for line in words.splitlines() if line.startswith(cells))
        assert f"| {row['microseconds']:.1f} |" in line
    for row in found["steps"]:
        assert f"| {row['network']} | {row['setting']} | {row['milliseconds']:.2f} |" in words
    drawn = [ElementTree.parse(plot).getroot() for plot in plots]
    assert [plot.name for plot in plots] == ["gpu-smoke-kernels.svg", "gpu-smoke-steps.svg"]
    assert all(f"]({plot.name})" in words for plot in plots)
    ours = [row for row in found["rows"] if row["side"] == "ours" and row["direction"] != "both"]
    assert sum("share" in (t.text or "") for t in drawn[0].iter()) == len(ours)


def test_a_report_says_what_was_wrong_and_what_is_missing(tmp_path):
    done = run("--report", folder=tmp_path)
    assert done.returncode != 0
    assert "there are no results" in done.stderr
    row = {
        "case": "layer norm",
        "shape": [4, 8],
        "direction": "forward",
        "side": "torch",
        "microseconds": 3.0,
    }
    data = {"device": "Some <GPU>", "date": "2026-11-22", "torch": "2", "triton": "3", "command": "c"}
    data |= {
        "rows": [row],
        "small": [],
        "steps": [],
        "notes": ["left out: vit"],
        "wrong": ["layer norm: far"],
    }
    (tmp_path / "gpu-some.json").write_text(json.dumps(data))
    assert run("--report", folder=tmp_path).returncode == 0
    words = (tmp_path / "gpu-some.md").read_text()
    assert "**1 results were wrong**" in words
    assert "- layer norm: far" in words
    assert "- left out: vit" in words
    assert "| layer norm | 4x8 | forward | 3.0 |  |  |" in words


def test_in_a_plot_a_bar_is_as_long_as_its_number():
    bars = [page.Bar(0.5, "red", "a < b"), page.Bar(2.0, "red", "2.00")]
    drawn = ElementTree.fromstring(page.plot("times", {}, [("case", bars)]))
    widths = [float(r.get("width")) for r in drawn.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths[1] == 4 * widths[0]


def test_a_section_alone_within_no_time_leaves_notes(tmp_path):
    done = run("--smoke", "--only", "rows", "--minutes", "0.05", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu-smoke-rows.json").read_text())
    assert any("left out" in note for note in found["notes"])
    assert found["rows"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_both_commands_say_what_to_do(tmp_path, capsys):
    done = run(folder=tmp_path)
    assert done.returncode != 0
    assert "choose cpu" in done.stderr
    assert main(["bench", "--device", "cuda"]) == 2
    assert "choose cpu" in capsys.readouterr().err


def test_wrong_answers_and_unwritten_ones_are_seen():
    case = Case("batch norm + relu", (2, 4, 3, 3), "channel")
    s = make_set(case, torch.bfloat16, torch.device("cpu"))

    def wrong(s):
        return ours("channel")(s) * 1.01

    def unwritten(s):
        return ours("channel")(s) + torch.empty(1)

    sides = {"torch": torchs("channel"), "right": ours("channel"), "wrong": wrong, "ours": unwritten}
    found = {name: all(e.within for e in each) for name, each in errors(case, sides, s).items()}
    assert found["right"]
    assert not found["wrong"]
    assert not found["ours"]


def test_bytes_of_the_floor():
    t = 2 * 8 * 4 * 4 * 2  # bytes of the tensor in two bytes each
    plain = Case("batch norm + relu", (2, 8, 4, 4), "channel")
    assert moved(plain, 2, cache=0)["forward"] == (3 * t, 2 * t)
    assert moved(plain, 2, cache=0)["backward"] == (5 * t, 3 * t)
    assert moved(plain, 2, cache=10 * t)["both"] == (5 * t, 5 * t)
    added = plain._replace(residual=True)
    assert moved(added, 2, cache=0)["forward"] == (4 * t, 3 * t)
    assert moved(added, 2, cache=0)["backward"] == (8 * t, 5 * t)
    assert moved(Case("layer norm", (4, 8), "layer"), 2, cache=0)["both"] == (5 * 64, 5 * 64)


def test_an_error_in_one_case_is_written_down_and_the_rest_goes_on(tmp_path):
    report = Report(torch.device("cpu"), tmp_path, 1, "")

    def fails():
        raise ZeroDivisionError("so")

    report.attempt("this", fails)
    assert json.loads(report.path.read_text())["wrong"] == ["this: ZeroDivisionError: so"]

    def stops():
        raise OutOfTimeError

    with pytest.raises(OutOfTimeError):
        report.attempt("that", stops)


def test_outputs_live_for_a_round_of_calls(monkeypatch):
    """So that the allocator hands out a block that has left the cache."""

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def elapsed_time(self, other):
            return 1.0

    class Output:
        pass

    waits = dict.fromkeys(("synchronize", "_sleep"), lambda *_: None)
    for name, stand_in in {"Event": Event, "device": nullcontext, **waits}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    made, alive = [], []

    def call():
        alive.append(sum(one() is not None for one in made))
        output = Output()
        made.append(weakref.ref(output))
        return output

    assert device_seconds([call] * 5, "cuda", 20) == [1e-3] * 20
    assert alive == [0, 1, 2, 3, 4] + [5] * 15  # across groups of calls too
    assert not any(one() for one in made)


def test_timing_on_the_cpu():
    order = []
    assert len(device_seconds([lambda: order.append(0), lambda: order.append(1)], "cpu", 3)) == 3
    assert order == [0, 1, 0]
    assert sets_past_the_cache(1, "cpu") == 1
    assert launches(lambda: None, "cpu") is None
