"""From the time that steps take to the overhead to plan for: simulated steps, with noise and busy moments."""

from __future__ import annotations

import random

import pytest

from leannorm.planning import loop as loops
from leannorm.planning.loop import PLAIN, PLAN, Loop

FINE = [0.004 * i for i in range(1, 150)]


def ends_at(asked, factor, of_hooks=0.0, noise=0.02, seed=0, rungs=FINE, loop=None):
    """The overhead that is taken when the loop has ended, where each planned second takes `factor`."""
    source = random.Random(seed)
    if loop is None:
        loop = Loop(asked)
        loop.take(rungs, asked)
    passes = 0
    while loop.is_measuring and passes < 4000:
        kind = loop.next()
        passes += 1
        taken = 1.0 + (of_hooks + factor * loop.at if kind == PLAN else 0.0)
        busy = source.uniform(1.5, 4.0) if source.random() < 0.1 else 1.0
        if loop.is_timed:
            loop.note(kind, taken * busy * (1 + abs(source.gauss(0, noise))), loop.at)
    return (0.0 if loop.is_off else of_hooks + factor * loop.at), loop


@pytest.mark.parametrize("asked", [0.05, 0.1, 0.2, 0.3])
@pytest.mark.parametrize("factor", [0.2, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("of_hooks", [0.0, 0.02])
def test_what_is_taken_is_what_was_asked(asked, factor, of_hooks):
    for seed in range(8):
        taken, loop = ends_at(asked, factor, of_hooks, seed=seed)
        least_more = 0.004 * factor
        within = abs(taken - asked) <= 0.03
        assert within or asked - least_more <= taken <= asked or loop.at == FINE[-1], (taken, loop.__dict__)
        assert abs(loop.measured - taken) <= 0.03 or loop.is_off


def test_where_the_line_has_few_points_the_last_below_is_taken():
    for seed in range(8):
        taken, _ = ends_at(0.1, 1.0, rungs=[0.02, 0.05, 0.3, 0.6], seed=seed)
        assert taken == 0.05


def test_where_hooks_alone_take_more_every_pass_is_plain_and_it_is_tried_again():
    taken, loop = ends_at(0.1, 1.0, of_hooks=0.4)
    assert taken == 0.0
    assert loop.is_off
    assert loop.measured == pytest.approx(0.4, abs=0.03)
    assert [loop.next() for _ in range(loops.AGAIN - 1)] == [PLAIN] * (loops.AGAIN - 1)
    assert loop.next() == PLAN
    taken, loop = ends_at(0.1, 1.0, loop=loop)  # meanwhile the machine was busy, and it is not now
    assert taken == pytest.approx(0.1, abs=0.03)


def test_it_is_measured_again_and_follows_what_has_changed():
    taken, loop = ends_at(0.2, 1.0)
    assert [loop.next() for _ in range(loops.AGAIN - 1)] == [PLAN] * (loops.AGAIN - 1)
    loop.next()
    taken, loop = ends_at(0.2, 3.0, loop=loop)
    assert taken == pytest.approx(0.2, abs=0.03)


def test_one_busy_measurement_decides_nothing():
    """The first steps of the plan take ten times as long."""
    loop = Loop(0.1)
    loop.take(FINE, 0.1)
    turn = 0
    while loop.is_measuring and turn < 500:
        kind = loop.next()
        turn += 1
        taken = 1.0 + (loop.at if kind == PLAN else 0.0)
        if loop.is_timed:
            loop.note(kind, taken * (10 if turn < 8 else 1), loop.at)
    assert loop.at == pytest.approx(0.1, abs=0.03)
    assert not loop.is_off


def test_passes_that_are_never_timed_stay_as_planned():
    loop = Loop(0.1)
    loop.take(FINE, 0.1)
    assert {loop.next() for _ in range(loops._IDLE)} == {PLAN, PLAIN}
    assert {loop.next() for _ in range(500)} == {PLAN}
    assert loop.measured is None


def test_where_nothing_can_be_rebuilt_every_pass_is_plain():
    loop = Loop(0.1)
    loop.take([0.0], 0.0)
    assert {loop.next() for _ in range(20)} == {PLAIN}


def test_a_plan_that_takes_clearly_too_much_is_left_before_it_is_known_how_much():
    """Its steps take .08 to .32 more: the error of their median is above .02 for a long time."""
    loop = Loop(0.05)
    loop.take(FINE, 0.05)
    first, passes, taken = loop.at, 0, {PLAIN: [1.0], PLAN: [1.08, 1.08, 1.2, 1.2, 1.32, 1.32, 1.2, 1.2]}
    counts = dict.fromkeys(taken, 0)
    while loop.at == first and passes < 400:
        kind = loop.next()
        passes += 1
        if loop.is_timed:
            loop.note(kind, taken[kind][counts[kind] % len(taken[kind])], loop.at)
            counts[kind] += 1
    assert passes < 100
