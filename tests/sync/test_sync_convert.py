"""`convert(model, to="sync")` and back: what a layer is besides its statistics stays as it is."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch import nn as torch_nn

from benchmarks.architectures import import_torchvision
from leannorm import nn
from leannorm.transforms import convert, preview


class ThenTanh(torch_nn.BatchNorm2d):
    """A subclass that nobody knows."""

    def forward(self, input):
        return torch.tanh(super().forward(input))


class ByItself(torch_nn.BatchNorm2d):
    def forward(self, input):
        return torch_nn.functional.batch_norm(input, None, None, self.weight, self.bias, True)


def network():
    torch.manual_seed(0)
    shared = torch_nn.BatchNorm2d(4, momentum=None)
    layers = [
        torch_nn.Conv2d(3, 4, 3),
        shared,
        ThenTanh(4),
        torch_nn.ReLU(),
        shared,
        nn.BatchNormAct2d(4, act="silu"),
    ]
    model = torch_nn.Sequential(*layers)
    model[2].eval()
    model[2].weight.requires_grad_(False)
    return model


def test_objects_flags_hooks_and_sharing_stay():
    model = network()
    seen = []
    model[1].register_forward_hook(lambda *args: seen.append(1))
    before = {name: (id(value), value.requires_grad) for name, value in model.named_parameters()}
    keys = list(model.state_dict())
    repr_before, classes = repr(model), [type(m) for m in model]
    assert convert(model, to="sync") is model
    assert {name: (id(value), value.requires_grad) for name, value in model.named_parameters()} == before
    assert list(model.state_dict()) == keys
    assert model[1] is model[4]
    assert not model[2].training
    assert all(isinstance(model[i], nn.SyncBatchNorm) for i in (1, 2, 4, 5))
    assert isinstance(model[1], torch_nn.BatchNorm2d)
    model(torch.randn(2, 3, 5, 5))
    assert seen == [1, 1]
    with pytest.raises(ValueError, match="expected 4D"):
        model[1](torch.randn(2, 4))
    with pytest.warns(UserWarning, match="ThenTanh is not known"):
        convert(model, to="leannorm", fuse=False)
    assert not any(isinstance(m, nn.SyncBatchNorm) for m in model)
    assert isinstance(model[1], nn.BatchNorm2d)
    with pytest.warns(UserWarning, match="torch has no such layer"):
        convert(convert(model, to="sync"), to="torch")
    assert [type(m) for m in model][:5] == classes[:5]
    assert repr(model[:5]) == repr(network()[:5])
    assert repr_before
    assert not set(vars(model[1])) - set(vars(torch_nn.BatchNorm2d(4)))


@pytest.mark.parametrize("run_first", [True, False])
def test_lazy_layers_get_their_size_and_share(run_first):
    model = torch_nn.Sequential(torch_nn.LazyBatchNorm2d(momentum=None))
    x = torch.randn(2, 3, 5, 5)
    assert convert(model, to="sync") is model
    twin = pickle.loads(pickle.dumps(model))
    if run_first:
        assert torch.equal(twin(x), nn.BatchNorm2d(3, momentum=None)(x))
        assert type(twin[0]).__name__ == "SyncBatchNorm2d"
        assert twin[0].layer_name == "0"
    convert(twin, to="torch")
    assert type(twin[0]) is (torch_nn.BatchNorm2d if run_first else torch_nn.LazyBatchNorm2d)
    assert torch.equal(twin.eval()(x).isfinite(), torch.ones(x.shape) > 0)
    assert type(twin[0]) is torch_nn.BatchNorm2d


def test_copies_and_pickles():
    model = convert(network(), to="sync")
    x = torch.randn(2, 3, 5, 5)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(m) for m in twin] == [type(m) for m in model]
        assert twin[1].layer_name == "1"
        assert torch.equal(twin(x), copy.deepcopy(model)(x))


def test_preview_changes_nothing():
    model = network()
    state = [(type(m), dict(vars(m))) for m in model]
    found = preview(model, to="sync")
    assert [(type(m), dict(vars(m))) for m in model] == state
    assert found.swapped["1"] == ("BatchNorm2d", "SyncBatchNorm2d")
    assert found.swapped["2"] == ("ThenTanh", "SyncThenTanh")
    assert "1: BatchNorm2d -> SyncBatchNorm2d" in str(found)


LEFT = [
    (ByItself(3), "by itself"),
    (nn.ConvBatchNorm2d(3, 4, 3), "to_pair"),
]


@pytest.mark.parametrize(("layer", "reason"), LEFT, ids=lambda v: type(v).__name__)
def test_what_is_left_is_named(layer, reason):
    model = torch_nn.Sequential(layer)
    assert reason in "".join(preview(model, to="sync").left.values())
    with pytest.warns(UserWarning, match=reason):
        convert(model, to="sync")
    assert type(model[0]) is type(layer)


def test_torchs_own_sync_batch_norm_runs_on_a_cpu():
    model = torch_nn.Sequential(torch_nn.SyncBatchNorm(3))
    assert convert(model, to="sync")(torch.randn(2, 3)).shape == (2, 3)
    assert type(convert(model, to="torch")[0]) is torch_nn.SyncBatchNorm


def converted(rank, make):
    """Two ranks' outputs, gradients and statistics, and the whole batch's through the model as it was."""
    one = make().double().train()
    model = convert(copy.deepcopy(one), to="sync")
    torch.manual_seed(1)
    x = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    mine = slice(rank, rank + 1 + 2 * rank)
    whole, part = one(x), model(x[mine])
    pairs = [(whole[mine], part), *zip(one.buffers(), model.buffers(), strict=True)]
    whole.square().sum().backward()
    part.square().sum().backward()
    gradients = [(p.grad, q.grad) for p, q in zip(one.parameters(), model.parameters(), strict=True)]
    gradients = [(p, q) for p, q in gradients if p is not None]
    largest = max(p.norm() for p, _ in gradients)
    for p, q in gradients:
        dist.all_reduce(q)
        pairs.append((p / largest, q / largest))
    return max((a - b).abs().max().item() for a, b in pairs)


def tiny():
    return network()[:5]


def timm():
    import_torchvision()  # timm needs it too
    return pytest.importorskip("timm")


def resnet_of_timm():
    return timm().create_model("resnet10t", num_classes=5)


def resnet_of_torchvision():
    timm()
    return pytest.importorskip("torchvision").models.resnet18(weights=None, num_classes=5)


def efficient_net_of_timm():
    return timm().create_model("efficientnet_b0", num_classes=5, drop_rate=0, drop_path_rate=0)


@pytest.mark.sampled(of=2)
@pytest.mark.parametrize("make", [tiny, resnet_of_timm, resnet_of_torchvision, efficient_net_of_timm])
def test_whole_models(make):
    assert max(ranks(2, converted, make)) <= 1e-11  # float64, tens of layers
