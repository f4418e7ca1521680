"""Values that wait on the host: what the planner says of them happens, and where it chooses them."""

from dataclasses import replace

import pytest
from planning_steps import MILLI, layers_to_move

from leannorm.planning.goal import Goal
from leannorm.planning.lines import Lines
from leannorm.planning.outcome import of_stock, outcome
from leannorm.planning.plan import plan


def test_copies_that_are_as_fast_as_the_computation_cost_nothing():
    step = layers_to_move(8)
    found = outcome(step, frozenset(), range(8))
    assert found.seconds == pytest.approx(0.0)
    assert found.moved == frozenset(range(7))  # the last one is read before it has left
    assert (found.held, found.away) == (100, 700)
    assert found.held + found.away == of_stock(step).held


def test_copies_that_are_slower_make_the_computation_wait():
    step = layers_to_move(8, link=25 / MILLI)  # a copy takes four layers of the forward pass
    waits = outcome(step, frozenset(), range(8)).seconds
    # out: 4 ms for each but those on their way at the end; back: 4 ms for each, in 2 ms of computation
    assert waits > 8 * MILLI
    # one of them leaves unseen, and the first one that is read is not expected
    assert outcome(step, frozenset(), [0]).seconds == pytest.approx(4 * MILLI)


def test_rebuilding_hides_copies():
    step = layers_to_move(24, link=10 / MILLI)
    again, moved = frozenset([1, 2]), [0, 3]
    alone = outcome(step, frozenset(), moved).seconds
    both = outcome(step, again, moved).seconds - outcome(step, again).seconds
    assert both == pytest.approx(alone - 4 * MILLI)


def test_a_moved_value_is_not_in_memory_between_its_copies():
    step = layers_to_move(8)
    kept, moved = outcome(step, frozenset()), outcome(step, frozenset(), range(8))
    assert kept.peak == 800
    assert moved.peak <= 500
    assert all(a <= b for a, b in zip(moved.alive, kept.alive, strict=True))
    assert sum(moved.alive) > 0


def test_a_plan_moves_where_copies_are_hidden_and_rebuilds_where_that_is_cheaper():
    fast, slow = layers_to_move(16), layers_to_move(16, link=1 / MILLI)
    found = plan(Lines(fast), Goal(budget=0.5))
    assert found.reached
    assert (found.point.seconds, found.point.again) == (0.0, frozenset())
    found = plan(Lines(slow), Goal(budget=0.5))
    assert found.reached
    assert not found.point.moved
    assert found.point.seconds == pytest.approx(8 * 4 * MILLI)
    between = plan(Lines(layers_to_move(16, link=40 / MILLI)), Goal(budget=0.3))
    assert between.reached
    assert between.point.moved
    assert between.point.seconds < 11 * 4 * MILLI


def test_moves_are_spread_over_the_pass_so_that_copies_are_hidden():
    """Each layer saves four values, and the link carries one of them while the layer runs."""
    one = layers_to_move(16)
    values = [value._replace(seconds=None) for value in one.values for _ in range(4)]
    backward = [
        moment._replace(reads=range(4 * moment.reads[0], 4 * moment.reads[0] + 4)) for moment in one.backward
    ]
    step = replace(one, values=values, backward=backward, stock=frozenset(range(64)))
    found = plan(Lines(step), Goal(budget=0.8)).point
    assert found.held <= 0.8 * of_stock(step).held
    assert found.seconds == pytest.approx(0, abs=1.1 * MILLI)  # the first one that is read back
    in_a_row = outcome(
        step, frozenset(), sorted(range(64), key=lambda i: values[i].ready)[: len(found.moved)]
    )
    assert in_a_row.seconds > 5 * MILLI


def test_with_a_link_no_goal_takes_longer_than_without():
    for link in (5, 20, 40, 80, 200):
        step = layers_to_move(12, link=link / MILLI)
        lines, alone = Lines(step), Lines(replace(step, link=0.0))
        for share in (0.2, 0.4, 0.6, 0.8):
            for goal in (Goal(budget=share), Goal(peak=share)):
                ours, theirs = plan(lines, goal), plan(alone, goal)
                assert ours.reached >= theirs.reached
                if theirs.reached:
                    assert ours.point.seconds <= theirs.point.seconds + 1e-12


def test_nothing_moves_without_a_link():
    step = replace(layers_to_move(12), link=0.0)
    assert not any(point.moved for point in Lines(step).by_held)
