"""While another thread compiles, this one's code stays eager: `lean()` hooks in, statistics move once."""

import threading
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import leannorm


@contextmanager
def another_thread_compiles():
    begun, end = threading.Event(), threading.Event()

    def backend(module, inputs):
        begun.set()
        end.wait(60)
        return module.forward

    compiled = torch.compile(lambda x: x.sin() + 1, backend=backend)
    thread = threading.Thread(target=compiled, args=(torch.ones(3),))
    thread.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("when", ["from within the pass on", "until within the pass", "all the time"])
def test_lean_is_neither_idle_nor_leaves_hooks_while_another_thread_compiles(when):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()), torch.randn(256, 64)
    stock = torch.autograd.grad(model(x).square().mean(), [*model.parameters()])
    with ExitStack() as other:
        if when != "from within the pass on":
            other.enter_context(another_thread_compiles())
        with leannorm.lean("conv") as saved:
            loss = model(x).square().mean()
            if when == "from within the pass on":
                other.enter_context(another_thread_compiles())
            if when == "until within the pass":
                other.close()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        ours = torch.autograd.grad(loss, [*model.parameters()])
    assert saved.rebuilt_bytes > 0
    assert not saved.reasons
    assert all(map(torch.equal, ours, stock))


@pytest.mark.parametrize("reentrant", [True, False])
def test_statistics_move_once_while_another_thread_compiles(reentrant):
    def buffers(around):
        torch.manual_seed(0)
        layer, x = leannorm.nn.BatchNorm2d(8), torch.randn(4, 8, 6, 6, requires_grad=True)
        loss = checkpoint(layer, x, use_reentrant=reentrant).square().sum()
        with around:
            loss.backward()
        return [*layer.buffers()]

    alone = buffers(ExitStack())
    assert alone[-1] == 1  # batches
    assert all(map(torch.equal, buffers(another_thread_compiles()), alone))
