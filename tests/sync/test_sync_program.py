"""Programs of networks that share statistics: forked, saved and loaded on ranks, against the eager model."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import outcomes, ranks
from sync_cases import messages_sent
from torch import nn as torch_nn

from leannorm import nn, program
from leannorm._errors import InputError
from leannorm.distributed import no_sync


def network(**options):
    torch.manual_seed(0)
    layers = [
        torch_nn.Conv2d(3, 4, 3),
        nn.SyncBatchNorm(4, **options),
        torch_nn.ReLU(),
        torch_nn.Dropout(0.1),
    ]
    return torch_nn.Sequential(*layers, torch_nn.Conv2d(4, 2, 3))


def forked(net, batch=4):
    x = torch.randn(batch, 3, 6, 6)
    return program.fork(net, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))


def step(run, x, seed):
    torch.manual_seed(seed)
    y = run(x)
    y.square().sum().backward()
    return y


def equals_the_model(run, net, model, rank):
    """Two steps and inference, on batches of other sizes on each rank: equal to the bit, and as many sums."""
    calls = messages_sent()
    for seed in range(2):
        x = torch.randn(2 + rank + seed, 3, 6, 6)
        found = []
        for train, infer, owner in (
            (run.train, run.infer, net),
            (model.train(), lambda x: model.eval()(x), model),
        ):
            start = len(calls)
            y = step(train, x, seed)
            trained = len(calls) - start
            state = [p.grad for p in owner.parameters()] + list(owner.buffers())
            z = infer(x)
            assert len(calls) - start == trained == 2
            found.append([y, z, *(t.clone() for t in state)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return model[1].running_mean.clone()


class Owner:
    """A program's variables in the order of the model's."""

    def __init__(self, run, model):
        self.run, self.model = run, model

    def parameters(self):
        found = dict(self.run.named_parameters())
        return [found[name] for name, _ in self.model.named_parameters()]

    def buffers(self):
        found = self.run.state_dict()
        return [found[name] for name, _ in self.model.named_buffers()]


def in_memory(rank, options):
    net = network(**options)
    return equals_the_model(forked(net), net, copy.deepcopy(net), rank)


OPTIONS = [{}, {"momentum": None}, {"process_group": "node", "affine": False}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_the_model_on_two_ranks(options):
    one, other = ranks(2, in_memory, options)
    assert torch.equal(one, other)


def loaded(rank, path):
    run, model = program.Program.load(path), network()
    return equals_the_model(run, Owner(run, model), model, rank)


def test_a_file_written_by_one_process_shares_on_two(tmp_path):
    """What was asked for is in the file: all ranks, however many there are when it runs."""
    net = network()
    run = forked(net)
    run.save(tmp_path / "net.pt2")
    one, other = ranks(2, loaded, tmp_path / "net.pt2")
    assert torch.equal(one, other)
    again, model = program.Program.load(tmp_path / "net.pt2"), network()
    x = torch.randn(4, 3, 6, 6)
    assert torch.equal(step(again.train, x, 0), step(model.train(), x, 0))  # one process: batch norm
    assert torch.equal(again.infer(x), model.eval()(x))


def saved_by_a_group(rank, path):
    """Ranks 0 and 2 share, 1 and 3 do not; a file tells which ranks they were."""
    groups = dist.new_group([0, 2]), dist.new_group([1, 3])
    run = forked(network(process_group=groups[rank % 2]))
    if rank == 0:
        run.save(path)
    x = torch.full((2, 3, 6, 6), float(rank)) + torch.randn(2, 3, 6, 6)
    step(run.train, x, 0)
    mean = run.state_dict()["1.running_mean"].clone()
    dist.barrier()
    again = program.Program.load(path)
    if rank % 2 == 0:
        step(again.train, x, 0)
        assert torch.equal(again.state_dict()["1.running_mean"], mean)
    else:
        before = {k: v.clone() for k, v in again.state_dict().items()}
        with pytest.raises(InputError, match=r"by the ranks 0,2, and this process has no group"):
            again.train(x)
        assert all(torch.equal(v, before[k]) for k, v in again.state_dict().items())
        assert again.infer(x).shape == (2, 2, 2, 2)
    dist.barrier()
    return mean


def test_a_group_of_some_ranks_is_known_by_its_ranks(tmp_path):
    means = ranks(4, saved_by_a_group, tmp_path / "net.pt2")
    assert torch.equal(means[0], means[2])
    assert torch.equal(means[1], means[3])
    assert not torch.equal(means[0], means[1])
    again = program.Program.load(tmp_path / "net.pt2")
    with pytest.raises(InputError, match=r"init_process_group, and new_group\(\[0,2\]\)"):
        again.train(torch.randn(4, 3, 6, 6))
    assert again.infer(torch.randn(4, 3, 6, 6)).shape == (4, 2, 2, 2)


def deployed(rank):
    """One branch as an exported program; no_sync() holds for what runs within, as for the layer."""
    net = network()
    model, x = copy.deepcopy(net), torch.randn(3 + rank, 3, 6, 6)
    run = forked(net)
    exported = run.to_exported("train").module()
    y = step(exported, x, 0)
    assert torch.equal(y, step(model, x, 0))
    with no_sync():
        assert torch.equal(step(run.train, x, 1), step(model, x, 1))
    assert not any("sync" in str(n.target) for n in run.to_exported("infer").graph.nodes)
    return True


def test_deployed():
    assert all(ranks(2, deployed))


def one_rank_infers(rank):
    run = forked(network(timeout=2.0))
    x = torch.randn(4, 3, 6, 6)
    step(run.train, x, 0)
    (run.infer if rank else run.train)(x)


def test_a_rank_that_takes_the_other_branch_is_named():
    training, _ = outcomes(2, one_rank_infers)
    assert "SyncError" in training.error
    assert "rank 1 did not come" in training.error
