"""The digit network at a large batch size: plain layers, the fusion of PyTorch's tutorial, and leannorm.

    python -m benchmarks.conv_batch_norm [--batch-size 512] [--steps 9] [--device cpu] [--json FILE]

Gradients are checked before anything is timed. The three networks alternate in one process that keeps freed
memory, and ratios are medians over the turns.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections import OrderedDict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight

from benchmarks import record
from leannorm._freed_memory import keep_freed_memory
from leannorm.nn import ConvBatchNorm2d
from leannorm.report.demo.digits import DigitNetwork, load
from leannorm.report.memory import measure_step
from leannorm.report.numerics import largest_difference
from leannorm.report.timing import time_step

REACH = {"held": 0.60, "peak": 0.88, "time": 1.40}


class _Fused(torch.autograd.Function):
    """Convolution and batch norm as in PyTorch's tutorial: save x, and recompute the convolution.

    Every intermediate result is a tensor of its own, as in a first version written for clarity.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, filters: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, filters, weight)
        ctx.eps = eps
        z = F.conv2d(x, filters)
        variance, mean = torch.var_mean(z, (0, 2, 3), correction=0, keepdim=True)
        out = z - mean
        out *= torch.rsqrt(variance + eps) * weight.view(-1, 1, 1)
        out += bias.view(-1, 1, 1)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, filters, weight = ctx.saved_tensors
        z = F.conv2d(x, filters)
        variance, mean = torch.var_mean(z, (0, 2, 3), correction=0, keepdim=True)
        rstd = torch.rsqrt(variance + ctx.eps)
        centred = (z - mean) * rstd
        dweight, dbias = (dy * centred).sum((0, 2, 3)), dy.sum((0, 2, 3))
        count = z.numel() / z.shape[1]
        shared = dbias.view(-1, 1, 1) / count + centred * (dweight.view(-1, 1, 1) / count)
        dz = (dy - shared) * (rstd * weight.view(-1, 1, 1))
        dx = conv2d_input(x.shape, filters, dz) if ctx.needs_input_grad[0] else None
        return dx, conv2d_weight(x, filters.shape, dz), dweight, dbias, None


class TutorialPair(nn.Module):
    """The tutorial's layer, with the same parameter names as the other pairs."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, bias=False)
        self.bn = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Fused.apply(x, self.conv.weight, self.bn.weight, self.bn.bias, self.bn.eps)
        return out


def stock_pair(in_channels: int, out_channels: int, kernel_size: int) -> nn.Module:
    """torch's two layers, with the attribute names of `ConvBatchNorm2d`."""
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, bn=nn.BatchNorm2d(out_channels)))


PAIRS = {"stock": stock_pair, "tutorial": TutorialPair, "leannorm": ConvBatchNorm2d}


def loss_of(network: nn.Module, images: Tensor, labels: Tensor, seed: int) -> Tensor:
    """The loss of a batch; `seed` decides the dropout mask."""
    torch.manual_seed(seed)
    return F.nll_loss(network(images), labels)


def check_answers(networks: dict[str, DigitNetwork], images: Tensor, labels: Tensor) -> dict[str, float]:
    """The largest relative difference from the baseline's gradients, in float64; exit if beyond rounding."""
    gradients = {}
    for name, network in networks.items():
        double = copy.deepcopy(network).double()
        loss_of(double, images.double(), labels, 0).backward()
        gradients[name] = [p.grad for p in double.parameters() if p.grad is not None]
    off = {name: largest_difference(ours, gradients["stock"])[1] for name, ours in gradients.items()}
    wrong = {name: difference for name, difference in off.items() if not difference <= 1e-9}
    if wrong:
        raise SystemExit(f"nothing was timed, because gradients are wrong: {wrong}")
    return off


def measure(batch_size: int, steps: int, device: str) -> dict[str, Any]:
    """Activation bytes, peak bytes and median step time of every pair, and their ratios to the baseline's."""
    digits = load()
    repeat = -(-batch_size // len(digits.labels))
    images = digits.images.repeat(repeat, 1, 1, 1)[:batch_size].to(device)
    labels = digits.labels.repeat(repeat)[:batch_size].to(device)
    networks = {name: DigitNetwork(pair).to(device) for name, pair in PAIRS.items()}
    for network in networks.values():
        network.load_state_dict(networks["stock"].state_dict())
    off = check_answers(networks, images[:64], labels[:64])
    freed_memory = keep_freed_memory()
    rows: dict[str, dict[str, Any]] = {}
    for name, network in networks.items():
        held, peak, *_ = measure_step(partial(loss_of, network, images, labels, 0), device=device)
        rows[name] = {"held": held, "peak": peak, "gradients": off[name]}
    seconds: dict[str, list[float]] = {name: [] for name in networks}
    for turn in range(steps + 3):  # the first turns cause the page faults; later ones reuse the pages
        for name, network in networks.items():
            network.zero_grad()
            taken = time_step(partial(_step, network, images, labels, turn), device)
            if turn >= 3:
                seconds[name].append(taken)
    for name, row in rows.items():
        row["seconds"] = median(seconds[name])
        row["ratios"] = {
            "held": row["held"] / rows["stock"]["held"],
            "peak": row["peak"] / rows["stock"]["peak"],
            "time": median(a / b for a, b in zip(seconds[name], seconds["stock"], strict=True)),
        }
    return {
        "batch_size": batch_size,
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "freed_memory": str(freed_memory),
        "rows": rows,
        "reach": REACH,
    }


def _step(network: nn.Module, images: Tensor, labels: Tensor, seed: int) -> None:
    loss_of(network, images, labels, seed).backward()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options.batch_size, options.steps, options.device)
    print(
        f"digit network, batch {result['batch_size']}, {options.device}, {result['threads']} threads, ",
        end="",
    )
    print(f"torch {result['torch']}; {result['freed_memory']}")
    print(f"{'':10} {'kept':>16} {'peak':>16} {'step':>17} {'gradients':>10}")
    for name, row in result["rows"].items():
        ratios = row["ratios"]
        print(
            f"{record.shown(name):10} {row['held'] / 1e6:8.1f} MB {ratios['held']:4.2f} "
            f"{row['peak'] / 1e6:8.1f} MB {ratios['peak']:4.2f} "
            f"{row['seconds'] * 1e3:9.1f} ms {ratios['time']:4.2f} {row['gradients']:10.0e}"
        )
    print("goal       " + ", ".join(f"{record.shown(what)} {ratio:.2f}" for what, ratio in REACH.items()))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
