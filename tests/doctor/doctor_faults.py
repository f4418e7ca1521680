"""One planted fault for each check: what it does to a model, and the layer in which it is to be found."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from leannorm._catalog import norms_of


class Planted:
    """A fault in `layer`, and with what `doctor` is called beside the model.

    `spreads`: layers behind it have the fault too, in a smaller measure.
    """

    def __init__(self, layer, data=False, optimizer=None, spreads=False):
        self.layer, self.data, self.optimizer, self.spreads = layer, data, optimizer, spreads


def batch_norms(model):
    return [norm for norm in norms_of(model) if norm.kind == "batch" and norm.tracks]


def middle(norms):
    return norms[len(norms) // 2]


def _put(model, norm, module):
    """Replace a norm by a module that holds it as `norm`; gives the norm's new name."""
    for parent, _, child in norm.parents:
        setattr(parent, child, module)
    return f"{norm.name}.norm"


def nonfinite_statistics(model):
    norm = middle(batch_norms(model))
    norm.mean[-1] = float("nan")
    return Planted(norm.name)


def negative_variance(model):
    norm = middle(batch_norms(model))
    norm.var[0] = -1e-3
    return Planted(norm.name)


def nonfinite_parameters(model):
    norm = middle([norm for norm in norms_of(model) if norm.affine])
    norm.weight.data[0] = float("inf")
    return Planted(norm.name)


def never_updated_statistics(model):
    norm = middle(batch_norms(model))
    norm.module.reset_running_stats()
    return Planted(norm.name)


def half_precision_statistics(model):
    norm = middle(batch_norms(model))
    norm.module.running_mean = norm.module.running_mean.bfloat16()
    return Planted(norm.name)


def momentum(model):
    norm = middle(batch_norms(model))
    norm.module.momentum = 0.99
    return Planted(norm.name)


def eps_of_another_framework(model):
    norms = norms_of(model)
    largest = max({norm.kind for norm in norms}, key=lambda kind: sum(n.kind == kind for n in norms))
    norm = middle([norm for norm in norms if norm.kind == largest])
    name = next(name for name in ("eps", "variance_epsilon") if hasattr(norm.module, name))
    setattr(norm.module, name, norm.eps * 1000)
    return Planted(norm.name)


def eps_below_rounding(model):
    norm = middle(norms_of(model))
    name = next(name for name in ("eps", "variance_epsilon") if hasattr(norm.module, name))
    setattr(norm.module, name, 1e-30)
    return Planted(norm.name)


def frozen_by_requires_grad(model):
    norm = middle(batch_norms(model))
    norm.module.requires_grad_(False)
    return Planted(norm.name)


def frozen_by_eval(model):
    norm = middle(batch_norms(model))
    norm.module.eval()
    return Planted(norm.name)


def removed_bias(model):
    for parent_name, parent in model.named_modules():
        children = list(parent.named_children())
        for (name, conv), (_, norm) in pairwise(children):
            pair = isinstance(conv, nn.modules.conv._ConvNd) and isinstance(norm, nn.BatchNorm2d)
            if pair and conv.bias is None and conv.out_channels == norm.num_features:
                conv.bias = nn.Parameter(torch.zeros(conv.out_channels))
                untraced = type(model).__name__ == "MobileNetV2Model"  # its padding depends on sizes
                return Planted(f"{parent_name}.{name}" if parent_name else name, data=untraced)
    raise LookupError("no convolution stands before its norm")


def weight_decay(model):
    norm = middle([norm for norm in norms_of(model) if norm.affine])
    decayed = [p for _, p in norm.affine]
    others = [p for p in model.parameters() if not any(p is q for q in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return Planted(norm.name, optimizer=torch.optim.AdamW(groups))


def shared_norm(model):
    norms = batch_norms(model)
    for i, first in enumerate(norms):
        for second in norms[i + 1 :]:
            apart = second.parents[0][0] is not first.parents[0][0]
            if apart and type(first.module) is type(second.module) and first.channels == second.channels:
                _put(model, second, first.module)
                return Planted(first.name)
    raise LookupError("no two norms have the same channels")


def gamma_zero(model):
    norm = middle([norm for norm in norms_of(model) if norm.gamma is not None])
    with torch.no_grad():
        norm.weight[: norm.weight.numel() // 2] = 0
    return Planted(norm.name)


class Loop(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(self.norm(x))


class Seeing(nn.Module):
    """A norm that sees its input changed."""

    def __init__(self, norm, change):
        super().__init__()
        self.norm, self.change = norm, change

    def forward(self, x):
        seen = self.norm(self.change(x))
        return seen if seen.shape == x.shape else x


def repeated_call(model):
    norm = middle(batch_norms(model))
    return Planted(_put(model, norm, Loop(norm.module)))


def repeated_call_seen(model):
    return Planted(repeated_call(model).layer, data=True)


def few_values(model):
    norm = middle([n for n in batch_norms(model) if isinstance(n.module, nn.BatchNorm2d)])
    return Planted(_put(model, norm, Seeing(norm.module, lambda x: x[:1, :, :2, :2])), data=True)


def train_eval_gap(model):
    norm = middle(batch_norms(model))
    norm.mean.add_(3 * norm.var.sqrt())
    return Planted(norm.name, data=True)


def _padded(x):
    """Zero from another position on in each sample, as sequences of several lengths are."""
    length = x.shape[-1]
    ends = torch.linspace(length, 1, len(x)).int()
    return x * (torch.arange(length) < ends[:, None]).view(len(x), *[1] * (x.dim() - 2), length)


def padding_in_statistics(model):
    norm = next(n for n in norms_of(model) if n.kind in ("batch", "group"))
    return Planted(_put(model, norm, Seeing(norm.module, _padded)), data=True, spreads=True)


def _half_dead(x):
    return x * (torch.arange(x.shape[1]) % 2).view(1, -1, *[1] * (x.dim() - 2))


def dead_channels(model):
    norm = middle(batch_norms(model))
    return Planted(_put(model, norm, Seeing(norm.module, _half_dead)), data=True, spreads=True)


BATCH = [
    nonfinite_statistics,
    negative_variance,
    never_updated_statistics,
    half_precision_statistics,
    momentum,
    frozen_by_requires_grad,
    frozen_by_eval,
    removed_bias,
    shared_norm,
    repeated_call,
    repeated_call_seen,
    few_values,
    train_eval_gap,
    dead_channels,
]
ANY = [nonfinite_parameters, eps_of_another_framework, eps_below_rounding, weight_decay, gamma_zero]
CHECK_OF = {
    "negative_variance": "nonfinite_statistics",
    "eps_of_another_framework": "eps",
    "eps_below_rounding": "eps",
    "frozen_by_requires_grad": "half_frozen",
    "frozen_by_eval": "half_frozen",
    "repeated_call_seen": "repeated_call",
}


def faults_for(model):
    """The faults that a model can have."""
    norms = norms_of(model)
    faults = list(ANY)
    if all(norm.gamma is None for norm in norms):
        faults.remove(gamma_zero)
    if any(norm.kind == "batch" for norm in norms):
        faults += BATCH
    if any(norm.kind in ("batch", "group") for norm in norms):
        faults.append(padding_in_statistics)
    return faults
