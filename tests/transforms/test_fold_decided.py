"""`fold` names the tests in a model's Python code whose outcome the example gave, and no others."""

import re
import sys

import pytest
import torch

import leannorm
from benchmarks.architectures import import_torchvision
from leannorm import nn, program
from leannorm._errors import InputError

tnn = torch.nn
CFG = {"relu": True}
LIMIT = 3


class Block(tnn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = tnn.Conv2d(3, 4, 3), tnn.BatchNorm2d(4)
        self.active, self.calls, self.wide = True, 0, {"wide": True}

    def forward(self, x):
        return self.bn(self.conv(x))


class Batch(Block):
    def forward(self, x):
        y = self.conv(x)
        if x.shape[0] > 2 and self.active:
            y = self.bn(y)
        return y


class Rank(Block):
    def forward(self, x):
        x = x[None] if x.dim() == 3 else x
        return super().forward(x)


class Helper(Block):
    def forward(self, x):
        return self.scaled(super().forward(x))

    def scaled(self, y):
        _, _, h, w = y.size()
        (w, _), (h, _) = divmod(w * 2, 2), divmod(h, 1)
        while h * w / 2 > 20.5:
            y = tnn.functional.avg_pool2d(y, 2)
            h, w = h // 2, w // 2
        return y


def padded(y):
    rest = -y.size(-1) % 4
    return tnn.functional.pad(y, (0, rest)) if rest else y


class Function(Block):
    def forward(self, x):
        return padded(super().forward(x))


class Kept(Block):
    def forward(self, x):
        many = x.numel() >= 100
        y = super().forward(x)
        return y.relu() if many else y


class Dtype(Block):
    def forward(self, x):
        if x.dtype is not torch.float64:
            x = x * 1
        return super().forward(x.double() if x.is_cuda else x)


class Listed(Block):
    def forward(self, x):
        y = super().forward(x)
        return sum(y[..., i] for i in (0, 1, 7) if i < y.shape[-1])


class Matched(Block):
    def forward(self, x):
        y = super().forward(x)
        match x.shape[0]:
            case 1:
                return y[0]
            case _:
                return y


class Global(Block):
    def forward(self, x):
        y = super().forward(x)
        return y.relu() if CFG["relu"] else y


class Counting(Block):
    def forward(self, x):
        self.calls += 1
        y = super().forward(x)
        if self.calls > LIMIT:
            y = y * 2
        return y


DECIDED = {
    Batch: [("x.shape[0] > 2 and self.active", "4 > 2 is True")],
    Rank: [("x.dim() == 3", "4 == 3 is False")],
    Helper: [("h * w / 2 > 20.5", "18.0 > 20.5 is False")],
    Function: [("rest", "2 is True")],
    Kept: [("x.numel() >= 100", "768 >= 100 is True")],
    Dtype: [("x.dtype is not torch.float64", "dtype is torch.float32"), ("x.is_cuda", "is_cuda is False")],
    Listed: [("i < y.shape[-1]", "6 > 0 is True; 6 > 1 is True; 6 > 7 is False")],
    Matched: [("match x.shape[0]", "4 == 1 is False")],
    Global: [("CFG['relu']", "CFG is {'relu': True}")],
    Counting: [("self.calls > LIMIT", "self.calls is 0; LIMIT is 3")],
}


@pytest.mark.parametrize("cls", DECIDED, ids=lambda c: c.__name__)
def test_what_the_example_decided_is_named(cls):
    report = leannorm.fold(cls(), (torch.randn(4, 3, 8, 8),))
    assert [d[1:] for d in report.decided] == DECIDED[cls]
    for d in report.decided:
        line, owner = re.fullmatch(rf"{re.escape(__file__)}:(\d+) in (.*)", d.place).groups()
        with open(__file__) as source:
            assert d.test in source.read().replace('"', "'").splitlines()[int(line) - 1]
        expected = {Function: "padded", Helper: "Helper.scaled"}.get(cls, f"{cls.__name__}.forward")
        assert owner == (expected if sys.version_info >= (3, 11) else expected.rpartition(".")[2])
        assert re.search(
            rf"decided +{re.escape(d.place)} +`{re.escape(d.test)}` \({re.escape(d.value)}\)", str(report)
        )
    assert len(report.folded) == 1


def test_the_report_says_where_a_folded_model_goes_another_way():
    """What it is for: the norm is folded into a layer that another batch uses without it."""
    net = Batch()
    net.bn.running_mean.fill_(1.0)
    report = leannorm.fold(net, (torch.randn(4, 3, 8, 8),))
    few = torch.randn(2, 3, 8, 8)
    assert (report.model(few) - net.eval()(few)).abs().max() > 0.5
    assert [d.test for d in report.decided] == ["x.shape[0] > 2 and self.active"]


class Settled(Block):
    """Settings, checks, and what only torch's own functions decide."""

    def forward(self, x):
        if x.shape[1] != 3:
            raise ValueError("three channels")
        assert x.shape[1] == self.conv.in_channels, "three channels"
        torch._assert(x.dim() == 4, "a batch of images")
        torch._check(x.dim() == 4)
        if self.conv.weight.shape[0] == 4 and self.active and self.wide["wide"] and not self.training:
            x = tnn.functional.interpolate(x, size=(x.shape[2] * 2, x.shape[3] * 2))
        if self.bn is not None and torch.jit.is_scripting() is False:
            x = super().forward(x)
        return x.view(x.shape[0], max(x.shape[1], 1), -1)


@pytest.mark.parametrize("layers", [tnn, nn], ids=["torch", "leannorm"])
def test_settings_and_checks_are_not_named(layers):
    net = tnn.Sequential(Settled(), layers.LayerNorm(196), tnn.TransformerEncoderLayer(196, 2, 8))
    assert leannorm.fold(net, (torch.randn(4, 3, 8, 8),)).decided == ()


@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # torch copies its own modules so
def test_an_exported_model_has_no_tests_left():
    net, x = tnn.Sequential(Batch(), tnn.ReLU()).eval(), (torch.randn(4, 3, 8, 8),)
    exported = torch.export.export(net, x).module()  # with its own checks of the sizes
    with pytest.warns(UserWarning, match="folded nothing in GraphModule: 0.conv .Module. is no layer"):
        assert leannorm.fold(exported, x).decided == ()
    traced = torch.fx.symbolic_trace(tnn.Sequential(tnn.Conv2d(4, 4, 3), tnn.BatchNorm2d(4), tnn.ReLU()))
    assert leannorm.fold(traced, (torch.randn(2, 4, 3, 3),)).decided == ()


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_published_networks_raise_no_false_alarm(name):
    import_torchvision()  # timm needs it too
    net = pytest.importorskip("timm").create_model(name, num_classes=5)
    assert leannorm.fold(net, (torch.randn(2, 3, 64, 64),), verify=False).decided == ()


def test_a_published_network_that_resizes_is_named():
    import_torchvision()
    net = pytest.importorskip("timm").create_model("mobilevit_xxs", num_classes=5)
    (decided,) = leannorm.fold(net, (torch.randn(1, 3, 64, 64),), verify=False).decided
    assert decided.test == "new_h != H or new_w != W"
    assert decided.place.endswith("in MobileVitBlock.forward")
    assert "2 != 2 is False" in decided.value


class Valued(Block):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y


@pytest.mark.filterwarnings("ignore")
def test_a_test_of_values_is_named_where_it_cannot_be_traced():
    with pytest.raises(InputError, match=r"test_fold_decided\.py:\d+ in Valued\.forward: `y\.sum\(\) > 0`"):
        leannorm.fold(Valued(), (torch.randn(4, 3, 8, 8),))


def test_code_without_source_is_named_all_the_same():
    names = {"Block": Block, "__name__": __name__}
    exec("class Hidden(Block):\n def forward(self, x): return Block.forward(self, x[:2] if len(x) else x)\n"
         " def more(self, x): return x if x.shape[0] > 2 else x", names)  # fmt: skip
    names["Hidden"].forward = lambda self, x: Block.forward(self, self.more(x))
    (decided,) = leannorm.fold(names["Hidden"](), (torch.randn(4, 3, 8, 8),)).decided
    assert decided == ("<string>:3 in Hidden.more", "a test without source", "4 > 2 is True")


def test_the_model_is_left_as_it_was():
    net = Counting()
    state = torch.get_rng_state()
    leannorm.fold(net, (torch.ones(4, 3, 8, 8),), verify=False)
    assert (net.calls, net.training, int(net.bn.num_batches_tracked)) == (0, True, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_program_holds_no_python():
    forked = program.fork(Batch(), (torch.randn(4, 3, 8, 8),))
    assert leannorm.fold(forked).decided == ()
