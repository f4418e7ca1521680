"""What is put right on each rank after a planted fault, by the remedy as printed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from doctor_code import alternatives, run_as_printed
from rank_faults import gradients_of_nan, norm_that_one_rank_goes_around
from rank_models import convolutions, images
from rank_set_ups import grid
from torch.nn.parallel import DistributedDataParallel

import leannorm

# what no line can do: the same arguments on every rank, a forward, what made a value NaN, what goes around
SENTENCES = {
    "weight_offset_on_one_rank",
    "activation_on_one_rank",
    "eps_mode_on_one_rank",
    "no_parameters_on_one_rank",
    "frozen_on_one_rank",
    "class_on_one_rank",
    "local_weight_of_a_dtensor",
    "local_weight_over_a_mesh",
}
ELSEWHERE = {gradients_of_nan, norm_that_one_rank_goes_around}  # what is found follows from another layer


def _pairs(rank: int) -> Any:
    return [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]


GROUPS = {
    "group_of_all_under_tensor_parallelism": _pairs,
    "group_across_equal_batches": _pairs,
    "group_of_a_whole_mesh": _pairs,
    "group_of_one": lambda rank: dist.group.WORLD,
    "groups_that_do_not_agree": lambda rank: dist.group.WORLD,
    "megatron_7452_within_data_parallelism": lambda rank: grid()[1][rank // 2],
    "copy_of_a_shard": lambda rank: dist.new_group([1, 3]),
}


def _left(rank: int, fault: Any, which: int) -> tuple[str, set[str]] | None:
    """The code of one of a fault's remedies, and what is found after that and was not, or is its fault."""
    torch.manual_seed(0)
    job, check, _ = fault(rank)
    made = GROUPS.get(fault.__name__)
    group = made(rank) if made else None
    findings = job.report().findings
    codes = alternatives([one for one in findings if one.check == check])
    if which >= len(codes):
        return None
    given = {"model": job.model, "batches": [job.batch] * 8, "group": group, **job.arguments}
    run_as_printed(codes[which], given)
    others = {one.check for one in findings} - {check}
    return codes[which], {one.check for one in job.report().findings} - others


def unsynchronized(rank: int) -> list[tuple[str, list[str], bool]]:
    """Each remedy where ranks have statistics of their own: its code, what is found then, are they one?"""
    told = []
    for which in range(2):
        model = DistributedDataParallel(convolutions(), broadcast_buffers=False)
        model(images(rank + 1))
        (finding,) = leannorm.doctor(model, images(rank)).findings
        code = alternatives([finding])[which]
        run_as_printed(code, {"model": model})
        found = [one.check for one in leannorm.doctor(model, images(rank)).findings]
        for norm in (model.module[1], model.module[4]):
            norm.momentum = None if which else 0.0  # the buffers' own way is that they are sent before a pass
            if which:
                norm.reset_running_stats()
        model(images(rank + 2))
        means = [torch.empty(8) for _ in range(dist.get_world_size())]
        dist.all_gather(means, model.module[4].running_mean)
        told.append((code, found, torch.equal(means[0], means[1])))
    return told


def few(rank: int) -> list[tuple[str, list[str]]]:
    """Batches of two samples on each of two ranks: shared statistics are of four."""
    model = convolutions()
    findings = leannorm.doctor(model, images(rank)[:2]).findings
    codes = [code for code in alternatives(findings) if "sync" in code]
    told = [("", [one.check for one in findings])]
    for code in codes:
        run_as_printed(code, {"model": model})
        told.append((code, [one.check for one in leannorm.doctor(model, images(rank)[:2]).findings]))
    return told


def mended(rank: int, faults: list[Any]) -> dict[str, list[tuple[str, set[str]]]]:
    told: dict[str, list[tuple[str, set[str]]]] = {}
    for fault in faults:
        which = 0
        while (one := _left(rank, fault, which)) is not None:
            told.setdefault(fault.__name__, []).append(one)
            which += 1
    return told
