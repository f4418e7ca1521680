"""A sample of a sweep: its share of the cases, all values of short parameters; in turns, all cases."""

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from sampling import sample

SIZES = [(2, 3, 5), (12, 4), (3,), (40,), (7, 1), (2, 2, 2, 2, 2)]


def cases_of(sizes):
    return [dict(zip("abcde", found, strict=False)) for found in product(*map(range, sizes))]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("of", [1, 2, 3, 5])
def test_each_case_has_its_turn_and_no_short_parameter_misses_a_value(sizes, of):
    cases, seen = cases_of(sizes), set()
    share = -(-len(cases) // of)
    for turn in range(of):
        chosen = sample(cases, of, turn)
        seen |= chosen
        assert chosen == sample(cases, of, turn)
        assert share <= len(chosen) or turn == of - 1  # the last turn may be shorter
        for name, size in zip("abcde", sizes, strict=False):
            if size <= share:
                assert {cases[i][name] for i in chosen} == set(range(size))
    assert seen == set(range(len(cases)))


def test_a_sample_is_about_its_share():
    cases = cases_of((10, 10, 10))
    assert 250 <= len(sample(cases, 4)) <= 280


SWEEP = """
import pytest

@pytest.mark.sampled(of=6)
@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("second", ["c", "d"])
@pytest.mark.parametrize("third", ["e", "f", "g"])
def test_sweep(first, second, third): ...
"""
HOOKS = """
from sampling import leave_samples

def pytest_collection_modifyitems(items):
    leave_samples(items)
"""


def test_each_value_of_stacked_parameters_is_in_the_sample(tmp_path):
    (tmp_path / "test_sweep.py").write_text(SWEEP)
    (tmp_path / "conftest.py").write_text(HOOKS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-m",
        "not conformance",
        "-c",
        "/dev/null",
    ]
    there = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    told = subprocess.run(
        [*command, tmp_path], capture_output=True, text=True, env=there, cwd=tmp_path
    ).stdout
    ids = re.findall(r"test_sweep\[(.*)\]", told)
    assert set("".join(ids)) == set("abcdefg-")
    assert len(ids) < 12
