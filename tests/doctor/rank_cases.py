"""Jobs of two and four ranks: set-ups without a fault, and one planted fault of ranks for each check.

A set-up gives the model of a rank, its batch, and with what `doctor` is called beside them. A fault is a
set-up, what it does to the model on one rank or on all, and what is to be found.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import leannorm


class Job:
    """What `doctor` is called with on this rank."""

    def __init__(self, model: nn.Module, batch: Any, **arguments: Any) -> None:
        self.model, self.batch, self.arguments = model, batch, arguments

    def report(self) -> Any:
        return leannorm.doctor(self.model, self.batch, **self.arguments)


def images(seed: int = 0) -> Tensor:
    return torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed))


def convolutions(sync: Any = None, stepped: bool = True) -> nn.Module:
    """Two layers, in the middle of training: the statistics of all norms have moved."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.Dropout(),
    )
    for norm in (model[1], model[4]):
        norm.momentum = None
    for seed in range(4):
        model(images(seed))
    for norm in (model[1], model[4]):
        norm.momentum = 0.1
        with torch.no_grad():
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.uniform_(-0.1, 0.1)
    if sync is not None:
        leannorm.convert(model, to="sync", process_group=None if sync == "all" else sync)
    return model


class Block(nn.Module):
    """A norm and an MLP beside a residual."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


def blocks() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.LayerNorm(16))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.5, 1.5)
                module.bias.uniform_(-0.1, 0.1)
    return model


# ------------------------------------------------ sequence parallelism written by hand, as in Megatron-LM


class _Split(torch.autograd.Function):
    """The rank's part of the sequence; the parts of the gradient are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return _gathered(dy)


class _Gather(torch.autograd.Function):
    """The whole sequence; of its gradient, a sum over ranks, each has its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, partial: bool) -> Tensor:
        ctx.partial = partial
        return _gathered(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dy = dy.clone()
        if ctx.partial:
            dist.all_reduce(dy)
        return dy.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous(), None


class _Scatter(torch.autograd.Function):
    """The rank's part of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return _gathered(dy)


def _gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


class MegatronBlock(Block):
    """Its norm sees the rank's part of the sequence, its MLP is cut in columns and rows."""

    def __init__(self) -> None:
        super().__init__()
        ranks, rank = dist.get_world_size(), dist.get_rank()
        with torch.no_grad():
            self.up.weight = nn.Parameter(self.up.weight.chunk(ranks)[rank].clone())
            self.up.bias = nn.Parameter(self.up.bias.chunk(ranks)[rank].clone())
            self.down.weight = nn.Parameter(self.down.weight.chunk(ranks, 1)[rank].clone())
            self.down.bias = None
        for cut in (self.up.weight, self.up.bias, self.down.weight):
            cut.tensor_model_parallel = True

    def forward(self, x: Tensor) -> Tensor:
        inner = self.down(torch.relu(self.up(_Gather.apply(self.norm(x), True))))
        y: Tensor = x + _Scatter.apply(inner)
        return y


class Megatron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(MegatronBlock(), MegatronBlock())
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Gather.apply(self.norm(self.layers(_Split.apply(x))), False)
        return y


def _finalized(model: nn.Module, batch: Tensor) -> None:
    """A step of Megatron-LM: the norms' gradients are summed over tensor-parallel ranks after the pass."""
    (model(batch) * torch.linspace(0, 9, 16).cos()).sum().backward()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            for parameter in module.parameters():
                dist.all_reduce(parameter.grad)


def _summed_by_hooks(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return model


# ------------------------------------------------ set-ups without a fault


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


def ddp_own_statistics(rank: int) -> Job:
    """Its buffers differ after each step, and are sent before the next."""
    model = DistributedDataParallel(convolutions())
    model(images(rank)).sum().backward()
    return Job(model, images(rank))


def fsdp2(rank: int) -> Job:
    from torch.distributed.fsdp import fully_shard

    model = blocks()
    for unit in [*list(model)[:2], model]:
        fully_shard(unit)
    return Job(model, tokens(rank))


def _cut(model: nn.Module, sequence: bool) -> nn.Module:
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
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
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
    return Job(_summed_by_hooks(Megatron()), tokens())


def sequence_finalized(rank: int) -> Job:
    return Job(Megatron(), tokens(), backward=_finalized)


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


def average(rank: int) -> Job:
    from torch.optim.swa_utils import AveragedModel

    model = DistributedDataParallel(convolutions("all"))
    ema = AveragedModel(model.module, use_buffers=True)
    for step in range(3):
        model(images(10 * step + rank))
        ema.update_parameters(model.module)
    return Job(model, images(rank + 50), averaged=ema)


CLEAN = {
    single: 2,
    ddp: 2,
    ddp_own_statistics: 2,
    fsdp2: 2,
    tensor_parallel: 2,
    sequence_parallel: 2,
    sequence_by_hooks: 2,
    sequence_finalized: 2,
    subgroups: 4,
    pipeline: 4,
    average: 2,
}


# ------------------------------------------------ planted faults


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

    job = sequence_parallel(rank)
    job.model[1].norm.__class__ = Local
    return job, "partial_gradients", "1.norm"


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
    mode_on_one_rank: 2,
    model_in_evaluation_on_one_rank: 2,
    class_on_one_rank: 2,
    group_of_all_under_tensor_parallelism: 4,
    group_across_equal_batches: 4,
    group_of_one: 2,
    groups_that_do_not_agree: 2,
    megatron_7452: 2,
    one_norm_not_finalized: 2,
    local_weight_of_a_dtensor: 2,
    average_without_buffers: 2,
    target_copied_late: 2,
    server_of_a_federation: 2,
}
