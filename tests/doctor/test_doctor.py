"""The checks without data, one by one: what is a fault, and what looks like one and is none."""

import json

import pytest
import torch
from doctor_networks import network, told, trained
from ranks import outcomes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import leannorm
from leannorm import doctor
from leannorm.report.doctor.checks import CHECKS
from leannorm.report.doctor.subject import SEVERITIES

# ------------------------------------------------ the report


def test_findings_are_ranked():
    model = trained()
    model[0][1].running_var[0] = float("inf")
    model[1][1].momentum, model[2][1].momentum = 0.9, 0.99
    model[0][0].bias = nn.Parameter(torch.zeros(8))
    report = doctor(model)
    assert told(report) == [
        ("nonfinite_statistics", "0.1"),
        ("momentum", "2.1"),
        ("momentum", "1.1"),
        ("removed_bias", "0.0"),
    ]
    assert [one.severity for one in report.findings] == ["error", "warning", "warning", "note"]
    assert not report
    assert doctor(trained())


def test_the_table_of_checks():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names) == 25
    assert [check.find.__name__ for check in CHECKS] == names
    assert {check.severity for check in CHECKS} == set(SEVERITIES)


def test_json_has_no_nan_and_html_has_every_layer(tmp_path, capsys):
    model = trained()
    model[0][1].running_mean[0] = float("nan")
    model[1][1].running_mean += 9
    report = doctor(model, torch.randn(16, 3, 12, 12))
    data = json.loads(report.to_json())
    assert data["difference"] is data["layers"][0]["gap"] is None
    assert data["layers"][1]["gap"] > 3
    assert {"check", "layer", "value", "consequence", "remedy"} <= set(data["findings"][0])
    report.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for state in report.layers:
        assert f">{state.name}\n{state.cls}<" in page
    report.print()
    out = capsys.readouterr().out
    assert "nonfinite_statistics" in out
    assert "leannorm.recalibrate" in out
    assert "\x1b" not in out


def test_many_layers_of_one_fault_are_one_paragraph():
    model = network(layers=9).bfloat16()
    report = doctor(model)
    assert told(report) == [("half_precision_statistics", f"{i}.1") for i in range(9)]
    lines = str(report).splitlines()
    assert len(lines) < 14
    assert "  and 4 more layers" in lines


# ------------------------------------------------ statistics


def test_statistics_of_a_new_model():
    model = network()
    assert told(doctor(model)) == told(doctor(model, torch.randn(8, 3, 12, 12))) == []
    report = doctor(model.eval())
    assert told(report) == [("never_updated_statistics", "(model)")]
    assert report.findings[0].value == 3


def test_statistics_that_one_layer_or_a_checkpoint_lacks():
    model = trained()
    model[0][1].reset_running_stats()
    assert told(doctor(model)) == told(doctor(model.eval())) == [("never_updated_statistics", "0.1")]
    model = trained()
    without = {k: v for k, v in model.state_dict().items() if "running" not in k and "num_batches" not in k}
    fresh = network()
    fresh.load_state_dict(without, strict=False)
    assert told(doctor(fresh)) == [("never_updated_statistics", f"{i}.1") for i in range(3)]


def test_statistics_that_a_pass_does_not_reach():
    """Where only statistics have moved, a layer between those is known by its neighbours."""
    model = network()
    model(torch.randn(8, 3, 12, 12))
    model[1][1].reset_running_stats()
    assert told(doctor(model)) == [("never_updated_statistics", "1.1")]


def test_a_new_head_on_a_trained_model_is_new():
    model = nn.ModuleDict({"backbone": trained(), "head": network()})
    assert told(doctor(model)) == []
    assert told(doctor(model.eval())) == [("never_updated_statistics", f"head.{i}.1") for i in range(3)]


def test_momentum_by_every_convention():
    layers = nn.Sequential(
        nn.BatchNorm1d(4, momentum=None),
        leannorm.nn.BatchNormOp(4, momentum=0.99),
        nn.BatchNorm1d(4, momentum=0.5),
    )
    assert told(doctor(layers)) == []
    layers[2].momentum = 0.0
    layers[1].momentum = 0.01
    assert [(one.layer, one.value) for one in doctor(layers).findings] == [("2", 0.0), ("1", 0.99)]
    assert told(doctor(nn.BatchNorm1d(4, momentum=0.99, track_running_stats=False))) == []


def test_eps_beside_its_neighbours_and_beside_its_dtype():
    def norms(*eps, dtype=None):
        return nn.Sequential(*(nn.LayerNorm(4, eps=e, dtype=dtype) for e in eps))

    assert told(doctor(norms(1e-5, 1e-6, 1e-5, 1e-12))) == [("eps", "3")]
    assert told(doctor(norms(1e-5, 1e-6, 1e-6, 1e-5, 1e-6))) == []
    assert told(doctor(norms(1e-12, 1e-12, 1e-12))) == []
    assert told(doctor(norms(1e-12, 1e-12, dtype=torch.float16))) == [("eps", "0"), ("eps", "1")]
    assert told(doctor(norms(0.0))) == [("eps", "0")]
    mixed = nn.Sequential(nn.LayerNorm(4, eps=1e-6), nn.BatchNorm1d(4, eps=1e-3), nn.LayerNorm(4, eps=1e-6))
    assert told(doctor(mixed)) == []


# ------------------------------------------------ what is trained


def test_a_frozen_layer_is_frozen_or_half():
    model = trained()
    model[0][1].requires_grad_(False)
    model[1][1].eval()
    model[2][1].requires_grad_(False).eval()
    assert told(doctor(model)) == [("half_frozen", "0.1"), ("half_frozen", "1.1")]
    assert told(doctor(model.eval())) == []
    assert told(doctor(nn.Sequential(nn.BatchNorm1d(4, affine=False)))) == []


def test_gamma_that_no_optimizer_has():
    model = trained()
    kept = [p for name, p in model.named_parameters() if not name.startswith("1.1")]
    assert told(doctor(model, optimizer=torch.optim.SGD(kept, 0.1))) == [("half_frozen", "1.1")]
    rest = torch.optim.SGD(model[1][1].parameters(), 0.1)
    assert told(doctor(model, optimizer=[torch.optim.SGD(kept, 0.1), rest])) == []
    both = nn.ModuleDict({"generator": trained(), "critic": trained()})
    assert told(doctor(both, optimizer=torch.optim.SGD(both["critic"].parameters(), 0.1))) == []


def test_weight_decay():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    assert told(doctor(model, optimizer=torch.optim.SGD(model.parameters(), 0.1))) == []
    assert told(doctor(model, optimizer=torch.optim.AdamW(model.parameters()))) == [("weight_decay", "1")]
    model[1].requires_grad_(False)
    assert told(doctor(model, optimizer=torch.optim.AdamW(model.parameters()))) == []


def test_gamma_that_begins_at_zero_and_gamma_that_ends_there():
    model = network()
    nn.init.zeros_(model[1][1].weight)
    assert told(doctor(model)) == []
    model = trained()
    nn.init.zeros_(model[1][1].weight)
    model[2][1].weight.data[:4] = 0
    assert [(one.layer, one.value) for one in doctor(model).findings] == [
        ("1.1", "8 of 8"),
        ("2.1", "4 of 8"),
    ]


# ------------------------------------------------ how norms stand in a model


class Block(nn.Module):
    def __init__(self, order):
        super().__init__()
        self.conv, self.bn, self.order = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), order

    def forward(self, x, scale=None):
        if scale is not None:
            x = x * scale
        return self.order(self, x)


@pytest.mark.parametrize(
    ("order", "removed"),
    [
        (lambda self, x: self.bn(self.conv(x)), True),
        (lambda self, x: self.bn(self.conv(x).relu()), False),
        (lambda self, x: self.conv(self.bn(x)), False),
        (lambda self, x: (y := self.conv(x)) + self.bn(y), False),
        (lambda self, x: self.bn(self.conv(x)) if x.sum() > 0 else x, False),  # cannot be traced
    ],
    ids=["before", "relu between", "after", "read twice", "by value"],
)
def test_a_bias_before_a_norm(order, removed):
    assert told(doctor(Block(order))) == ([("removed_bias", "conv")] if removed else [])


def test_a_bias_is_removed_by_the_batch_s_mean_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert told(doctor(model)) == [("removed_bias", "0")]
    model[1].requires_grad_(False).eval()
    assert told(doctor(model)) == []
    assert told(doctor(nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4)))) == []
    assert told(doctor(nn.Sequential(nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4)))) == [("removed_bias", "0")]
    assert told(doctor(leannorm.nn.ConvBatchNorm2d(3, 4, 1))) == []


def test_the_trace_runs_nothing_and_changes_nothing():
    ran = []
    block = Block(lambda self, x: self.bn(self.conv(x)) + torch.rand(1))
    block.conv.register_forward_hook(lambda *_: ran.append(1))
    before = torch.get_rng_state()
    assert told(doctor(block)) == [("removed_bias", "conv")]
    assert torch.equal(torch.get_rng_state(), before)
    assert ran == []


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = network(3, 1), network(3, 1)

    def forward(self, x):
        return self.first(x) + self.second(x)


def test_a_norm_in_two_places():
    model = Heads()
    model.second[0][1] = model.first[0][1]
    assert told(doctor(model)) == [("shared_norm", "first.0.1")]
    exec(doctor(model).findings[0].remedy, {"model": model})
    assert told(doctor(model)) == []
    model.norm = model.first[0][1]  # another name for it, by which nobody calls it
    assert told(doctor(model)) == []
    tied = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    assert told(doctor(nn.Sequential(tied, nn.Sequential(tied[1])))) == []


def test_a_norm_that_a_step_calls_twice():
    model = Heads()
    model.second = model.first
    given = torch.randn(8, 3, 6, 6)
    assert told(doctor(model)) == []  # which of the children runs how often is not known before a pass
    report = doctor(model, given)
    assert told(report) == [("repeated_call", "first.0.1")]
    assert report.findings[0].value == 2

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(4)

        def forward(self, x):
            for _ in range(3):
                x = self.bn(x)
            return x

    assert [(one.check, one.layer, one.value) for one in doctor(Loop()).findings] == [
        ("repeated_call", "bn", 3)
    ]


def wrapped(rank):
    results = []
    for broadcast, to in ((False, None), (True, None), (False, "sync")):
        model = network()
        if to:
            leannorm.convert(model, to=to)
        model = nn.Sequential(DistributedDataParallel(model, broadcast_buffers=broadcast))
        report = doctor(model, torch.randn(4, 3, 4 + rank, 2))
        values = [one.value for one in report.findings]
        results.append((told(report), values, [state.values for state in report.layers]))
    return results


def test_ranks_whose_statistics_part():
    first, second = (rank.value for rank in outcomes(2, wrapped))
    assert first[0] == ([("unsynchronized_buffers", "0")], [3], [32] * 3)
    assert second[0] == ([("unsynchronized_buffers", "0")], [3], [40] * 3)
    assert (first[1], second[1]) == (([], [], [32] * 3), ([], [], [40] * 3))
    assert (first[2], second[2]) == (([], [], [64] * 3), ([], [], [80] * 3))
