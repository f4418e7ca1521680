"""Convolution + batch norm as one layer: the pair's numbers bit for bit, in every option."""

import copy

import pytest
import torch
from torch import nn as stock
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

from leannorm import functional, nn
from leannorm._errors import InputError

OPTIONS = [
    {},
    {"bias": True},
    {"stride": 2, "padding": 1},
    {"dilation": 2, "padding": "same"},
    {"padding": "valid"},
    {"kernel_size": (2, 4), "padding": "same"},
    {"padding": (2, 1), "padding_mode": "reflect"},
    {"padding": (1, 2), "padding_mode": "circular", "kernel_size": (3, 2)},
    {"padding": 2, "padding_mode": "replicate", "stride": (1, 2)},
    {"groups": 2, "bias": True},
    {"groups": 4, "out_channels": 4},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None},
]
options = pytest.mark.parametrize("option", OPTIONS, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()))
# torch says so of every even kernel with padding="same"
same = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")


def build(option, **more):
    return nn.ConvBatchNorm2d(**({"in_channels": 4, "out_channels": 6, "kernel_size": 3} | option | more))


def step(module, x, dy):
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters()), *module.buffers()]


@same
@options
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_equals_the_pair_bit_for_bit(option, layout):
    layer = build(option)
    pair = torch.nn.Sequential(*copy.deepcopy(layer.to_pair()))
    for training in (True, True, False):
        layer.train(training)
        pair.train(training)
        x = torch.randn(5, 4, 9, 8).to(memory_format=layout)
        dy = torch.randn(layer(x).shape).to(memory_format=layout)
        pair(x)
        for a, b in zip(step(layer, x, dy), step(pair, x, dy), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("samples", [64, 130, 67])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_larger_than_a_slice_equals_the_pair_bit_for_bit(samples, layout):
    layer = nn.ConvBatchNorm2d(8, 32, 3)
    pair = torch.nn.Sequential(*copy.deepcopy(layer.to_pair()))
    x = torch.randn(samples, 8, 30, 30).to(memory_format=layout)
    dy = torch.randn(samples, 32, 28, 28).to(memory_format=layout)
    for a, b in zip(step(layer, x, dy), step(pair, x, dy), strict=True):
        assert torch.equal(a, b)


MODES = [(True, "inside"), (True, "outside"), (False, "inside"), (False, "outside")]


@same
@options
@pytest.mark.parametrize(("training", "eps_mode"), MODES)
@pytest.mark.sampled(of=3)
def test_first_and_second_derivatives(option, training, eps_mode):
    layer = build(option, eps_mode=eps_mode, eps=1e-3).double().train(training)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    buffers = {k: v.clone() for k, v in layer.named_buffers()}

    def f(x, *parameters):
        fresh = {k: v.clone() for k, v in buffers.items()}
        return functional_call(layer, (dict(zip(names, parameters, strict=True)), fresh), (x,))

    leaves = (x, *(p.detach().requires_grad_() for p in parameters))
    assert gradcheck(f, leaves, fast_mode=True)
    assert gradgradcheck(f, leaves, fast_mode=True)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_eps_outside_is_its_formula(training):
    layer = nn.ConvBatchNorm2d(3, 4, 3, eps=1e-1, eps_mode="outside").train(training)
    x = torch.randn(4, 3, 8, 8)
    z = layer.conv(x)
    mean, var = z.mean((0, 2, 3)), z.var((0, 2, 3), unbiased=True)
    if not training:
        mean, var = layer.bn.running_mean.clone(), layer.bn.running_var.clone()
    shape = (1, -1, 1, 1)
    want = (z - mean.view(shape)) / (var.sqrt().view(shape) + 1e-1)
    torch.testing.assert_close(layer(x), want, rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="no pair computes the same"):
        layer.to_pair()


def test_a_frozen_norm_trains_the_convolution_without_running_it_again():
    layer = nn.ConvBatchNorm2d(3, 4, 3).eval()
    layer.bn.requires_grad_(False)
    stock.init.normal_(layer.bn.weight)
    pair = torch.nn.Sequential(*copy.deepcopy(layer.to_pair()))
    x, dy = torch.randn(2, 3, 8, 8), torch.randn(2, 4, 6, 6)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(inputs[0]), pair(inputs[1])]
    with torch.profiler.profile() as profile:
        for y in outputs:
            y.backward(dy)
    called = {event.key for event in profile.key_averages()}
    assert "aten::convolution_backward" in called
    assert "aten::convolution" not in called
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert torch.equal(layer.conv.weight.grad, pair[0].weight.grad)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_rank(rank):
    layer = (nn.ConvBatchNorm1d, nn.ConvBatchNorm2d, nn.ConvBatchNorm3d)[rank - 1](3, 5, 3, padding=1)
    pair = torch.nn.Sequential(*copy.deepcopy(layer.to_pair()))
    x = torch.randn(3, 3, *(4, 5, 6)[:rank])
    dy = torch.randn(3, 5, *(4, 5, 6)[:rank])
    for a, b in zip(step(layer, x, dy), step(pair, x, dy), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_padding_modes_in_three_dimensions(mode):
    layer = nn.ConvBatchNorm3d(2, 3, 2, padding=(1, 2, 1), padding_mode=mode).double()
    x = torch.randn(2, 2, 3, 4, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(layer, (x,), fast_mode=True)


def test_only_the_input_is_kept():
    layer, kept = nn.ConvBatchNorm2d(4, 32, 3, padding=1), {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    x = torch.randn(4, 4, 16, 16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
    parameters_and_statistics = layer.conv.weight.nbytes + layer.bn.weight.nbytes + 2 * 32 * 8
    assert sum(kept.values()) == x.nbytes + parameters_and_statistics


def test_joins_and_parts_a_pair():
    conv, bn = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4, momentum=0.3)
    layer = nn.ConvBatchNorm2d.from_pair(conv, bn)
    assert layer.to_pair() == (conv, bn)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(layer(x), copy.deepcopy(bn)(conv(x)))
    assert bn.num_batches_tracked == 1
    with pytest.raises(InputError, match="4 output channels"):
        nn.ConvBatchNorm2d.from_pair(conv, torch.nn.BatchNorm2d(5))
    with pytest.raises(InputError, match=r"joins a torch\.nn\.Conv2d"):
        nn.ConvBatchNorm2d.from_pair(torch.nn.Conv1d(3, 4, 3), bn)


def test_only_plain_pairs_are_joined():
    """What else the two layers do, an activation or a hook, would be lost."""
    conv = torch.nn.Conv2d(3, 4, 3)
    for norm in (nn.BatchNormAct2d(4), nn.SyncBatchNorm(4), torch.nn.BatchNorm1d(4)):
        with pytest.raises(InputError, match=r"must be a BatchNorm2d of torch\.nn or"):
            nn.ConvBatchNorm2d.from_pair(conv, norm)
    layer = nn.ConvBatchNorm2d.from_pair(conv, torch.nn.BatchNorm2d(4))
    x = torch.randn(2, 3, 8, 8)
    with (
        layer.conv.register_forward_pre_hook(lambda *_: None),
        pytest.raises(InputError, match="would not run"),
    ):
        layer(x)
    layer(x)
    layer.bn = nn.SyncBatchNorm(4)
    with pytest.raises(InputError, match="must be a BatchNorm2d"):
        layer(x)


def test_a_parametrized_convolution_is_used_as_it_is():
    torch.nn.utils.parametrizations.weight_norm(conv := torch.nn.Conv2d(3, 4, 3))
    layer = nn.ConvBatchNorm2d.from_pair(conv, torch.nn.BatchNorm2d(4))
    pair = torch.nn.Sequential(*copy.deepcopy((conv, nn.BatchNorm2d(4))))
    x, dy = torch.randn(2, 3, 8, 8), torch.randn(2, 4, 6, 6)
    for a, b in zip(step(layer, x, dy), step(pair, x, dy), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_forward_updates_the_statistics_once(reentrant):
    layer, x = nn.ConvBatchNorm2d(3, 4, 3), torch.randn(2, 3, 8, 8, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    once = nn.ConvBatchNorm2d.from_pair(*copy.deepcopy(layer.to_pair()))
    once.bn.reset_running_stats()
    once(x)
    assert layer.bn.num_batches_tracked == 1
    assert torch.equal(layer.bn.running_mean, once.bn.running_mean)


def test_autocast_is_the_pairs():
    layer = nn.ConvBatchNorm2d(3, 4, 3)
    conv, bn = layer.to_pair()
    x = torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = layer(x), bn(conv(x))
    assert a.dtype == torch.bfloat16
    assert torch.equal(a, b)
    a.float().sum().backward()
    assert layer.conv.weight.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which leaves float64 alone
        assert layer.double()(x.double()).dtype == torch.float64


BAD = [
    ({"input": torch.randn(2, 3)}, "3D or 4D or 5D"),
    ({"input": torch.ones(2, 3, 8, 8, dtype=torch.long)}, "floating point"),
    ({"conv_weight": torch.randn(4, 3, 3)}, "as many axes"),
    ({"input": torch.randn(2, 5, 8, 8)}, "must have 3 channels"),
    ({"conv_bias": torch.randn(3)}, "one entry per output channel"),
    ({"bn_weight": torch.randn(3)}, "one entry per output channel"),
    ({"running_var": torch.ones(7)}, "one entry per output channel"),
    ({"running_var": None}, "both be given"),
    ({"eps": 0.0}, "eps must be positive"),
    ({"momentum": 1.5}, "momentum must be in"),
    ({"eps_mode": "both"}, "eps_mode must be one of inside, outside; got 'both'"),
    ({"padding_mode": "mirror"}, "padding_mode must be one of"),
    ({"padding": "full"}, "padding must be one of"),
    ({"padding": "same", "stride": 2}, "needs stride 1"),
    ({"input": torch.randn(1, 3, 3, 3)}, "more than 1 value per channel"),
    ({"input": torch.randn(2, 3, 2, 2)}, "must fit into the padded input"),
    ({"input": torch.randn(2, 3, 8, 8).double()}, "conv_weight must have the input's dtype"),
    ({"conv_weight": torch.ones(4, 3, 3, 3, dtype=torch.int32)}, "conv_weight must be floating point"),
    ({"conv_weight": torch.randn(4, 3, 3, 3, device="meta")}, "on the input's device cpu, got meta"),
    ({"stride": 0}, "stride must be one integer, or 2, of at least 1; got 0"),
    ({"stride": (1, 1, 1)}, "stride must be one integer"),
    ({"dilation": 0}, "dilation must be one integer"),
    ({"padding": -1}, "padding must be one integer, or 2, of at least 0; got -1"),
    ({"groups": 0}, "groups must be positive"),
    ({"groups": 3}, "divide the 4 output channels"),
    ({"running_mean": None, "running_var": None, "training": False}, "evaluation needs running_mean"),
    ({"momentum": None, "num_batches_tracked": None}, "needs a count of the batches"),
    ({"num_batches_tracked": torch.tensor(0, device="meta")}, "must be on the input's device"),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=lambda v: v if isinstance(v, str) else None)
def test_bad_input_says_the_rule_and_changes_nothing(bad, message):
    good = {
        "input": torch.randn(2, 3, 8, 8),
        "conv_weight": torch.randn(4, 3, 3, 3),
        "conv_bias": None,
        "running_mean": torch.zeros(4),
        "running_var": torch.ones(4),
        "training": True,
        "num_batches_tracked": torch.tensor(0),
    }
    with pytest.raises(InputError, match=message):
        functional.conv_batch_norm(**(good | bad))
    assert torch.equal(good["running_mean"], torch.zeros(4))
    assert torch.equal(good["running_var"], torch.ones(4))
    assert good["num_batches_tracked"] == 0


def test_a_cumulative_average_without_a_counter_stays_where_it_is():
    """As torch's norm has it, which then moves nothing."""
    layer, x = nn.ConvBatchNorm2d(3, 4, 3, momentum=None), torch.randn(2, 3, 8, 8)
    pair = copy.deepcopy(layer.conv), torch.nn.BatchNorm2d(4, momentum=None)
    layer.bn.num_batches_tracked = pair[1].num_batches_tracked = None
    torch.testing.assert_close(layer(x), pair[1](pair[0](x)))
    assert torch.equal(layer.bn.running_mean, pair[1].running_mean)
    assert torch.equal(layer.bn.running_var, pair[1].running_var)
