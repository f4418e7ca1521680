"""`doctor` changes nothing of a model, to the bit, also where a forward pass raises."""

import copy
import pickle
import random
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import leannorm
from leannorm import InputError, doctor
from leannorm._catalog import norms_of


class Busy(nn.Module):
    """A forward pass that leaves nothing as it is: what models of the wild do, all at once."""

    def __init__(self, fails=None):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.ours = leannorm.nn.ConvBatchNorm2d(8, 8, 3)
        self.frozen = leannorm.nn.BatchNorm2d(8).eval()
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 1))
        self.teacher = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.twin = self.bn.running_mean  # a buffer under a second name, as a plain attribute
        self.register_buffer("queue", torch.zeros(8))
        self.register_buffer("replaced", torch.zeros(2))
        self.calls, self.seen, self.cache, self.fails = 0, [], {}, fails
        self.drop = nn.Dropout(0.5)

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        self.calls += 1
        return self

    def forward(self, x):
        self.calls += 1
        self.seen.append(x.shape)
        self.cache["last"] = x
        self.queue.add_(torch.randn(8) + random.random() + np.random.rand())
        self.replaced = torch.ones(3)
        self.teacher.data = self.teacher.data * 0.9 + 1
        self.conv.weight.data.mul_(0.5)
        self.late = nn.Linear(1, 1)
        y = self.drop(self.frozen(self.spectral(self.ours(self.bn(self.conv(x))))))
        if self.fails == len(self.seen):
            raise ValueError("the forward pass fails")
        with torch.enable_grad():
            (y.detach().sum() * self.bn.weight.sum()).backward()
        return y.mean((2, 3))


def everything(model):
    """Values, identities, versions, modes, hooks, attributes and gradients; and the random states."""
    of = {}
    for path, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                grad = None if tensor.grad is None else (id(tensor.grad), tensor.grad.tolist())
                raw = tensor.detach().flatten().view(torch.uint8).tolist()
                of[path, name] = (
                    id(tensor),
                    tensor._version,
                    tensor.requires_grad,
                    tensor.stride(),
                    raw,
                    grad,
                )
        of[path, "vars"] = {k: id(v) for k, v in vars(module).items()}
        containers = {k: v for k, v in vars(module).items() if isinstance(v, (dict, list, set))}
        of[path, "containers"] = {
            k: [(a, id(b)) for a, b in v.items()] if isinstance(v, dict) else [*v]
            for k, v in containers.items()
        }
        of[path, "is"] = (type(module), module.training, getattr(module, "calls", 0))
    states = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
    return of, states


def prepared(fails=None, mode=True):
    model = Busy(fails)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn_like(p)
    model.conv.register_forward_hook(lambda module, given, made: made + 1)
    return model.train(mode)


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("data", [False, True], ids=["alone", "batches"])
def test_nothing_is_changed(mode, data):
    model = prepared(mode=mode)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [torch.randn(4, 3, 8, 8) for _ in range(2)] if data else None
    before = everything(model)
    report = doctor(model, batches, optimizer=optimizer)
    assert everything(model) == before
    assert report.batches == (2 if data else 0)
    assert all(state.calls == 1 for state in report.layers if data)


@pytest.mark.parametrize("fails", [1, 2])
def test_nothing_is_changed_where_a_pass_raises(fails):
    model = prepared(fails)
    batches = [torch.randn(4, 3, 8, 8) for _ in range(2)]
    before = everything(model)
    with pytest.raises(ValueError, match="the forward pass fails"):
        doctor(model, batches)
    assert everything(model) == before


def test_a_pass_that_is_interrupted_changes_nothing():
    model, given = prepared(), torch.randn(4, 3, 8, 8)
    before = everything(model)

    def forward(model, batch):
        model(batch)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        doctor(model, given, forward=forward)
    assert everything(model) == before


class Noisy(nn.Module):
    """Holds a generator of its own."""

    def __init__(self, generator, draw):
        super().__init__()
        self.generator, self.draw, self.norm = generator, draw, nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.draw(self.generator))


GENERATORS = {
    "torch": (torch.Generator, lambda g: torch.rand(8, generator=g), lambda g: g.get_state().tolist()),
    "numpy": (np.random.default_rng, lambda g: float(g.random()), lambda g: g.bit_generator.state),
    "numpy, legacy": (np.random.RandomState, lambda g: float(g.rand()), pickle.dumps),
    "Python": (lambda: random.Random(0), random.Random.random, random.Random.getstate),
}


@pytest.mark.parametrize(("make", "draw", "state_of"), GENERATORS.values(), ids=GENERATORS)
def test_a_generator_that_the_model_holds_is_put_back(make, draw, state_of):
    generator = make()
    before = state_of(generator)
    assert doctor(Noisy(generator, draw), torch.randn(4, 8)).batches == 1
    assert state_of(generator) == before


class Pair(NamedTuple):
    x: torch.Tensor
    label: torch.Tensor


@dataclass
class Sample:
    x: torch.Tensor


class Stored(MutableMapping):
    """A mapping whose shallow copy shares its entries."""

    def __init__(self, **entries):
        self.entries = entries

    def __getitem__(self, name):
        return self.entries[name]

    def __setitem__(self, name, value):
        self.entries[name] = value

    def __delitem__(self, name):
        del self.entries[name]

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return len(self.entries)


HOLDERS = {
    "a tensor": (lambda x: x, lambda batch: batch),
    "a tuple": (lambda x: (x, x[0]), lambda batch: batch[0]),
    "a named tuple": (lambda x: Pair(x, x[0]), lambda batch: batch.x),
    "a dict": (lambda x: {"x": x}, lambda batch: batch["x"]),
    "a mapping": (lambda x: Stored(x=x), lambda batch: batch["x"]),
    "a dataclass": (Sample, lambda batch: batch.x),
}


@pytest.mark.parametrize(("hold", "tensor_of"), HOLDERS.values(), ids=HOLDERS)
def test_a_batch_that_the_model_edits_stays_as_it_is(hold, tensor_of):
    """And the outputs of the two modes are of equal inputs."""

    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8, momentum=None)

        def forward(self, x):
            return self.norm(x.sub_(0.5).div_(0.25))

    model, x = Normalized(), torch.rand(64, 8)
    model(x.clone())
    given, batch = x.clone(), hold(x)
    report = doctor(model, [batch], forward=lambda model, batch: model(tensor_of(batch)))
    assert tensor_of(batch) is x
    assert torch.equal(x, given)
    assert report.difference < 0.01  # by the variance's correction for 64 samples


def test_training_after_it_is_training_without_it():
    """The loss of every step, with dropout and a loader that shuffles by a generator of its own."""
    data = torch.utils.data.TensorDataset(torch.randn(24, 3, 8, 8), torch.arange(24) % 2)

    def losses(looks):
        torch.manual_seed(3)
        shuffle = torch.Generator().manual_seed(4)
        loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, generator=shuffle)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Flatten(), nn.Linear(288, 2)
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        of = []
        for _ in range(3):
            for x, y in loader:
                if looks:
                    report = doctor(model, loader, optimizer=optimizer)
                    assert report.batches == 3
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                of.append(loss.item())
        return of, [b.tolist() for b in model.buffers()]

    assert losses(True) == losses(False)


def test_a_backward_pass_that_waits_is_not_disturbed():
    """Buffers that autograd has saved keep their version."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    loss = model(torch.randn(4, 3, 8, 8)).square().sum()
    doctor(model, torch.randn(4, 3, 8, 8))
    loss.backward()
    assert model[0].weight.grad is not None


def test_a_wrapped_and_a_compiled_model():
    inner = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, momentum=0.9))
    for wrapped, prefix in ((nn.DataParallel(inner), "module."), (torch.compile(inner), "_orig_mod.")):
        report = doctor(wrapped, torch.randn(8, 3, 8, 8))
        assert [(one.check, one.layer) for one in report.findings] == [("momentum", f"{prefix}1")]
        assert wrapped.get_submodule(f"{prefix}1") is inner[1]
    assert inner[1].num_batches_tracked == 0


def test_layers_of_every_package_are_known():
    from benchmarks.architectures import import_torchvision

    import_torchvision()
    import timm.layers
    import torchvision

    layers = nn.ModuleDict(
        {
            "torch": nn.BatchNorm2d(4),
            "sync": nn.SyncBatchNorm(4),
            "ours": leannorm.nn.SyncBatchNorm(4),
            "act": leannorm.nn.BatchNormAct2d(4),
            "joined": leannorm.nn.ConvBatchNorm2d(4, 4, 1),
            "op": leannorm.nn.BatchNormOp(4),
            "timm": timm.layers.BatchNormAct2d(4),
            "timm_frozen": timm.layers.FrozenBatchNormAct2d(4),
            "frozen": torchvision.ops.FrozenBatchNorm2d(4),
            "instance": nn.InstanceNorm2d(4),
            "group": timm.layers.GroupNormAct(4, num_groups=2),
            "layer": timm.layers.LayerNorm2d(4),
            "rms": timm.layers.RmsNorm(4),
            "lazy": nn.LazyBatchNorm2d(),
            "none": nn.Linear(4, 4),
        }
    )
    kinds = {norm.name.split(".")[0]: norm.kind for norm in norms_of(layers)}
    assert kinds == {
        **dict.fromkeys(("torch", "sync", "ours", "act", "joined", "op", "timm", "lazy"), "batch"),
        **dict.fromkeys(("timm_frozen", "frozen"), "frozen"),
        "instance": "instance",
        "group": "group",
        "layer": "layer",
        "rms": "rms",
    }
    report = doctor(layers)
    assert report.findings == []
    assert "lazy" not in [state.name for state in report.layers]  # it has no statistics yet


def test_what_cannot_be_looked_at_is_said():
    with pytest.raises(InputError, match="at least one batch"):
        doctor(nn.BatchNorm1d(4), [])
    with pytest.raises(InputError, match="run the model once"):
        doctor(nn.Sequential(nn.LazyLinear(4), nn.BatchNorm1d(4)), torch.randn(4, 4))
    with pytest.raises(InputError, match="optimizer must be"):
        doctor(nn.BatchNorm1d(4), optimizer=nn.BatchNorm1d(4).parameters())
    with torch.device("meta"):
        assert doctor(nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4))).findings == []
    assert doctor(nn.Linear(4, 4), torch.randn(2, 4)).layers == []


def test_a_deep_copy_and_a_frozen_model_of_ours_are_looked_at_alike():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), leannorm.nn.BatchNorm1d(4, momentum=0.9))
    assert doctor(copy.deepcopy(model)).findings == doctor(model).findings != []
