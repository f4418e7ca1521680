"""Frozen norms stay bit for bit through real training loops, and answer as in evaluation."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from ranks import ranks
from torch import nn as stock
from torch.optim.swa_utils import update_bn

import leannorm
from benchmarks.architectures import import_torchvision
from leannorm import nn


def network(norm=nn.BatchNorm2d):
    torch.manual_seed(0)
    return stock.Sequential(
        stock.Conv2d(3, 8, 3, bias=False), norm(8), stock.ReLU(),
        stock.Conv2d(8, 8, 3), norm(8), stock.Flatten(), stock.Linear(8 * 16, 2),
    )  # fmt: skip


def timm_norm(channels):
    import_torchvision()
    from timm.layers import BatchNormAct2d

    return BatchNormAct2d(channels)


def convnorm_network():
    layers = stock.Conv2d(8, 8, 3), stock.Flatten(), stock.Linear(128, 2)
    return stock.Sequential(nn.ConvBatchNorm2d(3, 8, 3), stock.ReLU(), *layers)


NETWORKS = {
    "ours": network,
    "act": lambda: network(nn.BatchNormAct2d),
    "sync": lambda: network(nn.SyncBatchNorm),
    "instance": lambda: network(lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True)),
    "torch": lambda: network(stock.BatchNorm2d),
    "timm": lambda: network(timm_norm),
    "timm converted": lambda: leannorm.convert(network(timm_norm)),
    "fused": lambda: leannorm.convert(network(stock.BatchNorm2d)),
    "convolution": convnorm_network,
    "operator": lambda: network(nn.BatchNormOp),
}


def norms(model):
    return [m for m in model.modules() if "running_var" in m._buffers or "estimated_var" in m._buffers]


def bytes_of(model):
    return [(k, v.clone()) for m in norms(model) for k, v in m.state_dict().items() if "act" not in k]


def assert_same(some, others):
    for (name, one), (_, other) in zip(some, others, strict=True):
        assert torch.equal(one, other), name


def steps(model, count=3, optimizer=None, after=lambda: None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, weight_decay=0.1)
    torch.manual_seed(1)
    for _ in range(count):
        model.train()
        x = torch.randn(4, 3, 8, 8, requires_grad=True) + 1
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()
        after()
    return optimizer


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.sampled(of=3)
def test_a_hundred_steps(name):
    model = NETWORKS[name]()
    optimizer = steps(model)  # gradients and momentum are there
    classes, keys = [type(m) for m in model.modules()], list(model.state_dict())
    wanted = [p.requires_grad for p in model.parameters()]
    first = model[0].conv if name == "convolution" else model[0]
    assert leannorm.freeze(model) is model
    assert ([type(m) for m in model.modules()], list(model.state_dict())) == (classes, keys)
    before, moving = bytes_of(model), first.weight.clone()
    steps(model, 100, optimizer)
    assert_same(bytes_of(model), before)
    assert not torch.equal(first.weight, moving)
    assert model.training
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(model.train()(x), model.eval()(x))
    assert leannorm.unfreeze(model.train()) is model
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert all(m.training for m in model.modules())
    assert all("train" not in vars(m) for m in model.modules())
    steps(model, 1, optimizer)
    assert not any(
        torch.equal(a, b) for (k, a), (_, b) in zip(bytes_of(model), before, strict=True) if "mean" in k
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_copies_are_frozen_and_by_themselves(name):
    model = leannorm.freeze(NETWORKS[name]())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    others = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)
    for other in others:
        before = bytes_of(other)
        steps(other)
        assert_same(bytes_of(other), before)
        leannorm.unfreeze(other)
        assert other.train()(torch.randn(4, 3, 8, 8)) is not None
        assert all(m.training for m in other.modules())
    assert not any(m.training for m in norms(model.train()))


def parametrized():
    return stock.utils.parametrizations.weight_norm(nn.BatchNorm2d(8), "weight", dim=None)


def attributes_copied(layer):
    twin = type(layer).__new__(type(layer))
    vars(twin).update(vars(layer))
    return twin


SHALLOW = {
    "copy": copy.copy,
    "copy of a copy": lambda layer: copy.copy(copy.copy(layer)),
    "replica": lambda layer: layer._replicate_for_data_parallel(),
    "attributes": attributes_copied,
}


@pytest.mark.parametrize("copied", SHALLOW)
@pytest.mark.parametrize("name", [*NETWORKS, "parametrized"])
def test_a_shallow_copy_is_by_itself(name, copied):
    layer = parametrized() if name == "parametrized" else norms(NETWORKS[name]())[0]
    before = sorted(vars(layer))
    leannorm.freeze(layer)
    if name == "parametrized" and "copy" in copied:
        with pytest.raises(RuntimeError, match="Serialization of parametrized"):  # as of one that trains
            SHALLOW[copied](layer)
        return
    for first in (0, 1):
        pair = [layer, SHALLOW[copied](layer)]
        assert all(m.training is False and "train" in vars(m) for m in pair)
        if copied != "attributes":
            pair[1].train(False)  # is the mode of the copy alone
        leannorm.unfreeze(pair[first])
        assert ["train" in vars(m) for m in pair] == [first == 1, first == 0]
        assert not pair[1 - first].training
        assert pair[0].train().training == (first == 0)
        leannorm.unfreeze(pair[1 - first])
        assert sorted(vars(layer)) == before
        assert layer.training
        leannorm.freeze(layer)


@pytest.mark.parametrize("copied", ["copy", "copy of a copy", "replica"])
def test_a_shallow_copy_with_frozen_parameters_has_its_mode(copied):
    layer = leannorm.freeze(nn.BatchNorm2d(8), statistics=False)
    twin = SHALLOW[copied](layer)
    twin.eval()
    assert (layer.training, twin.training) == (True, False)
    layer.eval(), twin.train()
    assert (layer.training, twin.training) == (False, True)


def test_statistics_alone_and_affine_alone():
    x = torch.randn(4, 3, 8, 8) + 1
    model = leannorm.freeze(network(), affine=False)
    before = dict(bytes_of(model))
    steps(model)
    after = dict(bytes_of(model))
    assert torch.equal(after["running_mean"], before["running_mean"])
    assert not torch.equal(after["weight"], before["weight"])
    model = leannorm.freeze(network(), statistics=False)
    before = dict(bytes_of(model))
    steps(model)
    after = dict(bytes_of(model))
    assert torch.equal(after["weight"], before["weight"])
    assert not torch.equal(after["running_mean"], before["running_mean"])
    assert model[1].training
    leannorm.freeze(model, affine=False)  # one after the other is both
    before = bytes_of(model)
    steps(model)
    assert_same(bytes_of(model), before)
    assert torch.equal(model.train()(x), model.eval()(x))
    assert not leannorm.unfreeze(model)[1].training  # the mode that was last asked for
    assert leannorm.unfreeze(model)[1].weight.requires_grad
    assert leannorm.unfreeze(model).train()[1].training


def test_print_says_what_is_frozen():
    model = stock.Sequential(nn.BatchNorm2d(4), stock.BatchNorm2d(4), stock.LayerNorm(4))
    before = str(model)
    line = str(leannorm.freeze(model, affine=False)).splitlines()[1]
    assert line.endswith("track_running_stats=True, frozen=statistics)")
    assert str(leannorm.freeze(model)).count("frozen=statistics+affine") == 2
    assert str(copy.deepcopy(model)) == str(pickle.loads(pickle.dumps(model))) == str(model)
    assert str(leannorm.unfreeze(model)) == before


def test_what_did_not_train_before_does_not_after():
    model = network()
    model[1].weight.requires_grad_(False)
    leannorm.unfreeze(leannorm.freeze(leannorm.freeze(model)))
    assert (model[1].weight.requires_grad, model[1].bias.requires_grad) == (False, True)


def test_match_and_what_has_no_running_statistics():
    model = stock.Sequential(network(), stock.LayerNorm(2))
    leannorm.freeze(model, match=lambda name, layer: name == "0.1").train()
    assert [m.training for m in norms(model)] == [False, True]
    leannorm.freeze(model).train()
    assert [m.training for m in norms(model)] == [False, False]
    assert model[1].weight.requires_grad
    free = nn.BatchNorm2d(3, track_running_stats=False)
    for change in (leannorm.freeze, leannorm.unfreeze):
        with pytest.warns(UserWarning, match="e found no norm layer with running statistics in BatchNorm2d"):
            assert change(free).train().training
    with pytest.raises(leannorm.InputError, match=r"it is of none; their names are '0\.1', '0\.4'"):
        leannorm.freeze(model, match=lambda name, layer: name == "module.0.1")
    with pytest.raises(leannorm.InputError, match="statistics=False and affine=False"):
        leannorm.freeze(model, statistics=False, affine=False)


def test_parametrized_weights():
    layer = nn.BatchNorm2d(3)
    stock.utils.parametrizations.weight_norm(layer, "weight", dim=None)
    steps_of = torch.optim.SGD(layer.parameters(), 0.1)
    leannorm.freeze(layer)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    layer.train()(torch.randn(4, 3, 5, 5, requires_grad=True)).square().mean().backward()
    steps_of.step()
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    leannorm.unfreeze(layer)
    assert all(p.requires_grad for p in layer.parameters())


def test_update_bn_does_not_reset_it():
    model = network()
    steps(model)
    leannorm.freeze(model)
    before = bytes_of(model)
    update_bn([torch.randn(4, 3, 8, 8)], model)
    assert_same(bytes_of(model), before)
    update_bn([torch.randn(4, 3, 8, 8) + 3], leannorm.unfreeze(model))
    assert not torch.equal(model[1].running_mean, dict(before)["running_mean"])


def test_compiled_exported_scripted_and_forked():
    x = torch.randn(4, 3, 8, 8)
    for make in (network, NETWORKS["torch"]):
        model = leannorm.freeze(make()).train()
        before, want = bytes_of(model), model(x)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), want)
        assert torch.equal(torch.export.export(model, (x,)).module()(x), want)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            torch.testing.assert_close(torch.jit.trace(model, x)(x), want)
        branches = leannorm.program.fork(model, (x,))
        torch.testing.assert_close(branches.train(x), want)
        assert_same(bytes_of(model), before)


def test_convert_keeps_it_both_ways():
    model = leannorm.freeze(network(stock.BatchNorm2d))
    before = bytes_of(model)
    for to in ("leannorm", "sync", "leannorm", "torch"):
        leannorm.convert(model, to=to)
        steps(model)
        assert_same(bytes_of(model), before)
    assert type(model[1]) is stock.BatchNorm2d
    joined = stock.Sequential(
        nn.ConvBatchNorm2d.from_pair(stock.Conv2d(3, 8, 3), leannorm.freeze(nn.BatchNorm2d(8)))
    )
    before = bytes_of(joined)
    joined.train()(torch.randn(2, 3, 8, 8))
    assert_same(bytes_of(joined), before)


def kept_bytes(block, x):
    seen = {}

    def pack(t):
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        block(x)
    return sum(n for p, n in seen.items() if p != x.untyped_storage().data_ptr())


@pytest.mark.parametrize("act", ["identity", "relu", "leaky_relu"])
def test_a_frozen_norm_holds_no_input(act):
    """Beside the convolutions' inputs there are vectors alone; torch's norm holds the first's output too."""
    middle = nn.BatchNormAct2d(8, act=act)
    block = stock.Sequential(stock.Conv2d(3, 8, 1), middle, stock.Conv2d(8, 8, 1))
    x = torch.randn(4, 3, 16, 16)
    feature = 4 * 8 * 16 * 16 * 4
    assert kept_bytes(block, x) >= 2 * feature
    leannorm.freeze(block).train()
    assert feature <= kept_bytes(block, x) < feature + 2000
    torchs = stock.Sequential(block[0], stock.BatchNorm2d(8), stock.ReLU(), block[2])
    assert kept_bytes(leannorm.freeze(torchs), x) >= 2 * feature


@pytest.mark.parametrize("act", ["relu", "leaky_relu", "elu", "silu", "gelu"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.sampled(of=2)
def test_gradients_through_a_frozen_norm_and_its_activation(act, residual):
    layer = leannorm.freeze(nn.BatchNormAct2d(3, act=act)).double()
    layer.running_mean.normal_(), layer.running_var.uniform_(0.5, 2)
    given = [torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(1 + residual)]
    assert torch.autograd.gradcheck(layer, given)
    assert torch.autograd.gradgradcheck(layer, given)


def test_torchvisions_frozen_batch_norm_is_known():
    import_torchvision()
    from torchvision.ops import FrozenBatchNorm2d

    model = stock.Sequential(stock.Conv2d(3, 8, 1), FrozenBatchNorm2d(8))
    with torch.no_grad():
        for buffer in model[1].buffers():
            buffer.uniform_(0.5, 2)
    x = torch.randn(4, 3, 8, 8)
    want, state = model(x), model.state_dict()
    twin = leannorm.convert(copy.deepcopy(model))
    assert type(twin[1]).__module__.startswith("leannorm.")
    torch.testing.assert_close(twin(x), want)
    assert list(twin.state_dict()) == list(state)
    before = bytes_of(twin)
    steps_of = torch.optim.SGD(twin.parameters(), 0.1)
    twin.train()(x).square().mean().backward()
    steps_of.step()
    assert_same(bytes_of(twin), before)
    twin[1].load_state_dict(stock.BatchNorm2d(8).state_dict())  # torchvision's takes such a one too
    assert kept_bytes(twin, x) < 4 * 8 * 64 * 4
    assert type(leannorm.convert(twin, to="torch")[1]) is FrozenBatchNorm2d
    leannorm.freeze(twin), leannorm.unfreeze(twin)


def test_a_shared_parameter_trains_again():
    a, b = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    b.weight = a.weight
    leannorm.unfreeze(leannorm.freeze(stock.Sequential(a, b)))
    assert a.weight.requires_grad


def frozen_parts(rank):
    model = leannorm.freeze(network(nn.SyncBatchNorm), match=lambda name, layer: name == "1")
    model = stock.parallel.DistributedDataParallel(model)
    frozen, moving = ({k: v.clone() for k, v in model.module[i].state_dict().items()} for i in (1, 4))
    steps(model)
    assert all(torch.equal(v, frozen[k]) for k, v in model.module[1].state_dict().items())
    assert not any(torch.equal(v, moving[k]) for k, v in model.module[4].state_dict().items())
    return model.module[0].weight.sum().item()


def test_ranks_with_frozen_parts():
    first, second = ranks(2, frozen_parts)
    assert first == second
