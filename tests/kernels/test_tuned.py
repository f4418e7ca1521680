"""The file of what was measured on a device: read where it fits, refused with a reason elsewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from stand_ins import gpu_with, on_device

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
    from leannorm.ops.backends.triton import channel, channel_gradients, launch, tape, tuned
    from leannorm.ops.backends.triton.tiling import DEFAULT, Choice

    choice = Choice(in_flight=16, warps=2, moments=8, moments_stages=3, sums_stages=2, mapping_stages=4)
    tuned.save(file, DEVICE, PROCESSORS, choice)
    gpu_with(monkeypatch, name=DEVICE, multi_processor_count=PROCESSORS, major=9, minor=0)
    tuned.choice_for.cache_clear()
    assert tuned.choice_for(torch.device("cuda", 0)) == choice
    assert tuned.choice_for(torch.device("cpu")) is None
    tuned.choice_for.cache_clear()
    launched = {}
    note = lambda kernel, *_, **options: launched.update({kernel.__name__: options})  # noqa: E731
    on_device(monkeypatch, processors=PROCESSORS, launch=note)
    x, per_channel = torch.empty(64, 64, 80, 80, device="meta"), torch.empty(64, device="meta")
    found = []
    for made in (choice, None):
        on_device(monkeypatch, choice=made)
        tape.forget()
        channel.channel_forward(x, per_channel, per_channel, None, 1e-5, "relu", 0)
        moments, normalize = launched["moments_kernel"], launched["normalize_kernel"]
        found.append((moments["warps"], moments["registers"], moments["STAGES"], normalize["STAGES"]))
    assert found == [(2, 128, 3, 4), (4, 96, DEFAULT.moments_stages, DEFAULT.mapping_stages)]
    choice, x = Choice(sets_stages=3, alone_stages=2), x[:2, :, :14, :14].contiguous()
    on_device(monkeypatch, choice=choice)
    for groups, stages in ((0, [2, 3]), (16, [3, 3])):  # half of a tile backward, so one more; two programs
        tape.forget()
        _, mean, _, rstd, _ = channel.channel_forward(x, per_channel, per_channel, None, 1e-5, "relu", groups)
        given = (x, x, mean, rstd, per_channel, per_channel, None, None, "relu", groups, False)
        channel_gradients.channel_backward(*given)
        found = [launched[f"set_{which}_kernel"]["STAGES"] for which in ("forward", "backward")]
        assert found == stages
    launched.clear()
    on_device(monkeypatch, choice=Choice(rounds=0))
    tape.forget()
    channel.channel_forward(x, per_channel, per_channel, None, 1e-5, "relu", 0)
    assert set(launched) == {"moments_kernel", "merge_moments_kernel", "normalize_kernel"}
    assert Choice() == DEFAULT
    assert launch.processors(torch.device("cpu")) == 2
    tape.forget()


def measuring(of_choice, noise=lambda turn: 1.0):
    """Stands in for a device: each choice takes `of_choice(choice)` seconds, times what a turn's noise is."""
    seen = []

    def seconds(choice, what):
        seen.append(what)
        return None if of_choice(choice) is None else of_choice(choice) * noise(len(seen))

    return seconds, seen


def choices(**changed):
    from leannorm.ops.backends.triton.tiling import Choice

    return Choice(**changed)


def test_the_search_keeps_what_helps_and_goes_on_where_one_fails():
    from benchmarks.gpu import tune

    def of_choice(choice):
        if choice.warps == 2:
            return None  # cannot be launched
        return (1 - 0.1 * (choice.in_flight == 64)) * (1 - 0.05 * (choice.sums == 5))

    tried = {"in_flight": (16, 64), "warps": (2, 8), "sums": (3, 5)}
    seconds, seen = measuring(of_choice)
    fastest = tune.search(choices(), tried, seconds)
    assert fastest[0] == choices(in_flight=64, sums=5)
    assert len(fastest) == tune._FINALISTS
    assert len(seen) == len(set(seen)) == 7
    assert tune.search(choices(), tried, lambda choice, what: None) == []


@pytest.mark.parametrize(
    ("gain", "taken"), [(0.9, True), (0.97, True), (0.99, False), (1.0, False), (1.1, False)]
)
def test_what_is_written_down_was_faster_in_every_turn(gain, taken):
    """Turns differ by up to 1% here, the whole device by 30% between turns: that is taken for no gain."""
    from benchmarks.gpu import tune

    other = choices(sums_stages=2)
    seconds, seen = measuring(
        lambda choice: gain if choice == other else 1.0,
        lambda call: (1 + 0.3 * ((call - 1) // 2 % 2)) * (1 + 0.01 * (call % 3 == 0)),
    )
    chosen, times = tune.final(choices(), [other], seconds, 9)
    assert chosen == (other if taken else choices())
    assert [len(of_choice) for of_choice in times.values()] == [9, 9]
    assert len(seen) == 18


def test_a_lucky_measurement_is_not_written_down():
    from benchmarks.gpu import tune

    lucky = choices(warps=8)
    seconds, _ = measuring(lambda choice: 1.0, lambda call: 0.5 if call == 2 else 1.0)
    assert tune.search(choices(), {"warps": (8,)}, seconds) == [lucky]
    assert tune.final(choices(), [lucky], seconds, 9)[0] == choices()


def test_turns_that_the_time_was_not_enough_for_do_not_count():
    from benchmarks.gpu import tune

    other, left = choices(warps=8), iter([0.5, 1.0, 1.0, 0.5])
    chosen, times = tune.final(choices(), [other], lambda choice, what: next(left, None), 9)
    assert chosen == choices()
    assert [len(of_choice) for of_choice in times.values()] == [2, 2]


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
    measured = results["tuned"]
    assert {row["what"] for row in measured if row["part"] == "loops"} > {"the defaults", "in_flight = 16"}
    assert {row["sets_stages"] for row in measured if row["part"] == "sets"} == {1, 2}
    once = [row for row in measured if not row["what"].startswith("turn")]
    assert len(once) == 13
    assert len(measured) == len(once) or any(row["what"] == "turn 2 of 2" for row in measured)
    assert not results["wrong"]
    assert not results["notes"]
