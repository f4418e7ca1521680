"""A NaN is a NaN: which of its bit patterns a kernel makes may change from call to call, and is no edit."""

from __future__ import annotations

import pytest
import torch
from lean_cases import forget_trials

from leannorm import lean

pytestmark = pytest.mark.usefixtures("with_and_without_nodes")

CALLS = []


@torch.library.custom_op("leannorm_tests::nan_of_either_sign", mutates_args=())
def nan_of_either_sign(x: torch.Tensor) -> torch.Tensor:
    """As torch's convolution, whose NaN depends on how its memory is aligned."""
    CALLS.append(x)
    made = x * 2
    return torch.where(
        made.isnan(), torch.full_like(made, torch.nan).copysign_(made.new_tensor((-1.0) ** len(CALLS))), made
    )


nan_of_either_sign.register_autograd(lambda ctx, grad: 2 * grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_rebuilt_nan_of_another_bit_pattern_is_no_error(dtype):
    forget_trials()
    for step in range(6):
        x = torch.randn(64, 64, dtype=dtype, requires_grad=True)
        if step > 3:  # once the kind of call is trusted
            x.data[:] = torch.nan
        with lean("norm") as saved:
            loss = nan_of_either_sign((x * 1).cos()).sin().sum()
        assert step < 2 or saved.rebuilt_bytes > 0
        loss.backward()
        assert x.grad.isnan().all() == (step > 3)


def test_an_unseen_edit_of_numbers_beside_a_nan_is_one():
    forget_trials()
    for step in range(4):
        x = torch.randn(64, 64, requires_grad=True)
        x.data[0] = torch.nan
        with lean("norm") as saved:
            h = x @ torch.randn(64, 64)
            loss = h.cos().sin().sum()
        if step < 3:
            loss.backward()
    assert saved.rebuilt_bytes > 0
    h.detach().numpy()[:] += 1.0
    with pytest.raises(RuntimeError, match=r"edited|modified"):
        loss.backward()
