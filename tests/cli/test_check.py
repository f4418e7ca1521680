"""`check` passes here, covers what it claims, and falls short when a layer is wrong."""

import json
import math

import pytest
import torch

from leannorm import nn, use_backend
from leannorm.cli import main
from leannorm.report import numerics
from leannorm.report.check import CheckReport
from leannorm.report.numerics import Check, run_checks
from leannorm.report.operators import OperatorState

COVERED = [
    "batch norm, forward",
    "running_mean after 10 batches, momentum 0.1",
    "running_var after 10 batches, momentum None",
    "evaluation after 10 batches, momentum 0.1",
    "evaluation, track_running_stats=False",
    "layer norm, forward",
    "layer norm, gradient of the input",
    "layer norm, gradient of weight",
    "layer norm, gradient of bias",
    "conv-BN gradcheck, eps inside",
    "conv-BN gradcheck, eps outside",
    "conv-BN fused, gradient of the filters",
]


@pytest.mark.parametrize("backend", ["auto", "aten", "reference"])
def test_every_check_keeps_within_its_budget_and_none_is_vacuous(backend):
    before = torch.get_rng_state()
    with use_backend(backend):
        checks = {check.name: check for check in run_checks()}
    assert torch.equal(before, torch.get_rng_state())
    assert [check for check in checks.values() if not check.passed] == []
    assert set(COVERED) <= set(checks)
    for check in checks.values():
        assert check.budget < (1e-3 if backend == "aten" and "filters" in check.name else 1e-4)
        assert check.budget > 0 or check.against == "unfused"


def test_the_last_line_is_the_verdict():
    fine, short = Check("sum", 0.0, 1.0, "float64"), Check("mean", 2.0, 1.0, "float64")
    operators = [OperatorState("aten::add", "repeated"), OperatorState("aten::sub", "not tried", "why")]
    told = str(CheckReport([fine], operators)).splitlines()[-1]
    assert told == "passed: 2 checks within budget, lean() repeats 1 of 2 operators"
    told = str(CheckReport([fine, short])).splitlines()[-1]
    assert told == "failed: 1 of 2 checks fell short: mean"


def test_not_a_number_is_not_within_any_budget():
    assert not Check("nan", float("nan"), 1.0, "").passed


def test_a_gradient_that_is_not_a_number_is_a_difference():
    good, bad = torch.ones(2), torch.tensor([1.0, float("nan")])
    for pair in ([bad, good], [good, bad]):
        assert all(math.isnan(off) for off in numerics.largest_difference([good, pair[0]], [good, pair[1]]))
    assert numerics.largest_difference([good], [good * 0]) == (1.0, math.inf)

    class Broken(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + (x - x.detach()).sum() * float("nan")

    assert not numerics._gradcheck(
        "broken", Broken(2, 2, dtype=torch.float64), torch.rand(2, 2).double()
    ).passed


def test_a_wrong_layer_falls_short_and_says_which(monkeypatch, capsys, tmp_path):
    class BiasedVariance(torch.nn.BatchNorm2d):
        def forward(self, x):
            y = super().forward(x)
            if self.training and self.running_var is not None:
                self.running_var = self.running_var * 0.9999
            return y

    monkeypatch.setattr(nn, "BatchNorm2d", BiasedVariance)
    path = tmp_path / "check.json"
    assert main(["check", "--json", str(path)]) == 1
    out = capsys.readouterr().out
    assert "FELL SHORT" in out
    assert "running_var after 10 batches" in out
    data = json.loads(path.read_text())
    assert data["passed"] is False
    assert {c["name"] for c in data["checks"] if not c["passed"]} >= {
        "running_var after 10 batches, momentum 0.1"
    }


def test_a_wrong_gradient_falls_short(monkeypatch):
    class Wrong(torch.nn.Linear):
        def __init__(self):
            super().__init__(3, 3, dtype=torch.float64)

        def forward(self, x):
            y = super().forward(x)
            return y + 1e-4 * (y - y.detach())  # the value is right, the gradient is 1e-4 off

    assert not numerics._gradcheck("wrong", Wrong(), torch.randn(2, 3, dtype=torch.float64)).passed


def test_a_model_is_checked_under_lean(tmp_path, capsys):
    file = tmp_path / "model.json"
    assert main(["check", "--model", "torchvision_free:network", "--input", "2x3x16x16"]) == 2
    assert "cannot import" in capsys.readouterr().err
    arguments = ["check", "checked_networks:sound", "--input", "4x3x16x16", "--json", str(file)]
    assert main([*arguments, "--steps", "2"]) == 0
    checks = json.loads(file.read_text())["checks"]
    assert [c["name"] for c in checks if "step 2" in c["name"]] == [
        f"{setting}, step 2" for setting in ("stock", "lean", "lean, norm", "lean, conv", "lean, budget 0.5")
    ]
    assert all(c["error"] == 0 for c in checks)
    assert main([*arguments, "--model", "checked_networks:sound"]) == 2
    assert "name one model" in capsys.readouterr().err


def test_a_model_that_is_rebuilt_wrongly_is_named(capsys):
    assert main(["check", "--model", "checked_networks:edited_unseen", "--input", "4x3x16x16"]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "aten::relu" in told
    assert main(["check", "--model", "checked_networks:sound"]) == 2
    assert "go together" in capsys.readouterr().err
