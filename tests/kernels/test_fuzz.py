"""Random shapes, dtypes, layouts, activations and settings: the kernels against the reference.

Examples come from a fixed seed, so that a failure is the same everywhere; LEANNORM_FUZZ=5000 tries more.
"""

from __future__ import annotations

import os

import torch
from cases import ACTS, DTYPES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import Call, assert_close_to_reference, needs_kernels

pytestmark = needs_kernels
SIZES = st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 33, 49, 63, 64, 65, 100, 129]))


@st.composite
def calls(draw):
    spatial = draw(st.lists(SIZES, max_size=3))
    n, channels = draw(st.integers(1, 9)), draw(SIZES)
    while n * channels * torch.Size(spatial).numel() > 60_000:
        spatial = spatial[:-1]
    divisors = [g for g in range(1, channels + 1) if channels % g == 0]
    groups = draw(st.sampled_from([0, 0, *divisors]))
    values = torch.Size(spatial).numel() * (n if groups == 0 else channels // groups)
    if values < 2:  # a single value has no variance, and its gradient is nothing but rounding
        n, groups = n + 1, 0
    shape = (n, channels, *spatial)
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def tensor(mean=0.0, std=1.0):
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * std + mean
        x = values.to(dtype)
        layout = draw(st.sampled_from(["contiguous", "channels last", "offset", "strided", "swapped"]))
        if layout == "channels last":
            return x.movedim(1, -1).contiguous().movedim(-1, 1)
        if layout == "offset":
            return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(shape)
        if layout == "strided":
            return torch.stack((x, x), -1)[..., 0]
        if layout == "swapped":
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        return x

    def parameter():
        if draw(st.booleans()):
            return None
        kind = draw(st.sampled_from(DTYPES))
        return (torch.rand(channels, generator=generator, dtype=torch.float64) + 0.5).to(kind)

    return Call(
        tensor(draw(st.sampled_from([0.0, 1.0, -10.0])), draw(st.sampled_from([1.0, 3.0]))),
        tensor(),
        parameter(),
        parameter(),
        tensor() if draw(st.booleans()) else None,
        draw(st.sampled_from(ACTS)),
        groups,
        draw(st.booleans()),
    )


@settings(
    max_examples=int(os.environ.get("LEANNORM_FUZZ", "150")),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(calls())
def test_any_call(call):
    assert_close_to_reference(call)
