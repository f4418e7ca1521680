"""What sums ask of a device: nothing is sent there, and a header is awaited on that device's own stream."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from test_sync_capture import CALL, Alone
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("xpu:1")  # fake: any that is not the current one


class Event:
    """Notes on which stream it is recorded."""

    recorded: ClassVar[list] = []

    def __init__(self, device):
        self.device = device

    def record(self, stream=None):
        self.recorded.append((self.device, stream))

    def query(self):
        return False


class Sent(TorchDispatchMode):
    """Notes what goes from the host to a device."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [v for v in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        if isinstance(result, torch.Tensor) and result.device == DEVICE:
            self.operations += [str(func) for v in given if v.device.type == "cpu"]
        return result


@pytest.fixture
def group(monkeypatch):
    stream = lambda device=None: f"stream of {device}"  # noqa: E731
    for owner, name, stand_in in ((torch, "Event", Event), (torch.accelerator, "current_stream", stream)):
        monkeypatch.setattr(owner, name, stand_in)
    Event.recorded.clear()
    group = Alone()
    group.devices = {DEVICE.type}
    with FakeTensorMode():
        yield group


def sums():
    return [torch.ones(16, dtype=torch.float64, device=DEVICE)]


def test_a_header_is_awaited_on_the_stream_of_its_own_device(group):
    group.all_reduce(sums(), 8, CALL)
    assert Event.recorded == [(DEVICE, f"stream of {DEVICE}")]


def test_nothing_is_sent_to_the_device_for_a_new_batch_size(group):
    with Sent() as sent:
        torch.ones(3).to(DEVICE)
        assert sent.operations == ["aten._to_copy.default"]
        for count in (8, 9, 10):
            group.all_reduce(sums(), count, CALL)
    assert len(sent.operations) == 1
