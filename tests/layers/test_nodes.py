"""Autograd nodes in C++ (csrc/nodes/) beside the functions in Python that they stand in for: the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from more_inputs import Modulated, RowsOfSum, Summed, modulated_and_gated
from stand_ins import without_nodes
from torch._dynamo import compiled_autograd
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import leannorm
from leannorm import nn
from leannorm.autograd import nodes
from leannorm.report.info import installation

SHAPE = (6, 4, 5, 3)


LAYERS = {
    "batch, residual": lambda: Summed("identity", 4),
    "batch, residual, act by output": lambda: Summed("relu", 4),
    "batch, residual, act": lambda: Summed("silu", 4),
    "batch": lambda: nn.BatchNorm2d(4),
    "batch, act": lambda: nn.BatchNormAct2d(4, act="silu"),
    "evaluation": lambda: nn.BatchNorm2d(4).eval(),
    "evaluation, no affine": lambda: nn.BatchNorm2d(4, affine=False).eval(),
    "evaluation, act": lambda: nn.BatchNormAct2d(4, act="silu").eval(),
    "frozen": lambda: nn.BatchNorm2d(4).eval().requires_grad_(False),
    "frozen, act by output": lambda: nn.BatchNormAct2d(4).eval().requires_grad_(False),
    "group": lambda: nn.GroupNorm(2, 4),
    "instance": lambda: nn.InstanceNorm2d(4),
    "layer": lambda: nn.LayerNorm(3),
    "layer, dim=1": lambda: nn.LayerNorm(4, dim=1),
    "rms": lambda: nn.RMSNorm(3),
    "rms, 1 + weight": lambda: nn.RMSNorm(3, weight_offset=1.0),
    "rms, dim=-3, cast": lambda: nn.RMSNorm(4, dim=-3, cast="before"),
    "layer of a sum": lambda: RowsOfSum(3),
    "rms of a sum": lambda: RowsOfSum(3, rms=True),
    "rms of a sum, dim=1, cast": lambda: RowsOfSum(4, rms=True, dim=1, weight_offset=1.0, cast="before"),
    "modulated": lambda: Modulated(3, 6),
    "modulated, no shift": lambda: Modulated(3, 1, shifts=False),
    "modulated, rms": lambda: Modulated(3, 6, 4, rms=True),
    **modulated_and_gated(*SHAPE),
}
built = pytest.mark.skipif(nodes.NODES is None, reason=str(nodes.WHY_NOT))
each_layer = pytest.mark.parametrize("name", LAYERS)


def of(name):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) + 1)
    return layer, torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)


def gradients(layer, x):
    return [x.grad, *(p.grad for p in layer.parameters())]


def in_python(node):
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def compare(told, monkeypatch):
    """What `told` gives with nodes in C++ and with those in Python."""
    ours = told()
    without_nodes(monkeypatch, "autograd")
    others = told()
    assert len(ours) == len(others)
    for a, b in zip(ours, others, strict=True):
        if isinstance(a, torch.Tensor):
            assert (a.dtype, a.stride()) == (b.dtype, b.stride())
            assert torch.equal(a, b)
        else:
            assert a == b


@built
@each_layer
def test_a_node_shows_itself_as_that_of_python(name, monkeypatch):
    layer, x, _ = of(name)
    node = layer(x).grad_fn
    without_nodes(monkeypatch, "autograd")
    other = layer(x).grad_fn
    assert in_python(other) and not in_python(node)  # noqa: PT018
    assert node.name() == other.name() == type(node).__name__ == type(other).__name__
    assert isinstance(node, Node)
    edges = [[type(edge).__name__ for edge, _ in n.next_functions if edge] for n in (node, other)]
    assert edges[0] == edges[1]


@built
@each_layer
def test_layouts_dtypes_and_parts_of_the_gradient(name, monkeypatch):
    def told():
        found = []
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            for layout in (torch.channels_last, torch.contiguous_format):
                layer, x, dy = of(name)
                x = x.detach().to(dtype, memory_format=layout).requires_grad_()
                y = layer(x)
                y.backward(dy.to(y.dtype))
                found += [y.detach(), *gradients(layer, x)]
        layer, x, _ = of(name)
        layer(x).sum().backward()  # an expanded gradient
        found += gradients(layer, x)
        layer, x, dy = of(name)
        layer(x).backward(dy.repeat_interleave(2, -1)[..., ::2])  # one that is not dense
        found += gradients(layer, x)
        layer, x, dy = of(name)
        if not layer.training or "batch" not in name:
            empty = torch.empty(0, *SHAPE[1:], requires_grad=True)
            layer(empty).backward(torch.empty_like(empty))
            found += gradients(layer, empty)
        layer, x, dy = of(name)
        checkpoint(layer, x, use_reentrant=False).backward(dy)
        found += gradients(layer, x)
        layer, x, dy = of(name)
        y = layer(x.detach())  # of which the parameters alone are recorded
        if y.requires_grad:
            y.backward(dy)
            found += gradients(layer, x)
        for frozen in (("weight",), ("bias",), ("weight", "bias")):
            for given in (True, False):
                layer, x, dy = of(name)
                for parameter in frozen:
                    if getattr(layer, parameter, None) is not None:
                        getattr(layer, parameter).requires_grad_(False)
                y = layer(x if given else x.detach())
                if y.requires_grad:
                    y.backward(dy)
                    found += gradients(layer, x)
        return found

    compare(told, monkeypatch)


@built
@each_layer
def test_second_derivatives_and_batches_of_gradients(name, monkeypatch):
    def told():
        layer, x, dy = of(name)
        y = layer(x)
        leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
        batch = torch.stack([dy, 2 * dy])
        found = list(torch.autograd.grad(y, leaves, batch, is_grads_batched=True, retain_graph=True))
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        total = dx.square().sum() + x.sin().sum()
        return [*found, dx.detach(), *torch.autograd.grad(total, leaves, allow_unused=True)]

    compare(told, monkeypatch)


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return None


@built
@each_layer
def test_no_gradient_at_all_is_one_of_zeros(name, monkeypatch):
    def told():
        layer, x, dy = of(name)
        Nothing.apply(layer(x)).backward(dy)
        return gradients(layer, x)

    compare(told, monkeypatch)


@built
@each_layer
def test_hooks_of_tensors_and_of_the_node(name, monkeypatch):
    def told():
        layer, x, dy = of(name)
        y, seen = layer(x), []
        y.register_hook(lambda g: g * 2)
        y.grad_fn.register_prehook(lambda gs: tuple(None if g is None else g * 3 for g in gs))
        y.grad_fn.register_hook(lambda into, out: seen.append(out[0]))
        x.register_hook(lambda g: g + 1)
        y.backward(dy)
        return [*gradients(layer, x), *seen]

    compare(told, monkeypatch)


def error_of(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return None


@built
@each_layer
def test_twice_through_the_graph_and_what_was_edited_since(name, monkeypatch):
    def told():
        layer, x, dy = of(name)
        y = layer(x)
        y.backward(dy, retain_graph=True)
        y.backward(dy)
        found = [*gradients(layer, x), error_of(lambda: y.backward(dy))]
        assert "second time" in found[-1]
        for edited in ("x", "y", "weight"):
            layer, x, dy = of(name)
            x = x * 1
            y = layer(x)
            tensor = {"x": x, "y": y}.get(edited, getattr(layer, edited, None))
            if tensor is not None:
                with torch.no_grad():
                    tensor.mul_(2)
            found.append(error_of(lambda y=y, dy=dy: y.backward(dy)))
        return found

    compare(told, monkeypatch)


@built
@each_layer
def test_lean_behind_a_node(name, monkeypatch):
    def told():
        layer, x, _ = of(name)
        outside = layer(x * 1)
        with leannorm.lean("norm"):
            loss = (layer(outside).relu() * outside).sin().sum()
        loss.backward()
        return gradients(layer, x)

    compare(told, monkeypatch)


# torch reads it of a saved output, whoever saved it
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@built
@each_layer
@pytest.mark.sampled(of=3)
def test_compiled_autograd(name, monkeypatch):
    def told():
        layer, x, dy = of(name)
        with compiled_autograd._enable(lambda graph: graph):
            for factor in (1, 2):  # the second pass runs the graph of the first, on other saved tensors
                layer(x * factor).backward(dy * factor)
        return gradients(layer, x)

    compare(told, monkeypatch)


@built
@each_layer
def test_nothing_is_kept_behind_the_backward_pass(name):
    layer, x, dy = of(name)
    inner = x * 1
    y = layer(inner)
    kept, output = weakref.ref(inner), weakref.ref(y)
    y.backward(dy)
    del inner
    assert kept() is None  # the graph of y stands, its tensors are gone
    del y
    assert output() is kept() is None
    inner = x * 1
    y = layer(inner)
    kept, output = weakref.ref(inner), weakref.ref(y)
    del inner, y
    assert output() is kept() is None


class Raises(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise ZeroDivisionError(str(function))


@built
@each_layer
def test_modes_and_their_errors(name):
    layer, x, dy = of(name)
    y = layer(x)
    with pytest.raises(ZeroDivisionError), Raises():
        torch.autograd.grad(y, x, dy)
    with pytest.raises(ZeroDivisionError), Raises():
        layer(x)


@built
def test_threads(monkeypatch):
    def told():
        layer, x, dy = of("layer")
        found = [None] * 4

        def work(i):
            mine = (x.detach() + i).requires_grad_()
            for _ in range(20):
                layer(mine).backward(dy)
            found[i] = mine.grad

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    compare(told, monkeypatch)


@built
@each_layer
def test_inference_mode_and_autocast(name, monkeypatch):
    def told():
        layer, x, dy = of(name)
        with torch.inference_mode():
            y = layer(x)
        assert y.is_inference()
        with torch.autocast("cpu", torch.bfloat16):
            z = layer(x)
        z.backward(dy)
        return [y.clone(), z.detach(), *gradients(layer, x), *layer.buffers()]

    compare(told, monkeypatch)


USE = """
import torch, leannorm
from leannorm.report.info import installation
y = leannorm.nn.LayerNorm(3)(torch.ones(2, 3, requires_grad=True))
y.sum().backward()
print(isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction), end=" | ")
print(installation().facts["autograd nodes of small calls"])
"""
OTHER = b"0" * len(str(nodes.INTERFACE))
UNFIT = {
    "not there": (None, "not built: the package was installed without building them"),
    "empty": (lambda data: b"", "is not whole"),
    "of another torch": (
        lambda data: data.replace(STAMP, STAMP.replace(b" torch ", b" torch_")),
        "build it again",
    ),
    "of another interface": (
        lambda data: data.replace(STAMP, STAMP.replace(b"%d torch" % nodes.INTERFACE, OTHER + b" torch")),
        "build it again",
    ),
    "of other operators": (
        lambda data: data.replace(STAMP, STAMP[:-4] + b"0000"),
        "was built for another torch, Python or source",
    ),
    "all but the last byte": (lambda data: data[:-1], "is not whole"),
}
STAMP = f"leannorm nodes {nodes.built_for()}".encode()


@pytest.mark.sampled(of=3)
@built
@pytest.mark.parametrize("unfit", UNFIT)
def test_a_library_that_does_not_fit_rests_and_says_why(tmp_path, unfit):
    change, words = UNFIT[unfit]
    package = tmp_path / "leannorm"
    ignored = shutil.ignore_patterns("_nodes.*", "__pycache__")
    shutil.copytree(nodes.PATH.parent, package, ignore=ignored)
    if change is not None:
        (package / nodes.PATH.name).write_bytes(change(nodes.PATH.read_bytes()))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", USE], env=environment, check=True, capture_output=True, text=True
    )
    python, said = run.stdout.split(" | ")
    assert python == "True"
    assert said.startswith("in Python: the C++ autograd nodes ")
    assert words in said


def test_what_serves_is_told():
    said = installation().facts["autograd nodes of small calls"]
    assert said == ("in C++" if nodes.NODES is not None else f"in Python: {nodes.WHY_NOT}")
