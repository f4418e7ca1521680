"""A graph that is never run backward is freed where it is dropped, as without `lean()`.

Autograd's nodes hold values through C++, where Python's collector sees nothing: a value that held the node
that saved it would never go.
"""

from __future__ import annotations

import contextlib
import weakref
from functools import partial

import lean_cases
import pytest
import torch
import torch.nn.functional as F
from contract import FIRST
from torch import nn

import leannorm
import leannorm.functional as LF
from leannorm import lean
from leannorm.report.operators import PROGRAMS
from leannorm.saving import recorded_pass

SETTINGS = {
    "plain": {},
    "norm": {"recompute": "norm"},
    "conv": {"recompute": "conv"},
    "budget": {"budget": 0.05},
    "verify": {"verify": True},
    "held": {"held": (lambda t: t.clone(), lambda t: t)},
}
NETWORKS = {
    **{name: (make, lean_cases.IMAGE) for name, make in lean_cases.IMAGES.items()},
    **{name: (make, lean_cases.TOKENS) for name, make in lean_cases.SEQUENCES.items()},
}


class Mark:
    """In the memory of a node, and gone with it."""


def mark(loss):
    """A mark in every node behind the loss, but for those of leaves."""
    found, left = {}, [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found and not hasattr(node, "variable"):
            made = node.metadata["mark"] = Mark()
            found[node] = weakref.ref(made)
            left += [producer for producer, _ in node.next_functions]
    return list(found.values())


def left_of(forward, context, ends):
    """The nodes that are left of a pass, and how many saved tensors, without a look by the collector."""
    references, before = [], recorded_pass.LOG.alive()
    with contextlib.suppress(ZeroDivisionError), context as saved:
        loss = forward()
        references += mark(loss)
        assert references
        if ends == "in an error":
            raise ZeroDivisionError
    if ends == "run backward, and kept":
        loss.backward(retain_graph=True)
    if saved is not None:
        assert saved.records
    del loss
    left = recorded_pass.LOG.alive() - before
    return [reference() for reference in references if reference() is not None] + [left] * bool(left)


ENDS = "unused", "in an error", "run backward, and kept"


def assert_gone(forward, setting):
    for ends in ENDS:  # passes after the first follow a plan
        assert not left_of(forward, contextlib.nullcontext(), ends)  # else it is stock's
        assert not left_of(forward, lean(**SETTINGS[setting]), ends), ends


def view_of_an_edited_base(leaf):
    """torch makes its node while the node that reads it is made, which then is not the newest."""
    base = torch.cosh(leaf)
    view = base.view(base.shape)
    base[:1].mul_(2)
    return view


SOURCES = {
    "of an edited base": view_of_an_edited_base,
    "rebuilt": F.silu,
    "not saved": torch.cosh,
    "saved later": torch.cosh,
}


@pytest.mark.sampled(of=3)
@pytest.mark.filterwarnings("ignore:leannorm")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_of_every_operator(name, setting):
    program, shape = PROGRAMS[name]
    for source, made in SOURCES.items():

        def forward(source=source, made=made):
            leaf = torch.randn(shape, requires_grad=True)
            x = made(leaf)
            y = program(x, leaf)
            loss = y.square().sum() + y.abs().sqrt().sum()
            return loss + x.square().sum() if source == "saved later" else loss

        assert_gone(forward, setting)


@pytest.mark.filterwarnings("ignore:leannorm")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_of_every_layer(case, setting):
    layer, wide = case.make(), nn.Linear(1, 1)

    def forward(made):
        inputs = [t.detach().requires_grad_() for t in case.inputs(torch.float32)]
        y = layer(made(inputs[0]), *inputs[1:])
        return y.square().sum() + F.silu(y).sum()

    for made in (lambda x: x * wide.weight[0, 0], torch.cosh):
        assert_gone(partial(forward, made), setting)


W, CHANNELS, KERNEL = (torch.ones(shape, requires_grad=True) for shape in ((64,), (16,), (16, 16, 1, 1)))
# of x, which nobody else saves, and of another tensor
CALLS = {
    "sum and RMS norm": lambda x, r: LF.add_rms_norm(x, r, (64,), W),
    "sum and layer norm": lambda x, r: LF.add_layer_norm(x, r, (64,), W),
    "modulated": lambda x, r: [LF.ada_rms_norm(x, (64,), r[:, 0, 0])],
    "sum and modulated": lambda x, r: LF.add_ada_layer_norm(x, r, W, (64,), *r[:, :2, 0].unbind(1)),
    "sum and modulated RMS norm": lambda x, r: LF.add_ada_rms_norm(x, r, W, (64,), r[:, 0, 0]),
    "gated": lambda x, r: [LF.gated_rms_norm(x, r, (64,))],
    "batch norm": lambda x, r: [LF.batch_norm_act(x, None, None, CHANNELS, CHANNELS, True, residual=r)],
    "group norm": lambda x, r: [LF.group_norm_act(x, 4, CHANNELS, CHANNELS)],
    "convolution and norm": lambda x, r: [
        LF.conv_batch_norm(x, KERNEL, None, None, None, CHANNELS, CHANNELS, training=True)
    ],
    "rsqrt": lambda x, r: [x.rsqrt()],
    "sqrt": lambda x, r: [x.sqrt()],
    "residual": lambda x, r: [F.relu(x + r, inplace=True)],
}


@pytest.mark.filterwarnings("ignore:leannorm")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", CALLS)
def test_of_every_fused_call(name, setting):
    def forward(needed):
        x, r = (torch.randn(4, 16, 16, 64, requires_grad=needs) for needs in (True, needed))
        return sum(y.square().sum() for y in CALLS[name](torch.cosh(x), r))

    for needed in (False, True):
        assert_gone(partial(forward, needed), setting)


@pytest.mark.sampled(of=3)
@pytest.mark.filterwarnings("ignore:.* is out of reach", "ignore:leannorm. more is kept than the plan says")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("make", "shape"), NETWORKS.values(), ids=NETWORKS)
def test_of_every_converted_network(make, shape, setting):
    model = leannorm.convert(make())
    assert_gone(lambda: model(torch.randn(shape)).float().square().mean(), setting)


def test_memory_stays_flat_where_passes_are_dropped_within_one_context():
    """Evaluation of many batches within one `lean()`: nothing waits for its end."""
    leannorm.keep_freed_memory()
    linear, w = nn.Linear(512, 512), torch.ones(512, requires_grad=True)
    alive = []
    with lean("conv"):
        for _ in range(6):
            y, r = LF.add_rms_norm(linear(torch.randn(64, 512)), torch.randn(64, 512), (512,), w)
            del y, r
            alive.append(recorded_pass.LOG.alive())
    assert len(set(alive[1:])) == 1
