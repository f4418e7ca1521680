"""What is kept of a launch and of an operator's call, and everything that must not be kept."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from leannorm import functional, nn, use_backend
from leannorm.autograd.nodes import NODES, WHY_NOT
from leannorm.ops.backends import triton

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
interpreted = pytest.mark.skipif(
    triton._UNAVAILABLE is not None or not triton.INTERPRETED, reason="runs on the interpreter"
)
SCENES = (
    "same_launches",
    "integers",
    "numbers",
    "alignment",
    "negated",
    "devices_and_streams",
    "hooks",
    "layers",
    "passes",
    "another_triton",
)


def run_by_itself(script, *arguments):
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.sampled(of=3)
def test_without_a_device(scene):
    run_by_itself("stand_in_driver.py", scene)


@needs_triton
@pytest.mark.skipif(NODES is None, reason=str(WHY_NOT))
def test_launches_by_the_driver():
    run_by_itself("driver_launches.py")


@interpreted
def test_a_call_with_one_tensor_twice_is_not_taken_for_one_with_two():
    from leannorm.ops.backends.triton import rows, tape

    tape.forget()
    x, other, w = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    rows.row_forward(x, x, w, None, 1, 2, 1e-5, True)
    for _ in range(2):
        total = rows.row_forward(x, other, w, None, 1, 2, 1e-5, True)[1]
        torch.testing.assert_close(total, x + other)
    torch.testing.assert_close(rows.row_forward(x, x, w, None, 1, 2, 1e-5, True)[1], x + x)


@pytest.mark.sampled(of=3)
@interpreted
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
def test_calls_in_turns_are_those_of_their_own_kind(layout):
    """Dtypes, None, layouts, activations and sizes change from call to call, forward and backward."""
    made = [
        nn.BatchNorm2d(6),
        nn.GroupNorm(3, 6),
        nn.LayerNorm(6, dim=1),
        nn.RMSNorm(4),
        nn.InstanceNorm2d(6),
    ]
    plain = [
        torch.nn.BatchNorm2d(6),
        torch.nn.GroupNorm(3, 6),
        None,
        torch.nn.RMSNorm(4),
        torch.nn.InstanceNorm2d(6),
    ]
    for turn in range(3):
        for samples in (2, 5):
            for ours, torchs in zip(made, plain, strict=True):
                if torchs is None:
                    continue
                x = torch.randn(samples, 6, 4, 8 if layout == "strided" else 4)
                x = x[..., ::2] if layout == "strided" else x
                x = x.to(memory_format=torch.channels_last) if layout == "channels_last" else x
                mine, theirs = x.detach().requires_grad_(), x.detach().clone().requires_grad_()
                with use_backend("triton"):
                    y = ours(mine)
                    y.square().sum().backward()
                want = torchs(theirs)
                want.square().sum().backward()
                torch.testing.assert_close(y, want, msg=f"{turn} {ours}")
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(made[0].running_var, plain[0].running_var)


def in_memory():
    """Where the tensors lie that are alive and have memory."""
    gc.collect()
    alive = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.layout is torch.strided]
    return {t.untyped_storage().data_ptr() for t in alive if t.untyped_storage().nbytes()}


@interpreted
def test_a_noted_call_keeps_no_memory():
    """What lives on in a CUDA graph's pool is taken for a leak by torch.compile, which then raises."""
    from leannorm.ops.backends.triton import tape

    tape.forget()
    x, w, call = torch.randn(3, 7, 5), torch.randn(7), triton._kernels
    before = in_memory()
    made = [*call.row_forward(x, None, None, None, 2, 3, 1e-5, False), *call.channel_moments(x, 0, None)]
    made += [*call.channel_forward(x, w, w, None, 1e-5, "relu", 0, None), *call.constants_of(w, w, 1e-5)]
    assert len(in_memory()) > len(before)
    del made
    assert in_memory() == before


@interpreted
@pytest.mark.parametrize("which", ["x", "weight"])
def test_a_view_that_is_negated_when_it_is_read(which):
    """Such as the imaginary part of a conjugate: its memory holds the other sign."""
    x, weight = torch.randn(5, 8), torch.randn(8)
    given = {"x": x, "weight": weight}
    given[which] = torch._neg_view(given[which])
    for _ in range(3):
        with use_backend("triton"):
            y = functional.rms_norm(given["x"], (8,), given["weight"])
        torch.testing.assert_close(y, -functional.rms_norm(x, (8,), weight))


@interpreted
def test_an_error_is_the_same_after_calls_that_went_well():
    forward = triton._kernels.channel_forward
    x, w = torch.randn(2, 4, 3), torch.randn(4)
    for _ in range(3):
        forward(x, w, None, None, 1e-5, "relu", 0)
        with pytest.raises(RuntimeError, match="one value a channel"):
            forward(x, w[:2], None, None, 1e-5, "relu", 0)
        with pytest.raises(RuntimeError, match="unknown activation"):
            forward(x, w, None, None, 1e-5, "nothing", 0)


@interpreted
def test_kept_calls_are_so_many_at_most(monkeypatch):
    from leannorm.ops.backends.triton import rows, tape

    monkeypatch.setattr(tape, "_MOST", 4)
    tape.forget()
    for n in range(1, 12):
        rows.row_forward(torch.randn(n, 8), None, None, None, 1, 2, 1e-5, True)
        assert len(rows.row_forward.tapes) <= 4


@interpreted
def test_a_momentum_that_is_a_tensor_is_read_by_every_call():
    layer, plain = nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    for momentum in (0.1, 0.7, 0.2):
        layer.momentum, plain.momentum = torch.tensor(momentum), momentum
        x = torch.randn(8, 3)
        with use_backend("triton"):
            layer(x)
        plain(x)
        torch.testing.assert_close(layer.running_var, plain.running_var)


@interpreted
def test_a_long_row_of_float64_is_computed_in_float64():
    """Of each lane's running mean too, whose weight was a float32 number."""
    x = torch.randn(2, 9000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with use_backend("triton"):
        y = functional.layer_norm(x, (9000,))
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (9000,)), rtol=0, atol=1e-13)
