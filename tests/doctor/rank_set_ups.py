"""Jobs of two and four ranks without a fault: the model of a rank, its batch, and `doctor`'s arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_models import Block, Megatron, blocks, convolutions, finalized, images, summed_by_hooks, tokens
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import leannorm


class Job:
    """What `doctor` is called with on this rank."""

    def __init__(self, model: nn.Module, batch: Any, **arguments: Any) -> None:
        self.model, self.batch, self.arguments = model, batch, arguments

    def report(self) -> Any:
        return leannorm.doctor(self.model, self.batch, **self.arguments)


def single(rank: int) -> Job:
    """A process on its own: the other rank is not asked."""
    return Job(
        convolutions(), images(3), group=[dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    )


def ddp(rank: int) -> Job:
    model = DistributedDataParallel(convolutions("all"))
    for step in range(2):
        model(images(10 * rank + step)).square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(1e-3 * parameter.grad)
    return Job(model, images(rank + 20))


def by_host(rank: int) -> Job:
    """Statistics are shared by the ranks of a host."""
    return Job(DistributedDataParallel(convolutions("node")), images(rank))


def ddp_own_statistics(rank: int) -> Job:
    """Its buffers differ after each step, and are sent before the next."""
    model = DistributedDataParallel(convolutions())
    model(images(rank)).sum().backward()
    return Job(model, images(rank))


def ddp_own_statistics_and_step(rank: int) -> Job:
    """Buffers that a step of its own sends are not the model's."""
    job = ddp_own_statistics(rank)
    return Job(job.model, job.batch, backward=lambda model, batch: model(batch).square().sum().backward())


def fsdp2(rank: int) -> Job:
    from torch.distributed.fsdp import fully_shard

    model = blocks()
    for unit in [*list(model)[:2], model]:
        fully_shard(unit)
    return Job(model, tokens(rank))


def _cut(model: nn.Module, sequence: bool, mesh: Any = None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    part, whole = Shard(1), Replicate()
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    by: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        by["norm"] = SequenceParallel()
        by["up"] = ColwiseParallel(input_layouts=part)
        by["down"] = RowwiseParallel(output_layouts=part, use_local_output=False)
        parallelize_module(model[2], mesh, SequenceParallel())
        top = PrepareModuleInput(
            input_layouts=(whole,), desired_input_layouts=(part,), use_local_output=False
        )
        parallelize_module(model[0], mesh, top)
    for block in model[:2]:
        parallelize_module(block, mesh, by)
    return model


def tensor_parallel(rank: int) -> Job:
    return Job(_cut(blocks(), False), tokens())


def sequence_parallel(rank: int) -> Job:
    return Job(_cut(blocks(), True), tokens())


def sequence_by_hooks(rank: int) -> Job:
    return Job(summed_by_hooks(Megatron()), tokens())


def sequence_finalized(rank: int) -> Job:
    return Job(Megatron(), tokens(), backward=finalized)


def subgroups(rank: int) -> Job:
    """Four ranks, whose statistics are of two each."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(convolutions(groups[rank // 2]))
    model(images(rank)).sum().backward()
    return Job(model, images(rank + 4))


def pipeline(rank: int) -> Job:
    """Two stages of two data-parallel ranks; a stage's ranks have one model."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = rank // 2
    model, batch = (blocks()[:2], tokens(rank)) if stage else (convolutions(groups[0]), images(rank))
    return Job(model, batch, group=groups[stage])


def average(rank: int, use_buffers: bool = True) -> Job:
    from torch.optim.swa_utils import AveragedModel

    model = DistributedDataParallel(convolutions("all"))
    ema = AveragedModel(model.module, use_buffers=use_buffers)
    for step in range(3):
        model(images(10 * step + rank))
        ema.update_parameters(model.module)
    return Job(model, images(rank + 50), averaged=ema)


def average_that_copies_buffers(rank: int) -> Job:
    return average(rank, False)


def grid() -> tuple[list[Any], list[Any], int, int]:
    """Four ranks, 2 × 2: the data-parallel groups, the groups that cut one model, and this rank's of each."""
    parallel = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    cutting = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return parallel, cutting, dist.get_rank() % 2, dist.get_rank() // 2


def sequence_and_data_parallel(rank: int) -> Job:
    """Megatron-LM's sequence parallelism over two ranks, within DistributedDataParallel over two."""
    parallel, cutting, mine, cut = grid()
    model = DistributedDataParallel(summed_by_hooks(Megatron(cutting[cut])), process_group=parallel[mine])
    return Job(model, tokens(cut))


def slabs(rank: int) -> Job:
    """Images that are cut in space over two ranks, of two samples: statistics are of all four ranks."""
    parallel, _, mine, _ = grid()
    return Job(DistributedDataParallel(convolutions("all"), process_group=parallel[mine]), images(rank))


def of_dtensors(rank: int, axis: int | None = None) -> Job:
    """Norms of a DTensor that is cut along this axis; three of its five channels are on the first rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    torch.manual_seed(0)
    model = leannorm.convert(nn.Sequential(nn.BatchNorm2d(5, momentum=None), nn.InstanceNorm2d(5)))
    batches = [torch.randn(7, 5, 9, 3, generator=torch.Generator().manual_seed(s)) + 2 for s in range(9)]
    for batch in batches:
        model(batch)
    mesh = init_device_mesh("cpu", (2,))
    placement = Replicate() if axis is None else Shard(axis)
    return Job(distribute_module(model, mesh), distribute_tensor(batches[0], mesh, [placement]))


def of_dtensors_cut_along_samples(rank: int) -> Job:
    return of_dtensors(rank, 0)


def of_dtensors_cut_along_channels(rank: int) -> Job:
    return of_dtensors(rank, 1)


def of_dtensors_cut_in_slabs(rank: int) -> Job:
    return of_dtensors(rank, 2)


class Cut(nn.Module):
    """A network whose ranks take parts of one batch, along an axis: ranks with even numbers the first."""

    def __init__(self, inner: nn.Module, axis: int) -> None:
        super().__init__()
        self.inner, self.axis = inner, axis

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.chunk(2, self.axis)[dist.get_rank() % 2])
        return y


def slabs_of_one_batch(rank: int) -> Job:
    """As before, but the model cuts the images, which two ranks have each."""
    both = torch.cat([images(rank - rank % 2), images(rank - rank % 2 + 1)], 2)
    return Job(DistributedDataParallel(Cut(convolutions("all"), 2)), both)


def parts_of_one_sequence(rank: int) -> Job:
    """Context parallelism: the gradients of parts are summed by DistributedDataParallel, over both ranks."""
    return Job(DistributedDataParallel(Cut(blocks(), 1)), tokens())


def lazy(rank: int) -> Job:
    return Job(nn.Sequential(nn.LazyLinear(4), nn.LayerNorm(4)), None)


def mesh_of_two_dimensions(rank: int, group: Any = "dp") -> Job:
    """FSDP2 over one dimension of a mesh, whose other one cuts the work; statistics are of the first."""
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh()
    model = convolutions(mesh["dp"] if group == "dp" else group)
    fully_shard(model, mesh=mesh["dp"])
    return Job(model, images(rank // 2))


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def sharded_and_sequence_parallel(rank: int) -> Job:
    """FSDP2 over one dimension, torch's sequence parallelism over the other: weights are cut by both."""
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh()
    model = _cut(blocks(), True, mesh["tp"])
    for unit in [*list(model)[:2], model]:
        fully_shard(unit, mesh=mesh["dp"])
    return Job(model, tokens(rank // 2))


def sharded_twice(rank: int) -> Job:
    """FSDP2 with copies over one dimension of a mesh and shards over the other."""
    from torch.distributed.fsdp import fully_shard

    model, mesh = blocks(), _mesh()
    for unit in [*list(model)[:2], model]:
        fully_shard(unit, mesh=mesh)
    return Job(model, tokens(rank))


class Noisy(Block):
    """Draws numbers in every pass, as diffusion models do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


def noise(rank: int) -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(Noisy(), Noisy())
    torch.manual_seed(rank)
    return Job(model, tokens())


def steep(rank: int) -> Megatron:
    """Gradients of its layers differ in size by 1e6."""
    model = Megatron()
    with torch.no_grad():
        for cut in (model.layers[0].down.weight, model.layers[1].up.weight):
            cut.mul_(1e-3)
        model.layers[0].up.weight.mul_(1e-3)
        model.layers[0].up.bias.mul_(1e-3)
    return model


def steep_gradients(rank: int) -> Job:
    return Job(summed_by_hooks(steep(rank)), tokens())


def own_parts(rank: int) -> Job:
    """Parameters that DistributedDataParallel is told to leave alone, and an expert of each rank."""
    model = blocks()
    torch.manual_seed(rank)
    model[0].up.reset_parameters()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.up.weight", "0.up.bias"])
    return Job(DistributedDataParallel(model), tokens(rank))


class Sample:
    """A part of a batch that nobody else can look into."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def objects(rank: int) -> Job:
    return Job(blocks(), [(Sample(tokens(rank)), 3)], forward=lambda model, batch: model(batch[0].x))


def uneven(rank: int) -> Job:
    """Of one rank the loader has a batch less, and its first one is empty on the other."""
    model = DistributedDataParallel(convolutions("all"))
    return Job(
        model, [images(rank)[: 8 * (1 - rank)], *(images(10 * step + rank) for step in range(3 - rank))]
    )


CLEAN = {
    single: 2,
    ddp: 2,
    by_host: 2,
    ddp_own_statistics: 2,
    ddp_own_statistics_and_step: 2,
    fsdp2: 2,
    tensor_parallel: 2,
    sequence_parallel: 2,
    sequence_by_hooks: 2,
    sequence_finalized: 2,
    subgroups: 4,
    pipeline: 4,
    average: 2,
    average_that_copies_buffers: 2,
    sequence_and_data_parallel: 4,
    slabs: 4,
    slabs_of_one_batch: 4,
    of_dtensors: 2,
    of_dtensors_cut_along_samples: 2,
    of_dtensors_cut_along_channels: 2,
    of_dtensors_cut_in_slabs: 2,
    parts_of_one_sequence: 2,
    lazy: 2,
    mesh_of_two_dimensions: 4,
    sharded_and_sequence_parallel: 4,
    sharded_twice: 4,
    noise: 2,
    steep_gradients: 2,
    own_parts: 2,
    objects: 2,
    uneven: 2,
}
