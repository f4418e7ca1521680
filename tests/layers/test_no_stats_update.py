"""Within `no_stats_update()` training uses the batch's statistics, and running statistics stay."""

import pytest
import torch
from ranks import ranks
from test_guard import LAYERS
from torch.utils.checkpoint import checkpoint

import leannorm
from leannorm import functional, nn, program

LAYERS = {**LAYERS, "BatchNormOp": lambda **of: nn.BatchNormOp(3, **of)}


def buffers(layer):
    return [b.clone() for b in layer.buffers()]


def assert_equal(some, others):
    for one, other in zip(some, others, strict=True):
        assert torch.equal(one, other)


def assert_stays(layer, call=None):
    """The output is that of training, and nothing moves, in the backward pass neither; without, all moves."""
    call, x, start = layer if call is None else call, torch.randn(4, 3, 6, 6) + 1, buffers(layer)
    with leannorm.no_stats_update():
        y = call(x.requires_grad_())
        assert_equal(buffers(layer), start)
    y.sum().backward()
    assert_equal(buffers(layer), start)
    assert torch.equal(call(x), y)
    assert not any(torch.equal(a, b) for a, b in zip(buffers(layer)[:2], start[:2], strict=True))


@pytest.mark.parametrize("name", LAYERS)
def test_eager(name):
    assert_stays(LAYERS[name]())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_checkpointed(name, reentrant):
    layer = LAYERS[name]()
    assert_stays(layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant))


@pytest.mark.sampled(of=4)
@pytest.mark.parametrize("name", LAYERS)
def test_compiled(name):
    layer = LAYERS[name]()
    assert_stays(layer, torch.compile(layer, fullgraph=True, backend="aot_eager"))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def twice(x):
        with leannorm.no_stats_update():
            y = layer(x)
        return y + layer(x)

    twin, x = LAYERS[name](), torch.randn(4, 3, 6, 6)
    twin.load_state_dict(layer.state_dict())
    twice(x), twin(x)
    for one, other in zip(buffers(layer), buffers(twin), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["BatchNorm2d", "ConvBatchNorm2d"])
def test_a_graph_that_leaves_and_a_program_keep_it(name):
    layer, x = LAYERS[name](), torch.randn(4, 3, 6, 6)
    with leannorm.no_stats_update():
        exported = torch.export.export(layer, (x,)).module()
        branches = program.fork(layer, (x,))
    start = buffers(layer)
    assert torch.equal(exported(x), branches.train(x))
    assert_equal(exported.buffers(), start)
    assert_equal(buffers(layer), start)


def test_functions():
    x, state = torch.randn(4, 3, 6, 6), (torch.zeros(3), torch.ones(3))
    with leannorm.no_stats_update():
        functional.batch_norm(x, *state, training=True)
        functional.batch_norm_act(x, *state, training=True, act="relu")
        functional.instance_norm(x, *state)
        functional.sync_batch_norm(x, *state, training=True)
        functional.batch_norm_op(x, *state, None, None)
    assert [s.tolist() for s in state] == [[0.0] * 3, [1.0] * 3]
    with leannorm.no_stats_update():
        assert functional.batch_norm(x, *state).equal(functional.batch_norm(x, *state, training=False))


def test_it_ends_with_an_error():
    layer = nn.BatchNorm2d(3)
    with pytest.raises(leannorm.InputError), leannorm.no_stats_update(), leannorm.no_stats_update():
        layer(torch.randn(3))
    layer(torch.randn(4, 3, 6, 6))
    assert layer.num_batches_tracked == 1


def on_ranks(rank):
    assert_stays(nn.SyncBatchNorm(3))
    return True


def test_ranks():
    assert ranks(2, on_ranks) == [True, True]
