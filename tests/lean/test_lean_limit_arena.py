"""Memory of tensors under a limit (csrc/nodes/record/arena.h): it is counted, used again, and returned."""

from contextlib import nullcontext
from threading import Thread

import pytest
import test_lean_limit
import torch
from test_lean_limit import MEGABYTE, in_a_process, perceptron, step
from torch import nn

from leannorm import lean
from leannorm.report.memory import measure_step

pytestmark = test_lean_limit.pytestmark
FAR = "900GiB"


def test_tensors_outlive_the_pass_that_made_them():
    network, x = perceptron(2)
    with lean(limit=FAR):
        y = network(x)
    y.sum().backward()
    kept, copied = y.detach(), y.detach().clone()
    for _ in range(3):
        step(network, x, lean(limit=FAR))
    assert torch.equal(kept, copied)
    view = kept.numpy()
    del kept, y
    for _ in range(3):
        step(network, x, lean(limit=FAR))
    assert torch.equal(torch.from_numpy(view), copied)


def test_memory_from_before_a_limit_is_freed_within_one_and_the_other_way_round():
    before = [torch.randn(300, 300) for _ in range(20)]
    blocked = [one.to_mkldnn() for one in before] if torch.backends.mkldnn.is_available() else []
    network, x = perceptron(2)
    with lean(limit=FAR):
        y = network(x)
        sums = [one.sum() for one in before]
        del before
        blocked = [one.to_dense() for one in blocked]
        within = [torch.randn(300, 300) for _ in range(20)]
    y.sum().backward()
    assert all(torch.equal(a.sum(), b) for a, b in zip(blocked, sums, strict=False))
    within[0].resize_(500, 500).fill_(1.0)
    assert within[0].sum() == 250_000
    del within


def convolutional():
    return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()), torch.randn(4, 16, 64, 64)


@pytest.mark.parametrize("make", [lambda: perceptron(4), convolutional], ids=["perceptron", "convolutional"])
def test_torch_counts_the_same_allocations(make):
    network, x = make()

    def measured(context):
        def forward():
            with context:
                return network(x).square().mean()

        network.zero_grad()
        return measure_step(forward)

    plain, limited = measured(nullcontext()), measured(lean(limit=FAR))
    assert abs(limited.held - plain.held) < 0.01 * plain.held
    assert abs(limited.peak - plain.peak) < 0.01 * plain.peak


def test_freed_memory_is_used_again_and_never_more_than_the_limit_is_kept():
    """Sizes differ from step to step, so that what one step has freed rarely fits the next."""
    code = """
most, limit = 0, NODES.bytes_in_use() + 150_000_000
for rows in (2048, 700, 1300, 90, 1900, 2048, 1100):
    step(network, x[:rows], lean(limit=limit))
    most = max(most, status("RssAnon"))
print(most / limit)
step(network, x, nullcontext())  # takes what was left first
print(status("RssAnon") / limit)
"""
    shares = [float(line) for line in in_a_process(code).split()]
    assert max(shares) <= 1.0


def test_without_a_limit_nothing_is_kept():
    code = """
tensors = []
with lean(limit="900GiB"):
    y = network(x)
    tensors = [torch.ones(10_000_000) for _ in range(10)]
y.sum().backward()
before = status("RssAnon")
del tensors, y
print(before - status("RssAnon"))
"""
    assert int(in_a_process(code)) > 350 * MEGABYTE


def test_threads_allocate_and_free_at_once():
    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(20_000, 200_000, (200,), generator=generator).tolist()
        kept = []
        for i, size in enumerate(sizes):
            kept.append(torch.full((size,), float(seed * 1000 + i)))
            if len(kept) > 8:
                one = kept.pop(i % 8)
                sound.append(bool((one == one[0]).all()))

    sound = []
    network, x = perceptron(2)
    with lean(limit=FAR):
        y = network(x)
        threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    y.sum().backward()
    assert len(sound) == 4 * 192
    assert all(sound)


def test_processes_forked_within_a_pass_allocate():
    code = """
import os
with lean(limit="900GiB"):
    y = network(x)
    child = os.fork()
    if child == 0:
        z = torch.full((1_000_000,), 2.0)
        os._exit(0 if z.sum() == 2_000_000 and y.sum().isfinite() else 1)
print(os.waitpid(child, 0)[1])
y.sum().backward()
"""
    assert in_a_process(code).split()[-1] == "0"


def test_kept_pages_are_returned_where_memory_cannot_be_allocated():
    """`ulimit -v` counts them, and then nothing else fits."""
    code = """
import resource
with lean(limit="900GiB"):
    y = network(x)
    tensors = [torch.ones(50_000_000) for _ in range(2)]
    del tensors  # the arena keeps their pages
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + 50_000_000, resource.RLIM_INFINITY))
    large = torch.ones(70_000_000)
    small = [torch.ones(10_000) for _ in range(4000)]
print(large.sum().item(), len(small))
"""
    assert in_a_process(code).split() == ["70000000.0", "4000"]
