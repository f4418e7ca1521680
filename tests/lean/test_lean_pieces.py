"""A plan may drop a tensor and keep what it is made of, although no node saves that."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leannorm import lean
from leannorm.saving.evidence import same_bits

pytestmark = pytest.mark.usefixtures("with_and_without_nodes")


class Dense(nn.Module):
    """Each layer reads the results of all layers before it, concatenated."""

    def __init__(self, layers=5, channels=8):
        super().__init__()
        sizes = range(channels, channels * (layers + 1), channels)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(size), nn.SiLU(), nn.Conv2d(size, channels, 3, padding=1))
            for size in sizes
        )

    def forward(self, x):
        parts = [x]
        for layer in self.layers:
            parts.append(layer(torch.cat(parts, 1)))
        return torch.cat(parts, 1)


class Grown(Dense):
    """The same, but nothing has a part once it is concatenated."""

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat((x, layer(x)), 1)
        return x


class Edited(Dense):
    """The last part is edited, after two layers have read it."""

    def forward(self, x):
        parts = [x]
        for layer in self.layers[:-1]:
            parts.append(layer(torch.cat(parts, 1)))
        y = self.layers[-1](torch.cat(parts, 1))
        with torch.no_grad():
            parts[2].mul_(2)
        return torch.cat((*parts, y), 1)


class Enlarged(nn.Module):
    """The smaller image is there when the larger one is saved."""

    def __init__(self, channels=8):
        super().__init__()
        self.norm, self.first = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.then, self.last = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        small = self.first(F.silu(self.norm(x)))
        large = self.then(F.interpolate(small, scale_factor=2.0))
        return self.last(F.silu(large))


class Grouped(nn.Module):
    """Attention in which four heads share their keys and values."""

    def __init__(self, size=64, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(size)
        self.queries, self.shared = nn.Linear(size, size), nn.Linear(size, 2 * size // heads)

    def forward(self, x):
        h = self.norm(x)
        queries = self.queries(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        pair = [one.sin().unsqueeze(1) for one in self.shared(h).chunk(2, -1)]
        keys, values = (one.repeat(1, self.heads, 1, 1) for one in pair)
        return x + F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2)


IMAGES = torch.randn(2, 8, 24, 24)
CASES = {
    "dense": (Dense, IMAGES),
    "dense, parts gone": (Grown, IMAGES),
    "a part edited": (Edited, IMAGES),
    "enlarged": (Enlarged, IMAGES),
    "grouped heads": (Grouped, torch.randn(8, 256, 64)),
}


def gradients(model, x, context=None):
    for parameter in model.parameters():
        parameter.grad = None
    if context is None:
        loss = model(x).square().mean()
    else:
        with context:
            loss = model(x).square().mean()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:leannorm. (budget|this budget)")
def test_a_plan_keeps_what_larger_tensors_are_made_of(case):
    torch.manual_seed(0)
    make, x = CASES[case]
    model, taken = make(), 0
    exact = gradients(model, x)
    for budget in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8):
        context = lean(budget=budget)
        for _ in range(3):
            for ours, theirs in zip(gradients(model, x, context), exact, strict=True):
                assert same_bits(ours, theirs)
        plan = context.plan
        taken += sum(map(len, plan.take))
        assert context.kept_bytes <= 1.01 * plan.kept_bytes, (budget, plan)
        assert context.kept_bytes >= 0.97 * plan.kept_bytes, (budget, plan)
    assert taken


@pytest.mark.filterwarnings("ignore:leannorm. (budget|this budget)")
def test_a_piece_that_is_gone_in_a_later_pass_is_made_again():
    """The plan keeps the smaller image, which the program has in some passes only."""
    torch.manual_seed(0)
    model, x = Enlarged(), IMAGES

    class Frees(Enlarged):
        def forward(self, x):
            large = F.interpolate(self.first(F.silu(self.norm(x))), scale_factor=2.0)
            return self.last(F.silu(self.then(large)))

    gone = Frees()
    gone.load_state_dict(model.state_dict())
    for budget in (0.3, 0.5, 0.7):
        for one in (model, model, gone, model, gone):
            context = lean(budget=budget)
            for ours, theirs in zip(gradients(one, x, context), gradients(one, x), strict=True):
                assert same_bits(ours, theirs)
