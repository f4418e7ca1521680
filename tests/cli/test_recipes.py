"""Every recipe of `lean()` is tried on the torch at hand; one that does not fit it rests, and says why."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from leannorm.report.recipes import ALIVE, NOT_TRIED, RESTING, WRONG, recipe_states
from leannorm.saving.graph import saved
from leannorm.saving.recipes import RECIPES
from leannorm.saving.steps import Step

from leannorm.autograd.nodes import NODES
from leannorm.cli import main
from leannorm.saving import reasons

ELSEWHERE = {
    "CudnnBatchNormBackward0",
    "MiopenBatchNormBackward0",
    "FusedRmsNormBackward0",
    "ScaledDotProductCudnnAttentionBackward0",
    "ScaledDotProductEfficientAttentionBackward0",
    "ScaledDotProductFlashAttentionBackward0",
    "leannorm._ToTorchTensor",
    "leannorm._FromTorchTensor",
    "leannorm.Redistribute",
}


def gelu_by(monkeypatch, recipe):
    """What becomes of GELU's output where its recipe is this one."""
    monkeypatch.setitem(RECIPES, "GeluBackward0", recipe)
    return {one.kind: one for one in recipe_states()}["GeluBackward0"]


def test_every_recipe_is_alive_that_can_be_tried_here():
    states = list(recipe_states())
    assert [one.kind for one in states] == list(RECIPES)
    assert [one for one in states if one.state not in (ALIVE, NOT_TRIED)] == []
    by_nodes = {"CopySlices", "AsStridedBackward0"} if NODES is None else set()
    assert {one.kind for one in states if one.state == NOT_TRIED} == ELSEWHERE | by_nodes
    assert all(one.why for one in states if one.state == NOT_TRIED)


def test_recipes_stand_in_one_order_in_all_processes():
    run = [sys.executable, "-c", "from leannorm.saving.recipes import RECIPES; print(*RECIPES)"]
    environments = [os.environ | {"PYTHONHASHSEED": seed} for seed in "12"]
    orders = [subprocess.check_output(run, env=env, text=True).split() for env in environments]
    assert orders[0] == orders[1] == list(RECIPES)


def test_a_recipe_whose_node_keeps_something_else_rests(monkeypatch):
    monkeypatch.setattr(reasons, "_WARNED", set())  # what is said once would be said here
    one = gelu_by(monkeypatch, lambda node, *rest: Step(F.gelu, (saved(node, "renamed"),)))
    assert one.state == RESTING
    assert "GeluBackward0" in one.why
    assert "_raw_saved_renamed" in one.why


def test_a_recipe_whose_numbers_are_others_rests(monkeypatch):
    """It is tried, and what it makes is compared."""
    one = gelu_by(monkeypatch, lambda node, *rest: Step(torch.cos, (saved(node, "self"),)))
    assert one.state == RESTING
    assert "outputs of GeluBackward0, and kept: a rebuild had other bits" in one.why


def test_a_kind_of_node_that_torch_makes_no_more_rests(monkeypatch):
    monkeypatch.setattr(F, "gelu", F.mish)
    assert gelu_by(monkeypatch, RECIPES["GeluBackward0"]).why == "this torch makes MishBackward0 in its place"


def test_a_rebuild_that_is_wrong_falls_short(monkeypatch, capsys):
    monkeypatch.setattr("leannorm.saving.trial.same_bits", lambda a, b: True)  # a trial that does not see it
    one = gelu_by(monkeypatch, lambda node, *rest: Step(F.silu, (saved(node, "self"),)))
    assert one.state == WRONG
    assert main(["check"]) == 1
    assert "lean(), gradients by recipe: GeluBackward0" in capsys.readouterr().out


def test_check_lists_every_recipe(tmp_path, capsys):
    path = tmp_path / "check.json"
    assert main(["check", "--json", str(path)]) == 0
    told = json.loads(path.read_text())["recipes"]
    assert [one["kind"] for one in told] == list(RECIPES)
    shown = capsys.readouterr().out
    for kind in RECIPES:
        assert kind.removesuffix("Backward0") in shown


@pytest.mark.parametrize("arguments", [["--model", "checked_networks:sound", "--input", "4x3x16x16"]])
def test_a_check_of_a_model_lists_none(tmp_path, arguments):
    path = tmp_path / "check.json"
    assert main(["check", *arguments, "--steps", "1", "--json", str(path)]) == 0
    assert "recipes" not in json.loads(path.read_text())
