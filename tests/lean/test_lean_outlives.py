"""Memory that existed before a pass stays after it: to drop what is written there frees nothing."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leannorm import lean
from leannorm.report.memory import measure_step

pytestmark = pytest.mark.filterwarnings("ignore:leannorm")
SETTINGS = [{"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.3}]
WIDTH, ROWS = 256, 32


class Loading:
    """Loads its weights at the start of each pass, as a training loop does that begins from a checkpoint."""

    def __init__(self):
        torch.manual_seed(0)
        layers = ((nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.SiLU()) for _ in range(3))
        self.network = nn.Sequential(*(layer for block in layers for layer in block))
        self.state = {name: value.clone() for name, value in self.network.state_dict().items()}
        self.x = torch.randn(ROWS, WIDTH)
        self.inputs = list(self.network.parameters())

    def loss(self):
        self.network.load_state_dict(self.state)
        return self.network(self.x).square().mean()


class Buffered(Loading):
    """Copies each batch into one buffer, as programs do that capture graphs."""

    def __init__(self):
        super().__init__()
        self.buffer = torch.zeros(ROWS, WIDTH)

    def loss(self):
        self.buffer.copy_(self.x)
        return self.network(self.buffer).square().mean()


class Scratch(Loading):
    """Computes masks in memory that it uses again."""

    def __init__(self):
        super().__init__()
        self.scratch = torch.zeros(ROWS, WIDTH)

    def loss(self):
        y = self.x
        for layer in self.network:
            torch.sin(y.detach(), out=self.scratch)
            y = F.silu(layer(y) + self.scratch)
        return y.square().mean()


def gradients_of(program, context):
    with context as saved:
        loss = program.loss()
    return [loss.detach(), *torch.autograd.grad(loss, program.inputs)], saved


@pytest.mark.parametrize("program", [Loading, Buffered, Scratch])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_gradients_are_exact_and_no_peak_is_higher(program, setting, with_and_without_nodes):
    made = program()
    plain, _ = gradients_of(made, nullcontext())
    for _ in range(4):
        found, saved = gradients_of(made, lean(**setting))
        assert all(map(torch.equal, found, plain))
    assert saved.rebuilt_bytes > 0

    def forward(context):
        with context:
            return made.loss()

    def step(context):
        return measure_step(lambda: forward(context), lambda loss: torch.autograd.grad(loss, made.inputs))

    before, after = step(nullcontext()), step(lean(**setting))
    assert after.held <= before.held
    if program is not Scratch:  # there, copies replace what is overwritten
        assert after.peak <= before.peak


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_weights_that_a_pass_writes_are_neither_rebuilt_nor_counted(setting, with_and_without_nodes):
    made, shares = Loading(), []
    for load in (True, False):
        if not load:
            made.network.load_state_dict = lambda state: None
        for _ in range(4):
            saved = gradients_of(made, lean(**setting))[1]
        shares.append((saved.kept_bytes, saved.rebuilt_bytes))
    assert shares[0] == shares[1]


FACTORIES = {
    "empty": lambda x: torch.empty(x.shape),
    "empty_like": torch.empty_like,
    "empty_strided": lambda x: torch.empty_strided(x.shape, x.stride()),
    "new_empty": lambda x: x.new_empty(x.shape),
    "zeros": lambda x: torch.zeros(x.shape),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "randn": lambda x: torch.randn(x.shape),
    "full": lambda x: torch.full(x.shape, 2.0),
}


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
def test_memory_that_a_pass_has_made_is_freed_when_its_contents_are_dropped(make, with_and_without_nodes):
    weight = torch.randn(ROWS, WIDTH, requires_grad=True)

    def loss():
        y = make(weight).copy_(weight)
        return y.sin().square().mean()  # keeps y, and what sin has made

    (plain,) = torch.autograd.grad(loss(), [weight])
    for _ in range(2):
        with lean("norm") as saved:
            made = loss()
        assert torch.equal(torch.autograd.grad(made, [weight])[0], plain)
        assert saved.rebuilt_bytes == 2 * weight.nbytes


@torch.library.custom_op("leannorm_tests::received", mutates_args={"buffer"})
def received(buffer: torch.Tensor) -> torch.Tensor:
    buffer.add_(1)
    return buffer.sum()


def test_memory_of_the_pass_with_an_unseen_writer_takes_memory(with_and_without_nodes):
    """A collective's result is written by another thread, which may still have it for a while."""
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    with lean("norm") as saved:
        buffer = torch.zeros(WIDTH, WIDTH).add(1)
        received(buffer)
        y = (x + buffer).exp()
        del buffer
    assert (saved.kept_bytes, saved.rebuilt_bytes) == (y.nbytes, 0)
