"""DTensors whose ranks disagree, die, or are not in the mesh: each rank has an error with names, in time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Outcome, outcomes
from torch import Tensor

from leannorm import functional as F
from leannorm import nn

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

WORLD, TIMEOUT = 3, 5.0


def slab(cut: bool = True, samples: int = 2) -> Tensor:
    """A third of a batch of images, cut along their rows; without `cut` a whole one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, at = init_device_mesh("cpu", (WORLD,)), Shard(2) if cut else Replicate()
    return DTensor.from_local(torch.randn(samples, 4, 3, 3), mesh, [at], run_check=False).requires_grad_()


def other_eps(rank: int) -> None:
    F.group_norm(slab(), 2, eps=2e-5 if rank == 1 else 1e-5)


def other_groups(rank: int) -> None:
    F.group_norm(slab(), 4 if rank == 1 else 2)


def other_samples(rank: int) -> None:
    F.instance_norm(slab(samples=3 if rank == 1 else 2))


def other_order(rank: int) -> None:
    norms: list[Callable[[Tensor], Any]] = [lambda x: F.group_norm(x, 2), F.instance_norm]
    for norm in norms[::-1] if rank == 1 else norms:
        norm(slab())


def other_placement(rank: int) -> None:
    F.group_norm(slab(cut=rank != 1), 2)


def dies_before_the_backward_pass(rank: int) -> None:
    y = F.group_norm(slab(), 2)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    y.backward(torch.ones_like(y))


# the words of the error, on rank 1 too where it has one
FAULTS: dict[Callable[[int], None], tuple[tuple[str, ...], bool]] = {
    other_eps: (("group_norm", "must have equal eps", "rank 1 with eps=2e-05"), True),
    other_groups: (("different calls", "rank 1 in layer 'group_norm' (training forward, 8 channels)"), True),
    other_samples: (("different calls", "rank 1 in layer 'instance_norm' (training forward, 12 "), True),
    other_order: (("different calls", "rank 1 in layer 'instance_norm'"), True),
    other_placement: (("layer 'group_norm'", "rank 1 did not come"), False),
    dies_before_the_backward_pass: (("'group_norm' (backward", "rank 1 did not come"), False),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
@pytest.mark.sampled(of=2)
def test_ranks_that_disagree_are_named_on_every_rank(fault: Callable[[int], None]) -> None:
    words, everywhere = FAULTS[fault]
    results: list[Outcome] = outcomes(WORLD, fault, group_timeout=TIMEOUT, deadline=8 * TIMEOUT)
    if not everywhere:
        assert results.pop(1).error is None  # it noticed nothing, or died
    for result in results:
        assert result.error is not None
        assert result.error.startswith("SyncError")
        assert all(word in result.error for word in words), result.error
        assert result.seconds < 2 * TIMEOUT


def outside_of_the_mesh(rank: int) -> str:
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("data", "depth"))
    try:
        along = mesh["data"]
    except IndexError:  # older releases of torch have no part of a mesh for a rank that is not in it
        assert mesh.get_coordinate() is None
        along = mesh
    return str(nn.SyncBatchNorm(4, process_group=along)(torch.randn(3, 4)).sum().item())


def no_such_dimension(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("data",))
    with pytest.raises(KeyError, match="depth"):  # torch's own
        mesh["depth"]
    with pytest.raises(RuntimeError, match="without mesh_dim_names"):
        init_device_mesh("cpu", (WORLD,))["depth"]
    nn.SyncBatchNorm(4, process_group="depth")(torch.randn(3, 4))


def test_meshes_without_the_rank_or_the_dimension_are_refused() -> None:
    *members, outside = outcomes(WORLD, outside_of_the_mesh, group_timeout=TIMEOUT)
    assert [member.error for member in members] == [None, None]
    assert outside.error is not None
    assert "InputError: process_group must contain this rank, but rank 2 is not in it" in outside.error
    for result in outcomes(WORLD, no_such_dimension, group_timeout=TIMEOUT):
        assert result.error is not None
        assert result.error.startswith("InputError")
        assert "got 'depth'" in result.error
        assert "mesh['depth']" in result.error
