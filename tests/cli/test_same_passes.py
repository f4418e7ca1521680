"""`profile` and `check MODEL` compare passes of one model on the same numbers, and leave all as it was."""

import random

import numpy as np
import torch
from torch import nn

from leannorm.report.profile import profile
from leannorm.report.verify import verify_model


class Centered(nn.Module):
    """Its forward replaces a buffer, as moving averages and codebooks are written."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x - self.mean


class Normalize(nn.Module):
    """Edits its input in place."""

    def forward(self, x):
        return x.sub_(0.5).div_(0.25)


class Masked(nn.Module):
    """Draws from the generators of numpy and Python."""

    def forward(self, x):
        mask = torch.from_numpy(np.random.rand(x.shape[0], 1) > 0.5).to(x.dtype)
        return x * mask * (0.5 + random.random())


def around(*layers):
    return nn.Sequential(*layers, nn.Linear(8, 8), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, 8))


def lean_and_stock_are_equal(model, x):
    return profile(model, x, recompute=["norm"], steps=1).settings[1].gradient_difference == 0


def test_a_buffer_that_forward_replaces_is_put_back_after_each_pass():
    model, x = around(nn.Linear(8, 8), Centered()), torch.randn(16, 8) + 3
    mean = model[1].mean
    assert lean_and_stock_are_equal(model, x)
    assert model[1].mean is mean
    assert mean.tolist() == [0.0] * 8


def test_each_pass_has_a_copy_of_inputs_that_the_model_edits():
    model, x = around(Normalize()), torch.rand(16, 8)
    given = x.clone()
    assert lean_and_stock_are_equal(model, x)
    assert torch.equal(x, given)
    stock, *leans = verify_model(model, x, steps=1)
    assert (stock.error, {one.budget for one in leans}) == (0, {0.0})
    assert torch.equal(x, given)


def states():
    _, key, position, *_ = np.random.get_state()
    return key.tolist(), position, random.getstate()


def test_each_pass_draws_the_same_of_numpys_and_pythons_random_numbers():
    model, x = around(Masked()), torch.randn(16, 8)
    np.random.seed(3)
    random.seed(3)
    before = states()
    assert lean_and_stock_are_equal(model, x)
    assert states() == before
    stock, *leans = verify_model(model, x, steps=1)
    assert (stock.error, {one.budget for one in leans}) == (0, {0.0})
    assert states() == before


class Noisy(nn.Module):
    """Holds a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        return x * torch.rand(8, generator=self.generator)


def test_each_pass_draws_the_same_of_the_models_own_generator():
    noisy = Noisy()
    before = noisy.generator.get_state()
    assert lean_and_stock_are_equal(around(noisy), torch.randn(16, 8))
    assert torch.equal(noisy.generator.get_state(), before)
