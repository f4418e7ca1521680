"""The batch-norm layers as torch.nn's stand-ins: old checkpoints, flags, whole models, bad input."""

import copy

import pytest
import torch
from torch import nn as stock

from leannorm import nn
from leannorm._errors import DtypeError, InputError

SHAPES = {"1d": (6, 4), "1dl": (6, 4, 5), "2d": (6, 4, 3, 5), "3d": (6, 4, 2, 3, 2)}
PAIRS = {
    "1d": (nn.BatchNorm1d, stock.BatchNorm1d),
    "1dl": (nn.BatchNorm1d, stock.BatchNorm1d),
    "2d": (nn.BatchNorm2d, stock.BatchNorm2d),
    "3d": (nn.BatchNorm3d, stock.BatchNorm3d),
}
kinds = pytest.mark.parametrize("kind", list(PAIRS))


def test_flag_turned_off_later_behaves_as_torchs():
    """Buffers that are there are used in evaluation and left alone in training."""
    ours, theirs = nn.BatchNorm2d(4), stock.BatchNorm2d(4)
    x = torch.randn(6, 4, 3, 5) + 2
    for layer in (ours, theirs):
        layer(x)
        layer.track_running_stats = False
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    assert ours.num_batches_tracked == theirs.num_batches_tracked == 1


def test_a_version_1_checkpoint_loads():
    old = stock.BatchNorm2d(4).state_dict()
    del old["num_batches_tracked"]
    old._metadata[""]["version"] = 1
    layer = nn.BatchNorm2d(4)
    layer(torch.randn(2, 4, 3, 3))
    layer.load_state_dict(old)
    assert layer.num_batches_tracked in (0, 1)  # torch keeps the layer's own count
    reference = stock.BatchNorm2d(4)
    reference(torch.randn(2, 4, 3, 3))
    reference.load_state_dict(old)
    assert layer.num_batches_tracked == reference.num_batches_tracked


def test_cumulative_average_is_over_all_batches():
    layer = nn.BatchNorm1d(3, momentum=None)
    batches = [torch.randn(8, 3) * 2 + i for i in range(10)]
    for batch in batches:
        layer(batch)
    torch.testing.assert_close(layer.running_mean, torch.stack([b.mean(0) for b in batches]).mean(0))
    torch.testing.assert_close(layer.running_var, torch.stack([b.var(0) for b in batches]).mean(0))


def wrong(kind):
    return torch.randn(SHAPES["2d" if kind.startswith("1d") else "1d"])


BAD = [
    (lambda kind: wrong(kind), InputError, r"expected .*D input \(got"),
    (lambda kind: torch.ones(SHAPES[kind], dtype=torch.long), DtypeError, "floating point"),
    (lambda kind: torch.randn(6, 5, *SHAPES[kind][2:]), InputError, "one entry per channel"),
    (
        lambda kind: torch.randn(1, 4, *(1 for _ in SHAPES[kind][2:])),
        InputError,
        "more than 1 value",
    ),
    (
        lambda kind: torch.randn(SHAPES[kind], device="meta"),
        InputError,
        "device meta, got cpu",
    ),
]


@kinds
@pytest.mark.parametrize(("make", "kind_of_error", "message"), BAD, ids=[b[2] for b in BAD])
def test_bad_input_says_the_rule_and_changes_nothing(kind, make, kind_of_error, message):
    layer = PAIRS[kind][0](4)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(kind_of_error, match=message):
        layer(make(kind))
    for a, b in zip(before.values(), layer.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": 0.0}, "eps must be positive, got 0"),
        ({"eps": -1e-5}, "eps must be positive, got -1e-05"),
        ({"momentum": 1.1}, "momentum must be in .0, 1. or None"),
        ({"momentum": -0.1}, "momentum must be in"),
    ],
)
def test_bad_arguments(change, message):
    layer, x = nn.BatchNorm2d(4, **change), torch.randn(SHAPES["2d"])
    with pytest.raises(ValueError, match=message):
        layer(x)
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"act": "tanh"}, "act must be one of identity, relu"),
        ({"residual": torch.randn(6, 4, 1, 1)}, "residual must have the input's shape"),
        ({"running_var": None}, "both be given or both be None"),
        ({"running_mean": torch.zeros(3)}, "running_mean must have one entry per channel"),
        ({"weight": torch.ones(4, dtype=torch.int32)}, "weight must be floating point"),
        ({"running_mean": None, "running_var": None}, "evaluation needs running_mean"),
        ({"residual": torch.ones(SHAPES["2d"], dtype=torch.long)}, "residual must be floating point"),
        ({"residual": torch.ones(SHAPES["2d"], device="meta")}, "residual must be on the input's device"),
        ({"momentum": None, "training": True}, "momentum=None .* needs a count"),
        ({"running_var": torch.ones(1).expand(4), "training": True}, "running_var is updated in place"),
        ({"running_var": torch.ones(4, requires_grad=True), "training": True}, "and need no gradient"),
    ],
)
def test_bad_arguments_of_the_function(change, message):
    from leannorm import functional

    good = {"running_mean": torch.zeros(4), "running_var": torch.ones(4), "act": "relu"}
    with pytest.raises(InputError, match=message):
        functional.batch_norm_act(torch.randn(SHAPES["2d"]), **(good | change))
    assert torch.equal(good["running_mean"], torch.zeros(4))


def swap(model):
    for child in model.children():
        for theirs, ours in ((stock.BatchNorm1d, nn.BatchNorm1d), (stock.BatchNorm2d, nn.BatchNorm2d)):
            if type(child) is theirs:
                child.__class__ = ours
        swap(child)
    return model


def test_a_whole_model_trains_the_same_in_float64():
    def block(i, o):
        return [stock.Conv2d(i, o, 3, padding=1, bias=False), stock.BatchNorm2d(o), stock.ReLU(inplace=True)]

    theirs = stock.Sequential(*block(3, 8), *block(8, 8), stock.AdaptiveAvgPool2d(1), stock.Flatten())
    theirs.append(stock.BatchNorm1d(8)).append(stock.Linear(8, 2)).double()
    ours = swap(copy.deepcopy(theirs))
    for _ in range(3):
        x = torch.randn(8, 3, 12, 12, dtype=torch.float64)
        for model in (theirs, ours):
            model.zero_grad()
            model(x).square().sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
    assert [type(m).__module__.split(".")[0] for m in ours if "BatchNorm" in repr(m)] == ["leannorm"] * 3
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    theirs.load_state_dict(ours.state_dict())
