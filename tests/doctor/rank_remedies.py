"""What is put right on each rank after a planted fault, by the remedy as printed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from doctor_code import alternatives, run_as_printed
from rank_faults import gradients_of_nan, norm_that_one_rank_goes_around
from rank_set_ups import grid

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


def mended(rank: int, faults: list[Any]) -> dict[str, list[tuple[str, set[str]]]]:
    told: dict[str, list[tuple[str, set[str]]]] = {}
    for fault in faults:
        which = 0
        while (one := _left(rank, fault, which)) is not None:
            told.setdefault(fault.__name__, []).append(one)
            which += 1
    return told
