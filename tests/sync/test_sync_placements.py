"""Norms of DTensors, of every placement, against the whole tensor in float64; statistics along a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import outcomes, ranks, torch_merges
from torch import Tensor
from torch import nn as torch_nn

from leannorm import functional as F
from leannorm import nn
from leannorm._errors import InputError

DOUBLE = {"dtype": torch.float64}
IMAGES = 5, 8, 4, 6  # over 4 ranks: 2, 2, 1 and no samples, 2, 2, 2 and no columns
ELEMENTS, VECTOR, KERNEL, MASK, STATE = "elements", "vector", "kernel", "mask", "state"

Case = tuple[Callable[..., Any], tuple[str, ...]]


def _masks(function: Callable[..., Tensor]) -> Case:
    return function, (ELEMENTS, VECTOR, VECTOR, MASK, STATE, STATE)


CHANNELS: dict[str, Case] = {
    "batch_norm": (
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, True),
        (ELEMENTS, VECTOR, VECTOR, STATE, STATE),
    ),
    "batch_norm, no statistics": (
        lambda x, w: F.batch_norm(x, None, None, w, None, True),
        (ELEMENTS, VECTOR),
    ),
    "batch_norm, evaluation": (
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b),
        (ELEMENTS, VECTOR, VECTOR, STATE, STATE),
    ),
    "batch_norm_act": (
        lambda x, r, w, b, m, v: F.batch_norm_act(x, m, v, w, b, True, act="silu", residual=r),
        (ELEMENTS, ELEMENTS, VECTOR, VECTOR, STATE, STATE),
    ),
    "batch_norm, mask": _masks(lambda x, w, b, k, m, v: F.batch_norm(x, m, v, w, b, True, mask=k)),
    "batch_norm, normalized mask": _masks(
        lambda x, w, b, k, m, v: F.batch_norm(x, m, v, w, b, True, mask=k, fill="normalize")
    ),
    "batch_norm, lengths": (
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, True, lengths=[6, 3, 1, 5, 0]),
        (ELEMENTS, VECTOR, VECTOR, STATE, STATE),
    ),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), (ELEMENTS, VECTOR, VECTOR)),
    "group_norm of 2": (lambda x, w, b: F.group_norm(x, 2, w, b), (ELEMENTS, VECTOR, VECTOR)),
    "group_norm_act": (lambda x, w, b: F.group_norm_act(x, 8, w, b), (ELEMENTS, VECTOR, VECTOR)),
    "group_norm, mask": (
        lambda x, w, b, k: F.group_norm(x, 4, w, b, mask=k),
        (ELEMENTS, VECTOR, VECTOR, MASK),
    ),
    "instance_norm": (lambda x, w: F.instance_norm(x, None, None, w), (ELEMENTS, VECTOR)),
    "instance_norm, statistics": (
        lambda x, w, b, m, v: F.instance_norm(x, m, v, w, b),
        (ELEMENTS, VECTOR, VECTOR, STATE, STATE),
    ),
    "instance_norm, mask": _masks(lambda x, w, b, k, m, v: F.instance_norm(x, m, v, w, b, mask=k)),
    "batch_norm_op": (
        lambda x, w, b, m, v: F.batch_norm_op(x, m, v, w, b)[:3],
        (ELEMENTS, VECTOR, VECTOR, STATE, STATE),
    ),
    "batch_norm_op, estimates": (
        lambda x, w, b, m, v: F.batch_norm_op(x, m, v, w, b, use_global_est=True)[:3],
        (ELEMENTS, VECTOR, VECTOR, STATE, STATE),
    ),
    "batch_norm_op, NHWC": (
        lambda x, w, b, m, v: F.batch_norm_op(x, m[:6], v[:6], w[:6], b[:6], data_layout="NHWC").y,
        (ELEMENTS, VECTOR, VECTOR, VECTOR, VECTOR),
    ),
    "conv_batch_norm": (
        lambda x, k, c, w, b, m, v: F.conv_batch_norm(x, k, c, m, v, w, b, padding=1, training=True),
        (ELEMENTS, KERNEL, VECTOR, VECTOR, VECTOR, STATE, STATE),
    ),
    "conv_batch_norm, outside": (
        lambda x, k, w, m, v: F.conv_batch_norm(
            x, k, None, m, v, w, padding=1, training=True, eps_mode="outside"
        ),
        (ELEMENTS, KERNEL, VECTOR, STATE, STATE),
    ),
}
ROWS: dict[str, Case] = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w[:6], b[:6]), (ELEMENTS, VECTOR, VECTOR)),
    "layer_norm along channels": (
        lambda x, w, b: F.layer_norm(x, (8,), w, b, dim=1),
        (ELEMENTS, VECTOR, VECTOR),
    ),
    "layer_norm, lengths": (
        lambda x, w: F.layer_norm(x.flatten(2), (24,), lengths=[8, 3, 1, 5, 0]) * w.sum(),
        (ELEMENTS, VECTOR),
    ),
    "rms_norm, mask": (
        lambda x, w, k: F.rms_norm(x, (8,), w, dim=1, mask=k, weight_offset=1.0),
        (ELEMENTS, VECTOR, MASK),
    ),
    "add_layer_norm": (lambda x, r, w: F.add_layer_norm(x, r, (6,), w[:6]), (ELEMENTS, ELEMENTS, VECTOR)),
    "gated_rms_norm": (lambda x, r, w: F.gated_rms_norm(x, r, (6,), w[:6]), (ELEMENTS, ELEMENTS, VECTOR)),
    "ada_layer_norm of tokens": (
        lambda x, s, t: F.ada_layer_norm(x, (6,), s, t),
        (ELEMENTS, ELEMENTS, ELEMENTS),
    ),
    "add_ada_rms_norm": (
        lambda x, r, w, s: F.add_ada_rms_norm(x, r, w[:6], (6,), s),
        (ELEMENTS, ELEMENTS, VECTOR, "samples"),
    ),
}
MERGING = {"layer_norm, lengths"}  # flattens its input, which is torch's to do
# the placements of the input that are refused, by the number of ranks
REFUSED = {
    "group_norm of 2": {4: {1}},
    "group_norm, mask": {n: {2, 3} for n in (2, 4)},
    "instance_norm, mask": {n: {2, 3} for n in (2, 4)},
    "conv_batch_norm": {n: {1, 2, 3} for n in (2, 4)},
    "conv_batch_norm, outside": {n: {1, 2, 3} for n in (2, 4)},
}


def tensor_of(kind: str) -> Tensor:
    if kind == MASK:
        return torch.rand(5, 1, 4, 6) > 0.3
    if kind == STATE:
        return torch.rand(8, **DOUBLE) + 0.5
    shape = {ELEMENTS: IMAGES, VECTOR: (8,), KERNEL: (8, 8, 3, 3), "samples": (5, 1, 1, 6)}[kind]
    return torch.randn(shape, **DOUBLE)


def outputs(made: Any) -> list[Tensor]:
    return list(made) if isinstance(made, (tuple, list)) else [made]


def compared(case: Case, mesh: Any, placements: list[Any], weights: Any = None) -> list[Any]:
    """Output, gradients and state, of DTensors and of the whole tensors."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(3)
    function, kinds = case
    whole = [tensor_of(kind) for kind in kinds]
    given = []
    everywhere = [Replicate()] * mesh.ndim
    for kind, v in zip(kinds, whole, strict=True):
        at: list[Any] = everywhere
        if kind in (ELEMENTS, MASK, "samples"):
            last = 3 if kind == "samples" else 4  # a scale of rows is whole, as the rows are
            at = [
                p if isinstance(p, Shard) and p.dim < last and v.shape[p.dim] > 1 else Replicate()
                for p in placements
            ]
        elif weights is not None and kind != STATE:
            at = [weights]
        given.append(distribute_tensor(v.clone(), mesh, at))
    for kind, v, d in zip(kinds, whole, given, strict=True):
        if kind not in (MASK, STATE):
            v.requires_grad_()
            d.requires_grad_()
    made = outputs(function(*given))
    expected = outputs(function(*whole))
    found = [(y.full_tensor(), z) for y, z in zip(made, expected, strict=True)]
    for y, z in zip(made, expected, strict=True):
        if z.requires_grad:
            g = torch.randn(z.shape, **DOUBLE)
            z.backward(g, retain_graph=True)
            y.backward(distribute_tensor(g, mesh, y.placements), retain_graph=True)
    found += [(d.grad.full_tensor(), v.grad) for d, v in zip(given, whole, strict=True) if v.grad is not None]
    found += [(d.full_tensor(), v) for d, v, k in zip(given, whole, kinds, strict=True) if k == STATE]
    return found


def every_placement(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    for name, case in {**CHANNELS, **ROWS}.items():
        for placement in (Replicate(), *map(Shard, range(4))):
            axis = getattr(placement, "dim", None)
            if name in MERGING:
                x = distribute_tensor(tensor_of(ELEMENTS), mesh, [placement])
                if not torch_merges(x, lambda v: v.flatten(2)):
                    continue
            if axis in REFUSED.get(name, {}).get(world, ()):
                with pytest.raises(
                    InputError, match=r"pass input.redistribute\(placements=\[Replicate\(\)\]\)"
                ):
                    compared(case, mesh, [placement])
                continue
            for got, expected in compared(case, mesh, [placement]):
                torch.testing.assert_close(
                    got, expected, rtol=1e-11, atol=1e-11, msg=lambda m, of=(name, axis): f"{of}: {m}"
                )


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.sampled(of=2)
def test_every_norm_of_every_placement_is_that_of_the_whole_tensor(world: int) -> None:
    ranks(world, every_placement, world)


def several_dimensions(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh, everywhere = init_device_mesh("cpu", (2, 2)), Replicate()
    cuts = [(0, 2), (0, 1), (0, None), (2, 3), (0, 0), (1, 1), (None, 2), (2, 1)]
    names = ["batch_norm", "batch_norm, mask", "group_norm", "instance_norm, statistics", "add_layer_norm"]
    for name in names:
        for axes in cuts:
            placements = [everywhere if axis is None else Shard(axis) for axis in axes]
            for got, expected in compared(CHANNELS.get(name) or ROWS[name], mesh, placements):
                torch.testing.assert_close(
                    got, expected, rtol=1e-11, atol=1e-11, msg=lambda m, of=(name, axes): f"{of}: {m}"
                )
    # a kernel cut by output channels: the output is cut by channels
    one = init_device_mesh("cpu", (4,))
    for got, expected in compared(CHANNELS["conv_batch_norm"], one, [everywhere], weights=Shard(0)):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
    # the terms of a sum are added up first, as torch's own norms do
    x = torch.randn(IMAGES, **DOUBLE)
    dist.broadcast(x, 0)
    terms = DTensor.from_local(x / 4, one, [Partial()], run_check=False)
    torch.testing.assert_close(F.group_norm(terms, 4).full_tensor(), F.group_norm(x, 4))
    # a second derivative goes through the sums over the ranks
    # (and through what brings cut rows together)
    norms: list[tuple[Callable[[Tensor], Tensor], int]] = [
        (lambda v: F.group_norm(v, 4), 2),
        (lambda v: F.layer_norm(v, (6,)), 3),
    ]
    for norm, axis in norms:
        leaf = x.clone().requires_grad_()
        cut = distribute_tensor(x, one, [Shard(axis)]).requires_grad_()
        second = []
        for v in (leaf, cut):
            (first,) = torch.autograd.grad(norm(v).square().pow(2).sum(), v, create_graph=True)
            (grad,) = torch.autograd.grad(first.square().sum(), v)
            second.append(grad)
        torch.testing.assert_close(second[1].full_tensor(), second[0], rtol=1e-9, atol=1e-9)


def test_meshes_of_two_dimensions_kernels_by_channels_sums_and_second_derivatives() -> None:
    ranks(4, several_dimensions)


LAYERS = {
    "batch": (lambda: torch_nn.BatchNorm3d(8), lambda: nn.BatchNorm3d(8)),
    "group": (lambda: torch_nn.GroupNorm(2, 8), lambda: nn.GroupNorm(2, 8)),
    "instance": (
        lambda: torch_nn.InstanceNorm3d(8, affine=True, track_running_stats=True),
        lambda: nn.InstanceNorm3d(8, affine=True, track_running_stats=True),
    ),
    "layer": (lambda: torch_nn.LayerNorm(6), lambda: nn.LayerNorm(6)),
    "rms": (lambda: torch_nn.RMSNorm(6), lambda: nn.RMSNorm(6)),
}


def trained(layer: torch_nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    y = layer(x)
    y.backward(g)
    assert x.grad is not None
    found = [
        y,
        x.grad,
        *(p.grad for p in layer.parameters()),
        *(b for b in layer.buffers() if b.is_floating_point()),
    ]
    return [getattr(v, "full_tensor", lambda v=v: v)().detach().double() for v in found]


def slabs(rank: int) -> None:
    """A volume of 2 x 8 x 7 x 5 x 6, far from 0, of which a rank has a slab, 4 or 3 deep."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_module

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("depth",))
    torch.manual_seed(0)
    x, g = 10 + torch.randn(2, 8, 7, 5, 6), torch.randn(2, 8, 7, 5, 6)
    at = slice(0, 4) if rank == 0 else slice(4, 7)
    for name, (theirs, make) in LAYERS.items():
        exact = trained(theirs().double(), x.double().requires_grad_(), g.double())
        whole = trained(theirs(), x.clone().requires_grad_(), g)

        def spread(v: Tensor) -> Tensor:
            how: Any = {"run_check": False, "shape": v.shape, "stride": v.stride()}
            return DTensor.from_local(v[:, :, at].contiguous(), mesh["depth"], [Shard(2)], **how)

        ours = trained(distribute_module(make(), mesh["depth"]), spread(x).requires_grad_(), spread(g))
        for i, (a, b, c) in enumerate(zip(ours, whole, exact, strict=True)):
            rounding = torch.finfo(torch.float32).eps * c.abs().max()
            allowed = 2 * (b - c).abs().max() + rounding
            assert (a - c).abs().max() <= allowed, (name, i, (a - c).abs().max(), (b - c).abs().max())


def test_a_volume_in_slabs_is_the_whole_volume() -> None:
    ranks(2, slabs)


def by_dimension(rank: int) -> None:
    """Plain slabs: SyncBatchNorm over one dimension of a mesh, and over both; rows need nothing but a sum."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "depth"))
    torch.manual_seed(0)
    x = torch.randn(4, 8, 6, 5, **DOUBLE)
    sample, place = divmod(rank, 2)
    mine = x[2 * sample : 2 * sample + 2, :, 3 * place : 3 * place + 3]
    for along, merged in (
        (mesh["depth"], x[2 * sample : 2 * sample + 2]),
        (mesh["data"], x[:, :, 3 * place : 3 * place + 3]),
        (mesh, x),
    ):
        layer, whole = nn.SyncBatchNorm(8, process_group=along).double(), torch_nn.BatchNorm2d(8).double()
        whole(merged)
        layer(mine)
        torch.testing.assert_close(layer.running_mean, whole.running_mean)
        torch.testing.assert_close(layer.running_var, whole.running_var)
    row, leaf = nn.LayerNorm(5).double(), torch_nn.LayerNorm(5).double()
    row(mine).square().sum().backward()
    leaf(x).square().sum().backward()
    assert row.bias.grad is not None
    dist.all_reduce(row.bias.grad)
    torch.testing.assert_close(row.bias.grad, leaf.bias.grad)
    with pytest.raises(KeyError):  # torch's own, on every rank, before anything is sent
        mesh["channels"]
    with pytest.raises(InputError, match="process_group must contain this rank"):
        nn.SyncBatchNorm(8, process_group=object()).double()(mine)  # type: ignore[arg-type]
    mixed(mesh["depth"], x)


def mixed(mesh: Any, x: Tensor) -> None:
    """What is refused: plain tensors among DTensors, and statistics that would be merged twice."""
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    whole, cut = (distribute_tensor(x, mesh, [p]) for p in (Replicate(), Shard(0)))
    layer = nn.BatchNorm2d(8).double()
    before = [b.clone() for b in layer.buffers()]
    for norm, given in ((layer, cut), (nn.LayerNorm(5).double(), whole), (nn.GroupNorm(2, 8).double(), cut)):
        with pytest.raises(
            InputError, match=r"takes DTensors of one mesh, or none, got a DTensor of .* and a plain"
        ):
            norm(given)
    with pytest.raises(InputError, match="a plain tensor"):
        F.layer_norm(whole, (5,), mask=torch.ones(4, 8, 6, dtype=torch.bool))
    assert all(torch.equal(a, b) for a, b in zip(before, layer.buffers(), strict=True))
    shared = distribute_module(nn.SyncBatchNorm(8).double(), mesh)
    for given in (cut, whole):
        with pytest.raises(InputError, match="may hold no parts of the same DTensor"):
            shared(given)
    ghost = distribute_module(nn.BatchNorm2d(8, group_size=2).double(), mesh)
    expected = nn.BatchNorm2d(8, group_size=2).double()
    torch.testing.assert_close(ghost(cut).full_tensor(), expected(x))
    torch.testing.assert_close(ghost.running_var.full_tensor(), expected.running_var)
    with pytest.raises(InputError, match="whole groups of samples on each rank"):
        distribute_module(nn.BatchNorm2d(8, group_size=4).double(), mesh)(cut)
    one = distribute_tensor(x[:1, :, :1, :1], mesh, [Shard(0)])
    with pytest.raises(InputError, match="Expected more than 1 value per channel"):
        distribute_module(nn.BatchNorm2d(8).double(), mesh)(one)


def test_statistics_along_a_dimension_of_a_mesh_and_what_is_refused() -> None:
    ranks(4, by_dimension)


def alone(rank: int) -> None:
    """One rank does not run the norm; the other one is told so."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(torch.randn(4, 8, 4, 4), init_device_mesh("cpu", (2,)), [Shard(2)])
    F.group_norm(x, 2)
    if rank == 0:
        F.group_norm(x, 2)


def test_a_rank_that_is_missing_is_named_within_the_time_out() -> None:
    first, _ = outcomes(2, alone, group_timeout=5.0, deadline=60.0)
    assert first.error is not None
    assert "SyncError" in first.error
    assert "group_norm" in first.error
