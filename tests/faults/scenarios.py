"""The scenarios: what each rank does, and what must become of all of them within the timeout."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from ranks import Outcome, outcomes

from leannorm import nn
from leannorm.distributed import join

TIMEOUT = 3.0


@dataclass(frozen=True)
class Scenario:
    """`fits` looks at the ranks' outcomes; all must have ended by themselves in time."""

    name: str
    expected: str
    world: int
    act: Callable[[int], object]
    fits: Callable[[list[Outcome]], bool]


def layers(*channels: int) -> list[nn.SyncBatchNorm]:
    return [nn.SyncBatchNorm(c, timeout=TIMEOUT) for c in channels]


def batch(layer: nn.SyncBatchNorm, samples: int = 4) -> torch.Tensor:
    return torch.randn(samples, layer.num_features, 5)


def train(model: list[nn.SyncBatchNorm], steps: int = 1) -> None:
    for _ in range(steps):
        for layer in model:
            layer(batch(layer).requires_grad_()).square().sum().backward()


def raised(result: Outcome, *words: str) -> bool:
    return result.error is not None and all(word in result.error for word in ("SyncError", *words))


def others_name(rank: int, *words: str) -> Callable[[list[Outcome]], bool]:
    def fits(results: list[Outcome]) -> bool:
        others = [r for i, r in enumerate(results) if i != rank]
        return all(raised(r, f"rank {rank} did not come", "SyncBatchNorm number", *words) for r in others)

    return fits


def all_say_the_same(*words: str) -> Callable[[list[Outcome]], bool]:
    def fits(results: list[Outcome]) -> bool:
        first = {(r.error or "").splitlines()[0] for r in results if r.error}
        return len(first) == 1 and all(raised(r, *words) for r in results)

    return fits


def nobody_fails(results: list[Outcome]) -> bool:
    return all(r.error is None and r.value is True and r.exitcode == 0 for r in results)


def killed(rank: int, victim: int) -> None:
    model = layers(3, 3)
    train(model)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    train(model, 3)


def rank_2_is_killed(rank: int) -> None:
    killed(rank, 2)


def rank_0_is_killed(rank: int) -> None:
    killed(rank, 0)


def rank_1_fails(rank: int) -> None:
    model = layers(3, 3)
    train(model)
    if rank == 1:
        raise ValueError("the user's own mistake")
    train(model)


def skips_a_layer(rank: int) -> None:
    model = layers(3, 7, 300)
    train(model)
    train([layer for i, layer in enumerate(model) if (rank, i) != (1, 1)])


def skips_an_equal_layer(rank: int) -> None:
    model = layers(3, 3, 3)
    train(model)
    train([layer for i, layer in enumerate(model) if (rank, i) != (1, 1)])


def skips_the_first_call(rank: int) -> bool:
    if rank == 1:
        time.sleep(TIMEOUT + 1)
        return True
    train(layers(3))
    return False


def skips_the_backward_pass(rank: int) -> bool:
    (layer,) = layers(3)
    y = layer(batch(layer).requires_grad_())
    if rank == 1:
        time.sleep(TIMEOUT + 1)
        return True
    y.sum().backward()
    return False


def evaluates(rank: int) -> bool:
    model = layers(3, 5)
    train(model)
    if rank == 1:
        for layer in model:
            layer.eval()
    train(model)
    if rank == 1:
        time.sleep(TIMEOUT + 1)
    return rank == 1


def evaluates_from_the_start(rank: int) -> bool:
    model = layers(3, 5)
    if rank == 1:
        for layer in model:
            layer.eval()
    train(model)
    if rank == 1:
        time.sleep(TIMEOUT + 1)
    return rank == 1


def other_channels(rank: int) -> None:
    train(layers(3 + 2 * (rank == 2)))


def other_order(rank: int) -> None:
    a, b, c = layers(4, 4, 4)
    train([a, b, c] if rank else [a, c, b])


def one_value(rank: int) -> bool:
    """Each rank catches the error, and looks whether its layer is as it was."""
    (layer,) = layers(3)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.ones(1 if rank == 0 else 0, 3))
    return all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())


def nan_on_one_rank(rank: int) -> bool:
    """As in one process: the channel is lost on every rank, and no other channel is."""
    (layer,) = layers(3)
    x = batch(layer)
    if rank == 1:
        x[0, 1, 0] = torch.nan
    y = layer(x)
    return bool(y[:, 1].isnan().all()) and not bool(y[:, [0, 2]].isnan().any())


def slow_rank(rank: int) -> bool:
    layer = nn.SyncBatchNorm(3, timeout=4 * TIMEOUT)  # a busy machine may add its own wait
    x = torch.arange(12.0).reshape(4, 3) * (rank + 1)
    for step in range(2):
        if rank == 1:
            time.sleep(TIMEOUT / 2 * step)
        y = layer(x)
    both = torch.cat([torch.arange(12.0).reshape(4, 3) * (r + 1) for r in range(dist.get_world_size())])
    exact = torch.nn.functional.batch_norm(both.double(), None, None, training=True)
    return bool((y - exact[4 * rank : 4 * rank + 4]).abs().max() < 1e-6)


def runs_out(rank: int) -> bool:
    model = layers(3, 5)
    train(model, 1 if rank == 1 else 3)
    if rank == 1:
        time.sleep(TIMEOUT + 1)
    return rank == 1


def runs_out_in_join(rank: int) -> bool:
    """3 layers, of which one needs a longer message; afterwards every rank has the same statistics."""
    model = torch.nn.ModuleList(layers(3, 5, 200))
    steps = (1, 4, 0)[rank]
    with join(model):
        for step in range(steps):
            for layer in model:
                torch.manual_seed(10 * rank + step)
                layer(batch(layer))
    oracle = [torch.nn.BatchNorm1d(c).double() for c in (3, 5, 200)]
    for step in range(4):
        for layer in oracle:
            xs = []
            for r in (r for r in range(3) if (1, 4, 0)[r] > step):
                torch.manual_seed(10 * r + step)
                xs.append(batch(layer))
            layer(torch.cat(xs).double())
    return all(
        bool((a.double() - b.double()).abs().max() < 1e-6)
        for layer, exact in zip(model, oracle, strict=True)
        for a, b in zip(layer.buffers(), exact.buffers(), strict=True)
    )


SCENARIOS = [
    Scenario("a rank is killed", "others name it", 4, rank_2_is_killed, others_name(2)),
    Scenario(
        "rank 0, which serves the store, is killed",
        "others say so",
        3,
        rank_0_is_killed,
        lambda results: all(raised(r, "SyncBatchNorm number", "rank 0") for r in results[1:]),
    ),
    Scenario("a rank fails on its own", "others name it", 3, rank_1_fails, others_name(1)),
    Scenario(
        "a rank skips a layer",
        "all say who and which",
        3,
        skips_a_layer,
        all_say_the_same("rank 1 in", "300 channels"),
    ),
    Scenario(
        "a rank skips a layer like the next",
        "all say who and which",
        3,
        skips_an_equal_layer,
        all_say_the_same("rank 1 in SyncBatchNorm number 3"),
    ),
    Scenario("a rank skips the first call", "others name it", 3, skips_the_first_call, others_name(1)),
    Scenario("a rank skips the backward pass", "others name it", 3, skips_the_backward_pass, others_name(1)),
    Scenario(
        "a rank evaluates, others train",
        "others name it, and say so",
        3,
        evaluates,
        others_name(1, "rank 1 runs SyncBatchNorm number 1", "in evaluation mode"),
    ),
    Scenario(
        "a rank evaluates from the start",
        "others name it, and say so",
        3,
        evaluates_from_the_start,
        others_name(1, "in evaluation mode, where the others train"),
    ),
    Scenario(
        "a rank has other channels",
        "all say who and how many",
        3,
        other_channels,
        all_say_the_same("rank 2 in", "5 channels"),
    ),
    Scenario(
        "a rank has another order",
        "all say who and which",
        3,
        other_order,
        all_say_the_same("rank 0 in SyncBatchNorm number 3"),
    ),
    Scenario("one value over all ranks", "all raise, nothing changes", 3, one_value, nobody_fails),
    Scenario("NaN on one rank", "passes: one channel lost", 3, nan_on_one_rank, nobody_fails),
    Scenario("a slow rank", "passes, exact", 3, slow_rank, nobody_fails),
    Scenario("a rank runs out of batches", "others name it", 3, runs_out, others_name(1)),
    Scenario("ranks run out within join", "passes, exact", 3, runs_out_in_join, nobody_fails),
]


def play(scenario: Scenario) -> tuple[bool, str, float]:
    """Did it go as expected; what was seen; the longest time any rank took, in seconds."""
    results = outcomes(scenario.world, scenario.act, deadline=4 * TIMEOUT + 20)
    seconds = max(r.seconds for r in results)
    if any(r.exitcode is None for r in results):
        return False, "a rank hung", seconds
    slack = TIMEOUT + 1 if scenario.fits is not nobody_fails else TIMEOUT
    within = all(r.seconds < TIMEOUT + slack for r in results)
    return scenario.fits(results) and within, seen(results), seconds


def seen(results: list[Outcome]) -> str:
    """One rank's words, the longest."""
    words = [(r.error or "no error").splitlines()[0] for r in results]
    return max(words, key=len)
