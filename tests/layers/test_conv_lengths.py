"""`conv_lengths`: the lengths that the layers themselves give, of each sequence alone."""

import pytest
import torch
from torch import nn as stock

import leannorm
from leannorm import nn

LAYERS = [
    stock.Conv1d(1, 1, 3),
    stock.Conv1d(1, 1, 3, stride=2, padding=1),
    stock.Conv1d(1, 1, 4, stride=3, padding=2, dilation=2),
    stock.Conv1d(1, 1, 5, padding="same", dilation=2),
    stock.Conv1d(1, 1, 4, padding="valid", dilation=2),
    stock.Conv1d(1, 1, 1, padding=1),
    stock.Conv2d(1, 1, (5, 3), stride=(1, 2), padding=(2, 1)),
    stock.ConvTranspose1d(1, 1, 4, stride=3, padding=1, output_padding=2, dilation=2),
    stock.MaxPool1d(3),
    stock.MaxPool1d(3, stride=2, padding=1, dilation=2, ceil_mode=True),
    stock.MaxPool1d(2, stride=3, ceil_mode=True),
    stock.MaxPool2d((1, 4), stride=(1, 3), padding=(0, 2), ceil_mode=True),
    stock.AvgPool1d(4, stride=3, padding=2),
    stock.AvgPool1d(2, stride=4, padding=1, ceil_mode=True),
    stock.AvgPool2d(2, ceil_mode=True),
    stock.LPPool1d(2, 3, stride=2, ceil_mode=True),
    nn.ConvBatchNorm1d(1, 1, 3, stride=2, padding=1),
]


def alone(layer, length):
    """What the layer makes of one sequence without padding; 0 where it makes nothing."""
    axes = 4 if "2d" in type(layer).__name__ else 3
    x = torch.zeros(1, 1, *(8,) * (axes - 3), length)
    try:
        return layer.eval()(x).shape[-1]
    except RuntimeError:  # shorter than the kernel
        return 0


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_as_the_layer_itself(layer):
    lengths = torch.arange(1, 40)
    want = [alone(layer, length) for length in lengths.tolist()]
    found = leannorm.conv_lengths(lengths, layer)
    assert found.tolist() == want
    assert max(want) > 2
    assert leannorm.conv_lengths(torch.tensor([[0], [9]]), layer).tolist() == [[0], [want[8]]]
    assert leannorm.conv_lengths(lengths.to(torch.uint8), layer).tolist() == want
    assert leannorm.conv_lengths(lengths.tolist(), layer).tolist() == want
    assert (found.dtype, leannorm.conv_lengths([], layer).tolist()) == (torch.int64, [])


def test_compiled_it_is_one_graph():
    layer = stock.MaxPool1d(3, stride=2, padding=1, ceil_mode=True)
    compiled = torch.compile(
        lambda lengths: leannorm.conv_lengths(lengths, layer), fullgraph=True, backend="eager"
    )
    for lengths in (torch.tensor([3, 5]), torch.tensor([0, 8, 9])):
        assert torch.equal(compiled(lengths), leannorm.conv_lengths(lengths, layer))


@pytest.mark.parametrize(
    ("lengths", "layer", "said"),
    [
        (torch.tensor([1.5]), LAYERS[0], "lengths must be integers, got torch.float32.*long"),
        (torch.tensor([True]), LAYERS[0], "lengths must be integers, got torch.bool"),
        ([3], stock.Linear(2, 2), "got Linear; ask it of each such layer in turn"),
        ([3], stock.AdaptiveAvgPool1d(2), "got AdaptiveAvgPool1d"),
        ([3], stock.Sequential(stock.Conv1d(1, 1, 3)), "got Sequential"),
    ],
)
def test_bad_input(lengths, layer, said):
    with pytest.raises(leannorm.InputError, match=said):
        leannorm.conv_lengths(lengths, layer)
