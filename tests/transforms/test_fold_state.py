"""`fold` on a model that writes buffers and attributes in evaluation mode: its check leaves no trace."""

import copy
import random

import pytest
import torch
from torch import nn

import leannorm
from leannorm import program


class Stream(nn.Module):
    """Keeps the end of its input for the next one, in a buffer, and counts."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.calls = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), 0
        self.bn.running_mean.normal_()
        self.register_buffer("cache", torch.zeros(1, 3, 2))

    def forward(self, x):
        self.calls += 1
        x = torch.cat([self.cache, x], -1)
        self.cache.copy_(x[..., -2:])
        return self.bn(self.conv(x))


@pytest.mark.parametrize("verify", [False, True])
def test_the_folded_model_begins_where_the_model_does(verify):
    """Of the second input, too: its cache is the first one's end."""
    model, inputs = Stream().eval(), torch.randn(3, 1, 3, 8)
    report = leannorm.fold(model, (inputs[0],), verify=verify)
    assert report.model.calls == model.calls == 0
    assert not report.model.cache.any()
    assert not model.cache.any()
    for x in inputs:
        torch.testing.assert_close(report.model(x), model(x))


def test_a_program_is_folded_without_a_false_error():
    model, inputs = Stream().eval(), torch.randn(3, 1, 3, 8)
    forked = program.fork(model, (inputs[0],))
    report = leannorm.fold(forked)
    assert len(report.folded) == 1
    assert report.checked < 1e-12
    assert not model.cache.any()
    folded, stock = report.model.module(), copy.deepcopy(model)
    torch.testing.assert_close(folded(inputs[0]), stock(inputs[0]))


def test_a_model_that_draws_numbers_of_pythons_is_no_false_error():
    class Noisy(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * random.random()

    report = leannorm.fold(Noisy(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.randn(2, 3))
    assert report.difference < 1e-5
