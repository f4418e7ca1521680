"""Each reason that `fold` gives is true of the norm that it names; where none is, the norm is folded."""

import pytest
import torch
from fold_cases import IMAGE, Residual, Twice, seq, trained
from test_fold import fold

from leannorm import nn, program

tnn, F = torch.nn, torch.nn.functional
parametrize = tnn.utils.parametrize.register_parametrization


class Net(tnn.Module):
    """A convolution and a norm, called by `run(net, x)`."""

    def __init__(self, run, bias=True, **more):
        super().__init__()
        self.conv, self.bn, self.run = tnn.Conv2d(3, 3, 1, bias=bias), tnn.BatchNorm2d(3), run
        for name, module in more.items():
            setattr(
                self,
                name,
                module(self) if callable(module) and not isinstance(module, tnn.Module) else module,
            )

    def forward(self, x):
        return self.run(self, x)


class Own(tnn.Module):
    """A norm whose statistics have names of their own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mu", torch.rand(3))
        self.register_buffer("spread", torch.rand(3) + 0.5)

    def forward(self, x):
        return F.batch_norm(x, self.mu, self.spread)


class Negated(tnn.Module):
    def forward(self, x):
        return -x


def norm(net, y):
    return F.batch_norm(y, net.bn.running_mean, net.bn.running_var, net.bn.weight, net.bn.bias)


def hooked(net, hook):
    getattr(net[0], hook)(lambda *a: None)
    return net


def parametrized(net, name, by):
    parametrize(net[0], name, by)
    return net


def sharing(net, one, other):
    """`one` and `other`, places in the net, are one parameter."""
    (path, name), tensor = one.rsplit(".", 1), net.get_parameter(other)
    setattr(net.get_submodule(path), name, tensor)
    return net


def pair():
    return seq(tnn.Conv2d(3, 3, 1), tnn.BatchNorm2d(3))


BEHIND = "; after it comes an output"
# the net → its norms, each with the reason, or None where it is folded
REASONS = {
    "norm, layer without bias, norm": (
        lambda: seq(tnn.BatchNorm2d(3), tnn.Conv2d(3, 4, 3, bias=False), tnn.BatchNorm2d(4)),
        {"0": None, "2": None},
    ),
    "norm, layer that pads, norm": (
        lambda: seq(tnn.BatchNorm2d(3), tnn.Conv2d(3, 4, 3, padding=1, bias=False), tnn.BatchNorm2d(4)),
        {
            "0": "before it comes an input; the conv layer after it has zeros at its border, which the norm "
            "does not shift",
            "2": None,
        },
    ),
    "norm, hooked layer, norm": (
        lambda: seq(
            tnn.BatchNorm2d(3), *hooked(seq(tnn.Conv2d(3, 4, 3)), "register_forward_hook"), tnn.BatchNorm2d(4)
        ),
        {"0": "1 has hooks, which may see other values", "2": "1 has hooks, which may see other values"},
    ),
    "the same padding of one value": (
        lambda: seq(tnn.BatchNorm2d(3), tnn.Conv2d(3, 4, 1, padding="same")),
        {"0": None},
    ),
    "the same padding of three": (
        lambda: seq(tnn.BatchNorm2d(3), tnn.Conv2d(3, 4, 3, padding="same")),
        {
            "0": "before it comes an input; the conv layer after it has zeros at its border, which the norm "
            "does not shift"
        },
    ),
    "transposed, of one value": (
        lambda: seq(tnn.BatchNorm2d(4), tnn.ConvTranspose2d(4, 6, 1, groups=2)),
        {"0": None},
    ),
    "transposed, of one value, with a stride": (
        lambda: seq(tnn.BatchNorm2d(3), tnn.ConvTranspose2d(3, 4, 1, stride=2)),
        {
            "0": "before it comes an input; the transposed layer after it has zeros at its border or between "
            "its inputs, which the norm does not shift"
        },
    ),
    "the operator's layer": (lambda: seq(tnn.Conv2d(3, 3, 1), nn.BatchNormOp(3)), {"1": None}),
    "a norm with names of its own": (lambda: seq(tnn.Conv2d(3, 3, 1), Own()), {"1": None}),
    "one norm, two names": (
        lambda: Net(
            lambda net, x: net.other(net.second(net.bn(net.conv(x)).relu())),
            other=lambda net: net.bn,
            second=tnn.Conv2d(3, 3, 1),
        ),
        {"bn|other": None},
    ),
    "one convolution, two names": (
        lambda: Net(lambda net, x: net.bn(net.other(x)), other=lambda net: net.conv),
        {"bn": None},
    ),
    "without its bias": (
        lambda: Net(lambda net, x: net.bn(F.conv2d(x, net.conv.weight))),
        {"bn": "conv is called without its bias"},
    ),
    "another bias": (
        lambda: Net(
            lambda net, x: net.bn(F.conv2d(x, net.conv.weight, net.b)), b=tnn.Parameter(torch.rand(3))
        ),
        {"bn": "conv is called with another bias than its own, b"},
    ),
    "another bias, none of its own": (
        lambda: Net(
            lambda net, x: net.bn(F.conv2d(x, net.conv.weight, net.b)), False, b=tnn.Parameter(torch.rand(3))
        ),
        {"bn": "conv is called with another bias than its own, b"},
    ),
    "its bias read elsewhere": (
        lambda: Net(lambda net, x: net.bn(net.conv(x)) + net.conv.bias.sum()),
        {"bn": "the parameters of conv are also read without it"},
    ),
    "its weight read elsewhere": (
        lambda: Net(lambda net, x: net.bn(net.conv(x)) + net.conv.weight.sum()),
        {"bn": "the parameters of conv are also read without it"},
    ),
    "called alone, too": (
        lambda: Twice(False),
        {"a": "conv is also called without this norm"},
    ),
    "a computed bias": (
        lambda: Net(lambda net, x: net.bn(F.conv2d(x, net.conv.weight, net.conv.bias * 2))),
        {"bn": f"before it comes a conv layer whose bias is computed{BEHIND}"},
    ),
    "a parametrized weight": (
        lambda: parametrized(pair(), "weight", Negated()),
        {"1": f"before it comes a conv layer whose weight is computed{BEHIND}"},
    ),
    "parametrized by nothing": (
        lambda: parametrized(pair(), "bias", tnn.Identity()),
        {"1": "0 is parametrized"},
    ),
    "as a weight": (
        lambda: Net(lambda net, x: F.conv2d(x, net.bn(net.conv.weight))),
        {"bn": "before it comes a parameter or buffer; after it comes a conv layer whose weight is computed"},
    ),
    "a hook before": (
        lambda: hooked(pair(), "register_forward_pre_hook"),
        {"1": "0 has hooks, which may see other values"},
    ),
    "one weight of two norms": (
        lambda: sharing(seq(*pair(), tnn.ReLU(), tnn.BatchNorm2d(3)), "3.weight", "1.weight"),
        {
            "1": "1 shares its parameters with another module",
            "3": f"before it comes aten.relu.default{BEHIND}",
        },
    ),
    "one weight of two layers": (
        lambda: sharing(seq(*pair(), tnn.ReLU(), tnn.Conv2d(3, 3, 1)), "3.weight", "0.weight"),
        {"1": "shares its parameters with another module"},
    ),
    "a layer of the user's": (
        lambda: Net(lambda net, x: net.bn(F.conv2d(x, net.w)), w=tnn.Parameter(torch.rand(3, 3, 1, 1))),
        {"bn": "the model (Net) is no layer of torch.nn that fold knows"},
    ),
    "a function of its tensors": (
        lambda: Net(lambda net, x: norm(net, net.conv(x))),
        {"bn": "its tensors are read by another module's forward"},
    ),
    "its tensors read elsewhere": (
        lambda: Net(lambda net, x: net.bn(net.conv(x)) + net.bn.running_var.sum()),
        {"bn": "its tensors are also read without it"},
    ),
    "before one layer and after another": (
        lambda: Net(
            lambda net, x: net.second(net.bn(net.bn(net.conv(x)).relu())), second=tnn.Conv2d(3, 3, 1)
        ),
        {"bn": "some of its calls come before a layer and some after one"},
    ),
    "one call of two": (
        lambda: Net(lambda net, x: net.bn(net.bn(net.conv(x)).relu())),
        {"bn": f"before it comes aten.relu.default{BEHIND} (in one of its calls)"},
    ),
    "a result that is added, too": (
        lambda: seq(tnn.Conv2d(3, 3, 1), Residual()),
        {
            "1.bn": "the result of the conv layer before it is used elsewhere too; after it comes "
            "aten.add.Tensor"
        },
    ),
    "a part": (
        lambda: Net(lambda net, x: net.bn(net.conv(x).chunk(1)[0])),
        {"bn": f"before it comes one of the results of aten.chunk.default{BEHIND}"},
    ),
    "computed statistics": (
        lambda: Net(lambda net, x: F.batch_norm(net.conv(x), net.bn.running_mean * 2, net.bn.running_var)),
        {"batch_norm": "its statistics are computed, not a variable"},
    ),
    "a batch's own statistics": (
        lambda: seq(tnn.Conv2d(3, 3, 1), tnn.BatchNorm2d(3, affine=False, track_running_stats=False)),
        {"1": "it uses the batch's own statistics"},
    ),
    "eps outside of the root": (
        lambda: seq(nn.ConvBatchNorm2d(3, 3, 1, eps_mode="outside")),
        {"0": "it is one operator with its convolution, and has no to_pair() with eps_mode='outside'"},
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_is_the_reason(name):
    make, norms = REASONS[name]
    net = trained(make()).eval()
    x = torch.randn(2, 4, *IMAGE[2:]) if name == "transposed, of one value" else torch.randn(IMAGE)
    want = net(x)
    report = fold(net, (x,))
    reasons = {**{f.norm: None for f in report.folded}, **{s.norm: s.reason for s in report.skipped}}
    assert len(reasons) == len(norms), report
    for (path, reason), (paths, words) in zip(sorted(reasons.items()), sorted(norms.items()), strict=True):
        assert path in paths.split("|")
        assert reason is words is None or words in reason, report
    torch.testing.assert_close(report.model(x), want, rtol=1e-4, atol=1e-5)


# in a graph each call has variables of its own, so that these are folded there
ALONE = ["another bias", "its bias read elsewhere", "without its bias", "one norm, two names"]


@pytest.mark.parametrize("name", [*ALONE, "the operator's layer", "norm, layer without bias, norm"])
def test_in_a_program_they_are_folded(name):
    net = trained(REASONS[name][0]())
    x = torch.randn(IMAGE)
    report = fold(program.fork(net, (x,)))
    assert not report.skipped
    torch.testing.assert_close(report.model.module()(x), net.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("as_program", [False, True])
def test_what_is_added_to_itself_is_no_result_of_one_use(as_program):
    def run(net, x):
        y = net.conv(x)
        return net.act(y, y)

    net, x = trained(Net(run, act=nn.BatchNormAct2d(3))), torch.randn(IMAGE)
    report = fold(program.fork(net, (x,)) if as_program else net, (x,))
    assert [s.norm for s in report.skipped] == ["act"]
    assert report.skipped[0].reason.startswith("the result of the conv layer before it is used elsewhere too")
