"""Folding against the unfolded model, case by case, those included on which torch's own goes wrong."""

import copy
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from fold_cases import CASES, IMAGE, seq, trained

import leannorm
from leannorm import program
from leannorm._errors import FoldError, InputError

tnn = torch.nn


WAYS = {
    "stock": lambda net: net,
    "converted": lambda net: leannorm.convert(net, fuse=False),
    "fused": lambda net: leannorm.convert(net),
}


def converted(net, way):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "convert left these layers")  # leannorm's own joined ones
        return WAYS[way](net)


def fold(net, *given, **more):
    """`leannorm.fold`, which warns where it has folded nothing, and only there."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        report = leannorm.fold(net, *given, **more)
    assert [str(one.message)[:19] for one in told] == ["fold folded nothing"] * (not report.folded)
    return report


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_folded_equals_unfolded(name, way):
    build, shape, count, reasons = CASES[name]
    net = converted(trained(build()), way)
    x = torch.randn(shape, dtype=next(net.parameters()).dtype)
    before = copy.deepcopy(net)
    report = fold(net, (x,))
    assert len(report.folded) == count, report
    assert len(report.skipped) == len(reasons)
    for skipped, words in zip(report.skipped, reasons, strict=True):
        assert words in skipped.reason
    y, expected = report.model(x), before.eval()(x)
    eps = torch.finfo(y.dtype).eps
    assert (y - expected).abs().max() <= 20 * eps * expected.abs().max()  # a sum's roundings, not an error's
    assert report.difference == (y - expected).double().abs().max().item()
    assert y.dtype == expected.dtype
    left = [m for m in report.model.modules() if isinstance(m, tnn.modules.batchnorm._BatchNorm)]
    assert (
        len(left)
        == len([m for m in before.modules() if isinstance(m, tnn.modules.batchnorm._BatchNorm)]) - count
        or name == "conv twice, one norm"
    )
    for key, value in net.state_dict().items():  # the original is untouched
        assert torch.equal(value, before.state_dict()[key])


# a fused model's graph is a stock one's, which `test_folded_equals_unfolded` and one of three here have shown
PROGRAMS = [name for name in CASES if "half" not in name and "without a batch" not in name]
ALSO_FUSED = [
    pytest.param(name, "fused", marks=[] if i % 3 == 0 else pytest.mark.conformance)
    for i, name in enumerate(PROGRAMS)
]


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize(("name", "way"), [*((name, "stock") for name in PROGRAMS), *ALSO_FUSED])
def test_folded_program_equals_the_model(name, way):
    build, shape, count, _ = CASES[name]
    net = converted(trained(build()), way)
    forked = program.fork(net, (torch.randn(shape),), dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    report = fold(forked)
    x = torch.randn(5, *shape[1:])
    y, expected = report.model.module()(x), net.eval()(x)
    assert (y - expected).abs().max() <= 20 * torch.finfo(y.dtype).eps * expected.abs().max()
    norms = sum("batch_norm" in str(n.target) for n in report.model.graph.nodes)
    assert norms == len(report.skipped)
    joined = "joined" in name  # with its convolution, in one operator
    alone = name == "conv twice, once alone"  # in a graph each call has weights of its own
    assert len(report.folded) == (0 if joined else 1 if alone else count)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchs_own_fuse_is_wrong_where_ours_is_right():
    """The two cases in which `torch.fx.experimental.optimization.fuse` silently computes something else."""
    from torch.fx.experimental.optimization import fuse

    for name in ("conv twice, once alone", "linear on 3-D"):
        build, shape, _, _ = CASES[name]
        net = trained(build()).eval()
        x = torch.randn(shape)
        theirs = (fuse(net)(x) - net(x)).abs().max()
        ours = (fold(net, (x,)).model(x) - net(x)).abs().max()
        assert theirs > 0.1
        assert ours < 1e-5


def hooked(net):
    net[0].register_forward_hook(lambda m, a, y: None)
    return net


def parametrized(net):
    return tnn.utils.parametrizations.weight_norm(net[0]) and net


def tied(net):
    net.append(tnn.Conv2d(3, 3, 1))
    net[2].weight = net[0].weight
    return net


class Extended(tnn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "0 has hooks"),
        (parametrized, "weight is computed"),
        (tied, "also called without|shares its parameters"),
        (lambda net: seq(net[0], Extended(3)), "Extended does more than normalize"),
        (
            lambda net: seq(net[0], tnn.utils.parametrizations.orthogonal(tnn.Linear(9, 9)), net[1]),
            "computed",
        ),
    ],
    ids=["hooks", "weight norm", "tied", "subclass", "orthogonal"],
)
def test_what_would_change_its_meaning_is_left_and_named(change, reason):
    net = trained(change(seq(tnn.Conv2d(3, 3, 1), tnn.BatchNorm2d(3))))
    x = torch.randn(IMAGE)
    report = fold(net, (x,))
    assert not report.folded
    assert re.search(reason, report.skipped[0].reason), report.skipped
    assert torch.equal(report.model(x), net.eval()(x))


def test_a_norm_that_only_scales_passes_padding():
    net = trained(seq(tnn.BatchNorm2d(3), tnn.Conv2d(3, 4, 3, padding=1)))
    net[0].running_mean.zero_(), net[0].bias.data.zero_()
    assert len(leannorm.fold(net, (torch.randn(IMAGE),)).folded) == 1


@pytest.fixture
def off_by(monkeypatch):
    """Weights are folded wrongly, by such a part of themselves."""
    from leannorm.transforms.folding import graph

    def fold_wrongly(share):
        right = graph.into_layer_before
        wrong = lambda *a: tuple(v * (1 + share) for v in right(*a[:2], a[2].double(), *a[3:]))  # noqa: E731
        monkeypatch.setattr(graph, "into_layer_before", wrong)

    return fold_wrongly


def test_a_wrong_fold_is_an_error(off_by):
    off_by(1e-8)
    net = trained(seq(tnn.Conv2d(3, 4, 3), tnn.BatchNorm2d(4)))
    with pytest.raises(FoldError, match="folding changed the output by"):
        leannorm.fold(net.double(), (torch.randn(IMAGE).double(),))
    assert leannorm.fold(net, (torch.randn(IMAGE).double(),), verify=False).difference is None


class Amplified(tnn.Module):
    """What it returns in float32 has few correct digits, or none, whoever computes it."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return torch.sin(self.factor * x)


@pytest.mark.parametrize("factor", [1e6, 1e10])
@pytest.mark.parametrize("as_program", [False, True])
def test_a_model_that_amplifies_roundings_is_judged_by_its_own(factor, as_program):
    net = trained(seq(tnn.Conv2d(3, 4, 3), tnn.BatchNorm2d(4), Amplified(factor)))
    x = (torch.randn(IMAGE),)
    report = leannorm.fold(program.fork(net, x) if as_program else net, x)
    assert report.checked > 1e4 * 2.0**-52 * report.scale


def test_a_wrong_fold_of_such_a_model_is_an_error(off_by):
    off_by(1e-6)
    net = trained(seq(tnn.Conv2d(3, 4, 3), tnn.BatchNorm2d(4), Amplified(1e6))).double()
    with pytest.raises(FoldError, match="folding changed the output by"):
        leannorm.fold(net, (torch.randn(IMAGE).double(),))


BAD = [
    (lambda: leannorm.fold(tnn.ReLU()), "needs example_inputs"),
    (lambda: leannorm.fold(3), "takes a module or a program"),
    (lambda: leannorm.fold(SimpleNamespace(to_exported=None)), "takes a module or a program, got SimpleName"),
    (lambda: leannorm.fold(tnn.Linear(3, 3), (torch.ones(2, 4),)), "torch.export cannot trace Linear"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("call", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_the_report_reads():
    net = trained(seq(tnn.Conv2d(3, 4, 3), tnn.BatchNorm2d(4), tnn.ReLU(), tnn.BatchNorm2d(4)))
    report = leannorm.fold(net, (torch.randn(IMAGE),))
    lines = [" ".join(line.split()) for line in str(report).splitlines()]
    assert lines[2:4] == [
        "folded 1 into 0",
        "skipped 3 before it comes aten.relu.default; after it comes an output",
    ]
    assert lines[-1].startswith("1 folded, 1 skipped; largest output difference")
    assert repr(report) == f"FoldReport({lines[-1]})"


def test_a_shortcut_that_leannorms_layer_adds_stays_with_it():
    class Net(tnn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = tnn.Conv2d(3, 3, 1), leannorm.nn.BatchNormAct2d(3)

        def forward(self, x):
            return self.bn(self.conv(x), x)

    net, x = trained(Net()).eval(), torch.randn(IMAGE)
    report = fold(net, (x,))
    assert [s.reason for s in report.skipped] == ["it also adds in the same call"]
    assert torch.equal(report.model(x), net(x))
    folded = fold(program.fork(net, (x,)))
    assert len(folded.folded) == 1
    torch.testing.assert_close(folded.model.module()(x), net(x))


def test_a_model_without_batch_norm_is_told():
    with pytest.warns(UserWarning, match="fold folded nothing in Sequential: it has no batch norm"):
        leannorm.fold(seq(tnn.Linear(3, 3)), (torch.randn(2, 3),))
