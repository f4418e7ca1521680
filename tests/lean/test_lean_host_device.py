"""`held="host"` on the stand-in for a GPU, whose memory the host cannot read: its own streams and copies."""

from functools import lru_cache

import pytest
import standin
from standin_cases import MODELS

from leannorm.autograd.nodes import NODES

pytestmark = pytest.mark.skipif(
    NODES is None or standin.why_not() is not None, reason=f"no stand-in for a GPU: {standin.why_not()}"
)


@lru_cache
def found():
    return standin.found_by("host_on_standin.py")


@pytest.mark.parametrize("setting", ["plain", "norm", "conv", "budget"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_has_its_bits_and_the_host_waits_for_no_copy(name, setting):
    one = found()[f"{name}, {setting}"]
    assert "error" not in one, one
    assert one["same"]
    assert 0 < one["moved"] <= one["kept"]
    assert one["waits"] == {}


def test_copies_run_on_a_stream_of_their_own_and_memory_waits_for_them():
    one = found()["streams"]
    assert "error" not in one, one
    side, out = one["side"], one["out"]
    assert side not in (0, 1, 2)
    # a copy waits for what has made the value, and the program for a copy before the memory is free
    assert out.count(["waits", 1, side]) == 5
    assert out.count(["waits", side, 1]) >= 3
    assert one["back"] == [["waits", 1, side], ["waits", side, 1]]
    assert one["other"] == [["waits", side, 2], ["used", one["memory"], 2]]


def test_a_reader_on_another_stream_waits_for_what_hooks_have_brought():
    assert found()["two streams"][0] == 1
    assert len(found()["two streams"][1]) >= 1
