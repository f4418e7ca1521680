"""Code that inductor makes, in fresh processes: torch's caches, and settings side by side."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "inductor_steps.py"


def run(settings, cache):
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT, json.dumps(settings)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.conformance  # fresh processes that compile
@pytest.mark.timeout(900)
def test_a_setting_is_followed_whatever_the_caches_hold(tmp_path):
    """The same model under several settings, in one process and in a second that finds its caches."""
    (half,) = run([{"budget": 0.6}], tmp_path)
    third, again = run([{"budget": 0.35}, {"budget": 0.6}], tmp_path)
    assert [half["hits"], third["hits"], again["hits"]] == [0, 0, 1]
    assert half["saved"] == half["planned"] == again["saved"]
    assert third["saved"] == third["planned"]
    assert third["saved"] <= 0.35 * third["stock"]
    assert 0.35 * half["stock"] < half["saved"] <= 0.6 * half["stock"]
    assert half["reasons"] == third["reasons"] == []
    assert "taken from torch's cache" in again["reasons"][0]
    for ours in (half, third, again):
        assert ours["error"] < 1e-12  # where torch's own partition, which reads the edited buffer, has 0.2
        assert ours["buffers"]
