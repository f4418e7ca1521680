"""Every layer is constructed as torch's of the same name is, `bias=False` included."""

import copy
import inspect

import pytest
import torch
from ranks import ranks
from torch import nn as stock

from leannorm import functional, nn, program
from leannorm.transforms import convert, fold

SAME = [name for name in nn.__all__ if hasattr(stock, name)]
# ours of another name, and torch's that they stand in for when told no more
ALSO = {f"BatchNormAct{n}d": f"BatchNorm{n}d" for n in (1, 2, 3)}


@pytest.mark.parametrize("name", [*SAME, *ALSO])
def test_it_accepts_what_torchs_accepts(name):
    """Of this torch: by position, by name, with the same defaults; what is ours alone goes by name."""
    ours = inspect.signature(getattr(nn, name)).parameters
    theirs = inspect.signature(getattr(stock, ALSO.get(name, name))).parameters
    by_position = [p for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD] == [
        p.name for p in by_position
    ]
    for p in theirs.values():
        assert (ours[p.name].kind, ours[p.name].default) == (p.kind, p.default)
    assert all(p.kind is p.KEYWORD_ONLY for p in ours.values() if p.name not in theirs)


def test_which_layers_are_compared():
    assert len(SAME) == 10


has_bias = pytest.mark.skipif(
    "bias" not in inspect.signature(stock.BatchNorm2d).parameters, reason="this torch has no bias= here"
)
SHAPES = {
    "BatchNorm2d": (6, 4, 3, 5),
    "InstanceNorm2d": (6, 4, 3, 5),
    "GroupNorm": (6, 4, 3, 5),
    "LayerNorm": (6, 3, 4),
}


def pair(name):
    """Ours and torch's without a bias, of random weights."""
    given = (2, 4) if name == "GroupNorm" else (4,)
    more = {"affine": True} if name.startswith("Instance") else {}
    ours, theirs = (getattr(module, name)(*given, bias=False, **more) for module in (nn, stock))
    with torch.no_grad():
        theirs.weight.copy_(torch.rand(4) + 0.5)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@has_bias
def test_affine_false_has_neither():
    layer = nn.SyncBatchNorm(4, affine=False, bias=False)
    assert layer.weight is None
    assert layer.bias is None


@has_bias
@pytest.mark.parametrize("name", SHAPES)
def test_convert_there_and_back(name):
    _, theirs = pair(name)
    x, twin = torch.randn(SHAPES[name]), copy.deepcopy(theirs)
    model = convert(stock.Sequential(theirs))
    assert type(model[0]) is getattr(nn, name)
    torch.testing.assert_close(model(x), twin(x))
    assert repr(convert(model, to="torch")[0]) == repr(twin)
    assert list(model[0].state_dict()) == list(twin.state_dict())


@has_bias
def test_sync_conversion_there_and_back():
    _, theirs = pair("BatchNorm2d")
    x, twin = torch.randn(6, 4, 3, 5), copy.deepcopy(theirs)
    model = convert(stock.Sequential(theirs), to="sync")
    torch.testing.assert_close(model(x), twin(x))
    assert model[0].bias is None
    assert repr(convert(model, to="torch")[0]) == repr(twin)


@has_bias
def test_conv_batch_norm_of_a_pair_and_back():
    conv, (ours, bn) = stock.Conv2d(3, 4, 3), pair("BatchNorm2d")
    for norm in (ours, bn):
        layer = nn.ConvBatchNorm2d.from_pair(conv, norm)
        assert list(layer.state_dict())[:2] == ["conv.weight", "conv.bias"]
        assert "bn.bias" not in layer.state_dict()
        x, twin = torch.randn(2, 3, 6, 6), copy.deepcopy(stock.Sequential(conv, norm))
        got, want = layer(x), twin(x)
        torch.testing.assert_close(got, want)
        got.square().sum().backward(), want.square().sum().backward()
        torch.testing.assert_close(norm.weight.grad, twin[1].weight.grad, rtol=1e-4, atol=1e-4)
        conv.weight.grad = norm.weight.grad = None
        assert layer.to_pair() == (conv, norm)


@has_bias
def test_fold_and_program():
    _, bn = pair("BatchNorm2d")
    model, x = stock.Sequential(stock.Conv2d(3, 4, 3), bn, stock.ReLU()), torch.randn(2, 3, 6, 6)
    model(x)
    net = program.fork(copy.deepcopy(model), (x,))
    torch.testing.assert_close(net.infer(x), model.eval()(x))
    want = model(x)
    folded = fold(model, (x,)).model
    assert not any(isinstance(m, stock.BatchNorm2d) for m in folded.modules())
    torch.testing.assert_close(folded(x), want, rtol=1e-4, atol=1e-5)


def on_two_ranks(rank):
    """Shares of a batch, and the whole one in one process."""
    torch.manual_seed(0)
    ours, whole = nn.SyncBatchNorm(4, bias=False), stock.BatchNorm1d(4, bias=False)
    x = torch.randn(8, 4)
    mine = x.chunk(2)[rank].clone().requires_grad_()
    y, want = ours(mine), whole(x.requires_grad_())
    y.square().sum().backward(), want.square().sum().backward()
    torch.testing.assert_close(y, want.chunk(2)[rank])
    torch.testing.assert_close(mine.grad, x.grad.chunk(2)[rank], rtol=1e-4, atol=1e-5)
    function = functional.sync_batch_norm(mine, None, None, ours.weight, None, training=True)
    torch.testing.assert_close(function, y)
    return [k for k, _ in ours.named_parameters()]


@has_bias
def test_two_ranks():
    assert ranks(2, on_two_ranks) == [["weight"]] * 2
