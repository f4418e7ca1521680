"""What tests have in place of a part of the library, so that they do not name its internals themselves."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch


def without_nodes(monkeypatch, package: str) -> None:
    """A package as it is where the C++ nodes are not built."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"leannorm.{package}.") and hasattr(module, "NODES"):
            monkeypatch.setattr(module, "NODES", None)


def whole_way(monkeypatch) -> None:
    """No call takes the fast path."""
    from leannorm.autograd import fast

    for picks in ("picks_cpu", "picks_triton"):
        monkeypatch.setattr(fast, picks, lambda *_: False)


def gpu_with(monkeypatch, **properties) -> None:
    """torch.cuda says this of every GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))


def on_device(monkeypatch, **parts) -> None:
    """Triton's operators as on a device: `processors`, `choice` and `launch`, wherever they are asked for.

    `processors` is a number, `choice` a `Choice` or None, `launch` is called instead of what runs a kernel.
    """
    from leannorm.ops.backends.triton import channel, channel_gradients, gated, rows, shares, statistics

    of_device = {"processors": "processors", "choice": "choice_for"}
    named = {name: lambda device, part=part: parts[part] for part, name in of_device.items() if part in parts}
    named |= {"launch": parts["launch"]} if "launch" in parts else {}
    for module in (channel, channel_gradients, gated, rows, shares, statistics):
        for name in named.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, named[name])
