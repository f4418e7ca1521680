"""How the rows of the table of layers are asked for a clause of the contract."""

import pytest
import torch
from layer_cases import LAYERS, Case
from torch import nn as stock

ALL = [Case(layer, option) for layer in LAYERS for option in layer.options]
FIRST = [Case(layer, layer.options[0]) for layer in LAYERS]
# of layers that differ in their number of axes alone one; of those that differ in their input's shape one
IMAGES = [case for case in FIRST if not case.layer.name.endswith(("1d", "3d"))]
KINDS = list({(case.layer.name, case.layer.residual): case for case in reversed(IMAGES)}.values())
ONE_MODE = (stock.GroupNorm, stock.LayerNorm, stock.RMSNorm)


def _sampled(cases, of):
    """The cases, then those that only `make conformance` runs, each with its marks."""
    rare = [case for case in of if case not in cases]
    return [*((case, ()) for case in cases), *((case, pytest.mark.conformance) for case in rare)]


def each(clause, cases, of=()):
    """Of all cases those whose layer promises this clause; `make conformance` runs those of `of`, too."""
    params = [pytest.param(c, marks=m) for c, m in _sampled(cases, of) if clause not in c.layer.without]
    return pytest.mark.parametrize("case", params, ids=str)


def each_mode(clause, cases, of=()):
    """Those in training and in evaluation, but for what is not promised in training.

    With `of`, layers for which both are the same are asked in training alone; `make conformance` asks all.
    """
    params = [
        pytest.param(
            case,
            training,
            id=f"{case}-{'train' if training else 'eval'}",
            marks=marks if training or not of or case.layer.kind not in ONE_MODE else pytest.mark.conformance,
        )
        for case, marks in _sampled(cases, of)
        for training in (True, False)
        if not {clause, f"{clause} in training" * training} & set(case.layer.without)
    ]
    return pytest.mark.parametrize(("case", "training"), params)


def randomized(case, **place):
    """The layer, with parameters and statistics that are random."""
    layer = case.make(**place)
    with torch.no_grad():
        for name, value in layer.state_dict().items():
            if value.is_floating_point():
                value.copy_(torch.rand_like(value) + 0.5 if "var" in name else torch.randn_like(value))
    return layer


def step(layer, inputs, call=None):
    """Forward and backward: the output, every gradient, and what then stands in the buffers."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = (layer if call is None else call)(*leaves)
    dy = torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype)
    parameters = dict(layer.named_parameters())
    gradients = torch.autograd.grad(y, [*leaves, *parameters.values()], dy)
    names = ["dx", "dsecond", "dthird"][: len(leaves)] + list(parameters)
    found = {"y": y.detach(), **dict(zip(names, gradients, strict=True))}
    return found | {name: b.clone() for name, b in layer.named_buffers()}


def assert_equal(got, want):
    """Both have the same names, and under each the same bits."""
    assert list(got) == list(want)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def assert_close(got, want, **tolerance):
    """The same to a tolerance, by default torch's."""
    assert list(got) == list(want)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, msg=lambda said, n=name: f"{n}: {said}", **tolerance)
