"""`lean()` in captured graphs, on the stand-in for a GPU: what is replayed trains as plain steps do."""

from functools import lru_cache

import pytest
import standin
from standin_cases import GRAPHED, MODELS, REPLAYED
from test_lean_device import needs_standin

from leannorm.saving import reasons

pytestmark = needs_standin


@lru_cache
def found():
    """All that graphs_on_standin.py finds."""
    return standin.found_by("graphs_on_standin.py")


@pytest.mark.parametrize("which", REPLAYED)
@pytest.mark.parametrize("name", MODELS)
def test_a_whole_step_is_captured_and_replayed(name, which):
    """Forward, backward and the parameters' step, after some passes outside of the capture."""
    one = found()[f"{name}, {which}"]
    assert "error" not in one, one
    assert one["same"], "parameters, gradients and buffers are those of plain steps"
    assert one["rebuilt"]
    assert not any("not tried before" in reason for reason in one["reasons"])


@pytest.mark.parametrize("which", GRAPHED)
@pytest.mark.parametrize("name", MODELS)
def test_make_graphed_callables(name, which):
    """torch captures the forward and the backward pass one after the other; a pass is within the first."""
    one = found()[f"{name}, {which}, graphed"]
    assert "error" not in one, one
    assert one["same"]
    assert one["rebuilt"]
    assert one["around"] == [reasons.NOTHING], "a replay saves nothing"


def test_a_capture_before_any_pass_keeps_what_was_not_tried():
    one = found()["first of all"]
    assert one["same"]
    assert any("not tried before a CUDA graph's capture" in reason for reason in one["reasons"])
