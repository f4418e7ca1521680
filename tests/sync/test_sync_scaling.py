"""docs/scaling.md: its formula, beside what gloo's ranks ask for and send."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import record, scaling
from benchmarks.scaling import Collective, ring, tree

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")


@pytest.mark.conformance
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what a socket has sent")
def test_ranks_ask_for_and_send_what_the_formula_says(tmp_path):
    out = tmp_path / "scaling.json"
    command = [sys.executable, "-W", "error", "-m", "benchmarks.scaling", "--ranks", "2", "--repeats", "2"]
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--json", str(out)], cwd=ROOT, env=settings, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = record.read(out)
    tables = {name: [row for row in rows if row["table"] == name] for name in {row["table"] for row in rows}}
    assert set(tables) == {"model", "spread", "recorded", "wire", "plans", "ping", "time", "waiting"}
    assert {row["norm"] for row in tables["recorded"]} == set(scaling.NORMS)
    assert max(row["ranks"] for row in tables["recorded"]) == max(scaling.RANKS)
    for row in tables["recorded"]:
        assert row["found"] == row["model"], row
    for row in tables["wire"]:
        assert row["bytes"] == row["model"], row
    (plans,) = tables["plans"]
    assert plans["equal"]
    assert plans["collectives"] == 4
    assert all(row["us"] > 0 for row in tables["time"])
    assert "wire" in done.stdout


def test_the_page_has_the_formula_of_today():
    file = record.FOLDER / "scaling.json"
    rows = [{k: v for k, v in row.items() if k != "about"} for row in record.read(file)]
    computed = json.loads(json.dumps([*scaling.modelled(), *scaling.waiting()]))
    assert [row for row in rows if row["table"] in ("model", "spread")] == computed


def test_costs_by_hand():
    gather, total = Collective("all_gather", 100), Collective("all_reduce", 100)
    assert ring(gather, 8) == (7, 700, 700)
    assert tree(gather, 8) == (3, 700, 700)
    assert ring(total, 8) == (14, 175, 175)
    assert tree(total, 9) == (8, 200, 800)
    assert ring(Collective("broadcast", 100), 8) == (3, 300, 300)
    for of in (gather, total):
        assert ring(of, 1)[0] == tree(of, 1)[0] == 0
    # the greatest of two, three and four normal numbers
    assert [round(scaling.slowest(p), 4) for p in (1, 2, 3, 4)] == [0, 0.5642, 0.8463, 1.0294]
