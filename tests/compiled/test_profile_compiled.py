"""`leannorm profile --compiled`: compiled stock and compiled lean settings beside the eager ones."""

import json

import pytest
from compiling import Gated, images

import leannorm
from leannorm.report.settings import settings_for


def test_every_setting_has_a_compiled_one():
    made = settings_for(Gated(), ["norm", "conv"], [0.5], compiled=True)
    compiled = ["compiled", "compiled norm", "compiled conv", "compiled budget 0.5"]
    assert [s.name for s in made if not s.eager] == compiled
    assert [s.name for s in made if s.eager] == ["stock", "norm", "conv", "budget 0.5"]


@pytest.mark.conformance
@pytest.mark.inductor
def test_compiled_settings_are_measured():
    report = leannorm.profile(Gated(), images(8, 64, 16), recompute=["conv"], compiled=True, steps=1)
    kept = {s.name: s.kept for s in report.settings}
    assert list(kept) == ["stock", "conv", "compiled", "compiled conv"]
    assert kept["compiled conv"] < 0.7 * kept["compiled"]
    assert all(s.gradient_difference < 1e-5 for s in report.settings)
    assert "compiled conv" in str(report)


@pytest.mark.conformance
@pytest.mark.inductor
def test_the_command_line_takes_it(tmp_path):
    from leannorm.cli import main

    file = tmp_path / "told.json"
    arguments = ["profile", "torch.nn:Identity", "--input", "2x3", "--compiled", "--json", str(file)]
    assert main(arguments) == 2  # nothing to learn: said before anything is compiled
    arguments[1:4] = ["timm:resnet10t", "--input", "2x3x32x32"]
    assert main([*arguments, "--steps", "1"]) == 0
    names = [s["name"] for s in json.loads(file.read_text())["settings"]]
    assert names == ["stock", "norm", "conv", "compiled", "compiled norm", "compiled conv"]
