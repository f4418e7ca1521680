"""Layers that only look like a norm of ours: what each computes, keeps or asks for is something else."""

import torch
import torch.nn.functional as F
from formula_cases import Norm


def normalized(x, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Twice(torch.autograd.Function):
    """The identity, with twice the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, up):
        return 2 * up


class Config:
    eps = 1e-6


class Attributes(Norm):
    """What the norms below read."""

    def __init__(self):
        super().__init__()
        self.config, self.calls, self.seen, self.cache = Config(), 0, [], None
        self.table = {"eps": 1e-6}
        self.register_buffer("eps", torch.tensor(1e-6))


def large(self, x):
    return normalized(x) * self.weight if x.abs().max() > 3 else x * self.weight


def large_batch(self, x):
    return normalized(x) * self.weight if x.shape[0] > 3 else normalized(x, 1e-3) * self.weight


def many_values(self, x):
    return normalized(x, 1e-6 if x.numel() < 100 else 1e-3) * self.weight


def needs_gradient(self, x):
    return normalized(x, 1e-6 if x.requires_grad else 1e-3) * self.weight


def in_gradient_mode(self, x):
    return normalized(x, 1e-6 if torch.is_grad_enabled() else 1e-3) * self.weight


def by_layout(self, x):
    return normalized(x, 1e-6 if x.is_contiguous() else 1e-3) * self.weight


def noise_in_training(self, x):
    return F.dropout(normalized(x) * self.weight, 0.5, self.training)


def other_eps_in_training(self, x):
    return normalized(x, 1e-3 if self.training else 1e-6) * self.weight


def eps_in_a_buffer(self, x):
    return normalized(x, self.eps) * self.weight


def eps_of_a_config(self, x):
    return normalized(x, self.config.eps) * self.weight


def eps_of_a_table(self, x):
    return normalized(x, self.table["eps"]) * self.weight


def eps_behind_the_root(self, x):
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * self.weight


def eps_twice(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6 + 1e-6) * self.weight


def least_variance(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp_min(1e-6)) * self.weight


def unbiased(self, x):
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-6) * self.weight


def not_centered(self, x):
    return x / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-6) * self.weight


def half_centered(self, x):
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * self.weight


def over_the_batch(self, x):
    return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6) * self.weight


def first_half(self, x):
    return x * torch.rsqrt(x[..., :8].pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def weight_squared(self, x):
    return normalized(x) * self.weight * self.weight


def weight_times_two(self, x):
    return normalized(x) * (2 * self.weight)


def weight_before_the_square(self, x):
    return normalized(x * self.weight)


def plus_input(self, x):
    return x + normalized(x) * self.weight


def detached(self, x):
    return x * torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def without_gradient(self, x):
    with torch.no_grad():
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x * root * self.weight


def other_gradient(self, x):
    return Twice.apply(normalized(x) * self.weight)


def rounded(self, x):
    return normalized(x).bfloat16().float() * self.weight


def a_tuple(self, x):
    return normalized(x) * self.weight, x


def transposed(self, x):
    return (normalized(x) * self.weight).transpose(0, 1)


def writes_its_input(self, x):
    return normalized(x.mul_(1)) * self.weight


def counts(self, x):
    self.calls += 1
    return normalized(x) * self.weight


def keeps(self, x):
    self.seen.append(x)
    return normalized(x) * self.weight


def caches(self, x):
    if self.cache is None:
        self.cache = self.weight * 1
    return normalized(x) * self.cache


def hides_its_state(self, x):
    self.__dict__["calls"] = 1
    return normalized(x) * self.weight


def swallows(self, x):
    try:
        if x.shape[0] == 3:
            return x
    except Exception:
        pass
    return normalized(x) * self.weight


def a_value(self, x):
    return normalized(x) * self.weight * x[0, 0, 0].item()


def a_residual(self, x, residual, scale):
    return normalized(x + residual) * self.weight * scale


def a_second_input(self, x, other):
    return normalized(x) * self.weight + other


def at_most_a_hundred(self, x):
    return normalized(100 - F.relu(100 - x)) * self.weight


def below_a_thousand(self, x):
    return normalized(x + (x / 1000).int()) * self.weight


def by_half(self, x):
    """What float16 cannot hold becomes infinite."""
    return (normalized(x.half().float()) * self.weight).to(x.dtype)


def quotients(self, x):
    return normalized(x + torch.div(x, 1000, rounding_mode="trunc")) * self.weight


def tiny_eps_behind_the_root(self, x):
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-14) * self.weight


GLOBAL = torch.ones(16)


def reads_a_global(self, x):
    return normalized(x) * self.weight * GLOBAL


def writes_its_own(self, x):
    with torch.no_grad():
        self.eps.mul_(1)
    return normalized(x) * self.weight


def gate_up_to_a_hundred(self, x, gate):
    return normalized(x) * self.weight * (100 - F.relu(100 - gate))


def two_norms(self, x):
    return normalized(normalized(x)) * self.weight


def plus_a_little_cubed(self, x):
    """Seen in large values alone."""
    return normalized(x) * self.weight + 1e-9 * x.pow(3)


def shrinks_what_is_large(self, x):
    return normalized(x) * self.weight / (1 + x.pow(2).mean(-1, keepdim=True) / 1e9)


def plus_a_little(self, x):
    return torch.add(normalized(x) * self.weight, x, alpha=1e-10)


def first_hundred_rows(self, x):
    """All rows of a small input."""
    return normalized(x[:, :100]) * self.weight


def first_values(self, x):
    return x * torch.rsqrt(x[..., :1000].pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


UNKNOWN = [
    large, large_batch, many_values, needs_gradient, in_gradient_mode, by_layout, noise_in_training,
    other_eps_in_training, eps_in_a_buffer, eps_of_a_config, eps_of_a_table, eps_behind_the_root, eps_twice,
    least_variance, unbiased, not_centered, half_centered, over_the_batch, first_half, weight_squared,
    weight_times_two, weight_before_the_square, plus_input, detached, without_gradient, other_gradient,
    rounded, a_tuple, transposed, writes_its_input, counts, keeps, caches, hides_its_state, swallows, a_value,
    a_residual, a_second_input, at_most_a_hundred, below_a_thousand, by_half, quotients,
    tiny_eps_behind_the_root, reads_a_global, writes_its_own, gate_up_to_a_hundred, two_norms,
    plus_a_little_cubed, shrinks_what_is_large, plus_a_little, first_hundred_rows, first_values,
]  # fmt: skip


def unknown(forward):
    """A layer of this forward."""
    return type("HandWrittenNorm", (Attributes,), {"forward": forward, "__module__": __name__})()
