"""`bench`: every backend that can serve is checked, then timed; a wrong one is named and not timed."""

import json

import pytest
import torch

from leannorm.cli import main
from leannorm.ops.select import backends
from leannorm.report.bench import CASES, bench

SMALL = [
    CASES[0]._replace(shape=(4, 8, 6, 6), features=8),
    CASES[2]._replace(shape=(32, 64), features=64),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_backend_is_checked_and_timed(dtype):
    report = bench(dtype=dtype, turns=1, cases=SMALL)
    assert report
    timings = report.timings
    served = ["torch", *(name for name, reasons in backends().items() if not reasons)]
    assert [timing.backend for timing in timings] == served * 2
    for timing in timings:
        assert timing.correct
        assert timing.seconds > 0
        assert timing.floor > 0
    assert [timing.ratio for timing in timings if timing.backend == "torch"] == [1, 1]


def test_the_compiler_takes_its_turn_where_it_is_asked_for():
    timings = {timing.backend: timing for timing in bench(turns=1, cases=SMALL[1:], compiled=True).timings}
    assert timings["torch.compile"].correct
    assert timings["torch.compile"].seconds > 0
    assert timings["torch.compile"].ratio == pytest.approx(
        timings["torch.compile"].seconds / timings["torch"].seconds
    )


def test_a_wrong_backend_is_not_timed_and_the_command_says_so(monkeypatch, capsys, tmp_path):
    wrong = CASES[2]._replace(ours=lambda *arguments: CASES[2].ours(*arguments) * 1.001)
    monkeypatch.setitem(bench.__kwdefaults__, "cases", [CASES[0], wrong])
    path = tmp_path / "bench.json"
    assert main(["bench", "--turns", "1", "--json", str(path)]) == 1
    assert "WRONG" in capsys.readouterr().out
    timings = json.loads(path.read_text())["timings"]
    wrong = [timing for timing in timings if not timing["correct"]]
    assert {timing["case"] for timing in wrong} == {"layer norm"}
    assert all(timing["seconds"] is None for timing in wrong)
