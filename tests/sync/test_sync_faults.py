"""Every fault scenario: nobody hangs, nobody returns wrong numbers, the errors name who and what."""

import pytest
from faults.scenarios import SCENARIOS, play


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_fault(scenario):
    good, seen, seconds = play(scenario)
    assert good, f"expected: {scenario.expected}; seen after {seconds:.1f} s: {seen}"
