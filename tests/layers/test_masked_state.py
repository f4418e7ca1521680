"""Masked norms and what a layer remembers: after bad input, too few values, and what acts on statistics."""

import copy

import pytest
import torch
from test_masks import F64, assert_padding_is_zero, layer_of, mask_of, packed, with_junk

import leannorm
from leannorm import nn
from leannorm._errors import InputError

BAD = [
    {"mask": torch.ones(4, 8, dtype=torch.bool)},
    {"mask": torch.ones(4, 9)},
    {"lengths": [1, 2, 3, 10]},
    {"lengths": [1, 2, 3, -1]},
    {"lengths": [1, 2, 3]},
    {"mask": torch.ones(4, 9, dtype=torch.bool), "lengths": [9] * 4},
    {"mask": torch.zeros(4, 9, dtype=torch.bool)},
    {"lengths": [1, 0, 0, 0]},
    {"fill": "mean"},
]
LAYERS = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(3),
    "BatchNormAct1d": lambda: nn.BatchNormAct1d(3),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(3),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(3, track_running_stats=True),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("i", range(len(BAD)))
def test_bad_input_changes_nothing(i, name):
    layer = LAYERS[name]()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(InputError):
        layer(torch.randn(4, 3, 9), **BAD[i])
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("name", LAYERS)
def test_too_few_values_where_the_host_cannot_know(name):
    """As on an accelerator: no error, and the statistics stay."""
    layer = LAYERS[name]()
    before = copy.deepcopy(layer.state_dict())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for lengths in ([1, 0, 0, 0], [0, 0, 0, 0]):
        y = compiled(torch.randn(4, 3, 9), lengths=torch.tensor(lengths))
        assert y.isfinite().all()
    for key in ("running_mean", "running_var"):
        assert torch.equal(layer.state_dict()[key], before[key])


def test_group_size_has_no_mask():
    with pytest.raises(InputError, match="group_size must be None with mask or lengths, got 2; leave"):
        nn.BatchNorm1d(3, group_size=2)(torch.randn(4, 3, 9), lengths=[9, 2, 3, 4])


def test_a_batch_that_is_not_finite_moves_nothing():
    layer = layer_of((4, 3, 9))
    x = torch.randn(4, 3, 9, dtype=F64)
    x[0, 1, 0] = torch.inf
    before = copy.deepcopy(layer.state_dict())
    layer(x, lengths=[4, 9, 1, 0])
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key])


def test_functions_of_statistics():
    """`accumulate_stats`, `recalibrate`, `no_stats_update`, `freeze`."""
    xs = [torch.randn(4, 3, 9, dtype=F64) for _ in range(3)]
    masks = [mask_of(x.shape, "random") for x in xs]
    values = torch.cat([packed(x, m) for x, m in zip(xs, masks, strict=True)])
    layer = layer_of((4, 3, 9), momentum=1.0)
    with leannorm.accumulate_stats(layer):
        for x, mask in zip(xs, masks, strict=True):
            layer(with_junk(x, mask, torch.nan), mask=mask)
    assert layer.num_batches_tracked == 1
    torch.testing.assert_close(layer.running_mean, values.mean(0))
    torch.testing.assert_close(layer.running_var, values.var(0))
    again = layer_of((4, 3, 9))
    leannorm.recalibrate(
        again, list(zip(xs, masks, strict=True)), forward=lambda model, batch: model(batch[0], mask=batch[1])
    )
    torch.testing.assert_close(again.running_mean, values.mean(0))
    torch.testing.assert_close(again.running_var, values.var(0))
    before = copy.deepcopy(again.state_dict())
    with leannorm.no_stats_update():
        again(xs[0], mask=masks[0])
    leannorm.freeze(again.train())
    y = again(with_junk(xs[0], masks[0], torch.nan), mask=masks[0])
    assert_padding_is_zero([y], masks[0])
    torch.testing.assert_close(packed(y, masks[0]), packed(again(xs[0]), masks[0]))
    for key, value in again.state_dict().items():
        assert torch.equal(value, before[key])


def test_what_is_kept_for_the_backward_pass():
    """The input and a byte a position: nothing of the input's size that the unmasked layer lacks."""
    x, mask = torch.randn(8, 16, 50, requires_grad=True), mask_of((8, 16, 50), "random")
    for act, residual in (("identity", None), ("silu", None), ("relu", torch.randn(8, 16, 50))):
        kept = []
        for masking in ({}, {"mask": mask}):
            layer, sizes = layer_of(x.shape, act, torch.float32), {}
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, s=sizes: s.setdefault(t.data_ptr(), t.numel() * t.element_size()) and t, lambda t: t
            ):
                layer(x, residual, **masking)
            kept.append(sum(sizes.values()))
        assert kept[1] <= kept[0] + mask.numel() + 8
