"""Programs with a change (`other`) of which no shape tells; see test_lean_changes.py."""

import torch
import torch.nn.functional as F
from torch import nn

import leannorm.functional as LF


class Program:
    """Convolutions `m`, an input that is new in every pass, and `f(m, x, other)`, computed of them."""

    def __init__(self, f, kernel=1, after=None):
        torch.manual_seed(0)
        make = [nn.Conv2d(8, 8, kernel, padding=kernel // 2, bias=False) for _ in range(4)]
        self.f, self.m, self.after = f, nn.ModuleList(make), after
        self.m.scale, self.m.square = nn.Parameter(torch.randn(8, 6, 6)), nn.Parameter(torch.randn(8, 8))
        self.m.gain, self.m.shift = (nn.Parameter(torch.randn(8)) for _ in range(2))
        self.at_first = [p.detach().clone() for p in self.m.parameters()]

    def gradients(self, context, other, seed):
        for p, at_first in zip(self.m.parameters(), self.at_first, strict=True):
            p.data.copy_(at_first)
        torch.manual_seed(seed)
        x = torch.randn(4, 8, 6, 6)
        self.m.zero_grad()
        self.m.kept = self.m[0].weight.to(torch.bfloat16)
        with torch.no_grad():
            self.m[0].weight.mul_(2)
            self.m.square.mul_(2)
        with context:
            loss = self.f(self.m, x, other)
        if self.after is not None and other:
            self.after(self.m)
        try:
            loss.backward()
        except RuntimeError as error:
            return str(error)
        return [p.grad for p in self.m.parameters() if p.grad is not None]


def choice(m, x, other):
    a, b = F.silu(m[0](x)), F.silu(m[1](x))
    return m[2](b if other else a).sum() + (a + b).mean()


def read_before_edit(m, x, other):
    y = m[0](x)
    r = y * 2.0
    with torch.no_grad():
        y.mul_(3.0)
    s = F.silu(y)
    t = y * 2.0
    return m[1](r if other else t).sum() + m[2](s).square().sum()


def read_before_a_saved_edit(m, x, other):
    y = m[0](x)
    r = -y
    if other:
        with torch.no_grad():
            y.mul_(3.0)
    return m[2](F.silu(y)).square().sum() + m[1](r).square().sum()


def edited_unseen_between_two_readers(m, x, other):
    a = F.silu(m[0](x))
    first = m[1](a)
    if other:
        a.data.mul_(2)
    return first.square().sum() + m[2](a).square().sum()


def edited_behind(m, x, other):
    y = m[0](x)
    s = F.silu(y)
    if other:
        with torch.no_grad():
            y.mul_(2)
    return m[1](torch.relu(y)).square().sum() + s.detach().sum()


def schedule(m, x, other):
    return m[1](F.leaky_relu(m[0](x), 0.3 if other else 0.1)).square().sum()


def edited_output(m, x, other):
    a = F.silu(m[0](x))
    if other:
        with torch.no_grad():
            a.mul_(2)
    return m[1](a).square().sum()


def address(m, x, other):
    a = m[0](x)
    q = F.silu(a)
    if other:
        del q, a
    b = m[1](x)
    return m[2](torch.relu(b if other else a)).square().sum()


def flags_within(m, x, other):
    z = m[3](x)
    torch._C._set_mkldnn_enabled(not other)
    try:
        b = m[0](x)
    finally:
        torch._C._set_mkldnn_enabled(True)
    return m[2](F.silu(b)).square().sum() + z.sum()


def other_sort(m, x, other):
    """The same node, whose input is rebuilt by another step: an activation joins a norm, or does not."""
    n = F.batch_norm(m[0](x), None, None, training=True) if other else F.silu(m[0](x))
    return m[1](F.hardswish(n)).square().sum()


def frozen_bias(m, x, other):
    bias = torch.ones(8) if other else None
    return m[1](F.silu(F.batch_norm(m[0](x), None, None, None, bias, training=True))).square().sum()


def scaled(m, x, other):
    """A number that the node keeps as a tensor tells nothing of itself."""
    return m[1](m[0](x) * torch.tensor(3.0 if other else 2.0)).square().sum()


def eps(m, x, other):
    y = F.batch_norm(m[0](x), None, None, training=True, eps=0.5 if other else 1e-5)
    return m[1](F.silu(y)).square().sum()


def eps_of_layer_norm(m, x, other):
    """What is run again, with what its call told and its node did not."""
    y = F.layer_norm(m[0](x), (8, 6, 6), eps=0.5 if other else 1e-5)
    return m[1](y).square().sum()


def weight_of_layer_norm(m, x, other):
    y = F.layer_norm(m[0](x), (8, 6, 6), m.scale if other else None)
    return m[1](F.silu(y)).square().sum()


def bias_of_layer_norm(m, x, other):
    """The weight is the bias, too, or there is none."""
    y = F.layer_norm(m[0](x), (8, 6, 6), m.scale, m.scale if other else None)
    return m[1](F.silu(y)).square().sum()


def bias_of_group_norm(m, x, other):
    y = F.group_norm(m[0](x), 2, None, torch.ones(8) if other else None)
    return m[1](F.silu(y)).square().sum()


def eps_of_group_norm(m, x, other):
    y = F.group_norm(m[0](x), 2, m.square[0], m.square[1], eps=0.5 if other else 1e-5)
    return m[1](F.silu(y)).square().sum()


def groups(m, x, other):
    y = F.group_norm(m[0](x), 4 if other else 2)
    return m[1](F.silu(y)).square().sum()


def with_itself(m, x, other):
    """A product of a tensor with itself, and one of two tensors that are alike."""
    a, b = m[0](x), m[1](x)
    return m[2](a * (b if other else a)).square().sum() + m[3](b).sum()


def two_apart(m, x, other):
    a, b = m[0](x), m[1](x)
    return m[2](a * (a if other else b)).square().sum() + m[3](b).sum()


def sum_with_itself(m, x, other):
    """A sum saves none of its inputs: what they are stands behind its edges."""
    a, b = m[0](x), m[1](x)
    u = F.silu(a) + F.silu(b)
    return m[2](torch.relu(a + (b if other else a))).square().sum() + m[3](u).sum()


def two_of_one_node(m, x, other):
    """Steps within the step, of outputs that no node saved: twice of one node, or of two."""
    a, b = m[0](x), m[1](x)
    u = F.silu(a) + F.silu(b)
    s, t = a.transpose(2, 3), b.transpose(2, 3)
    return m[2](torch.relu(s + (t if other else s))).square().sum() + m[3](u).sum()


def two_nodes(m, x, other):
    a, b = m[0](x), m[1](x)
    u = F.silu(a) + F.silu(b)
    s, t = a.transpose(2, 3), b.transpose(2, 3)
    return m[2](torch.relu(s + (s if other else t))).square().sum() + m[3](u).sum()


def kept_cast(m, x, other):
    """The node was made before the pass, of a weight that has changed since."""
    half = m.kept if other else m[0].weight.to(torch.bfloat16)
    return m[1](F.conv2d(x.bfloat16(), half).float()).square().sum()


def cast_before_edit(m, x, other):
    """The weight has changed since its node read it."""
    half = m[0].weight.to(torch.bfloat16)
    if other:
        m[0].weight.data.mul_(2)
    return m[1](F.conv2d(x.bfloat16(), half).float()).square().sum()


def scaled_before_edit(m, x, other):
    """The node saved a leaf, of which there is no sample, and which has changed since."""
    y = m[0](x) * m.scale
    if other:
        m.scale.data.mul_(2)
    return m[1](F.silu(y)).square().sum()


def copied_to_edit(m, x, other):
    """A copy by the user, and one that a node makes of what it then edits."""
    y = m[0](x)
    graph = F.silu(y)
    a = F.silu(y, inplace=True) if other else F.silu(y.clone())
    return m[1](a).square().sum() + graph.detach().sum()


def edited_before_its_reader(m, x, other):
    """A version above 0: by a node that says so, or with no word."""
    a = m[0](x)
    b = F.silu(a)
    if other:
        with torch.no_grad():
            b.mul_(2)
    else:
        b.mul_(2)
    return m[1](torch.relu(b)).square().sum() + m[2](b).sum()


def view_of_an_edited_leaf(m, x, other):
    """A step read the view before the leaf was edited, the node that saved the view after it."""
    view = m.square.t()
    r = -view
    if other:
        with torch.no_grad():
            m.square.mul_(3.0)
    return torch.mm(torch.mm(x.view(-1, 8), view), r).square().sum()


def _normed(m, y):
    return m[1](y).square().sum() + m[2](F.silu(y)).square().sum()


def own_activation(m, x, other):
    act = "silu" if other else "hardswish"
    return _normed(m, LF.batch_norm_act(m[0](x), None, None, m.gain, m.shift, training=True, act=act))


def own_groups(m, x, other):
    return _normed(m, LF.group_norm(m[0](x), 4 if other else 2, m.gain, m.shift))


def own_eps(m, x, other):
    return _normed(m, LF.layer_norm(m[0](x), (6,), m.gain[:6], None, 0.5 if other else 1e-5))


def own_bias(m, x, other):
    """No node saves it: it is a leaf behind an edge, or what a node has made, or there is none."""
    bias = m.shift * 3.0 if other else m.shift
    y = LF.batch_norm(m[0](x), None, None, m.gain, bias, training=True)
    z = LF.batch_norm(m[3](x), None, None, None, None if other else m.shift, training=True)
    return _normed(m, y) + m[2](F.silu(z)).square().sum()


def own_other_bias(m, x, other):
    y = LF.batch_norm(m[0](x), None, None, m.gain, m.gain if other else m.shift, training=True)
    return _normed(m, y)


def own_bias_is_edited(m, x, other):
    y = LF.batch_norm(m[0](x), None, None, m.gain, m.shift, training=True)
    loss = _normed(m, y)
    if other:
        with torch.no_grad():
            m.shift.mul_(7.0)
    return loss


def own_made_bias_is_edited(m, x, other):
    """By too little to tell from rounding, before the output is saved; a step copies what it makes."""
    normed = (
        LF.layer_norm(m[0](x), (6,), m.gain[:6], m.shift[:6] * 2),
        LF.batch_norm(m[3](x), None, None, m.gain, m.shift * 2, training=True),
    )
    if other:
        with torch.no_grad():
            m.shift.mul_(1.001)
    return sum(m[1](y).square().sum() for y in normed)


def own_residual(m, x, other):
    residual = m[3](x) if other else None
    y = LF.batch_norm_act(m[0](x), None, None, m.gain, m.shift, training=True, act="relu", residual=residual)
    return _normed(m, y)


GUARDED = [
    *(
        own_activation,
        own_groups,
        own_eps,
        own_bias,
        own_other_bias,
        own_bias_is_edited,
        own_made_bias_is_edited,
        own_residual,
    ),
    view_of_an_edited_leaf,
    *(kept_cast, cast_before_edit, scaled_before_edit, copied_to_edit),
    *(with_itself, two_apart, sum_with_itself, two_of_one_node, two_nodes, edited_before_its_reader),
    *(choice, read_before_edit, edited_behind, schedule, edited_output, address, flags_within),
    *(read_before_a_saved_edit, edited_unseen_between_two_readers),
    *(other_sort, frozen_bias, scaled, eps, groups, eps_of_group_norm, bias_of_group_norm),
    *(eps_of_layer_norm, weight_of_layer_norm, bias_of_layer_norm),
]
