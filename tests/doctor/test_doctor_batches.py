"""The checks of batches, one by one: what is a fault, and what looks like one and is none."""

import copy
from collections import UserDict
from typing import NamedTuple

import pytest
import torch
from doctor_networks import network, told, trained
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import leannorm
from leannorm import doctor
from leannorm.report.doctor.observe import Seen, _find_padding, moved


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


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = leannorm.nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(input=x, lengths=[1])


ALONE = {
    "torch's": (nn.Sequential(nn.BatchNorm1d(4)), (1, 4)),
    "untracked": (nn.Sequential(nn.BatchNorm2d(4, track_running_stats=False)).eval(), (1, 4, 1, 1)),
    "leannorm's": (nn.Sequential(leannorm.nn.BatchNorm1d(4)), (1, 4)),
    "ghost": (nn.Sequential(leannorm.nn.BatchNorm1d(4, group_size=1)), (3, 4)),
    "with its convolution": (nn.Sequential(leannorm.nn.ConvBatchNorm2d(4, 4, 3)), (1, 4, 3, 3)),
    "fused": (leannorm.convert(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())), (1, 4, 1, 1)),
    "instance": (nn.Sequential(nn.InstanceNorm1d(4, affine=True)), (3, 4, 1)),
    "group": (nn.Sequential(nn.GroupNorm(4, 4)), (1, 4)),
    "masked": (Masked(), (1, 4, 3)),
}


@pytest.mark.parametrize(("model", "sizes"), ALONE.values(), ids=ALONE)
def test_one_value_a_channel_is_a_finding_and_no_error(model, sizes):
    """Where the layer itself raises: the pass goes on, with what its formula makes of one value, beta."""
    (norm,) = (m for m in model.modules() if getattr(m, "bias", None) is not None)
    nn.init.normal_(norm.bias)
    before = copy.deepcopy(model.state_dict()), [dict(vars(m)) for m in model.modules()]
    behind = []
    hook = model.register_forward_hook(lambda module, args, y: behind.append(y))
    report = doctor(model, torch.randn(sizes))
    hook.remove()
    (finding,) = (one for one in report.findings if one.check == "few_values")
    assert (finding.value, finding.severity, report.difference) == (1, "error", None)
    assert sizes[0] > 1 or report.layers[0].gap is None
    beta = norm.bias.clamp_min(0) if getattr(model, "unfused", None) else norm.bias
    y = behind[0] if len(sizes) == 2 else behind[0].flatten(2)[..., 0]
    assert y.allclose(beta.expand(y.shape), atol=1e-4)  # torch's kernel folds the mean into the shift
    assert all(torch.equal(v, before[0][k]) for k, v in model.state_dict().items())
    assert [dict(vars(m)) for m in model.modules()] == before[1]


def test_a_last_batch_of_one_is_found_and_the_others_are_measured():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    report = doctor(model, [*torch.randn(2, 16, 4), torch.randn(1, 4)])
    assert told(report, "few_values")[0] == ("few_values", "1")
    assert [one.severity for one in report.findings] == ["error"]
    assert report.layers[0].gap is not None
    assert report.difference is not None


def test_another_error_of_the_model_stays_what_it_is():
    class Refusing(nn.BatchNorm1d):
        def forward(self, x):
            raise ValueError("no norm today")

    with pytest.raises(ValueError, match="no norm today"):
        doctor(nn.Sequential(Refusing(4)), torch.randn(8, 4))


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
    """Eight samples are 0.4 standard deviations from the distribution that they are of."""
    norm = nn.BatchNorm1d(64)
    norm.num_batches_tracked += 1
    norm.running_mean += 0.6
    few, many = (doctor(nn.Sequential(norm), torch.randn(count, 64)) for count in (8, 512))
    assert told(few) == []
    assert few.layers[0].gap > 0.5
    assert told(many, "train_eval_gap") == [("train_eval_gap", "0")]


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


class BatchEncoding(UserDict):
    """As a tokenizer's: its entries are attributes too."""

    def __getattr__(self, name):
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


class Pair(NamedTuple):
    input_ids: torch.Tensor
    labels: torch.Tensor


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    "batch", [BatchEncoding(input_ids=IDS), Pair(IDS, IDS)], ids=lambda b: type(b).__name__
)
def test_a_batch_keeps_its_class_on_its_way_to_the_model(batch):
    got = []

    def forward(model, batch):
        got.append(batch)
        return model(batch.input_ids)

    doctor(nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8)), [batch], forward=forward)
    assert {type(one) for one in got} == {type(batch)}
    assert all(torch.equal(one.input_ids, IDS) for one in got)
    assert moved(batch, torch.device("meta")).input_ids.is_meta
    assert batch.input_ids is IDS


def test_a_packed_sequence_is_moved_whole():
    """Its sizes stay on the CPU, where torch wants them."""
    packed = pack_sequence([torch.randn(n, 3) for n in (2, 5)], enforce_sorted=False)
    assert moved(packed, None).data.equal(packed.data)
    there = moved(packed, torch.device("meta"))
    assert (there.data.is_meta, there.sorted_indices.is_meta) == (True, True)
    assert there.batch_sizes.equal(packed.batch_sizes)


class Calls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_padding_is_found_in_as_many_calls_whatever_the_length():
    counts = []
    for length in (64, 512):
        x = torch.randn(2, 4, length)
        x[1, :, length // 4 : length * 3 // 4] = 0  # the longest run is not the last
        x[1, :, -length // 8 :] = 0
        seen = Seen()
        with Calls() as calls:
            _find_padding(seen, x)
        counts.append(calls.count)
        assert (seen.padded, seen.uneven) == ((length // 2 - 1) / (2 * length), True)
    assert counts[0] == counts[1]


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


def test_row_norms_do_not_hide_that_the_modes_differ():
    """Each layer's gap is small, and turns the output's sign. Rows have no samples that could explain it."""

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean(0, keepdim=True)

    norm = nn.BatchNorm1d(8)
    norm.num_batches_tracked += 1
    norm.running_mean += torch.linspace(-0.4, 0.4, 8)
    norm.bias.data = torch.linspace(-0.2, 0.2, 8)
    for model in (nn.Sequential(norm, Mean()), nn.Sequential(norm, Mean(), nn.LayerNorm(8))):
        assert "modes_differ" in [name for name, _ in told(doctor(model, torch.randn(8192, 8)))]


def test_padding_that_a_mask_leaves_out_is_none():
    """The layer's own statistics are of the data, and so are those that it is compared with."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = leannorm.nn.BatchNorm1d(4, momentum=1.0)

        def forward(self, x, lengths):
            return self.norm(x, lengths=lengths)

    model, lengths = Masked(), torch.arange(10, 42)
    x = torch.randn(32, 4, 42) + 5
    x[torch.arange(42).expand(32, 42)[:, None].expand_as(x) >= lengths[:, None, None]] = 0
    model(x, lengths)
    model.norm.momentum = 0.1
    report = doctor(model, {"x": x, "lengths": lengths})
    assert told(report) == []
    assert report.layers[0].gap < 1e-3


class Sign(nn.Module):
    def forward(self, x):
        return x.mean(0, keepdim=True)


def test_where_the_modes_differ_and_nothing_is_found_the_report_says_what_follows():
    norm = nn.BatchNorm1d(8)
    norm.num_batches_tracked += 1
    norm.running_mean += torch.linspace(-0.4, 0.4, 8)
    norm.bias.data = torch.linspace(-0.2, 0.2, 8)
    model, batches = nn.Sequential(norm, Sign()), torch.randn(16, 8)
    report = doctor(model, batches)
    assert report.findings == []
    assert report.difference > 0.5
    for word in ("no layer by itself", "16 samples a batch", "leannorm.recalibrate(model, batches)"):
        assert word in report.follows
        assert word in str(report)
        assert word in report.html()
    noted = doctor(model, batches, optimizer=torch.optim.AdamW(model.parameters()))
    assert [(one.severity, noted.follows) for one in noted.findings] == [("note", report.follows)]
    leannorm.recalibrate(model, batches)
    assert doctor(model, batches).follows == ""
    new = doctor(nn.Sequential(nn.BatchNorm1d(8)), 5 * torch.randn(64, 8) + 9)
    assert (new.findings, new.difference > 0.5) == ([], True)
    assert "have not moved yet" in new.follows


def test_bars_are_red_above_the_threshold_alone():
    """A layer with another fault has a bar of its gap."""
    model = trained()
    model[0][1].momentum = 0.9
    model[2][1].running_mean += 9
    report = doctor(model, torch.randn(64, 3, 12, 12))
    assert [one.gap > one.least for one in report.layers] == [False, False, True]
    from leannorm.report.doctor.findings import _bars

    calm, faulty, _ = _bars(report).figure.data
    assert [value is None for value in calm.y] == [False, False, True]
    assert [value is None for value in faulty.y] == [True, True, False]
    assert faulty.marker.color != calm.marker.color
