"""What lies around a pass: sparse tensors, the collector, modes of the program, other contexts."""

from __future__ import annotations

import gc
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from lean_cases import assert_as_stock
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from leannorm import lean

top = torch._C._autograd._top_saved_tensors_default_hooks
aten = torch.ops.aten


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("most", [-1, 1 << 30])
@pytest.mark.filterwarnings("ignore:Sparse .* is in beta", "ignore:leannorm. .*pass saved less")
def test_sparse_tensors_are_held_and_counted(layout, most, monkeypatch):
    monkeypatch.setenv("LEANNORM_SMALL_BYTES", str(most))
    adjacency = (torch.rand(128, 128) < 0.1).float().to_sparse(layout=layout)

    def program(context):
        weights = [torch.randn(32, 32, requires_grad=True) for _ in range(2)]
        x = torch.randn(128, 32)
        for _ in range(3):
            with context() as saved:
                h = torch.relu(torch.sparse.mm(adjacency, x @ weights[0]))
                loss = torch.sparse.mm(adjacency, h @ weights[1]).square().mean()
            loss.backward()
            assert (
                saved is None or saved.kept_bytes >= adjacency.values().nbytes
                if layout is torch.sparse_csr
                else True
            )
        return [w.grad for w in weights]

    assert_as_stock(program, recompute="norm")


def adjacency_of(layout):
    """A sparse matrix, and its bytes."""
    matrix = (torch.rand(128, 128) < 0.1).float().to_sparse(layout=layout)
    if layout is torch.sparse_coo:
        matrix = matrix.coalesce()
        return matrix, matrix.indices().nbytes + matrix.values().nbytes
    return matrix, matrix.crow_indices().nbytes + matrix.col_indices().nbytes + matrix.values().nbytes


LAYOUTS = [torch.sparse_coo, torch.sparse_csr]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("most", [-1, 1 << 30])
@pytest.mark.filterwarnings("ignore:Sparse .* is in beta")
def test_a_sparse_tensor_counts_once_by_what_it_is_made_of(layout, most, monkeypatch, with_and_without_nodes):
    monkeypatch.setenv("LEANNORM_SMALL_BYTES", str(most))
    matrix, nbytes = adjacency_of(layout)
    a, b = (torch.randn(128, 4, requires_grad=True) for _ in range(2))
    for _ in range(3):
        with lean("norm") as saved:
            loss = torch.sparse.mm(matrix, a).sum() + torch.sparse.mm(matrix, b).sum()
        loss.backward()
        assert saved.kept_bytes == nbytes


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.filterwarnings("ignore:Sparse .* is in beta")
def test_a_pass_with_sparse_tensors_has_a_plan(layout, with_and_without_nodes):
    matrix, _ = adjacency_of(layout)
    a, b = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    for _ in range(3):
        with lean(budget=0.9) as saved:
            h = torch.relu(torch.sparse.mm(matrix, torch.randn(128, 64) @ a))
            loss = torch.tanh(h @ b).square().mean()
        loss.backward()
        assert not [reason for reason in saved.reasons if "lowers no peak" not in reason]
    assert saved.plan.stock_bytes == saved.kept_bytes + saved.rebuilt_bytes


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.filterwarnings("ignore:Sparse .* is in beta", "ignore:leannorm. budget=.* is out of reach")
def test_a_plan_counts_a_sparse_tensor_of_two_readers_once(layout):
    matrix, _ = adjacency_of(layout)
    a, b = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    for _ in range(3):
        with lean(budget=0.9) as saved:
            h = torch.relu(torch.sparse.mm(matrix, torch.randn(128, 64) @ a))
            loss = torch.sparse.mm(matrix, torch.tanh(h @ b)).square().mean()
        loss.backward()
    assert saved.plan.stock_bytes == saved.kept_bytes + saved.rebuilt_bytes


@pytest.mark.parametrize("most", [-1, 1 << 30])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_nested_tensors_without_sizes_are_held(most, monkeypatch, with_and_without_nodes):
    monkeypatch.setenv("LEANNORM_SMALL_BYTES", str(most))

    def program(context):
        linear, rows = nn.Linear(64, 64), [torch.randn(n, 64) for n in (20, 33)]
        for _ in range(3):
            with context() as saved:
                y = torch.relu(linear(torch.nested.nested_tensor(rows)))
                loss = torch.nested.to_padded_tensor(y, 0.0).sum()
            loss.backward()
            assert saved is None or saved.kept_bytes >= 4 * 53 * 64
        return [linear.weight.grad]

    assert_as_stock(program, recompute="norm")


@contextmanager
def by_a_manager(saving):
    with saving as saved:
        yield saved


def test_a_plan_keeps_no_variables_of_the_functions_around_its_pass():
    """Another function than that of the training loop enters it."""
    model, batches = network(), []
    for _ in range(3):
        x = torch.randn(512, 64)
        batches.append(StorageWeakRef(x.untyped_storage()))
        with by_a_manager(lean(budget=0.5)):
            loss = model(x).square().mean()
        loss.backward()
    del x, loss
    assert all(batch.expired() for batch in batches)


@pytest.mark.parametrize("most", [-1, 1 << 30])
def test_nothing_is_left_to_the_collector(most, monkeypatch):
    monkeypatch.setenv("LEANNORM_SMALL_BYTES", str(most))
    x, w = torch.randn(64, 256), torch.randn(256, 256, requires_grad=True)

    def step(context):
        with context as saved:
            y = torch.tanh(x @ w) * 2
            loss = y.square().sum()
        held = StorageWeakRef(y.untyped_storage())
        loss.backward()
        return held, saved

    gc.collect()
    gc.disable()
    try:
        for make in (nullcontext, lambda: lean("norm")):
            found = [step(make()) for _ in range(4)]
            assert all(held.expired() for held, _ in found)
    finally:
        gc.enable()


class Rounded(TorchDispatchMode):
    """Products, norms and activations of float32 in the precision of bfloat16."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is aten.native_layer_norm.default:
            return (out[0].bfloat16().float(), *out[1:])
        return out.bfloat16().float() if func in (aten.silu.default, aten.addmm.default) else out


class RoundedFunctions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 1.0009765625 if func is F.silu else out


def network():
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.SiLU(), nn.Linear(128, 64))


@pytest.mark.parametrize("recompute", ["norm", "conv"])
@pytest.mark.parametrize("mode", [Rounded, RoundedFunctions])
def test_a_mode_of_the_program_may_change_what_operations_give(mode, recompute, with_and_without_nodes):
    def program(context):
        torch.manual_seed(1)
        model, found = network(), []
        for within in (
            nullcontext,
            nullcontext,
            nullcontext,
            mode,
            mode,
            mode,
        ):  # what is known is of plain torch
            with within(), context():
                loss = model(torch.randn(512, 64)).square().mean()
            model.zero_grad()
            loss.backward()
            found += [p.grad for p in model.parameters()]
        return found

    assert_as_stock(program, recompute=recompute)


def test_a_pass_may_end_where_torch_admits_no_hooks(monkeypatch):
    w = torch.randn(64, 64, requires_grad=True)
    first = lean("norm")
    first.__enter__()
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("told"),
        pytest.warns(UserWarning, match="admitted no"),
    ):
        first.__exit__(None, None, None)
    assert top(True) is None
    with lean("norm"):
        loss = torch.tanh(w @ w).sum()
    loss.backward()
    assert top(True) is None
