"""The file of what was measured on a device: read where it fits, refused with a reason elsewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
DEVICE, PROCESSORS = "NVIDIA H200", 132


@pytest.fixture
def file(tmp_path, monkeypatch):
    found = tmp_path / "tuned.json"
    monkeypatch.setenv("LEANNORM_TUNED", str(found))
    return found


def good(**changed):
    from leannorm.ops.backends.triton import tuned
    from leannorm.ops.backends.triton.tiling import Choice

    about = {"triton": tuned.triton_version(), "multiprocessors": PROCESSORS}
    return {**about, **Choice(sums_stages=2, warps=2)._asdict(), **changed}


def test_what_was_saved_is_read_and_others_entries_stay(file):
    from leannorm.ops.backends.triton import tuned
    from leannorm.ops.backends.triton.tiling import Choice

    assert tuned.load(DEVICE, PROCESSORS) is None
    first, second = Choice(moments_stages=3), Choice(in_flight=64)
    tuned.save(file, DEVICE, PROCESSORS, first)
    tuned.save(file, "another", 80, second)
    assert tuned.load(DEVICE, PROCESSORS) == first
    assert tuned.load("another", 80) == second
    assert tuned.load("a third", 80) is None
    assert not list(file.parent.glob("*.part"))


MALFORMED = {
    "another Triton": (good, {"triton": "3.5.0"}, "measured with Triton 3.5.0"),
    "another device": (good, {"multiprocessors": 80}, "80 multiprocessors, the device has 132"),
    "a word": (good, {"warps": "4"}, "warps must be one of 2, 4, 8, got '4'"),
    "a truth": (good, {"moments": True}, "moments must be one of"),
    "a number of warps that no launch has": (good, {"warps": 3}, "warps must be one of 2, 4, 8, got 3"),
    "too many programs": (good, {"warps": 8, "moments": 16}, "at most 64"),
    "an unknown field": (good, {"tiles": 4}, "an entry is an object of"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_an_entry_that_does_not_fit_is_refused(file, what):
    from leannorm.ops.backends.triton import tuned

    make, changed, words = MALFORMED[what]
    file.write_text(json.dumps({DEVICE: make()}))
    assert tuned.load(DEVICE, PROCESSORS) is not None  # else the test could not fail
    file.write_text(json.dumps({DEVICE: make(**changed)}))
    with pytest.warns(UserWarning, match="launched as without") as caught:
        assert tuned.load(DEVICE, PROCESSORS) is None
    assert words in str(caught[0].message)
    assert "--tune" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned.load("another", PROCESSORS) is None  # its own entry is not there


@pytest.mark.parametrize("text", ["", "{", "[]", '{"NVIDIA H200": 3}', "\u00e4"])
def test_a_file_that_is_none_is_refused(file, text):
    from leannorm.ops.backends.triton import tuned

    file.write_text(text)
    with pytest.warns(UserWarning, match="launched as without"):
        assert tuned.load(DEVICE, PROCESSORS) is None


def test_where_the_file_is(monkeypatch, tmp_path):
    from leannorm.ops.backends.triton import tuned

    monkeypatch.setenv("LEANNORM_TUNED", "")
    assert tuned.path() is None
    assert tuned.load(DEVICE, PROCESSORS) is None
    monkeypatch.delenv("LEANNORM_TUNED")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned.path() == tmp_path / "leannorm" / "tuned.json"


def test_the_plan_follows_the_file(file, monkeypatch):
    from leannorm.ops.backends.triton import channel, launch, tape, tuned
    from leannorm.ops.backends.triton.tiling import DEFAULT, Choice

    choice = Choice(in_flight=16, warps=2, moments=8, moments_stages=3, sums_stages=2, mapping_stages=4)
    tuned.save(file, DEVICE, PROCESSORS, choice)
    properties = SimpleNamespace(name=DEVICE, multi_processor_count=PROCESSORS, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    tuned.choice_for.cache_clear()
    assert tuned.choice_for(torch.device("cuda", 0)) == choice
    assert tuned.choice_for(torch.device("cpu")) is None
    tuned.choice_for.cache_clear()
    launched = {}
    monkeypatch.setattr(channel, "processors", lambda device: PROCESSORS)
    monkeypatch.setattr(
        channel, "launch", lambda kernel, *_, **options: launched.update({kernel.__name__: options})
    )
    x, per_channel = torch.empty(64, 64, 56, 56, device="meta"), torch.empty(64, device="meta")
    found = []
    for made in (choice, None):
        monkeypatch.setattr(channel, "choice_for", lambda device, made=made: made)
        tape.forget()
        channel.channel_forward(x, per_channel, per_channel, None, 1e-5, "relu", 0)
        moments, normalize = launched["moments_kernel"], launched["normalize_kernel"]
        found.append((moments["warps"], moments["registers"], moments["STAGES"], normalize["STAGES"]))
    assert found == [(2, 128, 3, 4), (4, 96, 1, 1)]
    assert Choice() == DEFAULT
    assert launch.processors(torch.device("cpu")) == 2
    tape.forget()


def test_smoke(tmp_path):
    """The sweep itself, interpreted; what it writes is what the kernels would read."""
    from leannorm.ops.backends.triton import tuned

    file = tmp_path / "found.json"
    command = [sys.executable, "-W", "error", "-m", "benchmarks.gpu", "--smoke", "--tune", str(file)]
    command += ["--out", str(tmp_path)]
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    entries = json.loads(file.read_text())
    tuned.read(entries["smoke"], 2)
    results = json.loads((tmp_path / "gpu-smoke-tune.json").read_text())
    assert len(results["tuned"]) == 8
    assert not results["wrong"]
    assert not results["notes"]
