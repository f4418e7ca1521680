"""A real case for `leannorm.doctor`: transformers' MobileNetV2, whose norms have TensorFlow's momentum.

    python -m benchmarks.doctor_case [CHART.svg]

Trains on scikit-learn's digits, about two minutes on one core, and draws a chart if a file is named.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from torch import nn
from torch.nn import functional as F

import leannorm
from benchmarks.architectures import import_torchvision
from leannorm.report.doctor.findings import LEAST_GAP

EPOCHS, BATCH, SIZE = 5, 64, 24
WIDTH, HEIGHT, LEFT = 780, 200, 50
COLOURS = {"as trained": "#dc2626", "recalibrated": "#2563eb"}


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    images = F.interpolate(images, size=SIZE, mode="bilinear").expand(-1, 3, -1, -1).contiguous()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.tensor(data.target)[order]


def network() -> nn.Module:
    import_torchvision()
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    torch.manual_seed(0)
    sizes = {"depth_multiplier": 0.35, "output_stride": 16, "num_labels": 10}
    config = MobileNetV2Config(**sizes, classifier_dropout_prob=0.0)
    return MobileNetV2ForImageClassification(config)


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(EPOCHS):
        model.train()
        order = torch.randperm(len(images))
        for part in order.split(BATCH):
            loss = F.cross_entropy(model(images[part]).logits, labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    right = sum(
        int((model(x).logits.argmax(1) == y).sum())
        for x, y in zip(images.split(256), labels.split(256), strict=True)
    )
    return right / len(images)


def chart(gaps: dict[str, list[float]], words: str) -> str:
    """A bar for each layer; the bars of the second run are drawn in front of those of the first."""
    highest = 1.1 * max(LEAST_GAP, *(max(values) for values in gaps.values()))
    parts = [f'<text x="{LEFT}" y="18">{escape(words)}</text>']
    for i, (name, colour) in enumerate(COLOURS.items()):
        parts.append(f'<rect x="{LEFT + 130 * i}" y="30" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 130 * i + 18}" y="41">{name}</text>')
    bottom = 60 + HEIGHT
    apart = next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 100) if highest / step <= 5)
    for i in range(int(highest / apart) + 1):
        tick = i * apart
        y = bottom - tick / highest * HEIGHT
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 10}" stroke="#9ca3af" stroke-opacity="0.4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for name, values in gaps.items():
        step = (WIDTH - 10 - LEFT) / len(values)
        for i, value in enumerate(values):
            height = value / highest * HEIGHT
            at = f'x="{LEFT + i * step + 1:.1f}" y="{bottom - height:.1f}" width="{step - 2:.1f}"'
            parts.append(f'<rect {at} height="{height:.1f}" fill="{COLOURS[name]}"/>')
    y = bottom - LEAST_GAP / highest * HEIGHT
    parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 10}" stroke="#374151" stroke-dasharray="5 4"/>')
    parts.append(
        f'<text x="{WIDTH - 10}" y="{y - 5:.1f}" text-anchor="end">a finding above {LEAST_GAP:g}</text>'
    )
    parts.append(f'<text x="{LEFT}" y="{bottom + 20}">first layer</text>')
    parts.append(f'<text x="{WIDTH - 10}" y="{bottom + 20}" text-anchor="end">last layer</text>')
    style = "font: 13px system-ui, sans-serif; fill: #6b7280"
    body = "\n".join(parts)
    size = f'viewBox="0 0 {WIDTH} {bottom + 32}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{style}">\n{body}\n</svg>\n'


def main() -> int:
    torch.set_num_threads(1)
    images, labels = digits()
    count = 1 + 20 * BATCH + 3  # the last batch of an epoch has four images
    seen, unseen = (images[:count], labels[:count]), (images[count:], labels[count:])
    model = network()
    train(model, *seen)
    batches = list(seen[0][:1280].split(160))
    others = list(unseen[0].split(160))[:3]  # on the batches used to recalibrate, the gap would be 0
    before = leannorm.doctor(model.train(), others)
    before.print()
    print(f"accuracy on unseen digits: {accuracy(model, *unseen):.1%}")
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.momentum = 0.003
    leannorm.recalibrate(model.train(), batches)
    after = leannorm.doctor(model, others)
    after.print()
    print(f"accuracy on unseen digits, recalibrated: {accuracy(model, *unseen):.1%}")
    if len(sys.argv) > 1:
        gaps = {
            name: [layer.gap or 0.0 for layer in report.layers]
            for name, report in zip(COLOURS, (before, after), strict=True)
        }
        words = "Gap between unseen batches' statistics and the running ones, in standard deviations"
        Path(sys.argv[1]).write_text(chart(gaps, words))
    return 0


if __name__ == "__main__":
    sys.exit(main())
