"""`doctor` on every rank of a job: faults are found with rank and layer, set-ups without are clean."""

import os
import time

import pytest
import rank_cases
import torch
import torch.distributed as dist
from rank_cases import CLEAN, FAULTS, Job, blocks, convolutions, images
from ranks import outcomes, ranks

import leannorm
from leannorm.report.doctor.checks import CHECKS

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

OF_RANKS = {check.name for check in CHECKS if check.of_ranks} | {"averaged_buffers"}


def _told(report):
    return [(one.check, one.layer, one.value, one.consequence, one.remedy) for one in report.findings]


def _run(rank, kind, names):
    """What `doctor` says on this rank in each set-up of a table."""
    results = {}
    for name in names:
        given = getattr(rank_cases, name)(rank)
        job, expected = (given, None) if isinstance(given, Job) else (given[0], given[1:])
        before = {key: value.clone() for key, value in job.model.state_dict().items()}
        report = job.report()
        after = job.model.state_dict()
        same = all(torch.equal(_local(value), _local(after[key])) for key, value in before.items())
        clean = all(p.grad is None or name in ("ddp", *_STEPPED) for p in job.model.parameters())
        results[name] = _told(report), expected, same and clean
    return results


_STEPPED = {"ddp_own_statistics", "subgroups"} | {f.__name__ for f in FAULTS}


def _local(tensor):
    return getattr(tensor, "_local_tensor", tensor)


def _table(table, world):
    names = [setup.__name__ for setup, size in table.items() if size == world]
    return ranks(world, _run, None, names)


@pytest.mark.parametrize("world", [2, 4])
def test_set_ups_without_a_fault(world):
    for told in _table(CLEAN, world):
        assert {name: found for name, (found, _, _) in told.items() if found} == {}
        assert [name for name, (_, _, same) in told.items() if not same] == []


@pytest.mark.parametrize("world", [2, 4])
def test_every_planted_fault_is_found_in_its_layer(world):
    results = _table(FAULTS, world)
    missed = {}
    for told in results:
        for name, (found, (check, layer), same) in told.items():
            own = [one for one in found if one[0] in OF_RANKS]
            if (
                (check, layer) not in [one[:2] for one in own]
                or {one[0] for one in own} != {check}
                or not same
            ):
                missed[name] = found, same
    assert missed == {}
    for name in results[0]:  # what ranks find together is the same on each
        every = [[one for one in told[name][0] if one[0] in OF_RANKS] for told in results]
        assert all(one == every[0] for one in every), name


# ------------------------------------------------ bad input: a named error on every rank


def other_model(rank):
    return leannorm.doctor(blocks() if rank else convolutions(), None)


def other_depth(rank):
    return leannorm.doctor(blocks()[: 2 + rank], None)


def batches_on_one_rank(rank):
    return leannorm.doctor(convolutions("all"), images() if rank else None)


def raises_in_the_pass(rank):
    def forward(model, batch):
        if rank == 1:
            raise ValueError("no such picture")
        return model(batch)

    return leannorm.doctor(convolutions("all"), images(rank), forward=forward)


def raises_before(rank):
    return leannorm.doctor(convolutions("all"), images(rank) if rank == 0 else [])


def not_called(rank):
    if rank == 1:
        time.sleep(8)
        return None
    return leannorm.doctor(convolutions(), None)


def dies(rank):
    if rank == 1:
        os._exit(3)
    return leannorm.doctor(convolutions(), None)


def dies_in_the_pass(rank):
    def forward(model, batch):
        if rank == 1:
            os._exit(3)
        return model(batch)

    return leannorm.doctor(convolutions("all"), images(rank), forward=forward)


BAD = {
    other_model: ("SyncError", "have one model"),
    other_depth: ("SyncError", "have one model"),
    batches_on_one_rank: ("SyncError", "on all ranks or on none"),
    raises_in_the_pass: ("SyncError", "rank 1 (ValueError: no such picture)"),
    raises_before: ("SyncError", "rank 1 (InputError"),
    not_called: ("SyncError", "rank 1 did not come"),
    dies: ("SyncError", "rank 1 did not come"),
    dies_in_the_pass: ("SyncError", "rank 1 did not come"),
}


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.__name__)
def test_bad_input_is_a_named_error_within_the_timeout(case):
    name, text = BAD[case]
    first, second = outcomes(2, case, group_timeout=5, deadline=60)
    assert first.error is not None, first.value
    assert first.error.startswith(name), first.error
    assert text in first.error
    assert first.seconds < 30
    if case not in (not_called, dies, dies_in_the_pass):
        assert second.error is not None, second.value


def called_by_one_then_by_all(rank):
    """A call that was given up is left out by those that come later."""
    try:
        if rank == 0:
            leannorm.doctor(convolutions(), None)
    except leannorm.SyncError:
        pass
    else:
        assert rank == 1
        time.sleep(4)
    return bool(leannorm.doctor(convolutions(), None))


def test_a_call_that_was_given_up():
    assert ranks(2, called_by_one_then_by_all, group_timeout=3) == [True, True]
