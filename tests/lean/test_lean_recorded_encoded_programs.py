"""Programs of which the log keeps something in fewer bytes (csrc/nodes/record/encode.h): bits as in torch."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from lean_cases import forget_trials, in_threads
from torch import nn

from leannorm import lean
from leannorm.autograd.nodes import NODES
from leannorm.saving.evidence import same_bits

pytestmark = pytest.mark.skipif(NODES is None, reason="the log is C++")

BITS, INTEGERS, CAST = "bits of a mask", "integers in a narrower dtype", "source of a cast"


@pytest.fixture(autouse=True)
def nothing_tried():
    forget_trials()


def gradients(program, context, *inputs):
    torch.manual_seed(3)
    leaves = [x.clone().requires_grad_() for x in inputs]
    with context as saved:
        made = program(*leaves)
    grads = torch.autograd.grad(made, leaves)
    return [made.detach(), *grads], saved


def dropout(x):
    return (F.dropout(x.exp(), 0.3) * x).sum()


def pooled(x):
    return F.max_pool2d((x * 2).cumsum(0), 2).square().sum()


def sorted_and_picked(x):
    values, indices = (x * 1).sort(-1)
    return (values * x.exp()).sum() + x.sin().gather(-1, indices).square().sum() + x.cummax(1)[0].sum()


def where(x):
    return torch.where(x * 2 > 0.3, x.exp(), x.sin()).sum() + x.masked_fill(x.cos() > 0, 0.0).square().sum()


def by_hand(x):
    mask = (torch.rand_like(x) > 0.3).float() / 0.7
    return (x.exp() * mask).square().sum()


def noise_of_rrelu(x):
    return F.rrelu(x * 1, training=True).square().sum()


def edited_after_the_save(x):
    y = F.dropout(x.exp(), 0.5)
    z = y.sum()
    y.add_(1)  # nobody has saved it
    return z + y.sin().sum()


def mask_edited_unseen(x):
    mask = (torch.rand_like(x) > 0.5).float()
    y = x.exp() * mask
    mask.data.mul_(2)
    z = x.sin() * mask
    del mask
    return (y * 3 + z.exp()).sum()


def saved_twice(x):
    mask = (torch.rand_like(x) > 0.5).float()
    made = (x.exp() * mask).sum() + (x.sin() * mask).sum()
    del mask
    return made + x.cos().square().sum()


def a_view_saved_too(x):
    mask = (torch.rand_like(x) > 0.5).float()
    made = (x.exp() * mask).sum() + (x.flatten().sin()[:99] * mask.flatten()[:99]).sum()
    del mask
    return made + x.cos().square().sum()


def read_by_a_later_call(x):
    mask = (torch.rand_like(x) > 0.5).float()
    y = x.exp() * mask
    z = x.cos().square().sum()
    return y.sum() + z + (mask * 2 * x.sin()).sum()


def concatenated(x):
    y = torch.cat([x.cumsum(0), F.silu(x) + torch.rand_like(x)], 1)
    z = torch.cat([y.sin()[:, 1:], x.exp(), y], 1)
    return y.square().sum() + z.square().sum()


PROGRAMS = [
    dropout,
    pooled,
    sorted_and_picked,
    where,
    by_hand,
    noise_of_rrelu,
    edited_after_the_save,
    mask_edited_unseen,
    saved_twice,
    a_view_saved_too,
    read_by_a_later_call,
    concatenated,
]


@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gaps"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_those_without_it(program, layout, setting):
    x = torch.randn(4, 8, 16, 16)
    x = x.to(memory_format=torch.channels_last) if layout == "channels_last" else x
    x = torch.randn(4, 8, 16, 32)[..., ::2] if layout == "gaps" else x
    plain, _ = gradients(program, nullcontext(), x)
    for _ in range(4):
        ours, _ = gradients(program, lean(setting), x)
        assert all(same_bits(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("program", [dropout, where, saved_twice, concatenated])
def test_twice_differentiated_and_twice_run(program):
    def run(context):
        torch.manual_seed(3)
        x = torch.linspace(-1, 1, 4 * 8 * 16 * 16).view(4, 8, 16, 16).requires_grad_()
        with context:
            loss = program(x)
        loss.backward(retain_graph=True)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
        loss.backward()
        return first.detach(), second, x.grad

    for ours, plain in zip(run(lean("norm")), run(nullcontext()), strict=True):
        assert same_bits(ours, plain)


def test_an_edit_in_place_raises_as_in_stock():
    x = torch.randn(64, 64, requires_grad=True)
    with lean("norm"):
        mask = (torch.rand(64, 64) > 0.5).float()
        loss = (x.exp() * mask).sum()
        x.cos().square()  # others save, meanwhile
    mask.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


def test_a_function_that_writes_into_what_it_saved_writes_its_own():
    class Overwrites(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, mask):
            ctx.save_for_backward(mask)
            return x * mask

        @staticmethod
        def backward(ctx, g):
            (mask,) = ctx.saved_tensors
            return mask.mul_(g), None

    def program(x):
        mask = (torch.rand(64, 64) > 0.5).float()
        y = (x.exp() * mask).sum() + Overwrites.apply(x, mask).square().sum()
        z = x.sin() * mask
        del mask
        return y + z.sum()

    x = torch.randn(64, 64)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        gradients(program, nullcontext(), x)
    for _ in range(3):  # ours each have their own
        gradients(program, lean("norm"), x)


def test_indices_and_masks_of_networks():
    x = torch.randn(4, 3, 33, 33)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 16, 3), nn.MaxPool2d(2), nn.Dropout(0.2), nn.Conv2d(16, 8, 3))

    def train(context):
        ours = copy.deepcopy(network)
        torch.manual_seed(1)
        with context as saved:
            loss = ours(x).square().mean()
        loss.backward()
        return [p.grad for p in ours.parameters()], saved

    for setting in ("norm", "conv"):
        for _ in range(3):
            ours, saved = train(lean(setting))
            assert all(map(same_bits, ours, train(nullcontext())[0]))
        names = {r.node: r.bytes for r in saved.records if not r.rebuilt}
        assert names[BITS] == 4 * 16 * 15 * 15 // 8
        assert names[INTEGERS] == 4 * 16 * 15 * 15 * 2


def test_parameters_are_not_counted():
    """They exist without autograd: also what a transposed weight shows, and a frozen one."""
    network = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Softplus(), nn.Linear(64, 64, bias=False))
    network[2].weight.requires_grad_(False)
    x = torch.randn(128, 64)
    with lean("norm") as saved:
        loss = network(x).sum()
    loss.backward()
    assert saved.kept_bytes + saved.rebuilt_bytes == 2 * x.nbytes


def test_logits_that_are_saved_later_are_kept_once():
    """The loss keeps a narrow copy of a cast; then the cast itself is saved, and takes the copy's place."""
    x, weight = torch.randn(64, 64).bfloat16(), torch.randn(4096, 64).bfloat16().requires_grad_()
    for _ in range(3):
        with lean("norm") as saved:
            logits = (x @ weight.T).float()
            loss = F.cross_entropy(logits, torch.arange(64)) + logits.square().mean()
            del logits
        loss.backward()
        assert sum(r.bytes for r in saved.records if not r.rebuilt and r.bytes > x.nbytes) == 64 * 4096 * 2


def test_a_pass_that_saves_parameters_alone_has_seen_them():
    weight, x = (
        nn.Parameter(torch.randn(64, 64), requires_grad=False),
        torch.randn(64, 64, requires_grad=True),
    )
    with lean("norm") as saved:
        loss = F.linear(x, weight).sum()
    loss.backward()
    assert saved.reasons == []
    assert saved.kept_bytes == 0


@pytest.mark.parametrize("passes", [1, 3])
def test_what_is_kept_and_rebuilt_is_what_stock_keeps(passes):
    x, weight = torch.randn(64, 64).bfloat16(), torch.randn(4096, 64).bfloat16().requires_grad_()
    target = torch.arange(64)
    for _ in range(passes):
        with lean("norm") as saved:
            loss = F.cross_entropy((x @ weight.T).float(), target)
        loss.backward()
    logits = 64 * 4096 * 4
    assert saved.kept_bytes + saved.rebuilt_bytes == logits + x.nbytes + target.nbytes + 4
    assert {r.node: r.bytes for r in saved.records}[CAST] == logits // 2


def test_two_threads():
    def work(seed, results):
        x = torch.randn(4, 8, 16, 16)
        same = True
        for _ in range(20):
            generator = torch.Generator().manual_seed(seed)
            mask = torch.rand(4, 8, 16, 16, generator=generator) > 0.3

            def program(x, mask=mask):
                kept = mask.float() / 0.7
                y = F.max_pool2d(x.exp() * kept, 2).square().sum()
                del kept
                return y + torch.where((x * 2).detach() > 0, x, -x).sum()

            found = [gradients(program, context, x)[0] for context in (nullcontext(), lean("norm"))]
            same &= all(map(same_bits, *found))
        results[seed] = same

    assert in_threads(work, 4) == dict.fromkeys(range(4), True)


def test_the_backward_pass_of_another_thread_reads_it_too():
    x = torch.randn(64, 64)
    plain, _ = gradients(dropout, nullcontext(), x)
    leaf = x.clone().requires_grad_()
    torch.manual_seed(3)
    with lean("norm"):
        loss = dropout(leaf)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert same_bits(leaf.grad, plain[1])
