"""The fuzzer itself: it finds a planted error of one bit, and knows what it must not make.

300 of its programs run in test_lean_recorded.py, and 100,000 by `make fuzz`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs.compare import judge
from programs.generate import generate
from programs.language import parse
from programs.observe import observe
from programs.run import Run
from programs.shrink import shrink
from programs.told_apart import SAME, UNSEEN

from leannorm.saving import recorded_pass


@pytest.mark.conformance
def test_operators_of_torchs_own_tests():
    """Two calls of each; `make fuzz` runs them all."""
    command = [sys.executable, "-m", "programs.operators", "--most", "2"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


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


def test_a_planted_error_of_one_bit_is_found_and_made_short(monkeypatch):
    """One bit of one element that a norm's backward pass reads is off."""
    with monkeypatch.context() as planted:
        planted.setattr(recorded_pass, "LOG", WithOneBitOff())
        found = [seed for seed in range(120) if judge(generate(seed)).kind == "numbers"]
        shrunk = [shrink(generate(seed), judge(generate(seed)))[0] for seed in found[:2]]
    planted = [program for program in shrunk if judge(program).kind == "same"]
    assert planted
    assert min(len(program.forward) for program in planted) <= 6
    assert all("Norm" in str(program) or "_norm" in str(program) for program in planted)


LOG = recorded_pass.LOG


class WithOneBitOff:
    """The log, but for what norms get back."""

    def __getattr__(self, name):
        return getattr(LOG, name)

    @staticmethod
    def record_unpack(packed):
        tensor, node = LOG.record_unpack(packed), torch._C._current_autograd_node()
        if node is None or node.name() not in ("NativeGroupNormBackward0", "NativeLayerNormBackward0"):
            return tensor
        tensor = tensor.clone()
        tensor.view(-1)[:1].view(torch.uint8)[:1] ^= 1
        return tensor
