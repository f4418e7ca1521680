"""`doctor` on ranks that do not come together: a named error on every rank, within the timeout."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from rank_models import Megatron, blocks, convolutions, images, tokens
from ranks import outcomes, ranks

import leannorm
from leannorm.report.doctor import meeting

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")


def other_model(rank):
    """The stages of a pipeline, called without group=."""
    return leannorm.doctor(blocks() if rank else convolutions(), None)


def other_depth(rank):
    return leannorm.doctor(blocks()[: 2 + rank], None)


def batches_on_one_rank(rank):
    return leannorm.doctor(convolutions("all"), images() if rank else None)


def step_on_one_rank(rank):
    return leannorm.doctor(blocks(), tokens(), backward=(lambda model, batch: None) if rank else None)


def no_model_on_one_rank(rank):
    return leannorm.doctor(None if rank else blocks(), tokens())


def raises_in_the_pass(rank):
    def forward(model, batch):
        if rank == 1:
            raise ValueError("no such picture")
        return model(batch)

    return leannorm.doctor(convolutions("all"), images(rank), forward=forward)


def raises_between_collectives(rank):
    def forward(model, batch):
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            raise ValueError("no such picture")
        dist.all_reduce(torch.ones(1))
        return model(batch)

    return leannorm.doctor(blocks(), tokens(rank), forward=forward)


def raises_in_its_step(rank):
    def backward(model, batch):
        model(batch).sum().backward()
        if rank == 1:
            raise ValueError("no such step")

    return leannorm.doctor(blocks(), tokens(rank), backward=backward)


def raises_before(rank):
    return leannorm.doctor(convolutions("all"), images(rank) if rank == 0 else [])


def steps_an_optimizer(rank):
    """In a hook, as torch's own tutorial has it: the model would be trained."""
    model = Megatron()
    before = [p.tolist() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    try:
        return leannorm.doctor(model, tokens())
    finally:
        assert before == [p.tolist() for p in model.parameters()]


def not_called(rank):
    if rank == 1:
        time.sleep(4)
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
    other_model: "pass group= of those, such as the ranks of a pipeline's stage (rank 0 has '1' (batch of 8)",
    other_depth: "ranks that have one model",
    batches_on_one_rank: "batches must be given on all ranks or on none (rank 0 has none, rank 1 has some)",
    step_on_one_rank: "backward must be given on all ranks or on none",
    no_model_on_one_rank: "rank 1 (InputError",
    raises_in_the_pass: "rank 1 (ValueError: no such picture)",
    raises_between_collectives: "rank 1 (ValueError: no such picture)",
    raises_in_its_step: "rank 1 (ValueError: no such step)",
    raises_before: "rank 1 (InputError",
    steps_an_optimizer: "in it SGD takes a step; pass backward=",
    not_called: "rank 1 did not come",
    dies: "rank 1 did not come",
    dies_in_the_pass: "rank 1 did not come",
}


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.__name__)
@pytest.mark.sampled(of=3)
def test_bad_input_is_a_named_error_within_the_timeout(case):
    first, second = outcomes(2, case, group_timeout=2, deadline=60)
    assert first.error is not None, first.value
    assert first.error.startswith(("SyncError: ", "InputError: doctor's backward pass")), first.error
    assert BAD[case] in first.error
    assert first.seconds < 8
    if case not in (not_called, dies, dies_in_the_pass):
        assert second.error is not None, second.value


def called_by_one_then_by_all(rank):
    """A call that was given up is left out by those that come later."""
    if rank == 0:
        with pytest.raises(leannorm.SyncError, match="rank 1 did not come"):
            leannorm.doctor(convolutions(), None)
    else:
        time.sleep(3)
    return bool(leannorm.doctor(convolutions(), None))


def test_a_call_that_was_given_up():
    assert ranks(2, called_by_one_then_by_all, group_timeout=2) == [True, True]


def warnings_while_one_comes_late(rank, late):
    meeting._PATIENCE = 0.5
    if rank == late:
        time.sleep(2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        leannorm.doctor(convolutions(), None)
    return [str(one.message) for one in told if "has waited" in str(one.message)]


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_waits_long_says_for_whom(late):
    told = ranks(2, warnings_while_one_comes_late, late)
    assert not told[late]
    assert f"for {'the others' if late == 0 else 'rank 1'}, and will for up to 60 s" in told[1 - late][0]


def in_a_store_that_outlives_its_group(rank):
    """As torchrun's does: the second group finds what the first one's ranks have told."""
    store = dist.PrefixStore("second", dist.distributed_c10d._get_default_store())
    told = []
    for life in range(2):
        dist.barrier()  # else one rank may leave while the other still connects
        dist.destroy_process_group()
        prefix = dist.PrefixStore(str(life), store)  # gloo's own keys; doctor's are those below
        dist.init_process_group("gloo", store=prefix, rank=rank, world_size=2)
        world = dist.distributed_c10d._get_default_group()
        dist.distributed_c10d._world.pg_map[world] = ("gloo", store)
        model = convolutions()
        model[1].eps = 1e-5 * (1 + life * rank)
        told.append([one.check for one in leannorm.doctor(model).findings])
    return told


def test_a_store_that_outlives_its_group():
    assert ranks(2, in_a_store_that_outlives_its_group) == [[[], ["rank_settings"]]] * 2
