"""The network that every framework saved and ran (fixtures/interop), as a torch module."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from leannorm import nn

FIXTURES = Path(__file__).parent / "interop" / "fixtures"

# framework → the file in which it saved the network
FILES = {"paddle": "paddle.pdparams", "keras": "keras.keras", "flax": "flax.msgpack", "onnx": "net.onnx"}
CHANNELS_LAST = ("keras", "flax")


class Net(torch.nn.Module):
    """Norms from `kinds`: leannorm.nn, or torch.nn for the error that torch makes itself."""

    def __init__(self, kinds=nn, dtype=torch.float64):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.bn = kinds.BatchNorm2d(4)
        self.dw = torch.nn.Conv2d(4, 4, 2, groups=4)
        self.up = torch.nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.fc = torch.nn.Linear(3, 6)
        self.ln = kinds.LayerNorm(6)
        self.to(dtype)

    def forward(self, x):
        x = self.up(self.dw(torch.relu(self.bn(self.conv(x)))))
        return self.ln(self.fc(x.mean((2, 3))))


def defaults(framework):
    """The defaults that the framework's own layers declare."""
    return json.loads((FIXTURES / f"{framework}.json").read_text())


def said(framework):
    """What the network had and the file of this framework does not state."""
    if framework in ("keras", "onnx"):
        return {}
    told = defaults(framework)
    return {"eps": {"bn": told["eps"], "ln": told["layer_eps"]}, "momentum": told["momentum"]}


def recorded(framework):
    """The network's input, outputs and updated statistics there, in float64; images channels-first."""
    with np.load(FIXTURES / f"{framework}.npz") as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files}
    if framework in CHANNELS_LAST:
        arrays["x"] = arrays["x"].permute(0, 3, 1, 2).contiguous()
    return arrays
