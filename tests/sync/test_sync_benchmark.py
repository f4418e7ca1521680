"""`benchmarks.sync --nccl` as far as a CPU goes: the whole path over gloo, and its refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*arguments):
    command = [sys.executable, "-W", "error", "-m", "benchmarks.sync", *arguments]
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=250)


@pytest.mark.conformance
def test_smoke(tmp_path):
    out = tmp_path / "nccl.json"
    done = run("--nccl", "--smoke", "--rounds", "1", "--repeats", "1", "--json", str(out))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["wrong"] == []
    (measured,) = found["measured"]
    assert {"alone", "bare", "shared", "torch", "batches"} < set(measured["shapes"][0]["milliseconds"])
    assert "rank 1 did not come" in measured["killed"]["0"]["said"]


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs")
def test_without_gpus_it_says_what_to_do():
    done = run("--nccl")
    assert done.returncode == 2
    assert "--smoke" in done.stdout


def test_what_goes_wrong_is_found():
    from benchmarks.sync_nccl import wrong

    heard = {"said": "SyncError: layer: rank 2 did not come", "seconds": 3.0}
    fine = {"ranks": 3, "shapes": [{}], "killed": {0: heard, 1: heard}}
    assert wrong(fine) == []
    for part in (
        {"shapes": []},
        {"killed": {0: heard}},
        {"killed": {0: heard, 1: {**heard, "seconds": 40.0}}},
        {"killed": {0: heard, 1: {**heard, "said": "nothing: the sum completed without the rank"}}},
    ):
        assert len(wrong({**fine, **part})) == 1
