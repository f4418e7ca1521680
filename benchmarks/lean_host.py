"""CPU time of `lean()`'s saved-tensor hooks: microseconds per saved tensor beyond hooks that do nothing.

    python -m benchmarks.lean_host [chain mobilenetv3 efficientnet_b0 llama] [--converted]
        [--turns 12] [--json FILE]

Measures the CPU time of one thread. The settings alternate, and the least time over the turns counts. `pack`
is the forward pass. `unpack` is the backward pass, including the kernels of rebuilds. Run it on an idle
machine, since other programs change the times.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks import record
from leannorm import convert
from leannorm.saving import lean

SETTINGS: dict[str, Callable[[], Any]] = {
    "no-op": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
    "lean": lambda: lean(),
    "norm": lambda: lean("norm"),
    "conv": lambda: lean("conv"),
}


def _chain() -> tuple[nn.Module, Tensor]:
    layers = [m for _ in range(200) for m in (nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.SiLU())]
    return nn.Sequential(*layers), torch.randn(4, 8, 8, 8)


def _timm(name: str, batch: int) -> tuple[nn.Module, Tensor]:
    from benchmarks.architectures import import_torchvision

    import_torchvision()  # timm needs it
    import timm

    return timm.create_model(name, num_classes=10), torch.randn(batch, 3, 64, 64)


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids).logits
        return logits


def _llama() -> tuple[nn.Module, Tensor]:
    from benchmarks.architectures import import_torchvision

    import_torchvision()  # transformers needs it
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return _Logits(LlamaForCausalLM(LlamaConfig(**sizes, **heads))), torch.randint(256, (2, 64))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "chain": _chain,
    "mobilenetv3": lambda: _timm("tf_mobilenetv3_small_075", 4),
    "efficientnet_b0": lambda: _timm("efficientnet_b0", 2),
    "llama": _llama,
}


def measure(model: nn.Module, x: Tensor, turns: int) -> Iterator[dict[str, Any]]:
    saves = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saves
        saves += 1
        return tensor

    with saved_tensors_hooks(count, lambda t: t):
        model(x).square().mean()
    taken: dict[str, list[tuple[float, float]]] = {setting: [] for setting in SETTINGS}
    for _ in range(turns + 4):  # the first turns verify each kind of rebuild
        x = torch.randn_like(x) if x.is_floating_point() else torch.randint_like(x, 256)
        for setting, context in SETTINGS.items():
            model.zero_grad()
            start = time.process_time()
            with context():
                loss = model(x).square().mean()
            middle = time.process_time()
            loss.backward()
            taken[setting].append((middle - start, time.process_time() - middle))
    least = {setting: [min(times) for times in zip(*of[4:], strict=True)] for setting, of in taken.items()}
    for setting in ("lean", "norm", "conv"):
        both = zip(least[setting], least["no-op"], strict=True)
        pack, unpack = (1e6 * (ours - theirs) / saves for ours, theirs in both)
        yield {"setting": setting, "saves": saves, "pack_us": round(pack, 1), "unpack_us": round(unpack, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.lean_host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="*", help=f"default: all of {', '.join(MODELS)}")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument(
        "--converted", action="store_true", help="convert the norms first; ours have their own nodes"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["LEANNORM_SMALL_BYTES"] = "-1"  # record these passes although they are small
    rows = []
    for name in options.models or MODELS:
        torch.manual_seed(0)
        model, x = MODELS[name]()
        for row in measure(convert(model) if options.converted else model, x, options.turns):
            rows.append({"model": f"{name}, converted" if options.converted else name, **row})
            print(rows[-1], flush=True)
    if options.json:
        record.write(options.json, rows, "model", "setting")


if __name__ == "__main__":
    main()
