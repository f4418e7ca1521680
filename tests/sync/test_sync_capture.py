"""Ranks' statistics while a CUDA graph is captured: nobody connects, makes room or waits, else an error."""

from __future__ import annotations

import pytest
import torch

from leannorm import InputError
from leannorm.distributed import group as module
from leannorm.distributed.call import HEADER, UNIT, Call

CALL = Call("bn1", "training forward", 4, 0.0, False)


class Alone(module.StatisticsGroup):
    """A group of one, without torch.distributed: what would be sent is counted."""

    def __init__(self):
        self.size, self.number, self.own_calls, self.world = UNIT, 0, 0, 1
        self.devices, self.broken, self.unread = {"cpu"}, None, []
        self._tokens, self._first, self.sent = {}, None, 0

    def _sum(self, total, call, wait=False):
        self.sent += 1
        self.number += 1


@pytest.fixture
def capture(monkeypatch):
    return lambda: monkeypatch.setattr(module, "capturing", lambda tensor: True)


def test_a_call_that_was_made_before_is_captured(capture):
    group, sums = Alone(), [torch.ones(16, dtype=torch.float64)]
    before = group.all_reduce(sums, 8, CALL)
    capture()
    group.unread.append("a header that may not be looked at")
    assert torch.equal(group.all_reduce(sums, 8, CALL), before)
    before[0] = 9
    assert torch.equal(group.all_reduce(sums, 9, CALL), before)  # another batch
    assert group.sent == 3


def test_the_first_call_of_all_cannot_be_captured_as_it_connects_the_ranks(capture):
    group = Alone()
    capture()
    with pytest.raises(InputError, match="captur"):
        group.all_reduce([torch.ones(16, dtype=torch.float64)], 8, CALL)
    assert group.sent == 0


@pytest.mark.parametrize(
    ("count", "values", "call"),
    [
        (8, UNIT - HEADER + 1, CALL),  # a message that is too small
        (8, 16, CALL._replace(debug=True)),  # waits
    ],
)
def test_what_cannot_be_captured_is_an_error_and_nothing_is_sent(count, values, call, capture):
    group, sums = Alone(), [torch.ones(16, dtype=torch.float64)]
    group.all_reduce(sums, 8, CALL)
    capture()
    with pytest.raises(InputError, match="captur"):
        group.all_reduce([torch.ones(values, dtype=torch.float64)], count, call)
    assert group.sent == 1
