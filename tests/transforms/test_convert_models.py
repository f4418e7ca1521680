"""`convert` on whole models of timm and torchvision: equal in float64, within the budget in float32."""

import copy
import pickle
from collections import Counter
from importlib.util import find_spec

import pytest
import torch
from cases import error
from fuse_cases import fused, nodes_of_python

from benchmarks.architectures import import_torchvision
from leannorm import convert, nn

# image size, the norms, and how many are computed with an activation; at 32 a channel of the last maps
# has two values, whose gradients are all rounding
MODELS = {
    "torchvision:resnet18": (64, {"BatchNorm2d": 20}, 0),
    "torchvision:mobilenet_v3_small": (64, {"BatchNorm2d": 34}, 23),
    "timm:test_resnet": (64, {"BatchNorm2d": 15}, 2),
    "timm:test_byobnet": (64, {"BatchNorm2dThenAct": 14}, 6),
    "timm:test_efficientnet": (64, {"BatchNorm2dThenAct": 13}, 9),
    "timm:test_efficientnet_gn": (64, {"GroupNormThenAct": 13}, 0),
    "timm:test_efficientnet_ln": (64, {"LayerNormThenAct": 13}, 0),
    "timm:test_coatnet": (160, {"BatchNorm2dThenAct": 7, "LayerNorm": 7}, 5),
    "timm:test_convnext": (64, {"LayerNorm": 14}, 0),
    "timm:test_vit": (160, {"LayerNorm": 13}, 0),
    "timm:test_vit4": (160, {"RMSNorm": 19}, 0),
}
SWEEP = [
    "torchvision:shufflenet_v2_x0_5",
    "torchvision:resnet50",
    "torchvision:densenet121",
    "torchvision:efficientnet_b0",
    "torchvision:convnext_tiny",
    "torchvision:regnet_y_400mf",
    "torchvision:googlenet",
    "torchvision:mnasnet0_5",
    "timm:resnet18",
    "timm:seresnet50",
    "timm:resnetv2_50",
    "timm:densenet121",
    "timm:efficientnet_b0",
    "timm:mobilenetv3_small_100",
    "timm:regnety_002",
    "timm:mixnet_s",
    "timm:cspresnet50",
    "timm:convnext_atto",
]


@pytest.fixture(scope="module")
def zoo():
    """timm and torchvision, by name."""
    if find_spec("timm") is None or find_spec("torchvision") is None:
        pytest.skip("needs timm and torchvision")
    import_torchvision()
    import timm
    import torchvision

    return {"timm": timm.create_model, "torchvision": torchvision.models.get_model}


def create(zoo, model):
    torch.manual_seed(0)
    library, name = model.split(":")
    options = {"init_weights": False} if name == "googlenet" else {}
    return zoo[library](name, num_classes=10, **options)


def results(model, x):
    torch.manual_seed(1)
    y = model.train()(x)
    y = getattr(y, "logits", y)
    gradients = torch.autograd.grad(y.square().sum(), list(model.parameters()), allow_unused=True)
    buffers = [b.clone() for b in model.buffers() if b.is_floating_point()]
    with torch.no_grad():
        evaluated = model.eval()(x)
    return [y.detach(), evaluated, *buffers, *(g for g in gradients if g is not None)]


def compare(zoo, model, size):
    original = create(zoo, model).double()
    converted = copy.deepcopy(original)
    assert convert(converted) is converted
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    got, want = results(converted, x), results(original, x)
    largest = max(w.abs().max().item() for w in want)
    for g, w in zip(got, want, strict=True):
        assert error(g, w) <= 1e-12 * largest
    return original, converted


def look(model):
    return [(name, type(m), sorted(vars(m)), m.training) for name, m in model.named_modules()]


def norms(model):
    ours = (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    return dict(Counter(type(m).__name__ for m in model.modules() if isinstance(m, ours)))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.sampled(of=2)
def test_same_numbers_and_a_way_back(zoo, model):
    size, expected, joined = MODELS[model]
    original, converted = compare(zoo, model, size)
    assert norms(converted) == expected
    with nodes_of_python():
        y = copy.deepcopy(converted).train()(torch.randn(2, 3, size, size).double())
    assert fused(y) == joined
    assert list(converted.state_dict()) == list(original.state_dict())
    x = torch.randn(1, 3, size, size, dtype=torch.float64)
    assert torch.equal(pickle.loads(pickle.dumps(converted))(x), converted(x))
    assert look(convert(converted, to="torch")) == look(original)
    assert torch.equal(copy.deepcopy(converted)(x), converted(x))


@pytest.mark.conformance
@pytest.mark.parametrize("model", SWEEP)
def test_sweep(zoo, model):
    compare(zoo, model, 96)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_float32_within_the_budget(zoo, layout):
    """As far from float64 as stock is, twice at most, in each output and gradient as a whole."""
    stocks = create(zoo, "torchvision:resnet18").to(memory_format=layout)
    exact, ours = copy.deepcopy(stocks).double(), convert(copy.deepcopy(stocks))
    x = torch.randn(8, 3, 32, 32).to(memory_format=layout)
    runs = [results(model, x.to(next(model.parameters()).dtype)) for model in (ours, stocks, exact)]
    total = {"ours": 0.0, "stock": 0.0}
    for got, torchs, want in zip(*runs, strict=True):
        assert got.dtype == torchs.dtype
        total["ours"] += (got - want).square().sum().item()
        total["stock"] += (torchs - want).square().sum().item()
    assert total["ours"] <= 4 * total["stock"]
