"""300 random programs see the same under `lean()` as under stock autograd; `make fuzz` runs 100,000.

Before that, the fuzzer itself: it finds a planted error of one bit, and knows what it must not make.
Programs of `lean()` are judged on the search here, and where operators are recorded in test_lean_recorded.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs.campaign import run_seeds, summary
from programs.compare import judge
from programs.generate import generate
from programs.language import parse
from programs.listings import FAIRLY_REFUSED, KNOWN
from programs.observe import observe
from programs.run import Run
from programs.shrink import shrink
from programs.told_apart import SAME, UNSEEN

PROGRAMS, PARTS = 300, 4


@pytest.mark.usefixtures("searched")
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part):
    size = PROGRAMS // PARTS
    counts, failures = run_seeds(range(part * size, (part + 1) * size), most=3)
    assert not failures, "\n\n".join([summary(counts), *map(str, failures)])
    assert counts["refused"] < 0.05 * size
    assert counts["lenient"] < 0.05 * size


@pytest.mark.conformance
def test_operators_of_torchs_own_tests():
    """Two calls of each; `make fuzz` runs them all."""
    command = [sys.executable, "-m", "programs.operators", "--most", "2"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("searched")
@pytest.mark.parametrize("name", KNOWN)
def test_programs_that_were_wrong(name):
    assert judge(parse(KNOWN[name])).kind in ("same", *FAIRLY_REFUSED.get(name, ()))


@pytest.mark.parametrize("name", SAME)
def test_programs_that_are_told_apart(name):
    """Programs on which the fuzzer itself once was wrong."""
    assert not judge(parse(SAME[name])).failed


@pytest.mark.parametrize("name", UNSEEN)
def test_edits_that_lean_documents_as_unseen_are_not_made(name):
    assert not observe(parse(UNSEEN[name])).documented


def test_a_listing_is_the_program():
    for seed in range(50):
        program = generate(seed)
        assert parse(str(program)) == program
        assert generate(seed) == program


def test_what_the_programs_are_made_of():
    """Most steps come to an end, and most programs have something rebuilt."""
    ended = steps = 0
    for seed in range(200):
        program = generate(seed)
        trace = Run(program)()
        raised = {event.where.split(",")[0] for event in trace if event.kind == "raised"}
        steps += program.steps
        ended += program.steps - len(raised)
    assert ended > 0.75 * steps


@pytest.mark.usefixtures("searched")
def test_a_planted_error_of_one_bit_is_found_and_made_short(monkeypatch):
    """One bit of one element of norms that a backward pass rebuilds is off; trials see nothing of it."""
    with monkeypatch.context() as planted:
        for name in ("native_group_norm", "native_layer_norm"):
            planted.setattr(torch, name, with_one_bit_off(getattr(torch, name)))
        found = [seed for seed in range(120) if judge(generate(seed)).kind == "numbers"]
        shrunk = [shrink(generate(seed), judge(generate(seed)))[0] for seed in found[:2]]
    planted = [program for program in shrunk if judge(program).kind == "same"]
    assert planted
    assert min(len(program.forward) for program in planted) <= 6
    assert all("Norm" in str(program) or "_norm" in str(program) for program in planted)


def with_one_bit_off(norm):
    def flipped(*arguments):
        y, *statistics = norm(*arguments)
        if torch._C._current_graph_task_id() != -1:  # in a backward pass
            y.view(-1)[:1].view(torch.uint8)[:1] ^= 1
        return y, *statistics

    return flipped
