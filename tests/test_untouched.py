"""Whoever is handed a model leaves it as it was: its tensors, attributes, counters, generators and hooks."""

import inspect
import itertools
import random
import warnings
from collections import OrderedDict, deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import leannorm
from leannorm import InputError, interop, program, transforms
from leannorm._untouched import Copies, left_alone, themselves, untouched
from leannorm.cli.inputs import tried
from leannorm.report.verify import verify_model


@dataclass
class State:
    """What a stream keeps beside its buffers."""

    steps: int = 0
    past: list = field(default_factory=lambda: [torch.zeros(3)])


class Slotted:
    __slots__ = ("held", "unset")

    def __init__(self):
        self.held = torch.zeros(3)


class Busy(nn.Module):
    """Its forward edits all that a model can hold; `fails`: and then raises."""

    def __init__(self, fails=False):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.unregistered = [nn.BatchNorm1d(4)]
        self.register_buffer("queue", torch.zeros(4))
        self.register_buffer("replaced", torch.zeros(2))
        self.plain, self.view = torch.zeros(6), None
        self.view = self.plain[2:4]
        self.listed = list(self.second.parameters())
        self.pair = (torch.zeros(2), [torch.zeros(2)])
        self.array = np.zeros(3)
        self.state, self.slots, self.names = State(), Slotted(), SimpleNamespace(calls=0)
        self.calls, self.seen, self.cache, self.counter = (
            0,
            deque(maxlen=9),
            {"a": {"b": [0]}},
            itertools.count(),
        )
        self.ordered = OrderedDict(a=1, b=2)
        self.torchs, self.pythons, self.numpys = torch.Generator(), random.Random(0), np.random.default_rng(0)
        self.fails = fails

    def train(self, mode=True):
        self.calls += 1
        self.first.weight.data.mul_(2.0 if mode else 0.5)  # as adapters that are merged in evaluation
        return super().train(mode)

    def forward(self, x):
        self.calls += 1
        self.names.calls += 1
        self.state.steps += 1
        self.seen.append(self.calls)
        self.cache["a"]["b"].append(self.calls)
        self.cache["c"] = 1
        self.ordered.move_to_end("a")
        self.queue.add_(1)
        random.random(), np.random.rand(), self.pythons.random(), self.numpys.random(), next(self.counter)
        y = self.bn(self.conv(x)) + torch.rand(4, 1, 1)
        if not torch.compiler.is_exporting():  # which refuses these
            self._edit_what_no_graph_has()
        if self.fails:
            raise ValueError("the forward pass fails")
        return self.second(self.first(y.mean((2, 3)))) + self.queue

    def _edit_what_no_graph_has(self):
        with torch.no_grad():
            torch.rand(1, generator=self.torchs)
            self.replaced = torch.ones(3)
            self.plain.add_(1)
            self.view.add_(1)
            self.state.past[0].add_(1)
            self.state.past.append(1)
            self.slots.held.add_(1)
            self.slots.unset = 1
            self.pair[0].add_(1)
            self.pair[1][0].add_(1)
            self.array += 1
            for mine, other in zip(self.first.parameters(), self.listed, strict=True):  # a momentum encoder
                other.data = 0.9 * other.data + 0.1 * mine.data
            self.conv.weight.data.mul_(0.5)
            self.conv.bias.tag = self.calls
        self.unregistered[0](torch.randn(5, 4))
        self.late = nn.Linear(1, 1)
        self.bn.eps *= 2
        self.bn.weight.requires_grad_(False)
        self.conv.register_forward_hook(lambda module, given, made: made + 1)
        if self.conv.weight.requires_grad:
            self.conv.weight.register_hook(lambda gradient: gradient * 2)


def everything(value, path="model", of=None, known=None):
    """All that a model holds, by identity and by value; of each thing one entry, by its path."""
    of, known = ({}, {}) if of is None else (of, known)
    if value is None or isinstance(value, (bool, int, float, str, type)):
        of[path] = value
        return of
    of[path] = id(value), type(value)
    if id(value) in known:
        return of
    known[id(value)] = value
    held = {}
    if isinstance(value, torch.Tensor):
        raw = tuple(value.detach().contiguous().flatten().view(torch.uint8).tolist())
        hooks = tuple(map(id, (value._backward_hooks or {}).values()))
        of[path] = *of[path], value.data_ptr(), value.shape, value.requires_grad, raw, hooks
        held = {"grad": value.grad, **vars(value)}
    elif type(value) in STATES:
        of[path] = *of[path], STATES[type(value)](value)
    elif isinstance(value, dict):
        of[path] = *of[path], *map(str, value)
        held = value
    elif isinstance(value, (tuple, list, set, deque)):
        held = dict(enumerate(value))
        of[path] = *of[path], len(held)
    else:
        slots = {n: getattr(value, n, "unset") for n in getattr(value, "__slots__", ())}
        held = {**getattr(value, "__dict__", {}), **slots}
    for name, one in held.items():
        everything(one, f"{path}.{name}", of, known)
    return of


STATES = {
    np.ndarray: np.ndarray.tolist,
    torch.Generator: lambda g: g.get_state().tolist(),
    random.Random: random.Random.getstate,
    np.random.Generator: lambda g: str(g.bit_generator.state),
    itertools.count: repr,
}


def states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def prepared(fails, mode):
    model = Busy(fails).train(mode)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    model.conv.register_forward_hook(lambda module, given, made: made)
    return model


def begins(callback, model):
    callback.on_train_begin(None, SimpleNamespace(is_world_process_zero=False), None, model=model)


def folded(model, x):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fold folded nothing")  # as the convolution has a hook
        leannorm.fold(model, (x,))


def typed(model, x):
    """It draws the input."""
    before = torch.get_rng_state()
    try:
        tried(model, ["2x3x8x8"], "a model")
    finally:
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        torch.randn(2, 3, 8, 8)
        assert torch.equal(torch.get_rng_state(), after)
        torch.set_rng_state(before)


def recalibrated(model, x):
    """Its own work is undone by hand."""
    before = [(b, b.clone()) for b in model.bn.buffers()]
    try:
        leannorm.recalibrate(model, [x, x])
        assert model.bn.num_batches_tracked == 2
    finally:
        for buffer, value in before:
            buffer.copy_(value)


LOOKS = {
    "doctor": lambda model, x: leannorm.doctor(model, [x, x]),
    "doctor, alone": lambda model, x: leannorm.doctor(model),
    "doctor, of two": lambda model, x: leannorm.doctor(nn.BatchNorm1d(3), averaged=model),
    "fit": lambda model, x: leannorm.fit(model, (3, 8, 8), "1MB", recompute=["norm"]),
    "fit, made": lambda model, x: leannorm.fit(lambda: model, (3, 8, 8), "1MB", recompute=["norm"]),
    "fold": folded,
    "fold of a program": lambda model, x: leannorm.fold(program.fork(model, (x,))),
    "fork": lambda model, x: program.fork(model, (x,)),
    "preview": lambda model, x: transforms.preview(model),
    "profile": lambda model, x: leannorm.profile(model, x, steps=1, budgets=[0.5]),
    "recalibrate": recalibrated,
    "check": lambda model, x: [*verify_model(model, x, steps=2)],
    "a command's input": typed,
    "transformers.doctor_callback": lambda model, x: begins(interop.transformers.doctor_callback(x), model),
}
# run none of the model's code
CHANGE_IT = {
    "accumulate_stats",
    "convert",
    "freeze",
    "unfreeze",
    "make_lean",
    "unmake_lean",
    "load",
    "save",
    "join",
}


def test_every_public_function_that_takes_a_model_is_here():
    rooms = (leannorm, transforms, program, interop, leannorm.distributed)
    functions = {
        name
        for room in rooms
        for name in room.__all__
        if inspect.isfunction(getattr(room, name))
        and {"model", "module", "network"} & inspect.signature(getattr(room, name)).parameters.keys()
    }
    assert functions == {name.partition(",")[0] for name in LOOKS} & functions | CHANGE_IT


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("fails", [False, True], ids=["runs", "raises"])
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_model_that_edits_all_that_it_holds_is_as_it_was(look, fails, mode):
    model, x = prepared(fails, mode), torch.randn(2, 3, 8, 8)
    before, given = everything(model), x.clone()
    random_states = states()
    # nothing is recalibrated in evaluation mode; three looks run no forward pass
    refused = look is recalibrated and not mode
    runs = look not in (LOOKS["doctor, alone"], LOOKS["doctor, of two"], LOOKS["preview"])
    with pytest.raises((ValueError, InputError)) if refused or (fails and runs) else nullcontext():
        look(model, x)
    assert states() == random_states
    assert everything(model) == before
    assert torch.equal(x, given)


def test_a_trainer_that_leads_back_to_the_model_is_left_alone():
    """It is no part of the model, and may have large things."""

    class Trainer:
        def __init__(self, model):
            self.strategy, self.data, self.steps = SimpleNamespace(model=model), torch.zeros(3), 0

    model = nn.BatchNorm1d(4)
    model.trainer = trainer = Trainer(model)
    with untouched(model):
        assert model.trainer.data is trainer.data
        trainer.steps, trainer.data[0] = 1, 1
    assert (model.trainer.steps, float(trainer.data[0])) == (1, 1.0)


def test_a_result_of_autograd_stays_itself_and_keeps_its_values():
    """A copy would not be of its graph."""
    model = nn.BatchNorm1d(4)
    weight = torch.ones(4, requires_grad=True)
    model.last = last = weight * 2
    with untouched(model), torch.no_grad():
        assert model.last is last
        last.data.add_(1)
    assert last.tolist() == [2.0] * 4
    last.sum().backward()
    assert weight.grad.tolist() == [2.0] * 4


def test_copies_share_memory_where_tensors_do():
    model = nn.Module()
    model.register_buffer("whole", torch.zeros(6))
    model.part = model.whole[2:4]
    with untouched(model):
        model.whole.fill_(1)
        assert model.part.tolist() == [1.0, 1.0]
    assert not model.whole.any()


def test_a_tensor_that_is_not_edited_keeps_its_version():
    """So a backward pass that waits is not disturbed, also where tensors are not exchanged."""
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(2, 3, 8, 8)
    loss = model(x).square().sum()
    with untouched(model, themselves):
        pass
    leannorm.profile(model, x, steps=1)
    loss.backward()
    assert model[0].weight.grad is not None


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn, self.calls = nn.BatchNorm1d(4), 0

    def forward(self, x):
        self.calls += 1
        return self.bn(x)


def test_a_scripted_model():
    model = torch.jit.script(Scripted())
    before = [b.clone() for b in model.buffers()]
    with untouched(model):
        model.eval()(torch.randn(8, 4))
        model.train()(torch.randn(8, 4))
    assert model.training
    assert model.calls == 0
    assert all(map(torch.equal, before, model.buffers()))


def test_lazy_layers_stay_lazy():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    with untouched(model):
        model(torch.randn(3, 2))
    assert model[0].has_uninitialized_params()
    assert model(torch.randn(3, 5)).shape == (3, 4)


def test_convert_draws_no_random_numbers():
    """Where it runs a layer of an unknown class, which does."""

    class NoisyNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            x = x + torch.randn_like(x) * random.random()
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight

    before = states()
    with pytest.warns(UserWarning, match="NoisyNorm"):
        leannorm.convert(nn.Sequential(NoisyNorm()))
    assert states() == before


@pytest.mark.parametrize("instead", [None, themselves, left_alone, Copies(parameters=False)])
def test_what_undoes_can_be_kept_from_it(instead):
    model = nn.BatchNorm1d(4)
    with untouched(model, instead) as undo:
        model.eps = 1.0
        undo.pop_all()
    assert model.eps == 1.0
    with untouched(model, instead):
        model.eps = 2.0
    assert model.eps == 1.0
