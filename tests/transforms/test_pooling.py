"""Statistics of several batches together: `accumulate_stats` and `recalibrate`."""

import copy
import io
import pickle
from contextlib import redirect_stderr

import pytest
import torch
from ranks import outcomes, ranks
from torch import nn as stock
from torch.utils.checkpoint import checkpoint

import leannorm
from leannorm import nn

F64 = torch.float64
LAYERS = {
    "BatchNorm2d": lambda **of: nn.BatchNorm2d(3, dtype=F64, **of),
    "BatchNormAct2d": lambda **of: nn.BatchNormAct2d(3, dtype=F64, act="silu", **of),
    "SyncBatchNorm": lambda **of: nn.SyncBatchNorm(3, dtype=F64, **of),
    "ConvBatchNorm2d": lambda **of: nn.ConvBatchNorm2d(3, 4, 3, dtype=F64, **of),
}
SIZES = (5, 1, 8, 2)


def buffers(layer):
    return {k: b.clone() for k, b in layer.named_buffers()}


def assert_close(some, others):
    for name, one in some.items():
        torch.testing.assert_close(one, others[name], rtol=1e-12, atol=1e-13)


def assert_equal(some, others):
    assert all(torch.equal(one, others[name]) for name, one in some.items())


def images():
    torch.manual_seed(3)
    return torch.randn(sum(SIZES), 3, 6, 5, dtype=F64) * 3 + 100


def accumulated(layer, call=None):
    with leannorm.accumulate_stats(layer):
        for x in images().split(SIZES):
            (layer if call is None else call)(x.requires_grad_()).sum().backward()
    return buffers(layer)


def by_one_batch(layer):
    layer(images())
    return buffers(layer)


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", LAYERS)
def test_micro_batches_count_as_one(name, backend, momentum):
    layer = LAYERS[name](momentum=momentum)
    twin = copy.deepcopy(layer)
    with leannorm.use_backend(backend):
        for _ in range(2):
            assert_close(accumulated(layer), by_one_batch(twin))
    assert "_pool" not in vars(layer)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_checkpointed(name, reentrant):
    layer = LAYERS[name]()
    twin = copy.deepcopy(layer)
    assert_close(
        accumulated(layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant)), by_one_batch(twin)
    )


@pytest.mark.sampled(of=2)
@pytest.mark.parametrize("name", ["BatchNorm2d", "ConvBatchNorm2d"])
def test_compiled_before_and_within(name):
    layer = LAYERS[name]()
    call = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    call(images())
    twin = copy.deepcopy(layer)
    assert_close(accumulated(layer, call), by_one_batch(twin))
    call(images())
    assert_close(buffers(layer), by_one_batch(twin))


def test_under_autocast_lean_and_func_grad():
    for call in (
        lambda layer, x: torch.func.grad(lambda x: layer(x).sum())(x),
        lambda layer, x: lean(layer, x),
    ):
        layer = nn.BatchNorm2d(3, dtype=F64)
        twin = copy.deepcopy(layer)
        with leannorm.accumulate_stats(layer):
            for x in images().split(SIZES):
                call(layer, x)
        assert_close(buffers(layer), by_one_batch(twin))
    layer = stock.Sequential(stock.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    with leannorm.accumulate_stats(layer), torch.autocast("cpu", torch.bfloat16):
        for x in images().float().split(SIZES):
            layer(x)
    assert layer[1].num_batches_tracked == 1


def lean(layer, x):
    with leannorm.lean("norm"):
        y = layer(x.clone().requires_grad_())
    y.sum().backward()


def test_a_bad_micro_batch_an_error_and_a_layer_not_called_move_nothing():
    model = stock.Sequential(nn.BatchNorm2d(3, dtype=F64), nn.BatchNorm2d(3, dtype=F64))
    start = buffers(model)
    xs = [x.clone() for x in images().split(SIZES)]
    with pytest.raises(leannorm.InputError), leannorm.accumulate_stats(model):
        model(model(xs[0])[0])
    assert_equal(buffers(model), start)
    xs[1][0, 0, 0, 0] = torch.nan
    with leannorm.accumulate_stats(model):
        for x in xs:
            model[0](x)
    assert_equal(buffers(model), start)
    with leannorm.accumulate_stats(model), leannorm.no_stats_update():
        model(xs[0])
    assert_equal(buffers(model), start)
    model(xs[0])
    assert model[0].num_batches_tracked == 1


def test_copies_made_within_are_ordinary_layers():
    layer = nn.BatchNorm2d(3, dtype=F64)
    with leannorm.accumulate_stats(layer):
        file = io.BytesIO()
        torch.save(layer, file)
        copies = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
        layer(images())
    file.seek(0)
    for other in (*copies, torch.load(file, weights_only=False)):
        other(images())
        assert_close(buffers(other), buffers(layer))


def test_what_it_refuses():
    x = images()
    with (
        pytest.raises(leannorm.InputError, match=r"layer '0' is a torch\.nn.*convert\(model\) first"),
        leannorm.accumulate_stats(stock.Sequential(stock.BatchNorm2d(3))),
    ):
        raise AssertionError
    with leannorm.accumulate_stats(stock.Sequential(stock.BatchNorm2d(3).eval())):
        pass
    layer = nn.BatchNorm2d(3, dtype=F64)
    with leannorm.accumulate_stats(layer):
        with pytest.raises(leannorm.InputError, match="is entered already"), leannorm.accumulate_stats(layer):
            raise AssertionError
        with pytest.raises(leannorm.InputError, match="cannot be exported"):
            leannorm.program.fork(layer, (x,))
        layer(x)
    assert layer.num_batches_tracked == 1


def accumulated_on_ranks(rank, world):
    layer = stock.parallel.DistributedDataParallel(nn.SyncBatchNorm(3, dtype=F64))
    twin = nn.BatchNorm2d(3, dtype=F64)
    x = images()
    with leannorm.accumulate_stats(layer):
        for micro_batch in x.split(8):
            layer(micro_batch.chunk(world)[rank]).sum().backward()
    twin(x)
    assert_close(buffers(layer.module), buffers(twin))
    return True


def test_ranks_accumulate():
    assert ranks(2, accumulated_on_ranks, 2) == [True, True]


# ---- recalibrate


def expected(xs, moved=True):
    x = torch.cat(list(xs)).to(F64)
    axes = (0, *range(2, x.dim()))
    return x.mean(axes), x.var(axes)


NORMS = {
    "ours": nn.BatchNorm2d,
    "torch": stock.BatchNorm2d,
    "act": nn.BatchNormAct2d,
    "sync": nn.SyncBatchNorm,
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", NORMS)
def test_it_is_one_pass_over_all_data(name, backend):
    layer = NORMS[name](3, dtype=F64)
    xs = list(images().split(SIZES))
    with leannorm.use_backend(backend):
        report = leannorm.recalibrate(layer, iter(xs))
    mean, var = expected(xs)
    torch.testing.assert_close(layer.running_mean, mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(layer.running_var, var, rtol=1e-12, atol=0)
    assert layer.num_batches_tracked == len(SIZES)
    (one,) = report.layers
    assert (one.layer, one.batches, one.values) == ("the model itself", 4, 16 * 30)
    assert one.mean_moved == pytest.approx(float((mean / (var + 1e-5).sqrt()).max()))
    assert one.var_moved == pytest.approx(float(var.max()), rel=1e-4)
    assert "moved by" in str(report)


def test_convolutions_with_their_norm_timm_fused_and_reused_layers():
    class Twice(stock.Module):
        def __init__(self):
            super().__init__()
            self.bn = self.again = nn.BatchNorm2d(3, dtype=F64)

        def forward(self, x):
            return self.bn(x[:, :, :2]), self.again(input=x[:, :, 2:])

    xs = list(images().split(SIZES))
    twice = Twice()
    leannorm.recalibrate(twice, xs)
    torch.testing.assert_close(twice.bn.running_mean, expected(xs)[0], rtol=1e-14, atol=0)
    torch.testing.assert_close(twice.bn.running_var, expected(xs)[1], rtol=1e-12, atol=0)
    assert twice.bn.num_batches_tracked == 8

    joined = nn.ConvBatchNorm2d(3, 4, 3, dtype=F64)
    torchs = nn.ConvBatchNorm2d.from_pair(copy.deepcopy(joined.conv), stock.BatchNorm2d(4, dtype=F64))
    for layer in (joined, torchs):
        leannorm.recalibrate(stock.Sequential(layer), xs)
        want = expected(layer.conv(x) for x in xs)
        torch.testing.assert_close(layer.bn.running_var, want[1], rtol=1e-12, atol=0)
        assert "_pool" not in vars(layer.bn)

    fused = leannorm.convert(stock.Sequential(stock.BatchNorm2d(3, dtype=F64), stock.ReLU()))
    leannorm.recalibrate(fused, xs)
    torch.testing.assert_close(fused[0].running_var, expected(xs)[1], rtol=1e-12, atol=0)


class Named(stock.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(3, dtype=F64)

    def forward(self, pixels, scale=1):
        return self.bn(pixels * scale)


def test_batches_of_every_kind():
    xs = list(images().split(SIZES))
    mean, _ = expected(xs)
    kinds = (
        (lambda x: {"pixels": x, "scale": 1}, None),
        (lambda x: (x, "label"), None),
        (lambda x: [x], None),
        (lambda x: ("label", x), lambda model, batch: model(batch[1])),
    )
    for wrap, forward in kinds:
        model = Named()
        leannorm.recalibrate(model, map(wrap, xs), forward=forward)
        torch.testing.assert_close(model.bn.running_mean, mean, rtol=1e-14, atol=0)


def mixed():
    torch.manual_seed(0)
    return stock.Sequential(
        nn.BatchNorm2d(3), stock.BatchNorm2d(3).eval(), leannorm.freeze(nn.BatchNorm2d(3)),
        nn.InstanceNorm2d(3, track_running_stats=True), stock.InstanceNorm2d(3, track_running_stats=True),
        nn.GroupNorm(1, 3), nn.BatchNorm2d(3, track_running_stats=False), stock.BatchNorm2d(3),
    )  # fmt: skip


def test_only_batch_norms_in_training_mode():
    model = mixed()
    start, training = buffers(model), [m.training for m in model]
    report = leannorm.recalibrate(model, [torch.randn(4, 3, 5, 5)])
    changed = {k.split(".")[0] for k, b in model.named_buffers() if not torch.equal(b, start[k])}
    assert changed == {"0", "7"}
    assert report.left == {"1": "in evaluation mode", "2": "in evaluation mode"}
    assert [m.training for m in model] == training
    assert not any(m._forward_pre_hooks for m in model)


def failing(model, batch):
    model(batch)
    raise ZeroDivisionError("by the caller")


GOOD = torch.randn(4, 3, 5, 5)
BAD = {
    "nothing": ([], {}, leannorm.InputError, "needs a batch, got none"),
    "empty": ([GOOD, GOOD[:0]], {}, leannorm.InputError, "batch 1 is empty"),
    "NaN": ([GOOD, GOOD / 0 * 0], {}, leannorm.InputError, "layer '0' are not finite"),
    "keys": ([{"input": GOOD}, {"wrong": GOOD}], {}, leannorm.InputError, "got wrong="),
    "no tensor": ([GOOD, 3], {}, leannorm.InputError, "got int; pass forward="),
    "shape": ([GOOD, GOOD[:, :2]], {}, leannorm.InputError, "one entry per channel"),
    "forward": ([GOOD], {"forward": failing}, ZeroDivisionError, "caller"),
    "too large": ([GOOD * 1e4], {}, leannorm.InputError, "cannot hold a variance of"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_batches_leave_everything(name):
    batches, options, error, said = BAD[name]
    model = mixed()
    if name == "too large":
        model[0].half()
    start, objects = buffers(model), [id(b) for b in model.buffers()]
    with pytest.raises(error, match=said):
        leannorm.recalibrate(model, batches, **options)
    assert_equal(buffers(model), start)
    assert [id(b) for b in model.buffers()] == objects
    assert not any(m._forward_pre_hooks or "_pool" in vars(m) for m in model.modules())


def test_what_it_refuses_to_begin():
    for model in (stock.Sequential(nn.BatchNorm2d(3)).eval(), stock.LayerNorm(3)):
        with pytest.raises(leannorm.InputError, match=r"call model\.train\(\) first"):
            leannorm.recalibrate(model, [GOOD])


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_compiled_models_and_progress(capsys):
    model = stock.Sequential(nn.BatchNorm2d(3, dtype=F64))
    call = torch.compile(model, backend="aot_eager")
    xs = list(images().split(SIZES))
    for x in xs:
        call(x)
    with redirect_stderr(Terminal()) as terminal:
        leannorm.recalibrate(call, xs)
    assert "recalibrate" in terminal.getvalue()
    torch.testing.assert_close(model[0].running_var, expected(xs)[1], rtol=1e-12, atol=0)
    assert capsys.readouterr().out == ""


def test_large_means_and_many_batches_lose_nothing():
    layer = nn.BatchNorm1d(2, dtype=F64)
    xs = [torch.randn(7, 2, dtype=F64) + 1e6 for _ in range(200)]
    leannorm.recalibrate(layer, xs)
    torch.testing.assert_close(layer.running_var, expected(xs)[1], rtol=1e-9, atol=0)


def recalibrated_on_ranks(rank, world):
    """Ranks have uneven numbers of batches, the last one none."""
    batches = list(images().split(SIZES))
    shares = [batches[r::world] if r < world - 1 or world == 1 else [] for r in range(world)]
    everything = [x for share in shares for x in share]
    mean, var = expected(everything)
    for make in (nn.BatchNorm2d, stock.BatchNorm2d, nn.SyncBatchNorm):
        model = make(3, dtype=F64)
        wrapped = stock.parallel.DistributedDataParallel(model)
        report = leannorm.recalibrate(wrapped, shares[rank])
        torch.testing.assert_close(model.running_mean, mean, rtol=1e-14, atol=0)
        torch.testing.assert_close(model.running_var, var, rtol=1e-12, atol=0)
        assert model.num_batches_tracked == len(everything)
        assert report.layers[0].values == 30 * sum(len(x) for x in everything)
    return [b.tolist() for b in model.buffers()]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_recalibrate(world):
    states = ranks(world, recalibrated_on_ranks, world)
    assert all(state == states[0] for state in states)


def one_fails(rank):
    for make in (nn.BatchNorm2d, nn.SyncBatchNorm):
        model = make(3)
        start = buffers(model)
        try:
            leannorm.recalibrate(model, [GOOD, {"wrong": GOOD}] if rank else [GOOD, GOOD, GOOD])
        except TypeError:
            assert rank == 1
        except leannorm.SyncError as error:
            said = rank == 0, "failed on 1 other ranks" in str(error)
            assert said == (True, True)
        else:
            raise AssertionError
        assert_equal(buffers(model), start)
        leannorm.recalibrate(model, [GOOD])  # the ranks are still in step
    return True


def test_a_rank_that_fails_does_not_leave_the_others_waiting():
    for outcome in outcomes(2, one_fails, group_timeout=20.0):
        assert outcome.error is None
        assert outcome.value is True
        assert outcome.seconds < 15
