"""The measured bytes against tensors counted by hand; freed memory kept, seen by the page faults it saves."""

import ctypes
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from leannorm import _errors
from leannorm import _freed_memory as freed_memory
from leannorm.report.memory import measure_step
from leannorm.report.timing import time_step

K = 1000  # elements; float32, so 4 kB a tensor
LOSS = 4


def leaf():
    return torch.zeros(K, requires_grad=True)


def kept_by_exp(x):
    return lambda: x.exp().sum()


def freed_before_the_end(x):
    def forward():
        with torch.no_grad():
            scratch = torch.zeros(5 * K)
            del scratch
        return x.exp().sum()

    return forward


def block_used_again(x):
    def forward():
        with torch.no_grad():
            for _ in range(50):
                torch.zeros(5 * K)
        return x.exp().sum()

    return forward


def kept_twice(x):
    return lambda: x.exp().sin().sum()  # exp keeps its result, sin its input: one tensor; sin's result goes


def rebuilt(x):
    return lambda: checkpoint(lambda t: t.exp().exp(), x, use_reentrant=False).sum()


# what is held after forward, and the peak, in tensors of K elements, beside the loss.
# Backward: sum's gradient is expanded (4 bytes), each exp or sin makes one new tensor.
CASES = {
    "exp keeps its result, its gradient is the second": (kept_by_exp, 1, 2),
    "a block freed within forward is in the peak only": (freed_before_the_end, 1, 5),
    "a block used again counts once": (block_used_again, 1, 5),
    "one tensor kept by two nodes counts once": (kept_twice, 1, 3),
}


@pytest.mark.parametrize(("make", "held", "peak"), CASES.values(), ids=CASES)
def test_bytes_are_those_counted_by_hand(make, held, peak):
    memory = measure_step(make(leaf()))
    assert memory.held == held * 4 * K + LOSS
    assert abs(memory.peak - peak * 4 * K) <= 2 * LOSS


def test_nothing_stays_after_a_step_but_the_gradient():
    x = leaf()
    memory = measure_step(kept_by_exp(x))
    assert memory.timeline[0] == (0.0, 0)
    assert memory.timeline[-1][1] <= 4 * K + 2 * LOSS
    assert x.grad is not None


def test_the_timeline_agrees_with_held_and_peak():
    memory = measure_step(block_used_again(leaf()))
    assert max(alive for _, alive in memory.timeline) == memory.peak
    assert [alive for at, alive in memory.timeline if at <= memory.forward_end][-1] == memory.held
    assert [at for at, _ in memory.timeline] == sorted(at for at, _ in memory.timeline)


def test_checkpoint_holds_nothing_of_its_inside():
    memory = measure_step(rebuilt(leaf()))
    generators = torch.get_rng_state().nbytes  # checkpoint keeps their state
    assert memory.held <= 4 * K + 2 * LOSS + generators  # exp's last result is sum's input, which sum drops
    assert memory.peak >= 3 * 4 * K


def test_reentrant_backward_is_seen_whatever_thread_it_runs_in():
    """Past a depth of 60, autograd moves nested backward passes to threads of its own."""

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.depth == 0:
                torch.zeros(100 * K)
                return grad, None
            with torch.enable_grad():
                inner = leaf()
                Nested.apply(inner, ctx.depth - 1).sum().backward()
            return grad, None

    x = leaf()
    assert measure_step(lambda: Nested.apply(x, 70).sum()).peak >= 100 * 4 * K


def test_parallel_kernels_are_seen_whole():
    """Every thread of a parallel kernel writes into one block, which counts once."""
    x = torch.zeros(64, 8, 32, 32, requires_grad=True)
    memory = measure_step(lambda: torch.relu(x).sum())
    assert memory.held == x.numel() * 4 + LOSS
    assert abs(memory.peak - 2 * x.numel() * 4) <= 2 * LOSS


def test_a_second_measurement_gives_the_same():
    x = leaf()
    first = measure_step(kept_by_exp(x))
    x.grad = None
    second = measure_step(kept_by_exp(x))
    assert first[:2] == second[:2]


def test_the_step_is_not_only_measured_but_run():
    x = leaf()
    measure_step(kept_by_exp(x), lambda loss: (2 * loss).backward())
    assert torch.equal(x.grad, torch.full((K,), 2.0))


def test_an_error_in_the_step_passes_through_and_the_next_measurement_works():
    with pytest.raises(ZeroDivisionError):
        measure_step(lambda: 1 / 0)
    assert measure_step(kept_by_exp(leaf())).held == 4 * K + LOSS


def test_other_devices_are_refused():
    with pytest.raises(_errors.InputError, match="cpu and cuda; got device 'meta'"):
        measure_step(kept_by_exp(leaf()), device="meta")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_bytes():
    x = torch.zeros(256 * K, device="cuda", requires_grad=True)
    memory = measure_step(kept_by_exp(x), device="cuda")
    assert 0 <= memory.held - 4 * 256 * K <= 4096
    assert 0 <= memory.peak - 2 * 4 * 256 * K <= 8192


def test_time_step_is_positive():
    assert time_step(lambda: sum(range(1000))) > 0


def in_a_fresh_process(code):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout, done.stderr


def test_measuring_writes_nothing_on_stderr_and_leaves_the_environment():
    out, err = in_a_fresh_process("""
        import os, torch
        from leannorm.report.memory import measure_step
        before = dict(os.environ)
        x = torch.zeros(10, requires_grad=True)
        measure_step(lambda: x.exp().sum())
        print(dict(os.environ) == before)
    """)
    assert (out.strip(), err) == ("True", "")


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted on Linux")
def test_kept_memory_is_not_faulted_in_again():
    out, _ = in_a_fresh_process("""
        import resource, torch
        from leannorm._freed_memory import keep_freed_memory

        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(10):
                torch.empty(16 * 2**20).fill_(0)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        given_back = faults()
        result = keep_freed_memory()
        after = faults()
        for _ in range(10):  # rounds until a block that is kept is large enough for the next, aligned
            after = min(after, faults())
        print(result.kept, result == keep_freed_memory(), given_back, after)
    """)
    kept, same, given_back, after = out.split()
    assert same == "True"
    if kept == "True":
        assert int(after) <= int(given_back) // 10


@pytest.mark.parametrize(
    ("platform", "symbols", "reason"),
    [
        ("darwin", {}, "only Linux with glibc has the setting, and this is darwin"),
        ("linux", {"mallctl": None, "gnu_get_libc_version": None}, "jemalloc is used by this process"),
        ("linux", {}, "the C library is not glibc"),
    ],
)
def test_where_it_cannot_work_it_says_why(monkeypatch, platform, symbols, reason):
    process = type("Process", (), symbols)()
    for owner, name, stand_in in ((sys, "platform", platform), (ctypes, "CDLL", lambda name: process)):
        monkeypatch.setattr(owner, name, stand_in)
    result = freed_memory.keep_freed_memory()
    assert not result
    assert reason in str(result)
