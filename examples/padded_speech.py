"""A small Conformer whose outputs and running statistics do not depend on how far its batch is padded.

    python examples/padded_speech.py [CHART.svg]

Needs no data and no GPU. The network is torchaudio's `Conformer` after two convolutions with stride 2. The
same utterances are padded more and more. The outputs of a training step, on the frames that are data, are
compared with those for the least padding. Attention and convolutions are masked in all networks; the norms
are torch's, or ours with `lengths=`.
"""

import sys
from xml.sax.saxutils import escape

import torch
from torch import nn

import leannorm

FEATURES, WIDTH, HEADS, BLOCKS = 40, 64, 4, 3
LENGTHS = torch.tensor([400, 311, 250, 190])
PADDED = (400, 440, 500, 600, 800, 1200)


class Norm(nn.Module):
    """Batch or group norm, then SiLU. Our norm gets the lengths; torch's has no argument for them."""

    def __init__(self, kind, ours):
        super().__init__()
        make = leannorm.nn if ours else nn
        self.norm = make.BatchNorm1d(WIDTH) if kind == "batch" else make.GroupNorm(1, WIDTH)
        self.ours = ours

    def forward(self, x, lengths):
        y = self.norm(x, lengths=lengths) if self.ours else self.norm(x)
        return nn.functional.silu(y) * frames(y, lengths)[:, None]


def frames(x, lengths):
    """A mask (N, L) for x of (N, C, L): 1 in the frames that are data, else 0."""
    return (torch.arange(x.shape[-1]) < lengths[:, None]).to(x.dtype)


class Convolution(nn.Module):
    """The convolution module of a Conformer, for (N, L, C)."""

    def __init__(self, kind, ours):
        super().__init__()
        self.rows = leannorm.nn.LayerNorm(WIDTH)
        self.into = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 15, padding=7, groups=WIDTH, bias=False)
        self.norm = Norm(kind, ours)
        self.out = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x, lengths):
        y = nn.functional.glu(self.into(self.rows(x, lengths=lengths).transpose(1, 2)), dim=1)
        y = y * frames(y, lengths)[:, None]  # removes the bias of `into` from the padding
        return self.out(self.norm(self.depthwise(y), lengths)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, kind, ours):
        super().__init__()
        self.first, self.second = (
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH)
            )
            for _ in range(2)
        )
        self.rows, self.last = leannorm.nn.LayerNorm(WIDTH), leannorm.nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.convolution = Convolution(kind, ours)

    def forward(self, x, lengths):
        x = x + self.first(x) / 2
        y = self.rows(x, lengths=lengths)
        padding = frames(y.transpose(1, 2), lengths) == 0
        x = x + self.attention(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        x = x + self.convolution(x, lengths)
        x = x + self.second(x) / 2
        return self.last(x, lengths=lengths)


class Conformer(nn.Module):
    def __init__(self, kind, ours):
        super().__init__()
        self.subsampling = nn.ModuleList(
            nn.Conv1d(size, WIDTH, 3, stride=2, padding=1) for size in (FEATURES, WIDTH)
        )
        self.norms = nn.ModuleList(Norm(kind, ours) for _ in self.subsampling)
        self.blocks = nn.ModuleList(Block(kind, ours) for _ in range(BLOCKS))

    def forward(self, x, lengths):
        """Map x of (N, features, L) to the outputs and their lengths."""
        for conv, norm in zip(self.subsampling, self.norms, strict=True):
            lengths = leannorm.conv_lengths(lengths, conv)
            x = norm(conv(x), lengths)
        x = x.transpose(1, 2)
        for block in self.blocks:
            x = block(x, lengths)
        return x, lengths


def step(kind, ours, length):
    """The outputs of a training step on the frames that are data, and the running means after it."""
    torch.manual_seed(0)
    model = Conformer(kind, ours)
    utterances = [torch.randn(FEATURES, n) * 2 + 1 for n in LENGTHS]
    x = torch.zeros(len(utterances), FEATURES, length)
    for sample, utterance in zip(x, utterances, strict=True):
        sample[:, : utterance.shape[1]] = utterance
    y, lengths = model(x, LENGTHS)
    data = torch.cat([sample[:n] for sample, n in zip(y, lengths, strict=True)]).detach()
    means = [m.norm.running_mean for m in model.modules() if isinstance(m, Norm) and kind == "batch"]
    return data, torch.cat(means) if means else torch.zeros(1)


def shifts(kind, ours):
    """For each amount of padding: the largest shift of an output, and of a running mean."""
    (first, mean), *others = (step(kind, ours, length) for length in PADDED)
    return [((y - first).abs().max().item(), (m - mean).abs().max().item()) for y, m in others]


COLOURS = {
    ("batch", False): "#dc2626",
    ("group", False): "#d97706",
    ("batch", True): "#2563eb",
    ("group", True): "#0d9488",
}


def chart(found):
    """A line for each network: the largest shift of an output against the padded length."""
    left, bottom, width, height = 50, 300, 560, 240
    highest = max(max(values) for values in found.values())
    parts = [f'<text x="{left}" y="18">Largest shift of an output on the frames that are data</text>']
    for i in range(int(highest / 0.5) + 1):
        y = bottom - i * 0.5 / highest * height
        parts.append(f'<path d="M{left} {y:.1f}H{left + width}" stroke="#9ca3af" stroke-opacity="0.4"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{i * 0.5:g}</text>')
    places = [left + (n - PADDED[0]) / (PADDED[-1] - PADDED[0]) * width for n in PADDED]
    for n, x in zip(PADDED, places, strict=True):
        if n == 440:  # its label would overlap the one before
            continue
        parts.append(f'<text x="{x:g}" y="{bottom + 18}" text-anchor="middle">{n}</text>')
    parts.append(
        f'<text x="{left}" y="{bottom + 38}">frames after padding, of utterances of at most 400</text>'
    )
    for (key, values), row in zip(found.items(), range(4), strict=True):
        points = " ".join(
            f"{x:g},{bottom - v / highest * height:.1f}" for x, v in zip(places, (0, *values), strict=True)
        )
        thick = 6 if key == ("batch", True) else 2  # so that the line of group norm is visible on it
        look = f'stroke="{COLOURS[key]}" stroke-width="{thick}"'
        parts.append(f'<polyline points="{points}" fill="none" {look}/>')
        words = f"{key[0]} norm, {'ours with lengths' if key[1] else 'torch'}"
        y = bottom + 60 + 18 * row
        parts.append(f'<rect x="{left}" y="{y - 10}" width="12" height="12" rx="2" fill="{COLOURS[key]}"/>')
        parts.append(f'<text x="{left + 18}" y="{y}">{escape(words)}</text>')
    style = "font: 13px system-ui, sans-serif; fill: #6b7280"
    body = "\n".join(parts)
    size = f'viewBox="0 0 {left + width + 30} {bottom + 130}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{style}">\n{body}\n</svg>\n'


def main():
    print("padded to            " + "".join(f"{n:>9}" for n in PADDED[1:]))
    found = {}
    for kind in ("batch", "group"):
        for ours in (False, True):
            of_outputs, of_means = zip(*shifts(kind, ours), strict=True)
            found[kind, ours] = of_outputs
            name = f"{kind} norm, {'ours' if ours else 'torch'}"
            print(f"{name:<21}" + "".join(f"{v:>9.1e}" for v in of_outputs))
            if kind == "batch":
                print(f"{'   a running mean':<21}" + "".join(f"{v:>9.1e}" for v in of_means))
            if ours:
                assert max((*of_outputs, *of_means)) < 1e-4, "ours does not depend on the padding"
            else:
                assert max(of_outputs) > 0.1, "torch's does"
    print("ours: the same outputs and statistics, however far the batch is padded")
    for path in sys.argv[1:]:
        with open(path, "w") as file:
            file.write(chart(found))


if __name__ == "__main__":
    main()
