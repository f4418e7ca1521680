"""`lean()` on programs whose passes differ from each other: kept activations and step time.

    python -m benchmarks.varying [PROGRAM ...] [--passes 100] [--json FILE]

`layerdrop` is a Wav2Vec2 of 12 layers, each of which a pass leaves out with a probability of 0.1. `blocks` is
a residual CNN of 16 blocks that leaves out a fifth of them, `lengths` a transformer on sequences of 32 to 512
tokens, and `recurrence` a loop over LSTM cells and a cross entropy of 8 to 64 words. Each pass runs in plain
PyTorch and under `lean()`, with the same random numbers, and gradients are compared bit for bit. Times are
CPU seconds of one thread, relative to plain PyTorch: of all passes from the third on, in which plans are made
too, and the median over these passes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from statistics import mean, median
from time import process_time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import held
from benchmarks.architectures import import_torchvision
from benchmarks.lean_transformers import same_gradients
from leannorm.saving import lean
from leannorm.saving.remembered import nothing_remembered

Program = tuple[nn.Module, Callable[[], Tensor]]  # the second runs a forward pass with random numbers
SETTINGS: dict[str, Callable[[], lean]] = {"lean()": lean, "lean(budget=.3)": partial(lean, budget=0.3)}
_FIRST = 2  # passes that are not timed


def layerdrop() -> Program:
    import_torchvision()
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8}
    front: dict[str, Any] = {"conv_dim": (128,) * 7, "num_conv_pos_embeddings": 32}
    model = Wav2Vec2Model(Wav2Vec2Config(layerdrop=0.1, **sizes, **front)).train()
    x = torch.randn(2, 32000)
    return model, lambda: model(x).last_hidden_state.square().mean()


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.is_same, stride = inputs == outputs, 1 if inputs == outputs else 2
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.shortcut = nn.Identity() if self.is_same else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_same and torch.rand(()) < 0.2:
            return x
        return torch.relu(self.body(x) + self.shortcut(x))


def blocks() -> Program:
    widths = [16, *[w for w in (32, 64, 128, 256) for _ in range(4)]]
    stages = (_Residual(a, b) for a, b in pairwise(widths))
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *stages)
    return model, lambda: model(torch.randn(8, 3, 96, 96)).square().mean()


def lengths() -> Program:
    layer = nn.TransformerEncoderLayer(256, 8, 1024, activation=F.gelu, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def loss() -> Tensor:
        tokens = int(torch.randint(32, 513, ()))
        made: Tensor = model(torch.randn(2, tokens, 256)).square().mean()
        return made

    return model, loss


def recurrence() -> Program:
    cell, words = nn.LSTMCell(256, 256), nn.Embedding(1000, 256)
    norm, head = nn.LayerNorm(256), nn.Linear(256, 1000)

    def loss() -> Tensor:
        h = c = torch.zeros(64, 256)
        losses = list[Tensor]()
        for word in torch.randint(0, 1000, (int(torch.randint(8, 65, ())), 64)):
            h, c = cell(words(word), (h, c))
            losses.append(F.cross_entropy(head(norm(h)), word))
        return torch.stack(losses).mean()

    return nn.ModuleList([cell, words, norm, head]), loss


PROGRAMS = {"layerdrop": layerdrop, "blocks": blocks, "lengths": lengths, "recurrence": recurrence}


def _seconds(loss: Callable[[], Tensor], context: AbstractContextManager[Any], number: int) -> float:
    for seed in (torch.manual_seed, np.random.seed, random.seed):  # Wav2Vec2 uses NumPy's
        seed(number)
    start = process_time()
    with context:
        made = loss()
    made.backward()
    return process_time() - start


def measured(name: str, setting: str, passes: int) -> held.Row:
    torch.manual_seed(0)
    model, loss = PROGRAMS[name]()
    equal, kept, seconds = True, list[float](), list[tuple[float, float]]()
    for number in range(passes):
        found, saved = list[list[Tensor | None]](), SETTINGS[setting]()
        times = []
        for context in (nullcontext(), saved):
            model.zero_grad()
            times.append(_seconds(loss, context, number))
            found.append([p.grad for p in model.parameters()])
        equal &= same_gradients(*found)
        kept.append(saved.kept_bytes / (saved.kept_bytes + saved.rebuilt_bytes))
        seconds.append((times[0], times[1]))
    plain, ours = zip(*seconds[_FIRST:], strict=True)
    shares = {"held": round(mean(kept[_FIRST:]), 3), "most": round(max(kept[_FIRST:]), 3)}
    ratios = {
        "time": round(sum(ours) / sum(plain), 3),
        "median": round(median(b / a for a, b in seconds[_FIRST:]), 3),
    }
    return {"program": name, "setting": setting, **shares, **ratios, "passes": passes, "equal": equal}


def rows(names: list[str], passes: int) -> Iterator[held.Row]:
    for name in names:
        for setting in SETTINGS:
            with nothing_remembered():
                yield measured(name, setting, passes)


def main() -> None:
    parser = held.parser_of(__doc__, PROGRAMS, "PROGRAM")
    parser.add_argument("--passes", type=int, default=100)
    options = held.parsed(parser)
    held.tell(options, rows(options.names or [*PROGRAMS], options.passes), "program", "setting")


if __name__ == "__main__":
    main()
