"""What NCCL would do to ranks, shown without a GPU: real groups of gloo, whose work behaves as NCCL's."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from nccl_like import like_nccl
from ranks import outcomes, ranks

from leannorm import nn
from leannorm.distributed import diagnostics, membership
from leannorm.distributed.call import Call
from leannorm.distributed.group import statistics_group

CALL = Call("a", "training forward", 4, 0.0, False)
SUMS = [torch.ones(16, dtype=torch.float64)]
WORLD_TIMEOUT = 3 * 3600.0


def group_of(parent=None):
    return statistics_group((parent or dist.group.WORLD).group_name, CALL)


def late(rank):
    """Rank 1 comes 2.5 s late, to a sum that the others wait for."""
    group = group_of()
    like_nccl()
    if rank == 1:
        time.sleep(2.5)
    return group.all_reduce(SUMS, 4, CALL._replace(debug=True)).tolist()


def test_a_late_rank_is_waited_for_and_its_communicator_lives():
    assert ranks(2, late) == [[8.0, *[2.0] * 16]] * 2


def never(rank):
    group = group_of()
    like_nccl()
    if rank == 1:
        time.sleep(4)
        return None
    return group.all_reduce(SUMS, 4, CALL._replace(debug=True, timeout=2.0))


def test_a_rank_that_does_not_come_is_named_in_time():
    first, second = outcomes(2, never)
    assert (
        "SyncError: layer 'a' (training forward, 4 channels): rank 1 did not come (waited 2 s)" in first.error
    )
    assert first.seconds < 3
    assert second.error is None


def with_a_device(rank):
    """Rank 2 has no part in the group of ranks 0 and 1, nor in what is made beside it."""
    world = dist.distributed_c10d._get_default_group()
    some = dist.new_group([0, 1])
    world.bound_device_id = torch.device("cuda:0")  # as init_process_group(device_id=...) leaves it
    if rank < 2:
        group = group_of(some)
        group.all_reduce(SUMS, 4, CALL)
        assert group.communicator.bound_device_id is None
    bound = [membership._node_group().bound_device_id, str(world.bound_device_id)]
    world.bound_device_id = None
    dist.barrier()  # a rank that ends closes what another one is about to connect
    return bound


def test_groups_are_made_by_their_ranks_alone_where_the_world_is_bound_to_a_device():
    """Bound, they would be split off the communicator of all ranks, by all ranks."""
    assert ranks(3, with_a_device, group_timeout=20.0) == [[None, "cuda:0"]] * 3


def in_more_groups(rank):
    """Ranks 0 and 1 are in a group more than rank 2, and the world shares statistics after it."""
    some = dist.new_group([0, 1])
    if rank < 2:
        group_of(some).all_reduce(SUMS, 4, CALL)
    found = float(group_of().all_reduce(SUMS, 4, CALL)[0]), membership._node_group().size()
    dist.barrier()
    return found


def test_ranks_in_another_number_of_groups_find_one_another():
    assert ranks(3, in_more_groups, group_timeout=20.0) == [(12.0, 3)] * 3


def made(rank):
    one = dist.new_group([0, 1], timeout=timedelta(seconds=77))
    other = dist.new_group([0, 1], timeout=timedelta(seconds=88), backend="cpu:gloo")
    found = [
        (dist.get_backend(parent), statistics_group(parent.group_name, CALL).communicator)
        for parent in (dist.group.WORLD, one, other)
    ]
    found.append(("gloo", membership._node_group()))
    for backend, communicator in found:
        assert dist.get_backend(communicator) == backend
    device = torch.device("cpu")
    dist.barrier()
    return [c._get_backend(device).options._timeout.total_seconds() for _, c in found]


def test_a_communicator_has_its_parents_timeout_and_backend():
    assert ranks(2, made, group_timeout=WORLD_TIMEOUT) == [[WORLD_TIMEOUT, 77, 88, WORLD_TIMEOUT]] * 2


def skips(rank, patience, stuck):
    """Rank 1 leaves layer b out; rank 0's host waits for its device, which waits for rank 1, and goes on."""
    diagnostics._PATIENCE = patience
    group = group_of()
    device = like_nccl()
    for layer in "abc":
        if rank == 0 or layer != "b":
            group.all_reduce(SUMS, 4, CALL._replace(layer=layer))
        else:
            time.sleep(1.5)  # by then rank 0 is past its last sum, and has seen no header of the second
    device.synchronize(30)
    if rank == 0:
        time.sleep(stuck)
    for layer in "abc":
        group.all_reduce(SUMS, 4, CALL._replace(layer=layer))
        device.synchronize(30)


def test_ranks_whose_hosts_do_not_wait_for_sums_all_say_who_skipped_a_layer():
    first, second = outcomes(2, skips, 10.0, 0.0, deadline=40)
    said = first.error.splitlines()[0]
    assert "SyncError: ranks that share statistics are in different calls (number 2 of the group)" in said
    assert "rank 0 in layer 'b' (training forward, 4 channels); rank 1 in layer 'c'" in said
    assert second.error.splitlines()[0] == said
    assert max(first.seconds, second.seconds) < 10


@pytest.mark.conformance
def test_a_rank_that_is_busy_elsewhere_is_not_waited_for_till_the_timeout():
    first, second = outcomes(2, skips, 2.0, 5.0, deadline=40)
    assert "rank 1 in layer 'c' (training forward, 4 channels); rank 0 did not say within 2 s" in second.error
    assert second.seconds < 5
    assert "rank 0 in layer 'b'" in first.error  # it finds what the other one left


def sizes(rank):
    """What the group holds after batches of ever new sizes, and what of it are tensors."""
    layer = nn.SyncBatchNorm(3)
    held = []
    for size in range(2, 40):
        layer(torch.randn(size + rank, 3, requires_grad=True)).sum().backward()
        parts = vars(group_of()).values()
        kept = [p for part in parts for p in (part.values() if isinstance(part, dict) else [part])]
        flat = [v for p in kept for v in (p if isinstance(p, (tuple, list)) else [p])]
        held.append((len(flat), sum(isinstance(v, torch.Tensor) for v in flat)))
    return set(held)


def test_new_batch_sizes_leave_nothing_behind():
    (first,), (second,) = ranks(2, sizes)
    assert first == second
    assert first[1] == 0  # as it might lie in the memory of a captured graph


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_the_header_of_a_message_counts_every_rank(backend):
    assert ranks(2, counted, backend) == [9.0, 9.0]


def counted(rank, backend):
    return float(group_of(dist.new_group([0, 1], backend=backend)).all_reduce(SUMS, 4 + rank, CALL)[0])
