"""What lines are made of: expressions of one tensor that keep its shape, and weights that can meet it."""

from __future__ import annotations

import torch

ELEMENTWISE = [
    "F.relu({})",
    "F.relu({})",
    "torch.sigmoid({})",
    "torch.tanh({})",
    "F.silu({})",
    "F.silu({})",
    "F.gelu({})",
    'F.gelu({}, approximate="tanh")',
    "F.hardswish({})",
    "F.hardsigmoid({})",
    "F.hardtanh({}, -0.5, 0.7)",
    "F.relu6({})",
    "F.leaky_relu({}, 0.1)",
    "F.elu({})",
    "F.celu({}, 0.5)",
    "F.selu({})",
    "F.softplus({})",
    "F.mish({})",
    "F.logsigmoid({})",
    "{}.softmax(-1)",
    "{}.exp()",
    "{}.abs().sqrt()",
    "{}.clamp(-0.5, 0.5)",
    "{}.pow(3)",
    "torch.where({} > 0, {}, 0.1)",
    "F.rrelu({}, training=True)",
    "F.normalize({}, dim=-1)",
    "{}.cumsum(-1)",
    "{}.log_softmax(1)",
    "torch.addcmul({}, {}, {}, value=0.5)",
    "torch.lerp({}, {}.tanh(), 0.3)",
]
COPIES = [
    "{}.to({}.dtype, copy=True)",
    "{}.to({}.dtype, copy=True)",
    "{}.clone()",
    "({} * 1.0)",
    "{}.to(torch.bfloat16)",
    "{}.to(torch.bfloat16)",
    "{}.double()",
    "{}.float()",
    "{}.to(torch.float32)",
    "{}.contiguous()",
    "{}.type_as({})",
]


def inner(g, name):
    """The tensor, or something made of it on the way."""
    if g.chance(0.7):
        return name
    return g.pick(*COPIES, *ELEMENTWISE).replace("{}", name)


def weight(g, shape, dtype):
    """A weight that the tensor's dtype can meet: its own, cast, or, under autocast, any."""
    if g.autocast() or dtype == torch.float32:
        name = g.leaf(shape)
        return g.pick(name, name, name, f"{name}.to({name}.dtype, copy=True)", f"F.relu({name})")
    return g.leaf(shape, dtype) if g.chance(0.3) else f"{g.leaf(shape)}.to({dtype})"
