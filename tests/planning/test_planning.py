"""The planner, on random steps: what it says happens, what it chooses is best, goals are monotone."""

import os
import random
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_steps import MILLI, choices, network, steps, told

import leannorm
from leannorm.planning.cut import Cuts, price
from leannorm.planning.goal import CONV, HALF, NORM, Goal, goal
from leannorm.planning.lines import Lines
from leannorm.planning.outcome import of_stock, outcome
from leannorm.planning.plan import plan
from leannorm.planning.timeline import Moment, Step, Value

examples = settings(max_examples=int(os.environ.get("LEANNORM_FUZZ", "100")), deadline=None, derandomize=True)


@examples
@given(steps(), st.data())
def test_an_outcome_is_what_happens_when_the_step_runs(step, data):
    can = [i for i, value in enumerate(step.values) if value.seconds is not None]
    again = frozenset(data.draw(st.sets(st.sampled_from(can)))) if can else frozenset()
    held, seconds, alive = told(step, again)
    found = outcome(step, again)
    assert (found.held, list(found.alive)) == (held, alive)
    assert found.seconds == pytest.approx(seconds)
    assert found.again <= again


@examples
@given(steps())
def test_the_chain_of_cuts_is_the_best_at_every_rate(step):
    every = {(c.held, price(c.seconds)) for c in choices(step)}
    chain = Cuts(step).chain()
    found = [(choice.held, choice.price) for choice in chain]
    assert set(found) <= every
    for low, high in pairwise(chain):
        assert low.again < high.again
        assert low.held > high.held
        assert low.price < high.price or low.price == high.price == 0
    for rate in (0, 1e-7, 1e-6, 5e-6, 1e-5, 3e-5, 1e-4, 1):
        best, ours = (min(held * rate * 1e12 + cost for held, cost in some) for some in (every, found))
        assert ours == pytest.approx(best)
    assert found[-1][0] == min(held for held, _ in every)


@examples
@given(steps())
def test_lines_lead_down_from_stock_and_never_above_it(step):
    lines = Lines(step)
    assert lines.stock == of_stock(step)
    for line, size in ((lines.by_held, lambda p: p.held), (lines.by_peak, lambda p: p.peak)):
        assert line[0] is lines.stock
        for point in line:
            assert point == outcome(step, point.again)
            assert point.held <= lines.stock.held
            assert point.peak <= lines.stock.peak
        for before, after in pairwise(line):
            assert size(after) < size(before)
            assert max(after.seconds, lines.stock.seconds) >= before.seconds


@examples
@given(steps())
def test_goals_are_kept_and_monotone(step):
    lines = Lines(step)
    for kind, shares in (("budget", (1.0, 0.8, 0.5, 0.3, 0.1)), ("overhead", (0.0, 0.01, 0.03, 0.1, 1.0))):
        plans = [plan(lines, Goal(**{kind: share})) for share in shares]
        for share, made in zip(shares, plans, strict=True):
            if made.reached:
                assert made.ratio <= share if kind == "budget" else made.overhead <= share + 1e-9
            else:
                assert made.point.held == made.least > share * lines.stock.held
        for before, after in pairwise(plans):
            assert after.point.held <= before.point.held
    for before, after in pairwise(made.point for made in [plan(lines, Goal(overhead=0.0)), *plans]):
        assert after.held + after.peak <= before.held + before.peak  # more time is spent on room alone
    for peaks in ((1.0, 0.9, 0.7, 0.5, 0.2), (2000, 1000, 500, 2)):
        plans = [plan(lines, Goal(peak=peak)) for peak in peaks]
        for before, after in pairwise(plans):
            assert after.point.peak <= before.point.peak
            assert after.reached <= before.reached
    bought = [plan(lines, Goal(worth=worth)).point for worth in (0.0, 0.1, 0.5, 2.0, 100.0)]
    assert all(after.held <= before.held for before, after in pairwise(bought))
    assert Lines(step).by_held == lines.by_held  # the same on every rank


@examples
@given(steps())
def test_half_is_the_first_that_is_enough_and_what_costs_nothing_behind_it(step):
    lines = Lines(step)
    made, line, (stock, seconds) = plan(lines, HALF), lines.by_held, (lines.stock, step.seconds)
    enough = [p for p in line if p.held <= 0.5 * stock.held]
    within = [p for p in line if p is stock or p.seconds <= stock.seconds + 0.1 * seconds]
    assert made.point in within
    assert made.point.peak <= stock.peak
    if enough and enough[0] in within:
        assert made.reached
        assert made.point.held <= enough[0].held
        assert made.point.seconds <= enough[0].seconds + 0.01 * seconds
        beyond = [p for p in within if p.held < made.point.held]
        assert all(p.seconds > enough[0].seconds + 0.01 * seconds for p in beyond)
    else:
        assert made.point.held == min(p.held for p in within)
        assert made.reached == (made.point.held <= 0.5 * stock.held)
    assert made.least == line[-1].held


def test_how_far_plans_are_from_the_best_there_are():
    """Of all choices for small networks, tried one by one: how often a plan is best, what else it costs."""
    rng, dearer = random.Random(0), {"budget": [], "peak": []}
    for _ in range(60):
        lines = Lines(network(rng, 9))
        every = [c for c in choices(lines.step) if c.peak <= lines.stock.peak and c.held <= lines.stock.held]
        for share in (0.8, 0.6, 0.4):
            for kind, size in (("budget", lambda c: c.held), ("peak", lambda c: c.peak)):
                made = plan(lines, Goal(**{kind: share}))
                best = min((c.seconds for c in every if size(c) <= share * size(lines.stock)), default=None)
                if best is None:
                    assert not made.reached
                else:
                    more = (made.point.seconds - best) / lines.step.seconds
                    dearer[kind].append(more if made.reached else 1.0)
    for shares in dearer.values():
        assert shares.count(1.0) <= 0.02 * len(shares)  # out of its reach, and not of the best's
        assert sum(share < 1e-9 for share in shares) >= 0.5 * len(shares)
        assert sum(share for share in shares if share < 1) <= 0.015 * len(shares)


def residual_stream(layers, width=1000):
    """x(l + 1) = x(l) + f(l): a chain that is cheap to make again, and would then be there all at once."""
    values, reads = [Value(width, None, (), 0, 0, width)], []
    for layer in range(layers):
        start = len(values)
        x = start - 1
        values.append(Value(4 * width, 4 * MILLI, (x,), 2 * layer, 2 * layer + 1, 4 * width))
        values.append(Value(width, 4 * MILLI, (start,), 2 * layer + 1, 2 * layer + 1, width))
        values.append(Value(width, MILLI, (x, start + 1), 2 * layer + 1, 2 * layer + 3, width))
        reads.append((x, start))
    forward, backward = 2 * layers + 2, [Moment(read) for read in reversed(reads)]
    stock = {i for read in reads for i in read}
    return Step(values, forward, backward, [0] * (forward + layers), frozenset(stock), 12 * MILLI * layers)


def test_a_long_chain_is_not_made_again_all_at_once():
    lines = Lines(residual_stream(24))
    lowest = lines.by_peak[-1]
    assert lowest.peak < 0.25 * lines.stock.peak  # a checkpoint every few layers; the chain alone gives 0.3
    assert all(point.peak <= lines.stock.peak for point in lines.by_held)


def test_what_shares_nothing_is_freed_layer_by_layer():
    """Equal layers have one price, and still a budget is met within a layer's bytes."""
    lines = Lines(residual_stream(16))
    for share in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        made = plan(lines, Goal(budget=share))
        assert share - 0.08 < made.ratio <= share


def test_a_large_part_is_taken_early_where_a_budget_lies_in_its_gap():
    """As a language model's logits: a fifth of the bytes at a high price, behind layers at a low one."""
    layers = [Value(100, MILLI, (0,), i, i, 100) for i in range(1, 9)]
    never_kept = Value(None, 0.0, (0,), 9, 9, 200)
    values = [Value(0, None), *layers, never_kept, Value(200, 10 * MILLI, (9,), 9, 9, 200)]
    backward = [Moment((i,)) for i in (10, *range(8, 0, -1))]
    stock = frozenset(range(11)) - {9}
    lines = Lines(Step(values, 10, backward, [0] * 19, stock, 100 * MILLI))
    made = plan(lines, Goal(budget=0.15))  # one layer at most is held, or the logits are
    assert (made.point.held, made.point.seconds) == (100, pytest.approx(17 * MILLI))


def test_a_few_bytes_at_the_peak_do_not_rule_out_all_that_make_them_again():
    """What the last moment reads is the cheapest to make again, and larger then; and the peak is there."""
    layers = [Value(100, MILLI, (0,), i, i, 100) for i in range(1, 17)]
    first = Value(100, 0.01 * MILLI, (0,), 17, 17, 104)
    other = Value(8, 0.2 * MILLI, (0,), 18, 18, 8)
    backward = [Moment((i,)) for i in range(16, 0, -1)] + [Moment((17,)), Moment((18,))]
    beside = [0] * (19 + 18)
    beside[-2] = 9000
    stock = frozenset(range(19))
    lines = Lines(Step([Value(0, None), *layers, first, other], 19, backward, beside, stock, 100 * MILLI))
    assert lines.stock.peak == 9108
    for share in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2):
        made = plan(lines, Goal(budget=share))
        assert share - 0.08 < made.ratio <= share
        assert made.point.peak <= lines.stock.peak


def test_a_step_of_some_thousand_values_is_planned_in_seconds():
    step = residual_stream(500)
    assert len(step.values) > 1500
    before = time.process_time()
    lines = Lines(step)
    assert len(lines.by_held) > 20
    assert len(lines.by_peak) > 20
    assert time.process_time() - before < 20  # 1 to 2 on a quiet machine


def test_a_step_without_values_has_stock_s_plan():
    step = Step([], 0, [], [], frozenset(), 0.0)
    lines = Lines(step)
    for asked in (HALF, NORM, CONV, Goal(budget=0.5), Goal(overhead=0.1), Goal(peak=0.5), Goal(peak=100)):
        made = plan(lines, asked)
        assert made.point is lines.stock
        assert (made.ratio, made.overhead, made.peak_ratio) == (0, 0, 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"recompute": "mlp"}, 'recompute is "norm" or "conv"; got \'mlp\''),
        ({"recompute": 0.5}, "write budget=0.5"),
        (
            {"budget": 0.5, "overhead": 0.1},
            "one of budget, overhead and peak; got budget=0.5 and overhead=0.1",
        ),
        ({"budget": 0.5, "peak": "8GiB"}, "got budget=0.5 and peak='8GiB'"),
        ({"budget": 0}, "in (0, 1]; got 0"),
        ({"budget": True}, "in (0, 1]; got True"),
        ({"overhead": -0.1}, "0 or more; got -0.1"),
        ({"overhead": float("nan")}, "0 or more; got nan"),
        ({"peak": "8 apples"}, "like 24GiB, 24GB or 500MB; got '8 apples'"),
        ({"peak": 0}, "got 0"),
        ({"peak": 1.5}, "got 1.5"),
        ({"peak": 8}, 'peak=8 is a number of bytes, and no step is as small; write "8GiB"'),
        ({"peak": 16.0}, 'write "16GiB"'),
        ({"recompute": "conv", "peak": 0.5}, "peak=0.5 chooses itself what to rebuild"),
        ({"peak": float("inf")}, "got inf"),
    ],
)
def test_goals_that_do_not_exist(given, said):
    arguments = {"recompute": "norm", "budget": None, "overhead": None, "peak": None, **given}
    with pytest.raises(leannorm.InputError) as error:
        goal(**arguments)
    assert said in str(error.value)


def test_nothing_asked_for_is_half():
    assert goal(None, None, None, None) == HALF


def test_peaks_in_words():
    assert goal("norm", None, None, "8GiB") == Goal(peak=8 * 2**30)
    assert goal("norm", None, None, 1) == Goal(peak=1.0)
    assert goal("norm", None, None, 2**20) == Goal(peak=2**20)


def test_numbers_of_numpy_are_numbers():
    assert goal("norm", None, None, np.int64(2**20)) == Goal(peak=2**20)
    assert goal("norm", np.float32(0.5), None, None) == Goal(budget=0.5)


def test_the_last_reader_spares_bytes_of_what_is_made_again_for_it_alone():
    first = Value(8, 1 * MILLI, made=0, until=-1, again=8, spares=8)
    second = Value(4, 1 * MILLI, (0,), made=0, until=-1, again=4)
    moments = [Moment((0,)), Moment(()), Moment((0,)), Moment((1,))]
    step = Step([first, second], 1, moments, [0, 5, 5, 20, 5], frozenset({0, 1}), 10 * MILLI)
    assert outcome(step, frozenset()).alive == (12, 17, 17, 32, 9)
    assert outcome(step, frozenset({0})).alive == (4, 17, 17, 24, 9)
    assert outcome(step, frozenset({0, 1})).alive == (0, 13, 13, 28, 17)  # the second is made of it later


def test_what_only_others_are_made_of_is_freed_once_these_are_there():
    """Of a chain two values are in memory at once, unless a moment reads one of them itself."""
    chain = [Value(8, 1 * MILLI, (i - 1,) if i else (), made=0, until=-1, again=8) for i in range(5)]
    everything = frozenset(range(5))
    for reads, alive in (((4,), 16), ((3, 4), 16), ((1, 4), 24), ((0, 1, 4), 32), ((0, 1, 2, 4), 40)):
        moments = [Moment(()), Moment(reads), Moment(())]
        step = Step(chain, 1, moments, [0, 3, 5, 3], everything, 10 * MILLI)
        assert outcome(step, everything).alive == (0, 3, 5 + alive, 3), reads
    later = Step(chain, 1, [Moment((4,)), Moment((1,))], [0, 0, 0], everything, 10 * MILLI)
    assert outcome(later, everything).alive == (0, 24, 8)
    assert outcome(later, everything - {1}).alive == (8, 24, 8)


@pytest.mark.parametrize(("made_of", "most"), [((1, 2), 12), ((2, 1), 21)])
def test_what_a_value_is_made_of_is_made_in_order(made_of, most):
    values = [
        Value(n, MILLI, of, until=-1, again=n) for n, of in ((10, ()), (1, (0,)), (10, ()), (1, made_of))
    ]
    step = Step(values, 1, [Moment((3,))], [0, 0], frozenset(range(4)), 10 * MILLI)
    assert outcome(step, frozenset(range(4))).alive == (0, most)


def test_a_call_of_several_results_reads_until_it_has_made_one():
    source, call, result = (Value(8, MILLI, until=-1, again=8), Value(None, MILLI, (0,), until=-1),
                            Value(8, MILLI, (1,), until=-1, again=8))  # fmt: skip
    last = Value(8, MILLI, (2,), until=-1, again=8)
    step = Step([source, call, result, last], 1, [Moment((3,))], [0, 0], frozenset(range(4)), MILLI)
    assert outcome(step, frozenset(range(4))).alive == (0, 16)
    step = Step([source, call, result], 1, [Moment((2,))], [0, 0], frozenset(range(3)), MILLI)
    assert outcome(step, frozenset(range(3))).alive == (0, 16)


def test_what_each_reader_computes_needs_what_it_is_made_of_until_the_end():
    first, second = (Value(8, 1 * MILLI, made=0, until=-1, again=8) for _ in range(2))
    fused = Value(8, 1 * MILLI, (0, 1), made=0, until=-1, again=8, fused=True)
    step = Step([first, second, fused], 1, [Moment((2,), whole=False)], [0, 0], frozenset(range(3)), MILLI)
    assert outcome(step, frozenset(range(3))).alive == (0, 16)
    more = [Value(8, 1 * MILLI, made_of, made=0, until=-1, again=8) for made_of in ((0,), ())]
    moments = [Moment((2, 3, 4), whole=False)]
    step = Step([first, second, fused, *more], 1, moments, [0, 0], frozenset(range(5)), MILLI)
    assert outcome(step, frozenset(range(5))).alive == (0, 32)
