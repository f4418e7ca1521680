"""`lean(limit=)` on whole models, with limits below plain PyTorch's peak: memory, time, and what is kept.

    python -m benchmarks.limit [MODEL ...] [--shares .9 .5] [--json FILE]

The models are a ResNet-50 (16 images of 128x128), a Llama of 4 layers and width 512 (six batches of four
sequences of 64 to 512 tokens, one of them with 1,024), and nnU-Net's network (two cubes of 64 per side;
without its package, a U-Net of two stages). A limit is the memory that the process has before its first step,
plus a share of what plain PyTorch's largest step takes beyond that. Each limit runs in a process of its own.
It trains on each batch in plain PyTorch and under the limit, alternating, and compares gradients bit for bit.
The peak is what Linux counts for the process (`VmHWM`, without pages of files), and times are medians of
ratios. Freed memory is returned to the system before each step. Needs Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import record, volumes
from benchmarks.architectures import import_torchvision
from leannorm.autograd.nodes import NODES
from leannorm.saving import lean

RESULTS = record.FOLDER / "limit.json"
SHARES = (0.9, 0.7, 0.5, 0.4)
PASSES, LONGEST, VOCABULARY = 6, 512, 8000


class Training(NamedTuple):
    """A model, its loss on a batch, a small batch that warms up libraries, and the batches."""

    name: str
    model: nn.Module
    loss: Callable[[Any], Tensor]
    small: Any
    batches: list[Any]


def _resnet50() -> Training:
    import_torchvision()
    import timm

    model = timm.create_model("resnet50", num_classes=10)

    def loss(x: Tensor) -> Tensor:
        found: Tensor = model(x).square().mean()
        return found

    return Training(
        "ResNet-50", model, loss, torch.randn(2, 3, 64, 64), [torch.randn(16, 3, 128, 128)] * PASSES
    )


def _llama() -> Training:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        vocab_size=VOCABULARY,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    lengths = torch.randint(64, LONGEST + 1, (PASSES,)).tolist()
    lengths[PASSES // 2] = 2 * LONGEST

    def loss(tokens: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    batches = [torch.randint(0, VOCABULARY, (4, length)) for length in lengths]
    return Training("Llama", model, loss, torch.randint(0, VOCABULARY, (2, 32)), batches)


def _unet() -> Training:
    name = "PlainConvUNet" if volumes.lacking("PlainConvUNet") is None else "two stages"
    model, x = volumes.volumes(name, 2, 64)
    return Training(name, model, partial(volumes.loss_of, model), x[:, :, ::2, ::2, ::2], [x] * PASSES)


MODELS = {"resnet50": _resnet50, "llama": _llama, "nnunet": _unet}


def _status() -> dict[str, int]:
    """The memory of the process in bytes, as the system counts it."""
    text = Path("/proc/self/status").read_text()
    return {name: int(kilobytes) * 1024 for name, kilobytes in re.findall(r"(\w+):\s+(\d+) kB", text)}


class Step(NamedTuple):
    """`peak` is that of the process in bytes, without pages of files; `gradients` is a hash of all bits."""

    seconds: float
    peak: int
    gradients: int
    saved: lean | None


def _return_freed() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _step(training: Training, batch: Any, around: Callable[[], AbstractContextManager[Any]]) -> Step:
    """One step without the optimizer."""
    training.model.zero_grad(set_to_none=True)
    _return_freed()
    torch.manual_seed(1)  # dropout
    Path("/proc/self/clear_refs").write_text("5")  # reset `VmHWM`
    start = perf_counter()
    with around() as saved:
        loss = training.loss(batch)
    loss.backward()
    seconds = perf_counter() - start
    status = _status()
    gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
    bits = hash(tuple(hash(g.numpy().tobytes()) for g in gradients))
    return Step(seconds, status["VmHWM"] - status["RssFile"], bits, saved)


def measure(name: str, share: float) -> dict[str, Any]:
    """Measure one model with one limit, in this process."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    training = MODELS[name]()
    _step(training, training.small, nullcontext)
    training.model.zero_grad(set_to_none=True)
    _return_freed()
    before = NODES.bytes_in_use()
    most = max(_step(training, batch, nullcontext).peak for batch in training.batches) - before
    limit = before + int(share * most)
    plain, ours, kept, said = [], [], [], 0
    for batch in training.batches:
        plain.append(_step(training, batch, nullcontext))
        ours.append(_step(training, batch, lambda: lean(limit=limit)))
        saved = ours[-1].saved
        assert saved is not None
        kept.append(saved.kept_bytes / (saved.kept_bytes + saved.rebuilt_bytes))
        said += any(reason.startswith("limit ") for reason in saved.reasons)
    ratios = [a.seconds / b.seconds for a, b in zip(ours, plain, strict=True)]
    most_values = max(batch.numel() for batch in training.batches)
    largest = [i for i, batch in enumerate(training.batches) if batch.numel() == most_values]
    peak = max(one.peak for one in ours)
    return {
        "model": name,
        "network": training.name,
        "share": share,
        "plain_mb": round(most / 1e6, 1),
        "limit_mb": round(limit / 1e6, 1),
        "peak": round(peak / limit, 3),
        "beyond": round((peak - before) / (limit - before), 3),
        "time": round(median(ratios), 3),
        "largest": round(median(ratios[i] for i in largest), 3),
        "kept": round(kept[largest[-1]], 3),
        "said": said,
        "equal": all(a.gradients == b.gradients for a, b in zip(ours, plain, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*MODELS, []], metavar="MODEL")
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES, help="of plain PyTorch's peak")
    parser.add_argument("--json", type=Path, default=RESULTS, help="add the rows to this file")
    parser.add_argument("--here", action="store_true", help="measure one model and share in this process")
    options = parser.parse_args()
    if options.here:
        return print(json.dumps(measure(options.names[0], options.shares[0])))
    for name in options.names or MODELS:
        for share in options.shares:
            command = [sys.executable, "-m", "benchmarks.limit", name, "--shares", str(share), "--here"]
            ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            row = json.loads(ran.stdout.splitlines()[-1])
            print(row, "" if row["equal"] else "GRADIENTS DIFFER", flush=True)
            record.write(options.json, [row], "model", "share")


if __name__ == "__main__":
    main()
