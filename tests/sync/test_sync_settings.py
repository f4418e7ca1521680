"""Ranks whose SyncBatchNorm differ in eps, momentum or tracking are all told so, and compute nothing."""

import pytest
import torch
from faults.scenarios import TIMEOUT
from ranks import outcomes, ranks
from sync_cases import messages_sent
from torch import nn as torch_nn

from leannorm import functional, nn
from leannorm.transforms import convert

BOTH = {"eps": 1e-5, "momentum": 0.1, "track_running_stats": True}
SETTINGS = {
    "eps": ({"eps": 1e-3}, "eps=0.001, momentum=0.1, track_running_stats=True"),
    "momentum": ({"momentum": 0.2}, "eps=1e-05, momentum=0.2, track_running_stats=True"),
    "cumulative": ({"momentum": None}, "eps=1e-05, momentum=None, track_running_stats=True"),
    "tracking": ({"track_running_stats": False}, "eps=1e-05, track_running_stats=False"),
}


def unlike(rank, other):
    """Rank 1 has another setting; a layer that is alike goes first."""
    nn.SyncBatchNorm(3, timeout=TIMEOUT)(torch.randn(4, 3))
    layer = nn.SyncBatchNorm(3, **{**BOTH, **(other if rank == 1 else {})}, timeout=TIMEOUT)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    try:
        layer(torch.randn(4, 3))
    finally:
        assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())


def unlike_later(rank):
    """A momentum that one rank changes between two steps."""
    layer = nn.SyncBatchNorm(3, timeout=TIMEOUT)
    layer(torch.randn(4, 3))
    layer.momentum = 0.1 if rank == 0 else 0.01
    layer(torch.randn(4, 3))


def unlike_converted(rank):
    model = torch_nn.Sequential(torch_nn.Linear(3, 5), torch_nn.BatchNorm1d(5, eps=(1e-5, 1e-6)[rank]))
    convert(model, to="sync")(torch.randn(4, 3))


def unlike_compiled(rank):
    layer = nn.SyncBatchNorm(3, eps=(1e-5, 1e-6)[rank], timeout=TIMEOUT)
    torch.compile(layer, fullgraph=True, backend="eager")(torch.randn(4, 3))


def unlike_calls(rank):
    functional.sync_batch_norm(torch.randn(4, 3), None, None, training=True, eps=(1e-5, 1e-6)[rank])


def assert_all_say(results, *words):
    errors = {(r.error or "no error").splitlines()[0] for r in results}
    assert len(errors) == 1
    assert all(word in next(iter(errors)) for word in ("SyncError", "must have equal eps", *words)), errors


@pytest.mark.parametrize("name", SETTINGS)
def test_all_ranks_say_what_each_has(name):
    other, said = SETTINGS[name]
    results = outcomes(3, unlike, other, deadline=40)
    same = "eps=1e-05, momentum=0.1, track_running_stats=True"
    assert_all_say(
        results,
        "SyncBatchNorm number 2 by construction (training forward, 3 channels)",
        f"ranks 0, 2 with {same}; rank 1 with {said}",
        "Construct the layer with the same arguments on every rank",
    )


@pytest.mark.parametrize("what", [unlike_later, unlike_converted, unlike_compiled, unlike_calls])
def test_however_the_layer_is_called(what):
    assert_all_say(outcomes(2, what, deadline=60), "rank 0 with eps=", "rank 1 with eps=")


def alike(rank):
    """Settings that say the same in other words, and one that nothing depends on."""
    for mine in (
        {"eps": (1, 1.0)[rank]},
        {"momentum": (1, 1.0)[rank]},
        {"momentum": (0.1, 0.2)[rank], "track_running_stats": False},
        {"affine": rank == 0},
    ):
        layer = nn.SyncBatchNorm(3, **mine, timeout=TIMEOUT)
        layer(torch.randn(4, 3).requires_grad_()).sum().backward()
    return True


def test_what_computes_the_same_passes():
    assert ranks(2, alike) == [True, True]


def messages(rank):
    """What a step sends: the number of sums, and their sizes."""
    layer = nn.SyncBatchNorm(3)
    layer(torch.randn(4, 3))
    sizes = messages_sent()
    layer(torch.randn(4, 3, requires_grad=True)).sum().backward()
    return sizes


def test_no_message_more_and_none_longer():
    assert ranks(2, messages) == [[512, 512]] * 2
