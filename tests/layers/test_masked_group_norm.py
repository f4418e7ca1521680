"""Group norm with a mask: each sample as if it came without padding, which is never read."""

import pytest
import torch

import leannorm
from leannorm import functional as F
from leannorm import nn
from leannorm._types import Channels, ChannelTensors
from leannorm.ops.select import pick

F64 = torch.float64
GROUPS, C = 2, 6
SHAPES = {
    "contiguous": (4, C, 9),
    "images": (4, C, 5, 3),
    "channels_last": (4, C, 5, 3),
    "transposed": (4, C, 9),
}
LENGTHS = torch.tensor([9, 4, 0, 1])


def given(layout, dtype=F64, padding=float("nan")):
    """An input with `padding` where the mask is False; one sample has no data, one has all."""
    torch.manual_seed(0)
    shape = SHAPES[layout]
    x = (torch.randn(shape, dtype=F64) * 2 + 1).to(dtype)
    mask = torch.rand(shape[0], *shape[2:]) < 0.6
    mask[1], mask[2] = False, True
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.masked_fill(~mask[:, None], padding), mask


def parameters(dtype=F64):
    torch.manual_seed(1)
    return [torch.randn(C, dtype=F64).to(dtype).requires_grad_() for _ in range(2)]


def wanted(x, mask, act="identity"):
    """Of each sample alone: the result, and all gradients."""
    leaf, (w, b) = x.detach().double().requires_grad_(), parameters()
    parts = []
    for i, valid in enumerate(mask):
        if valid.any():
            z = torch.nn.functional.group_norm(leaf[i][:, valid][None], GROUPS, w, b)
            z = {"identity": lambda v: v, "relu": torch.relu, "silu": torch.nn.functional.silu}[act](z)
            parts.append(z[0])
    return leaf, w, b, parts


TOLERANCE = {F64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.1}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("act", ["identity", "relu", "silu"])
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("padding", [float("nan"), float("inf")])
def test_as_each_sample_without_padding(layout, act, dtype, backend, padding):
    x, mask = given(layout, dtype, padding)
    torch.manual_seed(2)
    dy = torch.randn_like(x).masked_fill(~mask[:, None], padding)
    leaf, w, b, parts = wanted(x, mask, act)
    of_parts = [dy[i][:, valid].double() for i, valid in enumerate(mask) if valid.any()]
    torch.autograd.backward(parts, of_parts)
    ours, (v, c) = x.detach().requires_grad_(), parameters()
    with leannorm.use_backend(backend):
        y = F.group_norm_act(ours, GROUPS, v, c, act=act, mask=mask)
        y.backward(dy)
    tolerance = TOLERANCE[dtype]
    assert y.stride() == x.stride()
    assert (y.movedim(1, -1)[~mask] == 0).all()
    assert (ours.grad.movedim(1, -1)[~mask] == 0).all()
    got = torch.cat([y[i][:, valid].double() for i, valid in enumerate(mask) if valid.any()], 1)
    torch.testing.assert_close(got, torch.cat(parts, 1), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        ours.grad.movedim(1, -1)[mask].double(),
        leaf.grad.movedim(1, -1)[mask],
        rtol=tolerance,
        atol=tolerance,
    )
    for a, wide in ((v, w), (c, b)):
        torch.testing.assert_close(a.grad, wide.grad, rtol=tolerance, atol=10 * tolerance)


def test_lengths_are_a_mask():
    x, _ = given("contiguous", padding=1.0)
    mask = torch.arange(9) < LENGTHS[:, None]
    assert torch.equal(F.group_norm(x, GROUPS, lengths=LENGTHS), F.group_norm(x, GROUPS, mask=mask))
    layer = nn.GroupNorm(GROUPS, C).double()
    assert torch.equal(layer(x, lengths=LENGTHS), layer(x, mask=mask))
    both = nn.GroupNormAct(GROUPS, C).double()
    want = torch.nn.functional.silu(layer(x, mask=mask))
    torch.testing.assert_close(both(x, lengths=LENGTHS), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_all_valid_is_no_mask_bit_for_bit(layout, dtype):
    x, mask = given(layout, dtype, 1.0)
    whole = torch.ones_like(mask)
    assert torch.equal(F.group_norm(x, GROUPS, mask=whole), F.group_norm(x, GROUPS))
    given_whole = ChannelTensors(x, mask=whole.flatten(1)), Channels(GROUPS, 1e-5)
    with leannorm.use_backend("reference"):
        y, *_ = pick(x).channel_forward(*given_whole)
        assert torch.equal(y, F.group_norm(x, GROUPS))
    # the kernels, where the host may not know that all are valid, add up in another order
    y, *_ = pick(x).channel_forward(*given_whole)
    rounding = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(y, F.group_norm(x, GROUPS), rtol=rounding, atol=rounding)


def test_normalized_padding_has_the_statistics_of_the_data():
    x, mask = given("contiguous", padding=3.0)
    y = F.group_norm(x, GROUPS, mask=mask, fill="normalize")
    assert torch.equal(y.movedim(1, -1)[mask], F.group_norm(x, GROUPS, mask=mask).movedim(1, -1)[mask])
    values = x[0][:3, mask[0]]
    want = (3.0 - values.mean()) / (values.var(correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(y[0, 0, ~mask[0]], want.expand(int((~mask[0]).sum())), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fill", ["zero", "normalize"])
@pytest.mark.parametrize("act", ["identity", "silu"])
@pytest.mark.sampled(of=2)
def test_gradients_of_both_orders(act, fill):
    x, mask = given("contiguous", padding=2.0)
    mask, x = mask[:3, :4], x[:3, :, :4]
    mask[0] = torch.tensor([True, False, True, True])
    arguments = x.clone().requires_grad_(), *parameters()

    def run(x, w, b):
        return F.group_norm_act(x, GROUPS, w, b, act=act, mask=mask, fill=fill)

    if fill == "zero":
        assert torch.autograd.gradcheck(run, arguments)
        assert torch.autograd.gradgradcheck(run, arguments)
    else:  # a sample without data has a variance of 0: its derivatives are too large to be compared
        rest = x[[0, 2]].clone().requires_grad_(), *arguments[1:]
        mask = mask[[0, 2]]
        assert torch.autograd.gradcheck(run, rest)
        assert torch.autograd.gradgradcheck(run, rest)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_compiled_in_one_graph(layout):
    x, mask = given(layout, torch.float32)
    layer = nn.GroupNormAct(GROUPS, C)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    grads = []
    for run in (compiled, layer):
        leaf = x.detach().requires_grad_()
        run(leaf, mask=mask).square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_lean_checkpoint_and_autocast_give_the_same_gradients():
    torch.manual_seed(0)
    conv, norm, last = torch.nn.Conv1d(C, C, 1), nn.GroupNormAct(GROUPS, C), torch.nn.Conv1d(C, C, 1)
    x, lengths = torch.randn(4, C, 600), torch.tensor([600, 300, 0, 77])
    mask = torch.arange(600) < lengths[:, None]

    def run(x):
        return last(norm(conv(x), mask=mask))

    found = []
    for how in ("plain", "lean", "checkpoint"):
        leaf = x.clone().requires_grad_()
        if how == "lean":
            with leannorm.lean(verify=True) as saved:
                y = run(leaf).square().sum()
            assert saved.rebuilt_bytes + saved.kept_bytes > 0
        elif how == "checkpoint":
            y = torch.utils.checkpoint.checkpoint(run, leaf, use_reentrant=False).square().sum()
        else:
            y = run(leaf).square().sum()
        y.backward()
        found.append(leaf.grad)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    with torch.autocast("cpu", torch.bfloat16):
        assert (run(x).movedim(1, -1)[~mask] == last.bias.bfloat16()).all()


def test_exported_it_is_the_formula():
    x, mask = given("contiguous", torch.float32)
    layer = nn.GroupNormAct(GROUPS, C)
    want = layer(x, mask=mask)
    traced = torch.export.export(layer, (x,), {"mask": mask}).module()
    torch.testing.assert_close(traced(x, mask=mask), want, rtol=1e-5, atol=1e-5)
    other = mask.roll(1, 0)
    y = x.nan_to_num(2.0)
    torch.testing.assert_close(traced(y, mask=other), layer(y, mask=other), rtol=1e-5, atol=1e-5)


def test_bad_input_leaves_everything_as_it_was():
    x, mask = given("contiguous")
    for bad, said in (
        ({"mask": mask.float()}, "mask must be a bool tensor"),
        ({"mask": mask[:, :5]}, "mask must broadcast"),
        ({"lengths": [9, 10, 0, 1]}, "lengths must be from 0 to 9.*got 10"),
        ({"lengths": LENGTHS, "mask": mask}, "twice"),
        ({"mask": mask, "fill": "nan"}, "fill must be one of"),
    ):
        with pytest.raises(leannorm.InputError, match=said):
            nn.GroupNorm(GROUPS, C).double()(x, **bad)
