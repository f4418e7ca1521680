"""Gradients, buffers and bytes of compiled models under every kind of goal, beside eager code in float64."""

import pytest
from compiling import MODELS, assert_same, known, made, run_by_nodes, step

import leannorm

GOALS = {"conv": {"recompute": "conv"}, "budget": {"budget": 0.2}, "peak": {"peak": 0.5}}


@pytest.mark.sampled(of=5)
@pytest.mark.parametrize("goal", ["conv", "peak", pytest.param("budget", marks=pytest.mark.conformance)])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_eager_code(name, goal):
    """And what is saved is what was planned, and never more than torch's own choice."""
    options = leannorm.compile_options(**GOALS[goal])
    model, x = made(name)
    ours = step(model, run_by_nodes(model, options), x)
    drawn_by_the_compiler = "dropout" in name  # as inductor's own rule has it, and not as in eager code
    assert_same(ours, known(name, "compiled" if drawn_by_the_compiler else "eager"))
    assert ours.saved <= known(name, "compiled").saved
    (graph,) = options.report().graphs
    assert graph.reason is None
    assert abs(ours.saved - graph.plan.point.held) <= 0.02 * graph.plan.stock.held


@pytest.mark.lays_out
@pytest.mark.parametrize("kind", ["budget", pytest.param("overhead", marks=pytest.mark.conformance)])
@pytest.mark.parametrize(
    "name", ["residual blocks", pytest.param("leannorm's norms", marks=pytest.mark.conformance)]
)
def test_whoever_asks_for_less_never_gets_more(name, kind):
    """Where convolutions are laid out anew each choice above some share peaks above torch's."""
    model, x = made(name)
    asked = {"budget": (0.9, 0.5, 0.3, 0.1, 0.03), "overhead": (0.0, 0.05, 0.3, 1.0, 3.0)}[kind]
    saved = []
    for share in asked:
        options = leannorm.compile_options(**{kind: share})
        saved.append(step(model, run_by_nodes(model, options), x).saved)
        (graph,) = options.report().graphs
        assert graph.reason is None
        assert graph.plan.point.peak <= graph.plan.stock.peak
        if kind == "budget":
            assert graph.plan.reached == (graph.plan.ratio <= share)
    assert saved == sorted(saved, reverse=True)
    assert saved[-1] < 0.5 * known(name, "compiled").saved
