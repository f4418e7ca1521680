"""The fast path of shared statistics (autograd/fast.py), beside the whole way: same bits, same errors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from cases import is_fast, output_and_gradients
from ranks import ranks
from sync_cases import messages_sent
from torch.autograd.graph import saved_tensors_hooks

from leannorm import nn
from leannorm._errors import DtypeError, InputError
from leannorm.autograd import fast
from leannorm.distributed import communicator, group
from leannorm.ops.backends import CPU
from leannorm.transforms import convert

pytestmark = pytest.mark.skipif(bool(CPU.why_not()), reason="; ".join(CPU.why_not()))

IMAGE = (4, 8, 5, 3)
LAYERS = {
    "images": (lambda: nn.SyncBatchNorm(8), IMAGE),
    "rows": (lambda: nn.SyncBatchNorm(8), (4, 8)),
    "cumulative": (lambda: nn.SyncBatchNorm(8, momentum=None), IMAGE),
    "no affine": (lambda: nn.SyncBatchNorm(8, affine=False), IMAGE),
    "float64 statistics": (lambda: nn.SyncBatchNorm(8, stats_dtype=torch.float64), IMAGE),
    "act": (lambda: convert(nn.BatchNormAct2d(8, act="silu"), to="sync"), IMAGE),
    "an empty batch": (lambda: nn.SyncBatchNorm(8), (0, 8, 5, 3)),
}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def usual(on):
    fast.picks_cpu = lambda: on


def outcome(layer, x, dy, second=False):
    """All that a call leaves behind: output, gradients, buffers, and the gradients' gradients."""
    y, found, more = output_and_gradients(layer, x, dy, second)
    return [y.detach(), *(g.detach() for g in found), *more, *layer.buffers()], is_fast(y.grad_fn)


def equal(ours, others):
    return len(ours) == len(others) and all(
        a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
        for a, b in zip(ours, others, strict=True)
    )


def both_ways(rank):
    wrong = []
    for name, (make, shape) in LAYERS.items():
        # the ranks' batches differ in size; where it is to be empty, rank 1 has none
        shape = (
            (2, *shape[1:]) if rank == 0 and shape[0] == 0 else (shape[0] + rank * (shape[0] > 0), *shape[1:])
        )
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            for layout, form in LAYOUTS.items():
                if layout != "contiguous" and len(shape) != 4:
                    continue
                second = dtype is torch.float64
                torch.manual_seed(rank)
                x, dy = (torch.randn(shape).to(dtype).to(memory_format=form) for _ in range(2))
                layer, found = make().to(dtype), []
                for on in (True, False):
                    usual(on)
                    made, kind = outcome(copy.deepcopy(layer), x, dy, second)
                    found.append(made)
                    if kind != on:
                        wrong.append(f"{name}: {kind}")
                if not equal(*found):
                    wrong.append(f"{name}, {dtype}, {layout}")
    return wrong


def test_the_same_bits():
    assert ranks(2, both_ways) == [[], []]


def mixed(rank):
    """A rank under saved-tensor hooks goes the whole way, the other the usual one: as if both did."""
    torch.manual_seed(rank)
    x, dy, found = torch.randn(4, 8), torch.randn(4, 8), []
    layer = nn.SyncBatchNorm(8)
    for hooked in (False, rank == 1):
        if hooked:
            with saved_tensors_hooks(lambda t: t, lambda t: t):
                made, kind = outcome(copy.deepcopy(layer), x, dy)
        else:
            made, kind = outcome(copy.deepcopy(layer), x, dy)
        assert kind != hooked
        found.append(made)
    return equal(*found)


def test_ranks_that_go_different_ways_share():
    assert ranks(2, mixed) == [True, True]


def refused(rank):
    """What breaks a rule is refused before anything is sent or moved."""
    nn.SyncBatchNorm(8)(torch.randn(4, 8))
    layer = nn.SyncBatchNorm(8)

    def edited(**attributes):
        other = copy.deepcopy(layer)
        for name, value in attributes.items():
            setattr(other, name, value)
        return other

    four = torch.nn.Parameter(torch.ones(4))
    cases = [
        (edited(), torch.ones(4, 8, dtype=torch.int64), DtypeError),
        (edited(), torch.randn(4, 4), InputError),
        (edited(weight=four), torch.randn(4, 8), InputError),
        (edited(bias=four), torch.randn(4, 8), InputError),
        (edited(running_mean=torch.zeros(4)), torch.randn(4, 8), InputError),
        (edited(running_var=torch.ones(8).requires_grad_()), torch.randn(4, 8), InputError),
        (edited(running_var=torch.ones(1).expand(8)), torch.randn(4, 8), InputError),
        (edited(eps=0.0), torch.randn(4, 8), InputError),
        (edited(momentum=2.0), torch.randn(4, 8), InputError),
    ]
    sent = messages_sent()
    for number, (one, x, error) in enumerate(cases):
        before = [b.clone() for b in one.buffers()]
        with pytest.raises(error):
            one(x)
        assert all(torch.equal(a, b) for a, b in zip(one.buffers(), before, strict=True)), number
    return sent


def test_what_breaks_a_rule_is_refused_before_anything_is_sent():
    assert ranks(2, refused) == [[], []]


def summed_both_ways(rank):
    """By a gather, and by gloo's sum around a ring: equal on all ranks, and but for the order of the sum."""
    torch.manual_seed(rank)
    x, dy, found = torch.randn(4, 8, 5), torch.randn(4, 8, 5), []
    layer = nn.SyncBatchNorm(8)
    calls, all_reduce = [], dist.all_reduce

    def noted(tensor, *args, **kwargs):
        calls.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = noted
    for most, sums in ((2**17, 0), (0, 2)):
        communicator._GATHERED = most
        for one in group._groups.values():
            one._asked = 0, False  # a group asks once for each size
        calls.clear()
        found.append(outcome(copy.deepcopy(layer), x, dy)[0])
        assert len(calls) == sums
    running = [b for b in found[0] if b.shape == (8,)]
    return max((a - b).abs().max().item() for a, b in zip(*found, strict=True)), running


def test_a_gathered_sum_is_the_sum():
    results = ranks(3, summed_both_ways)
    assert all(difference <= 1e-6 for difference, _ in results)
    for _, running in results[1:]:
        for a, b in zip(running[-2:], results[0][1][-2:], strict=True):
            assert torch.equal(a, b)
