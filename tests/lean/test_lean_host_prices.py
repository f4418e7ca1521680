"""What plans say of values on the host, against a link with a clock (tests/lean/links.py)."""

import random

import pytest
import torch
from links import Timed

from leannorm.planning.moves import Away, Moving
from leannorm.saving import host


@pytest.mark.parametrize("seed", range(40))
def test_the_computation_waits_as_long_as_planned(seed, monkeypatch):
    """The same steps, moment by moment: values of random sizes leave, and are read backwards."""
    rng = random.Random(seed)
    count = rng.randint(1, 12)
    taken = [rng.uniform(0.1, 2) for _ in range(2 * count)]
    sizes = [rng.choice([64, 512, 4096]) for _ in range(count)]
    link = Timed(rng.choice([30, 300, 1000, 1e5]))
    monkeypatch.setattr(host, "link_of", lambda device: link)
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 1)
    host._ORDERS.clear()
    moves, held = host.Moves({}), []
    for moment in range(count):
        link.clock += taken[moment]
        held.append(moves.hold(torch.full((sizes[moment],), moment, dtype=torch.uint8)))
    for moment in range(count):
        value = count - 1 - moment
        assert torch.equal(held[value](), torch.full((sizes[value],), value, dtype=torch.uint8))
        link.clock += taken[count + moment]
    values = [Away(size, i, 2 * count - 1 - i) for i, size in enumerate(sizes)]
    assert link.waited == pytest.approx(Moving(taken, count, link.bandwidth, values).waited)
    assert link.faults == []
