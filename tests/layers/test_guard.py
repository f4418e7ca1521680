"""A batch whose statistics are not all finite leaves running statistics and counter as they were."""

import copy

import pytest
import torch
from ranks import ranks
from torch.utils.checkpoint import checkpoint

import leannorm
from leannorm import functional, nn, program
from leannorm.ops.select import use_backend

NAN, INF = torch.nan, torch.inf
LAYERS = {
    "BatchNorm2d": lambda **of: nn.BatchNorm2d(3, **of),
    "BatchNormAct2d": lambda **of: nn.BatchNormAct2d(3, act="silu", **of),
    "SyncBatchNorm": lambda **of: nn.SyncBatchNorm(3, **of),
    "ConvBatchNorm2d": lambda **of: nn.ConvBatchNorm2d(3, 4, 3, **of),
    "ConvBatchNorm2d-outside": lambda **of: nn.ConvBatchNorm2d(3, 4, 3, eps_mode="outside", **of),
    "InstanceNorm2d": lambda **of: nn.InstanceNorm2d(3, track_running_stats=True, **of),
}


def batches():
    """Good ones, and between them some of which one value of one channel is bad."""
    torch.manual_seed(0)
    good = [torch.randn(4, 3, 6, 6) for _ in range(3)]
    mixed = list(good)
    for at, value in ((1, NAN), (2, INF), (3, -INF)):
        bad = torch.randn(4, 3, 6, 6)
        bad[2, 1, 3, 3] = value
        mixed.insert(2 * at - 1, bad)
    return good, mixed


def train(layer, xs, call=None):
    """The buffers after a step on each batch; a bad batch must show in the output."""
    for x in xs:
        leaf = x.clone().requires_grad_()
        y = (layer if call is None else call)(leaf)
        assert y.isfinite().all() == x.isfinite().all()
        y.sum().backward()
    return [b.clone() for b in layer.buffers()]


def assert_unmoved_by_bad(make, call_of=lambda layer: None):
    """The buffers after good batches and bad ones are those after the good ones, bit for bit."""
    torch.manual_seed(1)
    layer = make()
    twin = copy.deepcopy(layer)
    start = [b.clone() for b in layer.buffers()]
    good, mixed = batches()
    got, want = train(layer, mixed, call_of(layer)), train(twin, good, call_of(twin))
    for one, other, first in zip(got, want, start, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()
        # torch's instance norm does not count
        assert not torch.equal(one, first) or (
            one.dtype == torch.int64 and isinstance(layer, nn.InstanceNorm2d)
        )


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", LAYERS)
def test_eager(name, backend, momentum):
    if momentum is None and name == "InstanceNorm2d":
        return  # it has no cumulative average: nothing ever moves
    with use_backend(backend):
        assert_unmoved_by_bad(lambda: LAYERS[name](momentum=momentum))


def test_interpreted_triton():
    with use_backend("triton"):
        assert_unmoved_by_bad(lambda: nn.BatchNorm2d(3))


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_buffers_of_other_dtypes(backend, dtype):
    def make():
        layer = nn.BatchNorm2d(3)
        for name in ("running_mean", "running_var"):
            setattr(layer, name, getattr(layer, name).to(dtype))
        return layer

    with use_backend(backend):
        assert_unmoved_by_bad(make)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_a_variance_that_the_buffer_cannot_hold_moves_nothing(backend, dtype):
    largest = torch.finfo(dtype).max
    x = torch.randn(8, 3, 5, dtype=torch.float64) * largest**0.5 * 4
    layer = nn.BatchNorm1d(3)
    layer.running_mean, layer.running_var = layer.running_mean.to(dtype), layer.running_var.to(dtype)
    with use_backend(backend):
        assert layer(x).isfinite().all()
    assert layer.running_mean.eq(0).all()
    assert layer.running_var.eq(1).all()
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_a_checkpoint_with_one_bad_channel_trains_in_the_others(backend):
    layer = nn.BatchNorm1d(3)
    layer.running_var[1] = NAN
    with use_backend(backend):
        layer(torch.randn(8, 3) + 5)
    assert layer.running_mean.ne(0).all()
    assert layer.running_var.isnan().tolist() == [False, True, False]
    assert layer.num_batches_tracked == 1


@pytest.mark.sampled(of=4)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("name", ["BatchNorm2d", "BatchNormAct2d", "ConvBatchNorm2d", "SyncBatchNorm"])
def test_compiled(name, momentum):
    def compiled(layer):
        return torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)

    assert_unmoved_by_bad(lambda: LAYERS[name](momentum=momentum), compiled)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_checkpointed(name, reentrant):
    assert_unmoved_by_bad(LAYERS[name], lambda layer: lambda x: checkpoint(layer, x, use_reentrant=reentrant))


@pytest.mark.parametrize("name", ["BatchNorm2d", "BatchNormAct2d", "ConvBatchNorm2d"])
def test_the_training_branch_of_a_program(name):
    def forked(layer):
        branches = program.fork(layer, (torch.randn(4, 3, 6, 6),))
        return branches.train, branches

    torch.manual_seed(1)
    layer = LAYERS[name]()
    twin = copy.deepcopy(layer)
    good, mixed = batches()
    (run, _), (run_twin, _) = forked(layer), forked(twin)
    for x in mixed:
        run(x)
    for x in good:
        run_twin(x)
    for one, other in zip(layer.buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, other)
    assert layer.state_dict()[next(k for k in layer.state_dict() if "num_batches" in k)] == 3


@pytest.mark.parametrize("name", LAYERS)
def test_in_less_memory(name):
    def lean(layer):
        def call(x):
            with leannorm.lean("norm"):
                return layer(x)

        return call

    assert_unmoved_by_bad(LAYERS[name], lean)


def test_the_graph_that_leaves():
    layer, twin = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    good, mixed = batches()
    exported = torch.export.export(layer, (good[0],)).module()
    for x in mixed:
        exported(x)
    for x in good:
        twin(x)
    for one, other in zip(exported.buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, other)


def test_models_trained_side_by_side_are_judged_each_by_itself():
    layers = [nn.BatchNorm2d(3) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(layers)
    x = torch.randn(3, 4, 3, 6, 6)
    x[1, 0, 0, 0, 0] = NAN

    def run(parameters, buffers, x):
        return torch.func.functional_call(layers[0], (parameters, buffers), (x,))

    torch.vmap(run)(parameters, buffers, x)
    assert buffers["num_batches_tracked"].tolist() == [1, 0, 1]
    assert buffers["running_mean"].ne(0).any(1).tolist() == [True, False, True]
    assert buffers["running_var"].ne(1).any(1).tolist() == [True, False, True]


def test_under_func_grad():
    layer, x = nn.BatchNorm2d(3), torch.randn(4, 3, 6, 6)
    x[0, 0, 0, 0] = INF
    torch.func.grad(lambda x: layer(x).sum())(x)
    assert [b.tolist() for b in layer.buffers()] == [[0.0] * 3, [1.0] * 3, 0]


def test_functions():
    x, state = torch.randn(4, 3, 6, 6), (torch.zeros(3), torch.ones(3))
    x[0, 0, 0, 0] = NAN
    functional.batch_norm(x, *state, training=True)
    functional.batch_norm_act(x, *state, training=True, act="relu")
    functional.instance_norm(x, *state)
    functional.sync_batch_norm(x, *state, training=True)
    assert [s.tolist() for s in state] == [[0.0] * 3, [1.0] * 3]


def on_ranks(rank, world):
    """The bad value is on one rank alone; buffers end equal on all, and as without the bad batches."""
    for momentum in (0.1, None):
        for backend in ("auto", "reference"):
            for where in range(world):
                layer, twin = nn.SyncBatchNorm(3, momentum=momentum), nn.SyncBatchNorm(3, momentum=momentum)
                good, mixed = batches()
                spread = [
                    torch.randn(4, 3, 6, 6) if not x.isfinite().all() and rank != where else x for x in mixed
                ]
                with use_backend(backend):
                    for x in spread:
                        layer(x.requires_grad_()).sum().backward()
                    for x in good:
                        twin(x)
                for one, other in zip(layer.buffers(), twin.buffers(), strict=True):
                    assert torch.equal(one, other)
                assert layer.num_batches_tracked == 3
    return [b.tolist() for b in layer.buffers()]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_one_rank_of_several(world):
    states = ranks(world, on_ranks, world)
    assert all(state == states[0] for state in states)
