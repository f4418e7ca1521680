"""`bench`: every backend that can serve is checked, then timed; a wrong one is named and not timed."""

import json
import math

import pytest
import torch

from leannorm.cli import main
from leannorm.ops.select import explain
from leannorm.report import bench as module
from leannorm.report.bench import CASES, bench

SMALL = [
    CASES[0]._replace(shape=(4, 8, 6, 6), features=8),
    CASES[2]._replace(shape=(32, 64), features=64),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_backend_is_checked_and_timed(dtype):
    timings = list(bench(dtype=dtype, turns=1, cases=SMALL))
    backends = ["torch", *(name for name, reasons in explain().items() if not reasons)]
    assert [timing.backend for timing in timings] == backends * 2
    for timing in timings:
        assert timing.correct
        assert timing.seconds > 0
        assert timing.floor > 0
    assert [timing.ratio for timing in timings if timing.backend == "torch"] == [1, 1]


def test_a_wrong_backend_is_not_timed_and_the_command_says_so(monkeypatch, capsys, tmp_path):
    def wrong(x, weight, bias):
        return SMALL[0].torchs(x, weight, bias) * 1.001

    monkeypatch.setattr(module, "CASES", [SMALL[0]._replace(ours=wrong)])
    monkeypatch.setattr(module.bench, "__defaults__", ("cpu", torch.float32, 9, module.CASES))
    path = tmp_path / "bench.json"
    assert main(["bench", "--turns", "1", "--json", str(path)]) == 1
    assert "WRONG" in capsys.readouterr().out
    timing = json.loads(path.read_text())[1]
    assert timing["correct"] is False
    assert math.isnan(timing["seconds"])
