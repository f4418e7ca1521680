"""The operators that `lean()` repeats are tried on the torch at hand; others are kept, with a reason."""

import json

import pytest
import torch
import torch.nn.functional as F
from lean_cases import recording_in

from leannorm.cli import main
from leannorm.report.operators import KEPT, NOT_TRIED, ON_GPUS, PROGRAMS, REPEATED, WRONG, operator_states
from leannorm.saving import recorded_pass
from leannorm.saving.operators import OPERATORS

# Of these rows no tensor that a CPU trains through is saved: constants, booleans, gradients, parts of others,
# and a batch norm that only modes call
ELSEWHERE = """
    _convolution linear to avg_pool1d any all argmax argmin full full_like zeros zeros_like ones ones_like
    new_zeros new_ones arange scalar_tensor copy _unsafe_index lift_fresh_copy slice_scatter select_scatter
    native_dropout_backward gelu_backward silu_backward threshold_backward sigmoid_backward tanh_backward
    expand_copy fill_ zero_ _native_batch_norm_legit
"""
OURS = {"leannorm::channel_moments", "leannorm::constants_of"}


def gelu():
    return {one.name: one for one in operator_states()}["aten::gelu"]


def test_every_operator_is_repeated_that_can_be_tried_here():
    states = list(operator_states())
    assert [one for one in states if one.state not in (REPEATED, NOT_TRIED)] == []
    assert {one.name for one in states if one.state == NOT_TRIED} == {*ON_GPUS}
    assert all(one.why for one in states if one.state == NOT_TRIED)


def test_every_row_of_the_table_is_tried_or_has_a_reason():
    called = {"product", "window", "pass", "reduced", "fused"}
    rows = {name for name, row in OPERATORS.items() if row.kind in called and not name.startswith("prims::")}
    elsewhere = {f"aten::{name}" for name in ELSEWHERE.split()} | OURS
    assert rows - {*PROGRAMS, *ON_GPUS} == elsewhere


def test_an_operator_that_torch_calls_no_more_is_kept(monkeypatch):
    shape = PROGRAMS["aten::gelu"][1:]
    monkeypatch.setitem(PROGRAMS, "aten::gelu", (lambda x, leaf: F.mish(x), *shape))
    assert (gelu().state, gelu().why) == (KEPT, "this torch calls another operator in its place")


def test_an_operator_that_this_torch_has_not_is_kept(monkeypatch):
    monkeypatch.delattr(F, "gelu")
    assert gelu().state == KEPT
    assert "AttributeError" in gelu().why


def test_an_operator_that_draws_random_numbers_is_kept(monkeypatch):
    monkeypatch.setitem(PROGRAMS, "aten::rand_like", (lambda x, leaf: x * torch.rand_like(x), (64, 64)))
    state = {one.name: one for one in operator_states()}["aten::rand_like"]
    assert state.state == KEPT
    assert state.why


def test_a_rebuild_that_is_wrong_falls_short(capsys):
    log = recorded_pass.LOG

    class Log:
        """What squares read is off."""

        def __getattr__(self, name):
            return getattr(log, name)

        @staticmethod
        def record_unpack(packed):
            tensor, node = log.record_unpack(packed), torch._C._current_autograd_node()
            return tensor * 2 if node is not None and node.name() == "PowBackward0" else tensor

    with recording_in(Log()):
        assert gelu().state == WRONG
        assert main(["check"]) == 1
    assert "lean(), gradients by operator: aten::silu" in capsys.readouterr().out


def test_check_lists_every_operator(tmp_path, capsys):
    path = tmp_path / "check.json"
    assert main(["check", "--json", str(path)]) == 0
    told = json.loads(path.read_text())["operators"]
    assert [one["name"] for one in told] == [*PROGRAMS, *ON_GPUS]
    shown = capsys.readouterr().out
    for name in PROGRAMS:
        assert name.removeprefix("aten::") in shown


@pytest.mark.parametrize("arguments", [["--model", "checked_networks:sound", "--input", "4x3x16x16"]])
def test_a_check_of_a_model_lists_none(tmp_path, arguments):
    path = tmp_path / "check.json"
    assert main(["check", *arguments, "--steps", "1", "--json", str(path)]) == 0
    assert "operators" not in json.loads(path.read_text())
