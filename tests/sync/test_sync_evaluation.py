"""SyncBatchNorm in evaluation: it needs no other rank, no group that is there, and takes the fast path."""

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch import nn as torch_nn
from torch.distributed.device_mesh import init_device_mesh

from leannorm import convert, nn
from leannorm.autograd import fast
from leannorm.ops.backends import CPU


def assert_evaluates(layer):
    """By its running statistics, as torch's batch norm."""
    alone = torch_nn.BatchNorm1d(3)
    alone.load_state_dict(layer.state_dict())
    x = torch.randn(5, 3)
    torch.testing.assert_close(layer.eval()(x), alone.eval()(x))


def evaluates_alone(rank, kind):
    """Before any training step, when the other rank has ended."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "context"))
    dist.barrier()  # the mesh's groups are connected
    if rank == 0:
        assert_evaluates(nn.SyncBatchNorm(3, process_group="node" if kind == "node" else mesh))


@pytest.mark.parametrize("kind", ["node", "a mesh of two dimensions"])
def test_a_first_evaluation_connects_no_ranks(kind):
    ranks(2, evaluates_alone, kind, group_timeout=20.0)


def evaluates_outside(rank):
    group = dist.new_group([1])
    if rank == 0:
        assert_evaluates(nn.SyncBatchNorm(3, process_group=group))
    dist.barrier()


def test_a_rank_outside_of_the_group_evaluates():
    ranks(2, evaluates_outside, group_timeout=20.0)


def evaluates_afterwards(rank):
    group = dist.new_group([0, 1])
    layer = convert(torch_nn.BatchNorm1d(3), to="sync", process_group=group)
    layer(torch.randn(4, 3))
    dist.barrier()
    dist.destroy_process_group()
    assert_evaluates(layer)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_evaluation_after_its_group_was_destroyed():
    ranks(2, evaluates_afterwards)


@pytest.mark.skipif(bool(CPU.why_not()), reason="; ".join(CPU.why_not()))
@pytest.mark.parametrize("track", [True, False])
def test_evaluation_takes_the_fast_path(track, monkeypatch):
    """As BatchNorm's does, and with the same bits."""
    answers, by_fast_path = [], fast.batch_norm

    def noted(*args):
        answers.append(by_fast_path(*args))
        return answers[-1]

    monkeypatch.setattr(fast, "batch_norm", noted)
    x = torch.randn(2, 16, 4, 4)
    layers = [
        nn.BatchNorm2d(16, track_running_stats=track),
        nn.SyncBatchNorm(16, track_running_stats=track),
        convert(torch_nn.BatchNorm2d(16, track_running_stats=track), to="sync"),
    ]
    with torch.no_grad():
        found = [layer.eval()(x) for layer in layers]
    assert len(answers) == len(layers)
    assert all(answer is y for answer, y in zip(answers, found, strict=True))
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize("declined", [False, True])
def test_each_evaluation_is_noted_once(declined, monkeypatch):
    """Also one that the fast path declines, which goes the whole way."""
    noted = []
    stand_ins = {"connected_group": lambda asked: "all", "note_evaluation": lambda *told: noted.append(told)}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(f"leannorm.nn.sync.{name}", stand_in)
    layer, x = nn.SyncBatchNorm(4).eval(), torch.randn(2, 4, 6, 6)
    layer(x[..., ::2] if declined else x)  # not dense
    assert noted == [("all", layer.layer_name)]
