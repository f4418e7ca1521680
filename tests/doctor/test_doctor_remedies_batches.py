"""Remedies of what batches show, run as printed: calls of a step, padding, too little behind a statistic."""

import copy

import pytest
import torch
from doctor_code import alternatives, code_in, run_as_printed
from doctor_networks import network
from doctor_networks import trained as small
from torch import nn

import leannorm
from leannorm import doctor
from leannorm._catalog import norms_of


def given():
    """Batches of the small model's data."""
    return [torch.randn(16, 3, 12, 12, generator=torch.Generator().manual_seed(seed)) for seed in range(3, 7)]


class Two(nn.Module):
    """A norm that a step calls twice; `forward` is what a person edits."""

    def __init__(self, norm):
        super().__init__()
        self.bn = norm

    def forward(self, x):
        return self.bn(x) + self.bn(2 * x)


class Once(Two):
    def forward(self, x):
        y = self.bn(x)
        with leannorm.no_stats_update():
            return y + self.bn(2 * x)


class Apart(Two):
    def forward(self, x):
        return self.bn(x) + self.other(2 * x)


class Subclass(nn.BatchNorm1d):
    """Of which `no_stats_update` knows nothing, converted or not."""

    def forward(self, x):
        return super().forward(x)


def test_a_class_of_its_own_is_called_twice():
    (finding,) = (one for one in doctor(Two(Subclass(8))).findings if one.check == "repeated_call")
    assert finding.remedy == "# in the forward that calls it: a norm of its own for each call"


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, leannorm.nn.BatchNorm1d], ids=["torch's", "leannorm's"])
@pytest.mark.parametrize("edited", [Once, Apart])
def test_a_norm_that_is_called_twice(norm, edited):
    model, batches = Two(norm(8, momentum=None)), [torch.randn(64, 8) for _ in range(4)]
    for seen in (None, batches):
        (finding,) = (one for one in doctor(model, seen).findings if one.check == "repeated_call")
        assert "leannorm.no_stats_update()" in finding.remedy
    run_as_printed(finding.remedy, {"model": model})
    model.__class__ = edited
    if edited is Apart:
        model.other = copy.deepcopy(model.bn)
    for one in batches:
        model(one)
    for seen in (None, batches):
        assert doctor(model, seen).findings == []


def test_torchs_norm_is_found_within_no_stats_update():
    """It moves there, too, and the remedy makes it a layer that does not."""
    model, batches = Once(nn.BatchNorm1d(8)), torch.randn(64, 8)
    for seen in (None, batches):
        (finding,) = (one for one in doctor(model, seen).findings if one.check == "repeated_call")
        assert finding.value == 2
    run_as_printed(finding.remedy, {"model": model})
    assert doctor(model, batches).findings == []


def test_padding_is_left_out_by_the_remedy_and_its_sentence():
    class Speech(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(5)

        def forward(self, x, lengths):
            return self.norm(x)

    class Masked(Speech):
        def forward(self, x, lengths):
            return self.norm(x, lengths=lengths)

    lengths = torch.linspace(40, 4, 8).long()
    x = (torch.randn(8, 5, 40) + 2) * (torch.arange(40) < lengths[:, None])[:, None]
    model = Speech()
    (finding,) = doctor(model, {"x": x, "lengths": lengths}).findings
    assert "lengths=" in finding.remedy
    run_as_printed(finding.remedy, {"model": model})
    model.__class__ = Masked
    assert doctor(model, {"x": x, "lengths": lengths}).findings == []


def test_what_only_a_person_can_mend_is_a_sentence():
    model = small()
    model[1][0].weight.data[:4] = 0
    findings = [one for one in doctor(model, given()).findings if one.check == "dead_channels"]
    assert findings
    assert all(one.remedy.startswith("# look at what") and not code_in(one.remedy) for one in findings)


# ------------------------------------------------ too little behind a statistic

FEW = {
    "batch": (
        lambda: nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16)),
        (4, 6),
        "few_values",
        2,
    ),
    "images": (lambda: network(8, 1), (2, 3, 8, 8), "few_samples", 2),
    "one image": (lambda: network(8, 1), (1, 3, 8, 8), "few_samples", 2),
    "ghost": (
        lambda: leannorm.convert(nn.Sequential(leannorm.nn.BatchNorm2d(8, group_size=2))),
        (32, 8, 4, 4),
        "few_samples",
        2,
    ),
    "group": (lambda: nn.Sequential(nn.GroupNorm(4, 8)), (16, 8), "few_values", 1),
    "instance": (lambda: nn.Sequential(nn.InstanceNorm1d(8, affine=True)), (16, 8, 3), "few_values", 1),
    "short": (lambda: nn.Sequential(nn.GroupNorm(2, 4)), (16, 4), "few_values", 1),
    "layer": (lambda: nn.Sequential(nn.LayerNorm(1)), (16, 1), "few_values", 1),
    "alone": (lambda: nn.GroupNorm(2, 4), (16, 4), "few_values", 1),
}


@pytest.mark.parametrize(("make", "sizes", "check", "remedies"), FEW.values(), ids=FEW)
def test_too_little_behind_a_statistic(make, sizes, check, remedies):
    data = torch.randn(64, *sizes[1:])
    dataset = [one for one in data]  # noqa: C416
    which = 0
    while True:
        model, batches = make(), [data[: sizes[0]], data[sizes[0] : 2 * sizes[0]]]
        findings = doctor(model, batches).findings
        assert [one.check for one in findings] == [check]
        codes = alternatives(findings)
        if which == len(codes):
            break
        names = run_as_printed(codes[which], {"model": model, "batches": batches, "dataset": dataset})
        assert doctor(names["model"], list(names["batches"])).findings == [], codes[which]
        which += 1
    assert which == remedies


def test_a_frozen_norm_needs_no_samples():
    model = network(8, 1)
    model(torch.randn(8, 3, 8, 8))
    leannorm.freeze(model)
    assert doctor(model, torch.randn(2, 3, 8, 8)).findings == []


def test_far_data_behind_a_frozen_norm():
    """It is measured on it, and frozen as before."""
    model, batches = leannorm.freeze(small(), affine=False), [one + 3 for one in given()]
    findings = doctor(model, batches).findings
    assert {one.check for one in findings} == {"train_eval_gap"}
    assert all("it is frozen" in one.consequence for one in findings)
    (code,) = alternatives(findings)
    run_as_printed(code, {"model": model, "batches": batches})
    assert doctor(model, batches).findings == []
    assert not any(norm.module.training for norm in norms_of(model))
    assert all(norm.weight.requires_grad for norm in norms_of(model))
