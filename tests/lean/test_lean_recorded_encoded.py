"""What the log (csrc/nodes/record/) keeps in fewer bytes: masks as bits, narrow integers, sources of casts.

Whatever the values are, what the backward pass reads has the bits that the forward pass saved.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lean_cases import forget_trials

from leannorm import lean
from leannorm.autograd.nodes import NODES
from leannorm.saving.evidence import same_bits

pytestmark = pytest.mark.skipif(NODES is None, reason="the log is C++")

BITS, INTEGERS, CAST = "bits of a mask", "integers in a narrower dtype", "source of a cast"
NAN = float("nan")


@pytest.fixture(autouse=True)
def nothing_tried():
    forget_trials()


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
    with lean("norm") as saved:
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
        assert (one.shape, one.stride(), one.dtype) == (before.shape, before.stride(), before.dtype)
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


def causal(size=(16, 128, 128)):
    return torch.randn(size).masked_fill(torch.ones(size[1:]).triu(1).bool(), -float("inf")).softmax(-1)


def with_last_bit_in(place, of):
    of = of.clone()
    of.view(torch.int32).view(-1)[place] |= 1
    return of


WHOLE = {
    "a causal softmax": causal,
    "a float's last bit in the middle": lambda: with_last_bit_in(2049, halves().float()),
    "a float's last bit at the end": lambda: with_last_bit_in(-1, halves().float()),
    "three numbers": lambda: with_first([2.0], random_mask() / 0.7),
    "a third number at the end": lambda: with_first([2.0], random_mask() / 0.7).flip(0, 1) * 1,
    "a mask with -0.0": lambda: with_first([-0.0, 0.0], random_mask() / 0.7),
    "a mask with a NaN": lambda: with_first([NAN, 0.0], random_mask() / 0.7),
    "NaNs of two payloads": lambda: patterns([0x7FC00001, 0x7FC00002], random_mask().float()),
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
    assert not {BITS, INTEGERS, CAST} & set(kept)
    assert sum(kept.values()) == before.nbytes
    assert_read(before, seen)


def test_a_causal_softmax_is_not_converted_in_vain():
    """It begins with numbers that would fit in bfloat16: a 1 and zeros."""
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as seen:
        kept, _, _ = kept_and_read(causal)
    size = causal().nbytes
    allocated = [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert size in kept.values()
    assert size in allocated
    assert size // 2 not in allocated


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


def test_denormals_that_a_thread_flushes_are_kept():
    values = torch.where(random_mask(), 1e-40, 2e-42)
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot")
    kept, before, seen = kept_and_read(lambda: values * 1)
    assert BITS in kept
    assert_read(before, seen)
    x, seen = torch.randn(4, requires_grad=True), []
    with lean("norm"):
        loss = Reads.apply(x, halves().float() * 2.0**-120, seen).sum()
        loss = Reads.apply(loss, halves(torch.float32).double() * 2.0**-130, seen)
    torch.set_flush_denormal(True)
    try:
        loss.backward()
    finally:
        torch.set_flush_denormal(False)
    assert all(t.count_nonzero() == t.numel() for t in seen)
