"""Batch norm with a mask by Flax and Keras themselves: `fill="normalize"` gives what they give."""

import numpy as np
import pytest
import torch
from interop_cases import FIXTURES

from leannorm import nn

# Keras casts to float32 inside its batch norm
ALLOWED = {"flax": 1e-12, "keras": 1e-5}


def told():
    with np.load(FIXTURES / "masked.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def layer(told):
    """Of their settings: momentum weighs the old value there, and the running variance is biased."""
    norm = nn.BatchNorm1d(3, eps=1e-3, momentum=0.1).double()
    names = {"weight": norm.weight, "bias": norm.bias, "mean": norm.running_mean, "var": norm.running_var}
    with torch.no_grad():
        for name, tensor in names.items():
            tensor.copy_(told[name])
    return norm


@pytest.mark.parametrize("framework", ALLOWED)
def test_a_step_is_the_frameworks_own(framework):
    there = told()
    norm, x = layer(there), there["x"].movedim(-1, 1).requires_grad_()
    y = norm(x, mask=there["mask"], fill="normalize")
    y.backward(there["dy"].movedim(-1, 1))
    old, n = there["var"], int(there["mask"].sum())
    biased = 0.9 * old + (norm.running_var - 0.9 * old) * ((n - 1) / n)
    found = {
        "y": y.movedim(1, -1),
        "dx": x.grad.movedim(1, -1),
        "dweight": norm.weight.grad,
        "dbias": norm.bias.grad,
        "new_mean": norm.running_mean,
        "new_var": biased,
    }
    for name, value in found.items():
        want = there[f"{framework}_{name}"]
        assert (value - want).abs().max() <= ALLOWED[framework] * want.abs().max(), name


@pytest.mark.parametrize("framework", ALLOWED)
def test_with_zeros_the_valid_positions_are_the_same(framework):
    there = told()
    y = layer(there)(there["x"].movedim(-1, 1), mask=there["mask"]).movedim(1, -1)
    assert (y[~there["mask"]] == 0).all()
    want = there[f"{framework}_y"][there["mask"]]
    assert (y[there["mask"]] - want).abs().max() <= ALLOWED[framework] * want.abs().max()


def test_they_normalize_what_is_padding_too():
    there = told()
    for framework in ALLOWED:
        assert (there[f"{framework}_y"][~there["mask"]].abs() > 1e-3).any()
    assert not there["mask"][2].any()
