"""Small networks, new and trained, and what a report says in short."""

import torch
from torch import nn


def told(report, *checks):
    return [(one.check, one.layer) for one in report.findings if not checks or one.check in checks]


def network(channels=8, layers=3):
    blocks = [
        nn.Sequential(
            nn.Conv2d(channels if i else 3, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )
        for i in range(layers)
    ]
    return nn.Sequential(*blocks)


def trained(channels=8, layers=3):
    model = network(channels, layers)
    for block in model:
        nn.init.uniform_(block[1].weight, 0.5, 1.5)
        nn.init.uniform_(block[1].bias, -0.1, 0.1)
        block[1].momentum = None
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(16, 3, 12, 12))
    for block in model:
        block[1].momentum = 0.1
    return model
