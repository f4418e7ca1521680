"""Planted faults of ranks: a set-up, what goes wrong in it on one rank or on all, and what is to be found.

Each gives the job, the check that finds it, and the layer.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from rank_models import Block, Megatron, blocks, convolutions, images, tokens
from rank_set_ups import (
    Job,
    ddp,
    fsdp2,
    grid,
    mesh_of_two_dimensions,
    sequence_parallel,
    sharded_and_sequence_parallel,
    sharded_twice,
    steep,
    tensor_parallel,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import leannorm


def weight_on_one_rank(rank: int) -> tuple[Job, str, str]:
    job = ddp(rank)
    if rank == 1:
        job.model.module[3].weight.data[0, 0, 0, 0] += 1e-6
    return job, "rank_weights", "module.3"


def gamma_on_one_rank(rank: int) -> tuple[Job, str, str]:
    job = ddp(rank)
    if rank == 1:
        job.model.module[4].weight.data[2] *= 1.5
    return job, "rank_weights", "module.4"


def beta_on_one_rank(rank: int) -> tuple[Job, str, str]:
    job = tensor_parallel(rank)
    if rank == 1:
        job.model[1].norm.bias.data += 0.5
    return job, "rank_weights", "1.norm"


def replicated_gamma_of_a_dtensor(rank: int) -> tuple[Job, str, str]:
    job = sequence_parallel(rank)
    if rank == 1:
        job.model[1].norm.weight.data._local_tensor[0] += 0.5
    return job, "rank_weights", "1.norm"


def statistics_on_one_rank(rank: int) -> tuple[Job, str, str]:
    """Without a wrapper that sends buffers: each rank has learned its own."""
    model = convolutions()
    if rank == 1:
        model[4](torch.randn(4, 8, 4, 4))
    return Job(model, images(rank)), "rank_buffers", "4"


def buffer_on_one_rank(rank: int) -> tuple[Job, str, str]:
    model = blocks()
    model[1].register_buffer("scale", torch.full((2,), 1.0 + rank))
    return Job(model, tokens(rank)), "rank_buffers", "1"


def eps_on_one_rank(rank: int) -> tuple[Job, str, str]:
    job = ddp(rank)
    if rank == 1:
        job.model.module[4].eps = 1e-6
    return job, "rank_settings", "module.4"


def weight_offset_on_one_rank(rank: int) -> tuple[Job, str, str]:
    norm = leannorm.nn.RMSNorm(8, weight_offset=float(rank))
    torch.nn.init.ones_(norm.weight)
    return Job(nn.Sequential(norm), None), "rank_settings", "0"


def activation_on_one_rank(rank: int) -> tuple[Job, str, str]:
    model = nn.Sequential(leannorm.nn.BatchNormAct2d(4, act=("relu", "silu")[rank]))
    return Job(model, None), "rank_settings", "0"


def eps_mode_on_one_rank(rank: int) -> tuple[Job, str, str]:
    layer = leannorm.nn.ConvBatchNorm2d(4, 4, 3, eps_mode=("inside", "outside")[rank])
    return Job(layer, None), "rank_settings", "bn"


def no_parameters_on_one_rank(rank: int) -> tuple[Job, str, str]:
    return Job(nn.Sequential(nn.LayerNorm(8, elementwise_affine=rank == 0)), None), "rank_settings", "0"


def momentum_on_one_rank(rank: int) -> tuple[Job, str, str]:
    job = ddp(rank)
    if rank == 0:
        job.model.module[1].momentum = 0.05
    return job, "rank_settings", "module.1"


def mode_on_one_rank(rank: int) -> tuple[Job, str, str]:
    job = ddp(rank)
    if rank == 1:
        job.model.module[4].eval()
    return job, "rank_settings", "module.4"


def model_in_evaluation_on_one_rank(rank: int) -> tuple[Job, str, str]:
    job = fsdp2(rank)
    job.model.train(rank != 1)
    return job, "rank_settings", "(model)"


def frozen_on_one_rank(rank: int) -> tuple[Job, str, str]:
    model = blocks()
    model[1].norm.requires_grad_(rank == 0)
    return Job(model, tokens(rank)), "rank_settings", "1.norm"


def class_on_one_rank(rank: int) -> tuple[Job, str, str]:
    model = convolutions()
    if rank == 1:
        model = leannorm.convert(model)
    return Job(model, images(rank)), "rank_settings", "1"


def group_of_all_under_tensor_parallelism(rank: int) -> tuple[Job, str, str]:
    """Two data-parallel ranks times two that cut their work: statistics are of all four."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = DistributedDataParallel(convolutions("all"), process_group=pairs[rank % 2])
    return Job(model, images(rank // 2)), "sync_group", "module.1"


def group_across_equal_batches(rank: int) -> tuple[Job, str, str]:
    """The same without a wrapper: ranks with the same batch are no data-parallel ones."""
    return Job(convolutions("all"), images(rank // 2)), "sync_group", "1"


def group_of_a_whole_mesh(rank: int) -> tuple[Job, str, str]:
    """FSDP2 over one dimension of the mesh, statistics over both."""
    return mesh_of_two_dimensions(rank, "all"), "sync_group", "1"


def group_of_one(rank: int) -> tuple[Job, str, str]:
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())]
    return Job(DistributedDataParallel(convolutions(alone[rank])), images(rank)), "sync_group", "module.1"


def groups_that_do_not_agree(rank: int) -> tuple[Job, str, str]:
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())]
    return (
        Job(DistributedDataParallel(convolutions(alone[0] if rank == 0 else "all")), images(rank)),
        ("sync_group"),
        "module.1",
    )


def megatron_7452(rank: int) -> tuple[Job, str, str]:
    """Sequence parallelism, norms whole on every rank, their gradients never summed."""
    return Job(Megatron(), tokens()), "partial_gradients", "layers.0.norm"


def megatron_7452_within_data_parallelism(rank: int) -> tuple[Job, str, str]:
    """The same along one dimension of 2 × 2 ranks: DistributedDataParallel sums over the other."""
    parallel, cutting, mine, cut = grid()
    model = DistributedDataParallel(Megatron(cutting[cut]), process_group=parallel[mine])
    return Job(model, tokens(cut)), "partial_gradients", "module.layers.0.norm"


def smallest_gradient_not_summed(rank: int) -> tuple[Job, str, str]:
    """Of one norm, whose gradient is a millionth of the others'."""
    model = steep(rank)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm) and module is not model.layers[0].norm:
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return Job(model, tokens()), "partial_gradients", "layers.0.norm"


class Sometimes(Block):
    """A norm that some ranks go around."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) if dist.get_rank() == 0 else x
        return y


def norm_that_one_rank_goes_around(rank: int) -> tuple[Job, str, str]:
    torch.manual_seed(0)
    return Job(nn.Sequential(Sometimes(), nn.LayerNorm(16)), tokens()), "partial_gradients", "0.norm"


def gradients_of_nan(rank: int) -> tuple[Job, str, str]:
    """What one rank's part makes NaN is NaN everywhere, and cannot be compared."""
    model = Megatron()
    if rank == 1:
        model.layers[1].up.weight.data[0] = float("nan")
    return Job(model, tokens()), "partial_gradients", "layers.1.norm"


def one_norm_not_finalized(rank: int) -> tuple[Job, str, str]:
    """A step that sums the gradients of all norms but one."""

    def step(model: nn.Module, batch: Tensor) -> None:
        keep = model.layers[1].norm
        (model(batch) * torch.linspace(0, 9, 16).cos()).sum().backward()
        for module in model.modules():
            if isinstance(module, nn.LayerNorm) and module is not keep:
                for parameter in module.parameters():
                    dist.all_reduce(parameter.grad)

    return Job(Megatron(), tokens(), backward=step), "partial_gradients", "layers.1.norm"


def local_weight_of_a_dtensor(rank: int) -> tuple[Job, str, str]:
    """`to_local()` without `grad_placements`: the gradient says that it is whole, and is a part."""
    from torch.distributed.tensor import DTensor

    class Local(nn.LayerNorm):
        def forward(self, x: Any) -> Any:
            mesh, cut = x.device_mesh, x.placements
            weight, bias = self.weight.to_local(), self.bias.to_local()
            y = nn.functional.layer_norm(x.to_local(), (16,), weight, bias)
            return DTensor.from_local(y, mesh, cut)

    job = sequence_parallel(rank) if dist.get_world_size() == 2 else sharded_and_sequence_parallel(rank)
    job.model[1].norm.__class__ = Local
    return job, "partial_gradients", "1.norm"


def local_weight_over_a_mesh(rank: int) -> tuple[Job, str, str]:
    """The same along one dimension of 2 × 2 ranks: FSDP2 sums over the other."""
    return local_weight_of_a_dtensor(rank)


def copy_of_a_shard(rank: int) -> tuple[Job, str, str]:
    job = sharded_twice(rank)
    if rank == 3:
        job.model[1].norm.bias._local_tensor.data += 0.1
    return job, "rank_weights", "1.norm"


def weights_cut_by_hand_and_not_marked(rank: int) -> tuple[Job, str, str]:
    """A warning: nobody says whether these are copies."""
    model = Megatron()
    del model.layers[0].up.weight.tensor_model_parallel
    return Job(model, tokens(rank)), "rank_weights", "layers.0.up"


def average_without_buffers(rank: int) -> tuple[Job, str, str]:
    """An average written by hand, of parameters alone."""
    model = convolutions()
    for norm in (model[1], model[4]):
        norm.reset_running_stats()
    ema = copy.deepcopy(model)
    for step in range(3):
        model(images(step))
        with torch.no_grad():
            for one, other in zip(ema.parameters(), model.parameters(), strict=True):
                one.lerp_(other, 0.1)
    return Job(model, images(9), averaged=ema), "averaged_buffers", "1"


def target_copied_late(rank: int) -> tuple[Job, str, str]:
    """A target network that follows in its parameters, with the statistics of the step that made it."""
    model = convolutions()
    target = copy.deepcopy(model)
    for step in range(30):
        model(images(step) * 3 + 2)
    return Job(model, images(9) * 3 + 2, averaged=target), "averaged_buffers", "1"


def server_of_a_federation(rank: int) -> tuple[Job, str, str]:
    """The server averages what `parameters()` gives: its statistics are as made."""
    model = convolutions()
    server = copy.deepcopy(model)
    for norm in (server[1], server[4]):
        norm.reset_running_stats()
    return Job(model, images(9), averaged=server), "averaged_buffers", "1"


FAULTS = {
    weight_on_one_rank: 2,
    gamma_on_one_rank: 2,
    beta_on_one_rank: 2,
    replicated_gamma_of_a_dtensor: 2,
    statistics_on_one_rank: 2,
    buffer_on_one_rank: 2,
    eps_on_one_rank: 2,
    momentum_on_one_rank: 2,
    weight_offset_on_one_rank: 2,
    activation_on_one_rank: 2,
    eps_mode_on_one_rank: 2,
    no_parameters_on_one_rank: 2,
    mode_on_one_rank: 2,
    model_in_evaluation_on_one_rank: 2,
    frozen_on_one_rank: 2,
    class_on_one_rank: 2,
    group_of_all_under_tensor_parallelism: 4,
    group_across_equal_batches: 4,
    group_of_a_whole_mesh: 4,
    group_of_one: 2,
    groups_that_do_not_agree: 2,
    megatron_7452: 2,
    megatron_7452_within_data_parallelism: 4,
    smallest_gradient_not_summed: 2,
    norm_that_one_rank_goes_around: 2,
    gradients_of_nan: 2,
    one_norm_not_finalized: 2,
    local_weight_of_a_dtensor: 2,
    local_weight_over_a_mesh: 4,
    copy_of_a_shard: 4,
    weights_cut_by_hand_and_not_marked: 2,
    average_without_buffers: 2,
    target_copied_late: 2,
    server_of_a_federation: 2,
}
