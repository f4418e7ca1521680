"""The checks one by one: what is a fault, and what looks like one and is none."""

import copy
import json

import pytest
import torch
from ranks import outcomes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import leannorm
from leannorm import doctor
from leannorm.report.doctor.checks import CHECKS, SEVERITIES
from leannorm.report.doctor.page import text


def told(report, *checks):
    return [(one.check, one.layer) for one in report.findings if not checks or one.check in checks]


def network(channels=8, layers=3):
    blocks = [
        nn.Sequential(
            nn.Conv2d(channels if i else 3, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )
        for i in range(layers)
    ]
    return nn.Sequential(*blocks)


def trained(channels=8, layers=3):
    model = network(channels, layers)
    for block in model:
        nn.init.uniform_(block[1].weight, 0.5, 1.5)
        nn.init.uniform_(block[1].bias, -0.1, 0.1)
        block[1].momentum = None
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(16, 3, 12, 12))
    for block in model:
        block[1].momentum = 0.1
    return model


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
    assert len(set(names)) == len(names) == 18
    assert [check.find.__name__ for check in CHECKS] == names
    assert {check.severity for check in CHECKS} == set(SEVERITIES)


def test_remedies_are_lines_that_mend():
    model = trained()
    model[0][1].momentum = 0.99
    model[1][1].eps = 1e-3
    model[2][0].bias = nn.Parameter(torch.zeros(8))
    for one in doctor(model).findings:
        exec(one.remedy.partition(",")[0], {"model": model})
    assert doctor(model).findings == []
    assert model[0][1].momentum == 0.01


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
        assert page.count(f">{state.name}<") >= 1
    report.print()
    out = capsys.readouterr().out
    assert "nonfinite_statistics" in out
    assert "leannorm.recalibrate" in out
    assert "\x1b" not in out


def test_many_layers_of_one_fault_are_one_paragraph():
    model = network(layers=9).bfloat16()
    report = doctor(model)
    assert told(report) == [("half_precision_statistics", f"{i}.1") for i in range(9)]
    lines = [line for _, line in text(report)]
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
    exec("import copy\n" + doctor(model).findings[0].remedy, {"model": model})
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
        report = doctor(model, torch.randn(2, 3, 4 + rank, 4))
        values = [one.value for one in report.findings]
        results.append((told(report), values, [state.values for state in report.layers]))
    return results


def test_ranks_whose_statistics_part():
    first, second = (rank.value for rank in outcomes(2, wrapped))
    assert first[0] == ([("unsynchronized_buffers", "0")], [3], [32] * 3)
    assert second[0] == ([("unsynchronized_buffers", "0")], [3], [40] * 3)
    assert (first[1], second[1]) == (([], [], [32] * 3), ([], [], [40] * 3))
    assert (first[2], second[2]) == (([], [], [64] * 3), ([], [], [80] * 3))


# ------------------------------------------------ what batches show


def test_few_values():
    layers = nn.Sequential(
        nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.GroupNorm(4, 8), nn.LayerNorm(8)
    )
    report = doctor(layers, torch.randn(4, 4))
    assert [(one.check, one.layer, one.value) for one in report.findings] == [
        ("few_values", "2", 2),
        ("few_values", "1", 4),
    ]
    assert told(doctor(layers, [torch.randn(8, 4), torch.randn(3, 4)]), "few_values")[1:] == [
        ("few_values", "1")
    ]
    assert told(doctor(layers, torch.randn(8, 4))) == [("few_values", "2")]
    layers[1].eval().requires_grad_(False)
    assert told(doctor(layers, torch.randn(4, 4))) == [("few_values", "2")]


def test_gaps_are_ranked_and_the_outputs_compared():
    model = trained()
    given = [torch.randn(16, 3, 12, 12) for _ in range(2)]
    clean = doctor(model, given)
    assert clean.findings == []
    assert clean.difference < 0.3
    model[0][1].running_mean -= model[0][1].running_var.sqrt()
    model[2][1].running_var *= 25
    report = doctor(model, given)
    assert told(report) == [("train_eval_gap", "2.1"), ("train_eval_gap", "0.1"), ("modes_differ", "(model)")]
    assert [one.value for one in report.findings[:2]] == pytest.approx([1.61, 1.0], abs=0.05)
    assert report.layers[2].spread == pytest.approx(0.2, rel=0.05)
    assert report.layers[0].mean_gap == pytest.approx(1, rel=0.05)
    assert report.difference > 0.5


def test_the_gap_is_that_of_all_batches_together():
    norm = nn.BatchNorm1d(3)
    x = torch.randn(40, 3, dtype=torch.float64) * 5 + 100
    norm.running_mean, norm.running_var = x.mean(0).float(), x.var(0).float()
    norm.num_batches_tracked += 1
    report = doctor(nn.Sequential(norm), list(x.float().split([8, 20, 12])))
    assert report.findings == []
    assert report.layers[0].gap < 1e-6


def test_a_gap_that_the_sample_explains_is_none():
    """Of four samples the mean is off by half a standard deviation, whatever the statistics."""
    norm = nn.BatchNorm1d(64)
    norm.train()(torch.randn(4096, 64))
    norm.running_mean, norm.running_var = torch.zeros(64), torch.ones(64)
    report = doctor(nn.Sequential(norm), torch.randn(8, 64))
    assert report.findings == []
    assert report.layers[0].gap > 0.3


def test_dead_channels():
    model = trained()
    model[1][0].weight.data[:4] = 0
    assert [
        (one.layer, one.value)
        for one in doctor(model, torch.randn(16, 3, 12, 12)).findings
        if one.check == "dead_channels"
    ] == [("1.1", "4 of 8")]
    constant = nn.Sequential(nn.BatchNorm1d(2))
    x = torch.stack((torch.full((16,), 0.1), torch.randn(16)), 1)
    assert told(doctor(constant, x)) == [("dead_channels", "0")]
    assert told(doctor(constant, [x, x + 1])) == []


def lengths(n, of):
    return torch.linspace(of, 4, n).long()


def test_padding():
    speech = nn.Sequential(nn.Conv1d(5, 8, 3, padding=1, bias=False), nn.BatchNorm1d(8), nn.GroupNorm(2, 8))
    x = torch.randn(8, 5, 40) + 2
    assert told(doctor(speech, x)) == []
    padded = x * (torch.arange(40) < lengths(8, 40)[:, None])[:, None]
    report = doctor(speech, padded)
    assert told(report) == [("padding_in_statistics", "1"), ("padding_in_statistics", "2")]
    assert report.findings[0].value == pytest.approx(0.43, abs=0.03)
    images = torch.randn(8, 3, 40, 32)
    for image, rows in zip(images, lengths(8, 40), strict=True):
        image[:, rows:] = 0
    assert told(doctor(network(), images), "padding_in_statistics")[:1] == [("padding_in_statistics", "0.1")]


def test_a_margin_is_no_padding():
    """Pictures of digits have one of about the same width each."""
    images = torch.zeros(8, 3, 28, 28)
    for i, image in enumerate(images):
        image[:, 4 + i % 3 : 24, 4 + i // 2 : 24 - i // 2] = torch.rand(3, 20 - i % 3, 20 - 2 * (i // 2))
    assert told(doctor(network(), images)) == []


def test_batches_of_every_form():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(4, momentum=0.9)

        def forward(self, x, mask=None):
            assert mask is None or mask.dtype == torch.bool
            return {"logits": (self.bn(x), mask)}

    x, labels, mask = torch.randn(8, 4), torch.arange(8), torch.ones(8, dtype=torch.bool)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, labels), batch_size=4)
    for given, count in ((x, 1), ([x, x], 2), ({"x": x, "mask": mask}, 1), ([(x, labels)], 1), (loader, 2)):
        report = doctor(Model(), given)
        assert (report.batches, told(report, "momentum")) == (count, [("momentum", "bn")])
        assert report.difference is not None
    assert doctor(Model(), (x for _ in range(99))).batches == 8
    assert doctor(Model(), [{"data": x}], forward=lambda model, one: model(one["data"])).batches == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    model = trained().to(dtype)
    report = doctor(model, torch.randn(16, 3, 12, 12).to(dtype))
    wide = dtype == torch.float64
    assert told(report) == ([] if wide else [("half_precision_statistics", f"{i}.1") for i in range(3)])


def test_joined_and_channels_last_layers_and_an_empty_batch():
    joined = nn.Sequential(leannorm.nn.ConvBatchNorm2d(3, 8, 3))
    report = doctor(joined, torch.randn(8, 3, 8, 8).to(memory_format=torch.channels_last))
    assert (report.layers[0].name, report.layers[0].values, report.findings) == ("0.bn", 288, [])
    assert doctor(nn.BatchNorm1d(4), torch.randn(0, 4)).findings == []
    last = nn.Sequential(leannorm.nn.BatchNormOp(4, data_layout="NHWC"))
    assert doctor(last, torch.randn(8, 3, 3, 4)).layers[0].values == 72


def test_a_copy_of_ours_in_place_of_torchs():
    model = trained()
    model[1][1].running_mean += 3
    given = torch.randn(16, 3, 12, 12)
    ours = doctor(leannorm.convert(copy.deepcopy(model)), given)
    assert told(ours) == told(doctor(model, given)) != []
