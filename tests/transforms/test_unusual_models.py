"""Models that a transform could take for others: settings elsewhere, hooks, frozen or shared layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import leannorm
from leannorm import InputError, conv_lengths, interop, program
from leannorm.functional import batch_norm_op
from leannorm.nn import BatchNorm1d, ConvBatchNorm2d
from leannorm.report.fitting import import_torchvision
from leannorm.transforms import fold

pytestmark = pytest.mark.filterwarnings("ignore:convert (left|found no)", "ignore:fold folded nothing")


def frozen(eps=1e-5, dtype=torch.float32):
    import_torchvision()
    from torchvision.ops import FrozenBatchNorm2d

    layer = FrozenBatchNorm2d(4, eps=eps).to(dtype)
    for buffer in layer.buffers():
        buffer.uniform_(0.5, 2)
    return nn.Sequential(layer)


@pytest.mark.parametrize("eps", [1e-5, 0.0])
@pytest.mark.parametrize("shape", [(2, 4, 5, 5), (4, 4, 5)], ids=["batch", "one image"])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)], ids=str)
def test_torchvisions_frozen_batch_norm_keeps_its_promotion(eps, shape, dtypes):
    model, x = frozen(eps, dtypes[1]), torch.randn(shape).to(dtypes[0])
    expected = model(x)
    found = leannorm.convert(model)(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


class CONFIG:
    eps = 1e-6


FACTOR = 1.0


def factor():
    return FACTOR


class OfAConfig(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG.eps) * self.weight


class OfAHelper(OfAConfig):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight * factor()


@pytest.fixture
def config():
    yield CONFIG
    CONFIG.eps = 1e-6


@pytest.mark.parametrize("cls", [OfAConfig, OfAHelper])
def test_what_a_formula_reads_of_its_module_may_change(cls, config, monkeypatch):
    x = torch.randn(3, 8)
    ours = leannorm.convert(nn.Sequential(cls()))
    for _ in range(2):
        torch.testing.assert_close(ours(x), cls()(x))
        config.eps = 1.0
        monkeypatch.setitem(globals(), "FACTOR", 3.0)
    torch.testing.assert_close(leannorm.convert(nn.Sequential(cls()))(x), cls()(x))


def test_complex_parameters_stay_with_torch():
    layer, x = nn.RMSNorm(4, dtype=torch.complex64), torch.randn(3, 4, dtype=torch.complex64)
    expected = layer(x)
    assert torch.equal(leannorm.convert(layer)(x), expected)


def test_recalibrate_reads_what_the_layers_own_hooks_make():
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False))
    model[0].register_forward_pre_hook(lambda layer, args: (args[0] * 3 + 1,))
    batches = [torch.randn(64, 4) for _ in range(3)]
    leannorm.recalibrate(model, batches)
    torch.testing.assert_close(model[0].running_mean, (torch.cat(batches) * 3 + 1).mean(0))
    torch.testing.assert_close(model[0].running_var, (torch.cat(batches) * 3 + 1).var(0))


class Last(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class OfALogarithm(BatchNorm1d):
    def forward(self, x):
        return super().forward(x.abs().log1p())


@pytest.mark.parametrize("cls", [Last, OfALogarithm])
@pytest.mark.parametrize("length", [4, 6])
def test_recalibrate_reads_what_a_subclass_normalizes(cls, length):
    x = torch.randn(16, length, 4) * torch.arange(1.0, 5)
    x = x if cls is Last else x.transpose(1, 2).contiguous()
    trained, layer = cls(4, momentum=1.0), cls(4)
    trained(x)
    leannorm.recalibrate(layer, [x])
    torch.testing.assert_close(layer.running_mean, trained.running_mean)
    torch.testing.assert_close(layer.running_var, trained.running_var)


def test_recalibrate_leaves_buffers_that_cannot_be_written():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].register_buffer("mask", torch.ones(1).expand(4))
    with torch.inference_mode():
        model[0].register_buffer("cache", torch.ones(4))
    leannorm.recalibrate(model, [torch.randn(8, 4) for _ in range(2)])
    assert model[1].num_batches_tracked == 2


class Squared(nn.Conv2d):
    def forward(self, x):
        return super().forward(x).square()


def test_a_joined_pair_passes_over_nothing():
    x = torch.randn(2, 3, 5, 5, requires_grad=True)
    for register in ("full_backward_hook", "full_backward_pre_hook", "forward_hook", "forward_pre_hook"):
        for child in ("conv", "bn"):
            layer = ConvBatchNorm2d(3, 4, 3)
            getattr(getattr(layer, child), f"register_{register}")(lambda *_: None)
            with pytest.raises(InputError, match="hooks on"):
                layer(x)
    for conv in (Squared(3, 4, 3), nn.Conv2d(3, 4, 3)):
        layer = ConvBatchNorm2d(3, 4, 3)
        layer.conv = conv
        if type(conv) is nn.Conv2d:
            layer(x)
            conv.forward = lambda x: x
        with pytest.raises(InputError, match="convolution must be"):
            layer(x)


def test_fork_restores_the_modes_of_frozen_layers():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    leannorm.freeze(model)
    program.fork(model, (torch.randn(8, 4),))
    leannorm.unfreeze(model)
    assert model[1].training


class ReadsItsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)


class ByTheFunction(ReadsItsNorm):
    def forward(self, x):
        return F.batch_norm(
            self.conv(x), self.bn.running_mean, self.bn.running_var, self.bn.weight, self.bn.bias
        )


class ItsWeightToo(ReadsItsNorm):
    def forward(self, x):
        return self.bn(self.conv(x)) * self.bn.weight.sum()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("cls", [ByTheFunction, ItsWeightToo])
def test_a_norm_whose_tensors_are_read_elsewhere_is_not_folded(cls, verify):
    model, x = cls().eval(), torch.randn(2, 3, 6, 6)
    expected = model(x)
    fold(model, (x,), verify=verify)
    assert isinstance(model.bn, nn.BatchNorm2d)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("at", ["estimated_mean", "estimated_var"])
def test_the_operator_moves_both_estimates_or_none(at):
    given = {"estimated_mean": torch.zeros(4), "estimated_var": torch.ones(4)}
    given[at] = torch.ones(1).expand(4)
    with pytest.raises(InputError, match=f"{at} is updated in place"):
        batch_norm_op(torch.randn(8, 4), scale=torch.ones(4), bias=torch.zeros(4), **given)
    assert given["estimated_mean"].tolist() in ([0.0] * 4, [1.0] * 4)


def test_a_checkpoint_is_loaded_whole_or_not_at_all():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    state = {name: torch.full_like(value, 7.0) for name, value in model.state_dict().items()}
    del model[1].bias
    model[1].register_buffer("bias", torch.zeros(1).expand(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match="cannot be written"):
        interop.load(model, state, "torch")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_lazy_layer_is_frozen_after_its_first_batch():
    model = nn.Sequential(nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(InputError, match="before its first batch"):
        leannorm.freeze(model)
    model(torch.randn(8, 3))
    assert not leannorm.freeze(model)[0].training


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_lengths_behind_a_pooling_whose_stride_is_its_size(ceil_mode):
    layer = nn.LPPool1d(2, 3, ceil_mode=ceil_mode)
    lengths = torch.arange(3, 12)
    assert conv_lengths(lengths, layer).tolist() == [layer(torch.ones(1, 1, n)).shape[-1] for n in lengths]


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5)], ids=str)
@pytest.mark.parametrize("form", [torch.contiguous_format, "channels last"], ids=str)
def test_a_mask_of_other_bytes_is_read_as_torch_reads_it(shape, form):
    positions = torch.Size([n for i, n in enumerate(shape) if i != 1])
    numbers = torch.randint(0, 3, positions, dtype=torch.uint8) * 127
    x = torch.randn(shape)
    x = x if form is torch.contiguous_format else x.movedim(1, -1).contiguous().movedim(-1, 1)
    layer = BatchNorm1d(4)
    assert torch.equal(layer(x, mask=numbers.view(torch.bool)), layer(x, mask=numbers != 0))
