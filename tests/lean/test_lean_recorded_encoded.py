"""What the log (csrc/nodes/record/) keeps in fewer bytes: masks, indices, casts, parts, rows of a log-softmax.

Whatever the values are, what the backward pass reads has the bits that the forward pass saved.
"""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leannorm import lean
from leannorm.autograd.nodes import NODES
from leannorm.saving import small
from leannorm.saving.trial import same_bits

pytestmark = pytest.mark.skipif(NODES is None, reason="the log is C++")

BITS, INTEGERS, CAST = "bits of a mask", "integers in a narrower dtype", "source of a cast"
NAN = float("nan")


@pytest.fixture(autouse=True)
def recording(monkeypatch):
    monkeypatch.setenv("LEANNORM_RECORD", "1")
    monkeypatch.setattr(small, "SMALL", -1)
    NODES.forget_trials()


class Reads(torch.autograd.Function):
    """Saves a tensor, and shows what its backward pass gets in its place."""

    @staticmethod
    def forward(ctx, x, saved, seen):
        ctx.save_for_backward(saved)
        ctx.seen = seen
        return x * 1

    @staticmethod
    def backward(ctx, g):
        (saved,) = ctx.saved_tensors
        ctx.seen.append(saved)
        return g, None, None


def kept_and_read(make, keep=lambda t: None, passes=1):
    """What is kept of a tensor that nobody but a node has, by name; what was saved; what is read."""
    x, seen = torch.randn(4, requires_grad=True), []
    with lean() as saved:
        given = make()
        before = given.clone(memory_format=torch.preserve_format)
        kept = keep(given)
        loss = Reads.apply(x, given, seen).sum()
        del given
    for _ in range(passes):
        loss.backward(retain_graph=True)
    del kept
    names = {r.node: r.bytes for r in saved.records if not r.rebuilt and r.bytes}
    return names, before, seen


def assert_read(before, seen, times=1):
    assert len(seen) == times
    for one in seen:
        assert one.shape == before.shape and one.stride() == before.stride() and one.dtype is before.dtype
        assert same_bits(one, before)


def halves(dtype=torch.bfloat16, size=(8, 16, 4, 8)):
    return torch.randn(size).to(dtype)


def with_first(values, of):
    of = of.clone()
    of.view(-1)[: len(values)] = torch.tensor(values, dtype=of.dtype)
    return of


def patterns(values, of):
    """The same, of bits."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[of.itemsize]
    of = of.clone()
    of.view(-1)[: len(values)] = torch.tensor(values, dtype=integers).view(of.dtype)
    return of


def random_mask(size=(64, 65)):
    return torch.rand(size) > 0.5


FITS = {
    "booleans": (random_mask, BITS),
    "booleans, all true": (lambda: torch.ones(64, 64, dtype=torch.bool), BITS),
    "a mask of dropout": (lambda: random_mask() / 0.7, BITS),
    "a mask in double": (lambda: random_mask().double() / 0.7, BITS),
    "a mask in bfloat16": (lambda: (random_mask() / 0.7).bfloat16(), BITS),
    "zeros of both signs": (lambda: torch.where(random_mask(), 0.0, -0.0), BITS),
    "one and NaN": (lambda: torch.where(random_mask(), 1.0, NAN), BITS),
    "infinities": (lambda: torch.where(random_mask(), float("inf"), -float("inf")), BITS),
    "two denormals": (lambda: torch.where(random_mask(), 1e-40, 2e-42), BITS),
    "one number": (lambda: torch.full((64, 65), 3.7), BITS),
    "two integers": (lambda: torch.where(random_mask(), -(2**62), 2**62), BITS),
    "two complex numbers": (lambda: torch.where(random_mask(), 1j, 2 + 0j), BITS),
    "bytes": (lambda: torch.randint(0, 256, (64, 65)), INTEGERS),
    "a range of bytes far from zero": (
        lambda: torch.randint(-(2**60) - 100, 100 - 2**60, (64, 65)),
        INTEGERS,
    ),
    "two bytes": (lambda: torch.randint(-(2**15), 2**15, (64, 65)), INTEGERS),
    "four bytes": (lambda: torch.randint(-(2**31), 2**31, (64, 65)), INTEGERS),
    "int32": (lambda: torch.randint(0, 5000, (64, 65), dtype=torch.int32), INTEGERS),
    "int16": (lambda: torch.randint(-100, 100, (64, 65), dtype=torch.int16), INTEGERS),
    "bfloat16": (lambda: halves().float(), CAST),
    "float16": (lambda: halves(torch.float16).float(), CAST),
    "bfloat16 in double": (lambda: halves().double(), CAST),
    "float in double": (lambda: halves(torch.float32).double(), CAST),
    "bfloat16 of every kind": (
        lambda: (
            patterns([-1, 0x7F81, -127, 1, -32767, 0x7F80, -32768, 0], halves())
            .view(torch.int16)
            .int()
            .mul(65536)
            .view(torch.float32)
        ),
        CAST,
    ),
    "float16 at the edge": (
        lambda: with_first([float("inf"), -0.0, 6e-8, 65504, -float("inf")], halves(torch.float16)).float(),
        CAST,
    ),
    "channels_last": (lambda: halves().float().contiguous(memory_format=torch.channels_last), CAST),
    "transposed": (lambda: (halves(size=(64, 65)).t() * 1).float(), CAST),
    "a mask, channels_last": (
        lambda: (torch.rand(4, 8, 8, 16).contiguous(memory_format=torch.channels_last) > 0.5).double(),
        BITS,
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_what_fits_is_kept_in_fewer_bytes(name):
    make, code = FITS[name]
    torch.manual_seed(0)
    kept, before, seen = kept_and_read(make, passes=2)
    assert set(kept) == {code}
    assert 2 * kept[code] <= before.nbytes
    if code == BITS:
        assert kept[code] == -(-before.numel() // 8)
    assert_read(before, seen, 2)


WHOLE = {
    "three numbers": lambda: with_first([2.0], random_mask() / 0.7),
    "a third number at the end": lambda: with_first([2.0], random_mask() / 0.7).flip(0, 1) * 1,
    "a mask with -0.0": lambda: with_first([-0.0, 0.0], random_mask() / 0.7),
    "a mask with a NaN": lambda: with_first([NAN, 0.0], random_mask() / 0.7),
    "NaNs of two payloads": lambda: patterns([0x7FC00001, 0x7FC00002], random_mask().float()),
    "a boolean of two": lambda: patterns([2], torch.ones(64, 64, dtype=torch.int16)).view(torch.bool).clone(),
    "wide integers": lambda: with_first([-(2**63), 2**63 - 1], torch.randint(0, 9, (64, 65))),
    "a float's last bit": lambda: patterns([1], halves().float()),
    "numbers": lambda: torch.randn(64, 64),
    "float16's smallest, and half of it": lambda: with_first([6e-8, 3e-8], halves(torch.float16).float()),
    "a NaN with a payload of float16's": lambda: patterns([0x7FC02001], halves(torch.float16).float()),
    "denormals of float in double": lambda: with_first([1e-40], halves(torch.float32).double()),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_does_not_fit_is_kept_as_it_is(name):
    torch.manual_seed(0)
    kept, before, seen = kept_and_read(WHOLE[name])
    if name not in ("a boolean of two",):
        assert not {BITS, INTEGERS, CAST} & set(kept)
        assert sum(kept.values()) == before.nbytes
    assert_read(before, seen)


@pytest.mark.parametrize("size", [0, 1, 7, 1023])
def test_what_is_small_is_kept_as_it_is(size):
    kept, before, seen = kept_and_read(lambda: torch.rand(size) > 0.5)
    assert BITS not in kept
    assert_read(before, seen)


class _Owned:
    """Ways to hold the memory of a tensor that a node has saved."""

    def itself(self, t):
        return t

    def view(self, t):
        return t[3:]

    def detached(self, t):
        return t.detach()

    def alias(self, t):
        return t.data

    def array(self, t):
        return t.numpy()

    def storage(self, t):
        return t.untyped_storage()

    def dlpack(self, t):
        return torch.from_dlpack(t)

    def list(self, t):
        return [t]


WAYS = [name for name in vars(_Owned) if not name.startswith("_")]


@pytest.mark.parametrize("way", WAYS)
def test_memory_that_somebody_has_is_kept_as_it_is(way):
    """It would add memory, and not see what is written there."""
    kept, before, seen = kept_and_read(lambda: random_mask().float(), getattr(_Owned(), way))
    assert not {BITS, INTEGERS, CAST} & set(kept)
    assert_read(before, seen)


def test_memory_of_an_array_is_kept_as_it_is():
    array = (np.random.rand(64, 64) > 0.5).astype(np.float32)
    kept, before, seen = kept_and_read(lambda: torch.from_numpy(array))
    assert not {BITS, INTEGERS, CAST} & set(kept)
    assert_read(before, seen)
    shared = kept_and_read(lambda: (torch.rand(64, 64) > 0.5).float().share_memory_())[0]
    assert not {BITS, INTEGERS, CAST} & set(shared)


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

    for ours, plain in zip(run(lean()), run(nullcontext()), strict=True):
        assert same_bits(ours, plain)


def test_an_edit_in_place_raises_as_in_stock():
    x = torch.randn(64, 64, requires_grad=True)
    with lean():
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
        gradients(program, lean(), x)


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
    with lean() as saved:
        loss = network(x).sum()
    loss.backward()
    assert saved.kept_bytes + saved.rebuilt_bytes == 2 * x.nbytes


@pytest.mark.parametrize("passes", [1, 3])
def test_what_is_kept_and_rebuilt_is_what_stock_keeps(passes):
    x, weight = torch.randn(64, 64).bfloat16(), torch.randn(4096, 64).bfloat16().requires_grad_()
    target = torch.arange(64)
    for _ in range(passes):
        with lean() as saved:
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

            found = [gradients(program, context, x)[0] for context in (nullcontext(), lean())]
            same &= all(map(same_bits, *found))
        results[seed] = same

    results = {}
    threads = [threading.Thread(target=work, args=(seed, results)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)


def test_the_backward_pass_of_another_thread_reads_it_too():
    x = torch.randn(64, 64)
    plain, _ = gradients(dropout, nullcontext(), x)
    leaf = x.clone().requires_grad_()
    torch.manual_seed(3)
    with lean():
        loss = dropout(leaf)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert same_bits(leaf.grad, plain[1])


def test_denormals_that_a_thread_flushes_are_kept():
    values = torch.where(random_mask(), 1e-40, 2e-42)
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot")
    kept, before, seen = kept_and_read(lambda: values * 1)
    assert BITS in kept
    assert_read(before, seen)
    x, seen = torch.randn(4, requires_grad=True), []
    with lean():
        loss = Reads.apply(x, halves().float() * 2.0**-120, seen).sum()
        loss = Reads.apply(loss, halves(torch.float32).double() * 2.0**-130, seen)
    torch.set_flush_denormal(True)
    try:
        loss.backward()
    finally:
        torch.set_flush_denormal(False)
    assert all(t.count_nonzero() == t.numel() for t in seen)
