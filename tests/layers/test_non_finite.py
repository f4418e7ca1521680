"""NaN and infinities in the input come out where torch's layers show them: nothing makes them a number."""

import pytest
import torch
from cases import ChannelCase, lay_out
from ranks import ranks
from torch import nn as torch_nn

from leannorm import nn
from leannorm.ops.activation import ACTIVATIONS
from leannorm.ops.backends import BACKENDS
from leannorm.ops.select import use_backend

NAN, INF = torch.nan, torch.inf
# what a channel holds beside its finite values, and from which of its values on
SPOILS = {"nan": (NAN,), "inf": (INF,), "-inf": (-INF,), "both": (INF, -INF), "all": (INF, NAN, -INF)}
PLACES = ("first", "last")
TRIED = {"triton": (("nan", "inf"), ("first", "middle"))}  # in a time that an interpreter has
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
BATCH = (
    ChannelCase((40, 3)),  # folded columns
    ChannelCase((600, 5)),
    ChannelCase((300, 33)),
    ChannelCase((4, 3, 7)),  # short planes of few samples
    ChannelCase((256, 8, 7, 7)),  # of many: chunks of samples
    ChannelCase((256, 8, 7, 7), "channels_last"),
    ChannelCase((8, 8, 32, 32)),
    ChannelCase((8, 8, 32, 32), "channels_last"),
    ChannelCase((2, 2, 130, 130)),  # several chunks to a plane
    ChannelCase((24, 2, 60, 60)),  # and planes to a channel
    ChannelCase((2, 3, 2, 9, 9)),
    ChannelCase((2, 3, 2, 9, 9), "channels_last"),
)
SMALL = (ChannelCase((40, 3)), ChannelCase((4, 2, 5, 5)), ChannelCase((2, 2, 12, 12), "channels_last"))
RUNS = [("auto", case) for case in BATCH] + [(b, case) for b in ("reference", "triton") for case in SMALL]


@pytest.fixture
def tried(backend):
    """What is tried with calls served by this backend, Triton's kernels being interpreted."""
    reasons = [] if backend == "auto" else BACKENDS[backend].why_not(torch.empty(1), named=True)
    if reasons:
        pytest.skip(" ".join(reasons))
    with use_backend(backend):
        yield TRIED.get(backend, (SPOILS, PLACES))


def kinds(t):
    """0 for a number, 1 and -1 for infinities, 2 for NaN."""
    return torch.where(t.isnan(), 2, (t == INF).int() - (t == -INF).int()) if t.is_floating_point() else t


def spoiled(case, dtype, spoil, place):
    """Values of which channel 1 of one sample is spoiled."""
    torch.manual_seed(0)
    x = torch.randn(case.shape).to(dtype)
    at = {"first": 0, "middle": case.shape[0] // 2, "last": -1}[place]
    values = x[at, 1].view(-1) if x.dim() > 2 else x[:, 1]
    start = 0 if place == "first" else values.numel() // 2
    bad = torch.tensor(SPOILS[spoil], dtype=dtype)[: values.numel() - start]
    values[start : start + bad.numel()] = bad
    return lay_out(x, case.layout)


def found(layer, x, *more):
    """The output and all gradients."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x, *more)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape).to(y.dtype))
    return {"y": y.detach(), "dx": x.grad, **{k: p.grad for k, p in layer.named_parameters()}}


def assert_same_kinds(ours, torchs):
    for (name, got), want in zip(ours.items(), torchs.values(), strict=True):
        differ = kinds(got) != kinds(want)
        assert not differ.any(), f"{name}: {got[differ]} in place of {want[differ]}"


def names(case):
    """The layers that take an input of this rank."""
    axes = max(len(case.shape) - 2, 1)
    return [f"BatchNorm{axes}d"] + ([f"InstanceNorm{axes}d"] if len(case.shape) > 2 else [])


@pytest.mark.sampled(of=4)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("backend", "case"), RUNS, ids=str)
def test_batch_and_instance_norm(case, dtype, tried):
    spoils, places = tried
    for name in names(case):
        for spoil in spoils:
            for place in places:
                x = spoiled(case, dtype, spoil, place)
                assert not x.isfinite().all()
                given = {"affine": True, "track_running_stats": True}
                if dtype == torch.float64:
                    given["dtype"] = dtype
                ours, torchs = (getattr(module, name)(case.shape[1], **given) for module in (nn, torch_nn))
                assert_same_kinds(found(ours, x), found(torchs, x))
                ours.eval(), torchs.eval()
                ours.reset_running_stats(), torchs.reset_running_stats()
                assert_same_kinds(found(ours, x), found(torchs, x))


class ThenAct(torch_nn.Module):
    """torch's own layers, one after the other."""

    def __init__(self, channels, act):
        super().__init__()
        self.weight, self.bias = (torch_nn.Parameter(v(channels)) for v in (torch.ones, torch.zeros))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.act = act

    def forward(self, x, residual=None):
        given = self.running_mean, self.running_var, self.weight, self.bias, self.training
        y = torch_nn.functional.batch_norm(x, *given)
        return ACTIVATIONS[self.act].forward(y if residual is None else y + residual)


@pytest.mark.sampled(of=4)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("act", ["identity", "relu", "leaky_relu", "silu"])
@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_batch_norm_act(act, training, tried):
    """The bias's gradient is a number: that of torch's relu passes where its input is NaN."""
    for case in SMALL[1:]:
        for spoil in tried[0]:
            x = spoiled(case, torch.float32, spoil, "middle")
            for more in ((), (torch.randn(case.shape),)):
                ours, torchs = nn.BatchNormAct2d(2, act=act).train(training), ThenAct(2, act).train(training)
                ours, torchs = found(ours, x, *more), found(torchs, x, *more)
                assert_same_kinds(ours, torchs)
                torch.testing.assert_close(ours["bias"], torchs["bias"], rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_conv_batch_norm(dtype, layout):
    for spoil in SPOILS:
        x = spoiled(ChannelCase((4, 3, 12, 12), layout), dtype, spoil, "middle")
        ours = nn.ConvBatchNorm2d(3, 5, 3, padding=1, dtype=dtype)
        torchs = torch_nn.Sequential()
        torchs.conv = torch_nn.Conv2d(3, 5, 3, padding=1, bias=False, dtype=dtype)
        torchs.bn = torch_nn.BatchNorm2d(5, dtype=dtype)
        torchs.load_state_dict(ours.state_dict())
        assert_same_kinds(found(ours, x), found(torchs, x))


NORMS = (("GroupNorm", 2, 4), ("LayerNorm", 6), ("LayerNorm", (5, 6)), ("RMSNorm", 6))


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_group_layer_and_rms_norm(dtype, tried):
    for case in (ChannelCase((3, 4, 5, 6)), ChannelCase((3, 4, 5, 6), "channels_last")):
        for spoil in tried[0]:
            x = spoiled(case, dtype, spoil, "middle")
            for name, *given in NORMS:
                ours, torchs = (getattr(module, name)(*given, dtype=dtype) for module in (nn, torch_nn))
                assert_same_kinds(found(ours, x), found(torchs, x))


SYNC = [(case, dtype) for case in BATCH[:2] + BATCH[4:6] for dtype in (torch.float32, torch.float64)]


@pytest.mark.parametrize(("case", "dtype"), SYNC, ids=str)
def test_sync_batch_norm_of_one_rank(case, dtype):
    for spoil in SPOILS:
        x = spoiled(case, dtype, spoil, "middle")
        torchs = torch_nn.BatchNorm1d if x.dim() < 4 else torch_nn.BatchNorm2d
        ours, torchs = (of(case.shape[1], dtype=dtype) for of in (nn.SyncBatchNorm, torchs))
        assert_same_kinds(found(ours, x), found(torchs, x))


def two_ranks(rank):
    """Every spoil of a batch whose halves are on two ranks, on the first, the second or both."""
    for backend in ("auto", "reference"):
        with use_backend(backend):
            for spoil in SPOILS:
                for place in ("first", "last", "both"):
                    for dtype in (torch.float32, torch.float64):
                        whole = torch.randn(8, 3, 5, dtype=dtype)
                        case = ChannelCase((4, 3, 5))
                        for half, r in ((whole[:4], 0), (whole[4:], 1)):
                            if place in (("first", "last")[r], "both"):
                                half.copy_(spoiled(case, dtype, spoil, "middle"))
                        ours, torchs = (of(3, dtype=dtype) for of in (nn.SyncBatchNorm, torch_nn.BatchNorm1d))
                        mine = found(ours, whole.chunk(2)[rank])
                        want = found(torchs, whole)
                        for name in ("y", "dx"):
                            want[name] = want[name].chunk(2)[rank]
                        assert_same_kinds(mine, want)
    return True


def test_sync_batch_norm_of_two_ranks():
    assert ranks(2, two_ranks) == [True, True]


@pytest.mark.parametrize("name", ["BatchNorm2d", "InstanceNorm2d", "GroupNorm"])
def test_squares_beyond_float64_are_infinite(name):
    """Of numbers whose squares are none, the variance is not 0, and no running one."""
    x = torch.randn(4, 2, 6, 6, dtype=torch.float64) * 1e200
    layer = getattr(nn, name)(*(2, 2) if name == "GroupNorm" else (2,), dtype=x.dtype)
    assert layer(x).abs().max() == 0
    if name == "BatchNorm2d":
        assert layer.running_var.eq(1).all()
        assert layer.running_mean.eq(0).all()
