"""`doctor` on every rank of a job: faults are found with rank and layer, set-ups without are clean."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from doctor_code import code_in
from rank_faults import FAULTS, weights_cut_by_hand_and_not_marked
from rank_models import Megatron, blocks, convolutions, images, summed_by_hooks, tokens
from rank_remedies import ELSEWHERE, SENTENCES, few, mended, unsynchronized
from rank_set_ups import CLEAN, Job, grid, of_dtensors
from ranks import ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import leannorm
from leannorm._catalog import norms_of
from leannorm.report.doctor.checks import CHECKS
from leannorm.report.doctor.observe import observe
from leannorm.report.doctor.parallel import ROUNDING, _partial, partial_gradients
from leannorm.report.doctor.ranks import in_numbers

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

OF_RANKS = {check.name for check in CHECKS if check.of_ranks} | {"averaged_buffers"}


def _told(report):
    return [(one.check, one.layer, one.value, one.consequence, one.remedy) for one in report.findings]


def _local(tensor):
    """A rank's values; None where there are none yet."""
    if tensor is None or isinstance(tensor, nn.UninitializedParameter):
        return None
    return getattr(tensor, "_local_tensor", tensor)


def _state(model):
    """Values, gradients and modes."""
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    values = [
        None if values is None else values.double().nan_to_num().tolist() for values in map(_local, tensors)
    ]
    return values, [m.training for m in model.modules()], torch.get_rng_state().tolist()


def _run(rank, set_ups):
    """What `doctor` says on this rank in each of some set-ups."""
    results = {}
    for set_up in set_ups:
        given = set_up(rank)
        job, expected = (given, None) if isinstance(given, Job) else (given[0], given[1:])
        before = _state(job.model)
        report = job.report()
        results[set_up.__name__] = _told(report), expected, _state(job.model) == before
    return results


def _table(table, world):
    results = ranks(world, _run, [set_up for set_up, size in table.items() if size == world])
    for name in results[0]:
        assert all(told[name][0] == results[0][name][0] for told in results), f"{name} differs by rank"
        assert all(told[name][2] for told in results), f"{name} is not as it was"
    return results[0]


@pytest.mark.parametrize("world", [2, 4])
def test_set_ups_without_a_fault(world):
    told = _table(CLEAN, world)
    assert {name: found for name, (found, _, _) in told.items() if found} == {}


@pytest.mark.parametrize("world", [2, 4])
def test_every_planted_fault_is_found_in_its_layer(world):
    missed = {}
    for name, (found, (check, layer), _) in _table(FAULTS, world).items():
        own = [one[:2] for one in found if one[0] in OF_RANKS]
        if (check, layer) not in own or {one[0] for one in own} != {check}:
            missed[name] = found
    assert missed == {}


def _doubtful(rank):
    job, _, _ = weights_cut_by_hand_and_not_marked(rank)
    return [(one.severity, one.remedy) for one in job.report().findings]


def test_what_may_be_cut_by_hand_is_a_warning():
    ((severity, remedy),) = ranks(2, _doubtful)[0]
    assert severity == "warning"
    cut = [line for line in remedy.split("\n") if line.startswith("# or ")]
    assert len(cut) == 1
    assert "weight.tensor_model_parallel = True" in cut[0]


def _seen_of_parts(rank):
    for axis in (None, 0, 1, 2):
        job = of_dtensors(rank, axis)
        seen, _ = observe(job.model, norms_of(job.model), [job.batch], None)
        of, x = seen["0"], job.batch.full_tensor().double().transpose(0, 1).flatten(1)
        assert of.pooled == x.shape[1] == 7 * 9 * 3
        torch.testing.assert_close(of.mean, x.mean(1), rtol=1e-6, atol=0)
        torch.testing.assert_close(of.std, x.std(1), rtol=1e-6, atol=0)
        assert torch.equal(of.least, x.amin(1))
        assert torch.equal(of.largest, x.amax(1))
    return True


def test_what_a_norm_of_a_dtensor_sees_is_of_all_ranks():
    assert all(ranks(2, _seen_of_parts))


def _sentences(rank, world):
    odd = rank == world - 1
    model = convolutions()
    if odd:
        model[1].eps = 1e-6
        model[4].bias.data += 1
        model[4].running_var[0] = float("nan")
    return [(one.check, str(one.value), one.consequence) for one in leannorm.doctor(model).findings]


def test_of_two_ranks_neither_is_blamed_and_of_more_the_odd_one():
    settings, beta, statistics = "rank_settings", "rank_weights", "nonfinite_statistics"
    two = {check: (value, why) for check, value, why in ranks(2, _sentences, 2)[0]}
    assert two[settings][0] == "rank 0: eps=1e-05; rank 1: eps=1e-06"
    assert two[beta][0].startswith("bias: rank 0: norm ")
    assert "; rank 1: norm " in two[beta][0]
    four = {check: (value, why) for check, value, why in ranks(4, _sentences, 4)[0]}
    assert four[settings][0] == "rank 3: eps=1e-06 (elsewhere eps=1e-05)"
    assert four[beta][0].startswith("bias: rank 3: norm ")
    assert four[statistics][1].startswith("on rank 3: ")  # what one rank alone has found is told on all


def _one_value(rank):
    report = leannorm.doctor(convolutions(), images()[:1, :, :5, :5])
    return [(one.check, one.layer, one.severity) for one in report.findings if one.severity == "error"]


def test_one_value_a_channel_is_a_finding_on_ranks_too():
    """At which batch norm raises, also in the pass whose gradients are compared."""
    assert ranks(2, _one_value) == [[("few_values", "4", "error")]] * 2


def test_a_gradient_of_which_only_rounding_is_left_is_not_compared():
    """Such as that of a beta that the next norm removes: each rank rounds in its own way."""
    rounding = [(0, [1e-8, 2e-8]), (1, [-1e-8, 3e-8])]
    assert _partial("norm", "bias", rounding, ROUNDING * 1.0, "") is None
    assert _partial("norm", "bias", rounding, ROUNDING * 1e-6, "") is not None


EXAMPLE = re.search(
    r"^## On every rank.*?^```python\n(.*?)^```$.*?^```console\n(.*?)^```$",
    (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(),
    re.M | re.S,
)


def _example(rank):
    with contextlib.redirect_stdout(io.StringIO()) as told:
        exec(EXAMPLE[1], {})
    return told.getvalue()


def test_the_example_of_the_page():
    told = ranks(2, _example)
    assert " ".join(EXAMPLE[2].split()) in " ".join(told[0].split())
    assert told[1] == ""


@pytest.mark.conformance
def test_the_example_of_the_page_under_torchrun(tmp_path):
    (tmp_path / "example.py").write_text(EXAMPLE[1])
    torchrun = "torch.distributed.run --nnodes 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0"
    done = subprocess.run(
        [sys.executable, "-m", *torchrun.split(), "--nproc-per-node", "2", str(tmp_path / "example.py")],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0: eps=1e-05; rank 1: eps=0.001" in done.stdout


# ------------------------------------------------ training goes on as without it


def _own_step(model, batch):
    model(batch).square().mean().backward()


def _train(rank, kind, when, **arguments):
    torch.manual_seed(5)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        model, batches = blocks(), tokens
        for unit in [*list(model)[:2], model]:
            fully_shard(unit)
    elif kind == "ddp and sequence":
        parallel, cutting, mine, cut = grid()
        model = DistributedDataParallel(summed_by_hooks(Megatron(cutting[cut])), process_group=parallel[mine])
        batches, rank = tokens, cut
    else:
        model, batches = DistributedDataParallel(convolutions("all"), gradient_as_bucket_view=True), images
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(4):
        batch = batches(10 * step + (0 if kind == "ddp, one batch" else rank))
        for moment in ("before", "between", "after"):
            if moment == when and step == 2:  # when gradients of two steps are added
                leannorm.doctor(model, batch, optimizer=optimizer, **arguments)
            if moment == "before":
                loss = model(batch).square().mean() + torch.rand(())
            elif moment == "between":
                loss.backward()
        if step != 1:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, _state(model)[0]


def _trainings(rank, kind):
    stock = _train(rank, kind, None)
    calls = [(when, {}) for when in ("before", "between", "after")]
    calls += [(when, {"backward": _own_step}) for when in ("before", "after")]
    return [(when, bool(given)) for when, given in calls if _train(rank, kind, when, **given) != stock]


@pytest.mark.parametrize(
    ("kind", "world"), [("ddp", 2), ("ddp, one batch", 2), ("ddp and sequence", 4), ("fsdp2", 2)]
)
@pytest.mark.sampled(of=2)
def test_training_goes_on_as_without_it(kind, world):
    """Losses, weights, statistics and gradients to the bit, also between a forward and its backward pass."""
    assert ranks(world, _trainings, kind) == [[]] * world


def _raising(rank):
    def forward(model, batch):
        model(batch)
        raise ValueError("no more")

    def fails(model, batch):
        with pytest.raises((leannorm.SyncError, ValueError), match="no more"):
            leannorm.doctor(model, batch, forward=forward)

    from torch.distributed.fsdp import fully_shard

    outputs = []
    for told in (False, True):
        model = blocks()
        fully_shard(model)
        if told:
            fails(model, tokens(rank))
        loss = model(tokens(rank)).square().mean()
        loss.backward()
        outputs.append((loss.item(), _state(model)[0]))
    return outputs[0] == outputs[1]


def test_a_pass_that_raises_leaves_fsdp2_as_it_was():
    assert ranks(2, _raising) == [True, True]


# ------------------------------------------------ one process


def test_one_process_without_a_job_is_as_before():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=0.99))
    report = leannorm.doctor(model, torch.randn(16, 4))
    assert [one.check for one in report.findings] == ["momentum", "removed_bias"]
    with pytest.raises(leannorm.InputError, match="call init_process_group first"):
        leannorm.doctor(model, group="dp")


def test_a_gradient_that_is_not_finite_hides_no_other_of_its_layer():
    far = torch.zeros(64)
    far[[3, 40]] = float("inf")  # told in numbers, of which some are infinite and some NaN
    gradients = [
        {"n.weight": ("", in_numbers(weight)), "n.bias": ("", in_numbers(bias))}
        for weight, bias in ((far, torch.ones(64)), (torch.zeros(64), 2 * torch.ones(64)))
    ]
    both = [SimpleNamespace(number=number, steps=False, wrapped=None) for number in (0, 1)]
    faults = list(partial_gradients.find(SimpleNamespace(ranks=both, gradients=gradients, passed="")))
    assert [fault.severity for fault in faults] == ["warning", None]


# ------------------------------------------------ remedies, as printed


@pytest.mark.parametrize("world", [2, 4])
def test_every_remedy_mends_its_fault_on_all_ranks(world):
    """And nothing else is found; what only a person can do is a sentence."""
    faults = [fault for fault, size in FAULTS.items() if size == world and fault not in ELSEWHERE]
    told = ranks(world, mended, faults)
    assert all(one == told[0] for one in told)
    sentences = {name for name, codes in told[0].items() for code, _ in codes if not code_in(code)}
    assert sentences == SENTENCES & {fault.__name__ for fault in faults}
    left = {(name, code): found for name, codes in told[0].items() for code, found in codes if found}
    assert {name: found for (name, _), found in left.items() if name not in sentences} == {}


def _elsewhere(rank):
    told = {}
    for fault in ELSEWHERE:
        job, check, layer = fault(rank)
        (told[fault.__name__],) = {
            one.remedy for one in job.report().findings if (one.check, one.layer) == (check, layer)
        }
    return told


def test_what_another_rank_does_not_run_gets_no_hook_that_waits_for_it():
    """And NaN is looked for by torch."""
    told = ranks(2, _elsewhere)[0]
    assert told["norm_that_one_rank_goes_around"].startswith("# look at why 0.norm has no gradient on rank 1")
    assert not code_in(told["norm_that_one_rank_goes_around"])
    try:
        exec(told["gradients_of_nan"])
        assert torch.is_anomaly_enabled()
    finally:
        torch.autograd.set_detect_anomaly(False)


def test_ranks_with_statistics_of_their_own_have_one_by_each_remedy():
    both = ranks(2, unsynchronized)
    assert both[0] == both[1]
    assert [(found, one) for _, found, one in both[0]] == [([], True)] * 2
    assert ["broadcast_buffers" in code for code, _, _ in both[0]] == [True, False]


def test_small_batches_of_ranks_are_shared():
    before, (code, after) = ranks(2, few)[0]
    assert before[1] == ["few_samples"] * 2
    assert 'leannorm.convert(model, to="sync")' in code
    assert after == []
