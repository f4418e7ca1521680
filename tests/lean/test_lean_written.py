"""`lean()` behind writes in place through views: sums and copies, of the whole and of parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lean_cases import assert_as_stock, forget_trials
from torch import nn

from leannorm import lean

pytestmark = pytest.mark.filterwarnings("ignore:leannorm. budget")


@pytest.fixture(autouse=True)
def nothing_tried():
    forget_trials()


def hidden(edit, tensor):
    with torch.no_grad():
        edit(tensor)


def residual(x, other):
    """nnU-Net's and DynUNet's block: the sum and the activation both go through instance norm's view."""
    y = F.instance_norm(x)
    y += other
    return F.leaky_relu(y, 0.1, inplace=True)


def without_a_factor(x, other):
    y = F.instance_norm(x)
    y.sub_(other, alpha=3)
    return y


def views_of_views(x, other):
    base = x * 2
    view, added = (t.transpose(1, 2)[:, 1:5].unflatten(3, (2, 4))[..., 1, :] for t in (base, other))
    view += added
    return base


def several_times(x, other):
    base = x * 2
    base[:, :4] += other[:, 4:]
    base[1:] -= other[:1]
    base[:, 2:].copy_(other[:, :6])
    F.relu(base.view(-1), inplace=True)
    return base


def broadcast(x, other):
    base = x * 2
    base.unsqueeze(0)[..., 2:] += other[:1, :, :1, :1]
    return base


def of_itself(x, other):
    base = x * other
    whole = base.view(-1)
    whole += whole
    base[:, 4:] += base[:, :4]
    return base


def of_a_wider_dtype(x, other):
    base = (x * 2).bfloat16()
    base[:, 2:] += other[:, 2:]
    return base.float()


def of_a_narrower_dtype(x, other):
    base = x * 2
    base[:, 2:] -= other[:, 2:].bfloat16()
    base[:, :2] = other[:, :2].half()
    return base


def new_memory_in_parts(x, other):
    """DeepSeek's keys."""
    whole = x.new_empty(*x.shape[:-1], 14)
    whole[..., :8].copy_(x * 2)
    whole[..., 8:] = (other * 3)[..., :6]
    return whole


def parts_that_overlap(x, other):
    whole = torch.empty(x.shape).transpose(1, 2)
    whole[:, :5].copy_((x * 2).transpose(1, 2)[:, 3:])
    whole[:, 3:].copy_((other * 3).transpose(1, 2)[:, 3:])
    return whole


REBUILT = [residual, without_a_factor, views_of_views, several_times, broadcast, of_a_wider_dtype]
REBUILT += [of_a_narrower_dtype, parts_that_overlap]


def zeros_where_no_part_is(x, other):
    whole = torch.zeros(*x.shape[:-1], 14)
    whole[..., :7].copy_((x * 2)[..., :7])
    whole[..., 8:13].copy_((other * 3)[..., :5])
    return whole


def ones_before_its_parts(x, other):
    whole = torch.empty(*x.shape[:-1], 16).fill_(1)
    whole[..., :8].copy_(x * 2)
    whole[..., 8:].copy_(other * 3)
    return whole


def read_before_all_is_filled(x, other):
    whole = torch.zeros(*x.shape[:-1], 16)
    whole[..., :8].copy_(x * 2)
    half = (whole * 1).exp()
    whole[..., 8:].copy_(other * 3)
    return half * whole.exp()


def a_part_of_another_dtype(x, other):
    whole = torch.empty(*x.shape[:-1], 16)
    whole[..., :8].copy_((x * 2).double())
    whole[..., 8:].copy_((other * 3).bfloat16())
    return whole


def edited_between(x, other):
    base = x * 2
    base[:, :4] += other[:, 4:]
    hidden(lambda t: t.mul_(-1), base)
    base[:, 2:] += other[:, 2:]
    return base


def edited_through_data(x, other):
    base = x * 2
    base[:, :4] += other[:, 4:]
    base.data.mul_(-1)
    base[:, 2:] += other[:, 2:]
    return base


def filled_and_edited(x, other):
    whole = torch.empty(*x.shape[:-1], 16)
    whole[..., :8].copy_(x * 2)
    hidden(lambda t: t.neg_(), whole[..., :8])
    whole[..., 8:].copy_(other * 3)
    return whole


def added_without_a_gradient(x, other):
    base = x * 2
    base[:, :4] += x[:, 4:].detach()
    base[:, 4:6] = 3.0
    return base * other


def of_imaginary_parts(x, other):
    base = torch.complex(x * 2, other * 3)
    base.imag.add_(other)
    torch.view_as_real(base)[..., 0] += x
    return torch.view_as_real(base).flatten(-2)


def by_strides(x, other):
    base = x * 2
    base.as_strided((3, 8, 8), (512, 64, 1), 128).sub_(other[:3, 0])
    return base


def beside_its_base(x, other):
    """A view that lies in its base's memory, not in its base."""
    memory = x.repeat(2, 1, 1, 1)
    base = memory[: len(x)].detach().requires_grad_() * 1
    base.view(-1)[5:].add_(other.view(-1)[5:])
    return base * x


OTHERS = [
    new_memory_in_parts,
    zeros_where_no_part_is,
    ones_before_its_parts,
    read_before_all_is_filled,
    a_part_of_another_dtype,
]
OTHERS += [edited_between, edited_through_data, filled_and_edited, added_without_a_gradient]
OTHERS += [of_imaginary_parts, of_itself, by_strides, beside_its_base]


def passes(program, form=torch.contiguous_format, dtype=torch.float32, seen=None):
    def run(context):
        first, second = nn.Conv2d(8, 8, 1, dtype=dtype), nn.Conv2d(8, 8, 1, dtype=dtype)
        model, found = nn.ModuleList((first, second)).to(memory_format=form), []
        for _ in range(4):
            model.zero_grad()
            x = torch.randn(4, 8, 8, 8, dtype=dtype).contiguous(memory_format=form)
            with context() as saved:
                y = program(F.silu(first(x)), F.silu(second(x)))
                loss = (F.silu(y) * y).square().sum()
            loss.backward()
            found += [p.grad.clone() for p in model.parameters()]
            if saved is not None and seen is not None:
                seen.append({record.node for record in saved.records if not record.rebuilt and record.bytes})
        return found

    return run


@pytest.mark.parametrize("settings", [{"recompute": "conv"}, {"budget": 0.05}], ids=str)
@pytest.mark.parametrize("program", REBUILT + OTHERS, ids=lambda program: program.__name__)
def test_gradients_are_stocks(program, settings):
    assert_as_stock(passes(program), **settings)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("program", REBUILT + OTHERS, ids=lambda program: program.__name__)
def test_gradients_are_stocks_in_other_layouts_and_dtypes(program, dtype):
    if dtype is torch.bfloat16 and program is of_imaginary_parts:
        pytest.skip("torch has no such complex numbers")
    if program not in (views_of_views, several_times, of_itself, beside_its_base):  # these view them
        assert_as_stock(passes(program, torch.channels_last, dtype), budget=0.05)
    assert_as_stock(passes(program, dtype=dtype), budget=0.05)


@pytest.mark.parametrize("program", REBUILT, ids=lambda program: program.__name__)
def test_what_was_written_is_rebuilt(program):
    """A sum of a whole norm's output by a budget alone, one of a part by lean() alone: its rule of sums."""
    held = []
    for settings in ({}, {"budget": 0.05}):
        assert_as_stock(passes(program, seen=(seen := [])), **settings)
        held.append({node for node in seen[-1] if node.endswith("_")})
    assert not min(held, key=len), held


def test_an_edit_after_it_was_saved_is_stocks_error():
    for settings in ({"recompute": "conv"}, {"budget": 0.05}):
        for of_base in (True, False):
            x = torch.randn(4, 8, 16, 16, requires_grad=True)
            with lean(**settings):
                base = F.silu(x) * 2
                view = base.view(4, -1)
                view += F.silu(x).view(4, -1)
                y = F.silu(base)
                hidden(lambda t: t.mul_(2), base if of_base else view)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


def test_a_view_of_as_many_elements_is_not_the_whole(with_and_without_nodes):
    """One that overlaps itself leaves a part of the base as it was."""

    def program(context):
        x, w = (torch.randn(4 * 1024, requires_grad=True) for _ in range(2))
        for strides in 4 * [(2048, 1024, 1)] + 2 * [(2560, 512, 1)]:
            x = torch.randn_like(x).requires_grad_()
            with context():
                base = x * 1.5
                base.as_strided((2, 2, 1024), strides).relu_()
                loss = (w * base).sum()
            yield torch.autograd.grad(loss, w)[0]

    assert_as_stock(program, recompute="norm")


WRITES = {
    "mul_": lambda y: y.mul_(y),
    "pow_": lambda y: y.pow_(2),
    "div_": lambda y: y.div_(y.detach() + 2),
    "addcmul_": lambda y: y.addcmul_(y, y),
    "sin_": lambda y: y.sin_(),
}


@pytest.mark.filterwarnings("ignore:leannorm")
@pytest.mark.parametrize("budget", [0.9, 0.7, 0.5, 0.3])
@pytest.mark.parametrize("write", WRITES)
def test_a_call_saves_what_a_plan_keeps_and_writes_it(write, budget, with_and_without_nodes):
    """Others were rebuilt from the value's source so far, and from the value itself from then on."""

    def program(context):
        torch.manual_seed(0)
        seen = []
        for x in torch.randn(4, 4, 6, 64):
            x.requires_grad_()
            with context():
                y = x * x
                z = F.scaled_dot_product_attention(y.double(), y.double(), y.double()).float() * y.exp()
                WRITES[write](y)
                loss = z.sum()
            loss.backward()
            seen += [loss.detach(), x.grad]
        return seen

    assert_as_stock(program, budget=budget)
