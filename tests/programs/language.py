"""A program: lines of Python that are run one by one, with a listing that can be read, kept and replayed.

    steps=3 n=4,4,3 s=6,6,7 forwards=1 threads=0 seed=17
    before:                           once
        w1 = parameter(64, 64)
    forward:                          every step (of `forwards` passes before the first backward pass)
        x = tensor(n, s, 64)
        with lean("norm"):
            y1 = torch.relu(w1.to(w1.dtype, copy=True))
            loss = (x @ y1).sum()
    backward:                         every step, once for each forward pass
        loss.backward()
        sgd(0.1)

A line that ends in a colon opens a block, which is run within that context (or in that model's forward pass).
`n` and `s` are this step's sizes, `i` is its number. With `threads=k` every k-th step is a thread's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import leannorm.functional as LF
from leannorm import nn as lnn
from programs import functions

SECTIONS = ("before", "forward", "backward")


class Line(NamedTuple):
    depth: int
    text: str

    @property
    def opens(self):
        return self.text.endswith(":")


@dataclass(frozen=True)
class Program:
    before: tuple[Line, ...] = ()
    forward: tuple[Line, ...] = ()
    backward: tuple[Line, ...] = ()
    n: tuple[int, ...] = (4,)
    s: tuple[int, ...] = (6,)
    forwards: int = 1
    threads: int = 0
    around: str = ""  # a context of the whole loop
    seed: int = 0

    @property
    def steps(self):
        return len(self.n)

    def __str__(self):
        n, s = (",".join(map(str, sizes)) for sizes in (self.n, self.s))
        rows = [f"n={n} s={s} forwards={self.forwards} threads={self.threads} seed={self.seed}"]
        if self.around:
            rows.append(f"around: {self.around}")
        for section in SECTIONS:
            rows.append(f"{section}:")
            rows += ["    " * (depth + 1) + text for depth, text in getattr(self, section)]
        return "\n".join(rows)

    def with_(self, **changes):
        return replace(self, **changes)


def parse(listing):
    """The program of a listing, as `str` writes it."""
    fields, section = {name: [] for name in SECTIONS}, None
    for row in listing.strip("\n").splitlines():
        text = row.strip()
        if not text or text.startswith("#"):
            continue
        if text.rstrip(":") in SECTIONS and text.endswith(":"):
            section, margin = text.rstrip(":"), None
        elif section is not None:
            indent = len(row) - len(row.lstrip())
            margin = indent if margin is None else margin
            fields[section].append(Line((indent - margin) // 4, text))
        elif text.startswith("around:"):
            fields["around"] = text.removeprefix("around:").strip()
        else:
            options = dict(option.split("=") for option in text.split())
            fields |= {name: tuple(map(int, options[name].split(","))) for name in "ns" if name in options}
            fields |= {
                name: int(options[name]) for name in ("forwards", "threads", "seed") if name in options
            }
    return Program(**{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()})


def _leaf(*shape, dtype=torch.float32, trained=False):
    values = torch.randn(shape, dtype=torch.float64) * (0.5 if len(shape) < 2 else shape[-1] ** -0.5)
    return values.to(dtype).requires_grad_(trained)


def parameter(*shape, dtype=torch.float32):
    return nn.Parameter(_leaf(*shape, dtype=dtype))


def frozen(*shape, dtype=torch.float32):
    return nn.Parameter(_leaf(*shape, dtype=dtype), requires_grad=False)


def positive(*shape, dtype=torch.float32):
    return _leaf(*shape, dtype=dtype).square() + 0.5


def tensor(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


def small_passes(nbytes):
    """Let `lean()` leave passes that save no more as they are, from their second time on."""
    os.environ["LEANNORM_SMALL_BYTES"] = str(nbytes)


def copied(tensor):
    """In the same layout, of which torch's kernels may depend to the last bit."""
    if 0 in tensor.stride():
        return tensor.clone()
    of = {"dtype": tensor.dtype, "device": tensor.device}
    return torch.empty_strided(tensor.shape, tensor.stride(), **of).copy_(tensor)


NAMESPACE = {
    "small_passes": small_passes,
    "COPIES": (copied, copied),
    "ALIASES": (torch.Tensor.detach, torch.Tensor.detach),
    **{name: v for name, v in vars(functions).items() if not name.startswith("_")},
    "torch": torch,
    "nn": nn,
    "F": F,
    "lnn": lnn,
    "LF": LF,
    "checkpoint": checkpoint,
    "parameter": parameter,
    "frozen": frozen,
    "buffer": _leaf,
    "positive": positive,
    "tensor": tensor,
    "leaf": leaf,
}
