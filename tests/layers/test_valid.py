"""`mask=` and `lengths=` become one description of valid positions; what breaks a rule is an error."""

import re

import pytest
import torch

from leannorm._errors import InputError
from leannorm.functional.valid import valid_positions

X = torch.zeros(2, 3, 4, 5)  # (N, C, H, W)
ROWS = (2, 4)  # of a row norm over the last two axes


def some(*shape):
    found = torch.zeros(shape, dtype=torch.bool)
    found.view(-1)[::3] = True
    return found


@pytest.mark.parametrize(
    "shape", [(2, 4, 5), (2, 1, 4, 5), (1, 1, 4, 5), (1, 4, 5), (4, 5), (5,), (2, 1, 5), (2, 4, 1)]
)
def test_masks_broadcast_without_the_channel(shape):
    mask = some(*shape)
    valid = valid_positions(X, mask, None)
    without = mask.squeeze(1) if mask.dim() == 4 else mask
    want = without.expand(2, 4, 5).reshape(2, 20)
    assert torch.equal(valid.mask, want)
    assert valid.total == int(want.sum())
    assert valid.mask.is_contiguous()


def test_masks_of_rows():
    mask = some(2, 3)
    assert torch.equal(valid_positions(X, mask, None, kept=ROWS).mask, mask)
    assert torch.equal(valid_positions(X, mask[:, :, None, None], None, kept=ROWS).mask, mask)
    assert torch.equal(
        valid_positions(X, None, [1, 2], kept=ROWS).mask, torch.arange(3) < torch.tensor([[1], [2]])
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_lengths_are_along_the_last_axis(dtype):
    valid = valid_positions(X, None, torch.tensor([5, 2], dtype=dtype), "normalize")
    want = (torch.arange(5) < torch.tensor([5, 2])[:, None])[:, None].expand(2, 4, 5).reshape(2, 20)
    assert torch.equal(valid.mask, want)
    assert valid.total == 28


def test_all_valid_is_no_mask():
    assert valid_positions(X, None, None) is None
    assert valid_positions(X, torch.ones(2, 4, 5, dtype=torch.bool), None) is None
    assert valid_positions(X, torch.ones(5, dtype=torch.bool), None) is None
    assert valid_positions(X, None, [5, 5]) is None
    assert valid_positions(X[:0], torch.ones(0, 4, 5, dtype=torch.bool), None) is None
    assert valid_positions(X[:0], None, torch.empty(0, dtype=torch.int64)) is None


def test_nothing_valid_is_a_mask():
    assert valid_positions(X, None, [0, 0]).total == 0
    assert valid_positions(X, torch.zeros(1, dtype=torch.bool), None).total == 0


def test_compiled_the_host_does_not_read():
    def positions(x, lengths):
        valid = valid_positions(x, None, lengths)
        assert valid.total is None
        return valid.mask

    compiled = torch.compile(positions, fullgraph=True, backend="eager")
    lengths = torch.tensor([9, 2])  # one is too long, which is clamped where the host cannot look
    assert torch.equal(compiled(X, lengths), valid_positions(X, None, lengths.clamp(max=5)).mask)


BAD = {
    "both": ({"mask": some(2, 4, 5), "lengths": [1, 2]}, "mask and lengths say the same thing twice"),
    "dtype": ({"mask": some(2, 4, 5).float()}, "mask must be a bool tensor.*float32.*mask.bool()"),
    "type": ({"mask": [[True]]}, "mask must be a bool tensor.*list"),
    "a mask of channels": (
        {"mask": some(2, 3, 4, 5)},
        r"mask must broadcast.*\(2, 4, 5\).*got \(2, 3, 4, 5\)",
    ),
    "shape": ({"mask": some(2, 5, 4)}, r"mask must broadcast.*got \(2, 5, 4\)"),
    "too many axes": ({"mask": some(1, 1, 1, 4, 5)}, "mask must broadcast"),
    "device": ({"mask": some(2, 4, 5).to("meta")}, "mask must be on the input's device cpu, got meta"),
    "floating lengths": (
        {"lengths": torch.tensor([1.0, 2.0])},
        "lengths must be integers, got torch.float32",
    ),
    "bool lengths": ({"lengths": [True, False]}, "lengths must be integers, got torch.bool"),
    "negative": ({"lengths": torch.tensor([-1, 2])}, "lengths must be from 0 to 5.*got -1"),
    "too long": ({"lengths": [2, 6]}, "lengths must be from 0 to 5.*got 6"),
    "count": ({"lengths": [2, 3, 4]}, r"one value a sample, shape \(2,\).*got \(3,\)"),
    "rank": ({"lengths": torch.tensor([[2, 3]])}, r"one value a sample.*got \(1, 2\)"),
    "lengths elsewhere": (
        {"lengths": torch.tensor([2, 3], device="meta")},
        "lengths must be on the input's device",
    ),
    "fill": ({"mask": some(5), "fill": "nan"}, "fill must be one of zero, normalize; got 'nan'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    given, said = BAD[name]
    with pytest.raises(InputError, match=re.compile(said, re.S)):
        valid_positions(X, given.get("mask"), given.get("lengths"), given.get("fill", "zero"))


def test_lengths_need_an_axis():
    with pytest.raises(InputError, match=r"lengths run along a last axis.*pass mask"):
        valid_positions(X[:, :, 0, 0], None, [1, 1])
