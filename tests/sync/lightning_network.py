"""What the test of Lightning trains, in Lightning and out of it."""

import torch


def network():
    torch.manual_seed(2)
    layers = [torch.nn.Conv2d(3, 6, 3), torch.nn.BatchNorm2d(6), torch.nn.ReLU(), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(96, 4)).double()
