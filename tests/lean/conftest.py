"""Fixtures of the tests of `held="host"`: either log, and a link to a host (links.py) that finds faults."""

import gc

import pytest
from lean_cases import without_nodes
from links import Late, nothing_is_left

from leannorm.autograd.nodes import NODES
from leannorm.saving import host, plans, recorded_pass

CHANCES = {"late": 0.0, "at random": 0.5}


@pytest.fixture(params=["C++", "Python"])
def log(request, monkeypatch):
    if request.param == "Python":
        without_nodes(monkeypatch)
    elif NODES is None:
        pytest.skip("the C++ nodes are not built")
    recorded_pass.LOG.forget_trials()
    plans.KNOWN.clear()
    host._ORDERS.clear()


@pytest.fixture(params=CHANCES.values(), ids=CHANCES)
def link(request, log, monkeypatch):
    made = Late(request.param)
    monkeypatch.setattr(host, "link_of", lambda device: made)
    yield made
    gc.collect()
    assert made.faults == []
    assert nothing_is_left(made)


@pytest.fixture
def late(log, monkeypatch):
    made = Late()
    monkeypatch.setattr(host, "link_of", lambda device: made)
    yield made
    gc.collect()
    assert made.faults == []
    assert nothing_is_left(made)
