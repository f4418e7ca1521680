"""Folding against the unfolded model, case by case, those included on which torch's own goes wrong."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch

import leannorm
from leannorm import program
from leannorm._errors import FoldError, InputError

tnn = torch.nn


def trained(net, *inputs):
    """Statistics, scales and shifts that are nobody's defaults."""
    generator = torch.Generator().manual_seed(1)
    for m in net.modules():
        for name in ("running_mean", "running_var", "estimated_mean", "estimated_var"):
            buffer = getattr(m, name, None)
            if buffer is not None:
                value = torch.rand(buffer.shape, generator=generator)
                buffer.copy_(value + 0.5 if "var" in name else value - 0.3)
        if isinstance(m, tnn.modules.batchnorm._BatchNorm) and m.affine:
            m.weight.data.uniform_(0.5, 1.5, generator=generator)
            m.bias.data.uniform_(-0.5, 0.5, generator=generator)
    return net


class Twice(tnn.Module):
    """One convolution, called before two norms or before one norm and alone."""

    def __init__(self, same):
        super().__init__()
        self.conv = tnn.Conv2d(3, 3, 3, padding=1)
        self.a, self.b = tnn.BatchNorm2d(3), tnn.BatchNorm2d(3)
        self.same = same

    def forward(self, x):
        x = self.a(self.conv(x)).relu()
        y = self.conv(x)
        return self.a(y) if self.same else y


class Declared(tnn.Module):
    """Declared in one order, run in another; a functional call stands between two of them."""

    def __init__(self):
        super().__init__()
        self.a, self.bn_b, self.b, self.bn_a = (
            tnn.Conv2d(3, 4, 3),
            tnn.BatchNorm2d(4),
            tnn.Conv2d(4, 4, 3),
            tnn.BatchNorm2d(4),
        )
        self.c, self.bn_c = tnn.Conv2d(4, 4, 1), tnn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn_c(self.c(self.bn_b(self.b(self.bn_a(self.a(x))))).tanh())


class Residual(tnn.Module):
    """The convolution's result is used beside the norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = tnn.Conv2d(3, 3, 1), tnn.BatchNorm2d(3)

    def forward(self, x):
        y = self.conv(x)
        return y + self.bn(y)


def seq(*layers):
    return tnn.Sequential(*layers)


IMAGE, ROW = (2, 3, 9, 9), (4, 6)
# name: (model, input shape, norms folded, words of the reasons for those that are not)
CASES = {
    "conv": (lambda: seq(tnn.Conv2d(3, 4, 3), tnn.BatchNorm2d(4)), IMAGE, 1, ()),
    "conv, groups, no bias": (
        lambda: seq(tnn.Conv2d(3, 6, 3, groups=3, bias=False), tnn.BatchNorm2d(6)),
        IMAGE,
        1,
        (),
    ),
    "conv 1d, 3d": (lambda: seq(tnn.Conv1d(3, 4, 3), tnn.BatchNorm1d(4)), (2, 3, 9), 1, ()),
    "conv 3d": (lambda: seq(tnn.Conv3d(3, 4, 2), tnn.BatchNorm3d(4)), (2, 3, 4, 4, 4), 1, ()),
    "padded with reflections": (
        lambda: seq(tnn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), tnn.BatchNorm2d(4)),
        IMAGE,
        1,
        (),
    ),
    "same padding": (lambda: seq(tnn.Conv2d(3, 4, 3, padding="same"), tnn.BatchNorm2d(4)), IMAGE, 1, ()),
    "transposed": (lambda: seq(tnn.ConvTranspose2d(3, 4, 3, stride=2), tnn.BatchNorm2d(4)), IMAGE, 1, ()),
    "transposed, groups": (
        lambda: seq(tnn.ConvTranspose2d(6, 4, 3, groups=2, bias=False), tnn.BatchNorm2d(4)),
        (2, 6, 5, 5),
        1,
        (),
    ),
    "transposed 1d, groups": (
        lambda: seq(tnn.ConvTranspose1d(4, 8, 3, groups=4), tnn.BatchNorm1d(8)),
        (2, 4, 5),
        1,
        (),
    ),
    "linear": (lambda: seq(tnn.Linear(6, 5), tnn.BatchNorm1d(5)), ROW, 1, ()),
    "linear, no affine": (
        lambda: seq(tnn.Linear(6, 5, bias=False), tnn.BatchNorm1d(5, affine=False)),
        ROW,
        1,
        (),
    ),
    "linear on 3-D": (lambda: seq(tnn.Linear(6, 6), tnn.BatchNorm1d(6)), (4, 6, 6), 0, ("another axis",)),
    "linear after, 3-D": (lambda: seq(tnn.BatchNorm1d(6), tnn.Linear(6, 6)), (4, 6, 6), 0, ("another axis",)),
    "without statistics": (
        lambda: seq(tnn.Conv2d(3, 4, 3), tnn.BatchNorm2d(4, track_running_stats=False)),
        IMAGE,
        0,
        ("batch's own",),
    ),
    "norm, then conv": (lambda: seq(tnn.BatchNorm2d(3), tnn.Conv2d(3, 4, 3)), IMAGE, 1, ()),
    "norm, then conv with groups": (
        lambda: seq(tnn.BatchNorm2d(4), tnn.Conv2d(4, 8, 3, groups=2, bias=False)),
        (2, 4, 7, 7),
        1,
        (),
    ),
    "norm, then padded conv": (
        lambda: seq(tnn.BatchNorm2d(3), tnn.Conv2d(3, 4, 3, padding=1)),
        IMAGE,
        0,
        ("border",),
    ),
    "norm, then linear": (lambda: seq(tnn.BatchNorm1d(6), tnn.Linear(6, 5)), ROW, 1, ()),
    "norm, then transposed": (
        lambda: seq(tnn.BatchNorm2d(3), tnn.ConvTranspose2d(3, 4, 3)),
        IMAGE,
        0,
        ("border",),
    ),
    "norms on both sides": (
        lambda: seq(tnn.BatchNorm2d(3), tnn.Conv2d(3, 4, 3), tnn.BatchNorm2d(4)),
        IMAGE,
        2,
        (),
    ),
    "activation between": (
        lambda: seq(tnn.Conv2d(3, 4, 3), tnn.ReLU(), tnn.BatchNorm2d(4), tnn.ReLU()),
        IMAGE,
        0,
        ("relu",),
    ),
    "conv twice, one norm": (lambda: Twice(True), IMAGE, 1, ()),
    "conv twice, once alone": (lambda: Twice(False), IMAGE, 0, ("also called without",)),
    "declared in another order": (Declared, (2, 3, 12, 12), 2, ("tanh",)),
    "one image without a batch": (
        lambda: seq(tnn.Conv2d(3, 5, 3), tnn.BatchNorm1d(7)),
        (3, 9, 9),
        0,
        ("another axis",),
    ),
    "used beside the norm": (Residual, IMAGE, 0, ("used elsewhere",)),
    "leannorm's layers": (
        lambda: seq(tnn.Conv2d(3, 4, 3), leannorm.nn.BatchNorm2d(4, momentum=None)),
        IMAGE,
        1,
        (),
    ),
    "leannorm's joined layer": (
        lambda: seq(leannorm.nn.ConvBatchNorm2d(3, 4, 3, padding=1), tnn.ReLU()),
        IMAGE,
        1,
        (),
    ),
    "half precision": (lambda: seq(tnn.Conv2d(3, 4, 3), tnn.BatchNorm2d(4)).bfloat16(), IMAGE, 1, ()),
    "half weights, wide statistics": (
        lambda: seq(tnn.Conv2d(3, 4, 3).bfloat16(), leannorm.nn.BatchNorm2d(4)),
        IMAGE,
        1,
        (),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_folded_equals_unfolded(name):
    build, shape, count, reasons = CASES[name]
    net = trained(build())
    x = torch.randn(shape, dtype=next(net.parameters()).dtype)
    before = copy.deepcopy(net)
    report = leannorm.fold(net, (x,))
    assert len(report.folded) == count, report.describe()
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


@pytest.mark.parametrize("name", [n for n in CASES if "half" not in n and "without a batch" not in n])
def test_folded_program_equals_the_model(name):
    build, shape, _, _ = CASES[name]
    net = trained(build())
    forked = program.fork(net, (torch.randn(shape),), dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    report = leannorm.fold(forked)
    x = torch.randn(5, *shape[1:])
    y, expected = report.model.module()(x), net.eval()(x)
    assert (y - expected).abs().max() <= 20 * torch.finfo(y.dtype).eps * expected.abs().max()
    norms = sum("batch_norm" in str(n.target) for n in report.model.graph.nodes)
    assert norms == len(report.skipped)
    if name == "conv twice, once alone":  # in a graph each call has weights of its own
        assert len(report.folded) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchs_own_fuse_is_wrong_where_ours_is_right():
    """The two cases in which `torch.fx.experimental.optimization.fuse` silently computes something else."""
    from torch.fx.experimental.optimization import fuse

    for name in ("conv twice, once alone", "linear on 3-D"):
        build, shape, _, _ = CASES[name]
        net = trained(build()).eval()
        x = torch.randn(shape)
        theirs = (fuse(net)(x) - net(x)).abs().max()
        ours = (leannorm.fold(net, (x,)).model(x) - net(x)).abs().max()
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
    report = leannorm.fold(net, (x,))
    assert not report.folded
    assert re.search(reason, report.skipped[0].reason), report.skipped
    assert torch.equal(report.model(x), net.eval()(x))


def test_a_norm_that_only_scales_passes_padding():
    net = trained(seq(tnn.BatchNorm2d(3), tnn.Conv2d(3, 4, 3, padding=1)))
    net[0].running_mean.zero_(), net[0].bias.data.zero_()
    assert len(leannorm.fold(net, (torch.randn(IMAGE),)).folded) == 1


def test_a_wrong_fold_is_an_error(monkeypatch):
    from leannorm.transforms import fold_modules

    right = fold_modules.into_layer_before
    monkeypatch.setattr(
        fold_modules,
        "into_layer_before",
        lambda *a: tuple(v * (1 + 1e-8) for v in right(*a[:2], a[2].double(), *a[3:])),
    )
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


def test_a_wrong_fold_of_such_a_model_is_an_error(monkeypatch):
    from leannorm.transforms import fold_modules

    right = fold_modules.into_layer_before
    monkeypatch.setattr(
        fold_modules, "into_layer_before", lambda *a: tuple(v * (1 + 1e-6) for v in right(*a))
    )
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
    text = leannorm.fold(net, (torch.randn(IMAGE),)).describe()
    assert text.startswith(
        "folded   1 into 0\nskipped  3: before it comes aten.relu.default; after it comes an output"
    )
    assert "1 folded, 1 skipped; largest output difference" in text
