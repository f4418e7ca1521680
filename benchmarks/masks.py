"""Masked batch norm, compared with the unmasked layer and with the formula that many projects use.

    python -m benchmarks.masks [--threads 1] [--rounds 9] [--only lengths]

Times forward and backward in CPU time, on the same padded tensor. Lengths are uniform between half and full;
a general mask is random, with 70 % valid. The masked layer is compared with the formula before anything is
timed. The three alternate in one process, and a time is the lower quartile over the rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from leannorm import nn
from leannorm._freed_memory import keep_freed_memory

SHAPES = ((32, 256, 400), (64, 80, 1000), (16, 64, 56, 56))
KINDS = ("lengths", "mask")
Step = Callable[[], list[Tensor]]


def masked_batch_norm(x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What projects write as `MaskedBatchNorm`: sums of products with the mask, in plain torch."""
    valid = mask.unsqueeze(1).to(x.dtype)
    dims = [0, *range(2, x.dim())]
    wide = [1, -1] + [1] * (x.dim() - 2)
    count = valid.sum()
    mean = (x * valid).sum(dims) / count
    centred = (x - mean.view(wide)) * valid
    var = centred.square().sum(dims) / count
    scale = weight * torch.rsqrt(var + 1e-5)
    return (centred * scale.view(wide) + bias.view(wide)) * valid


def sides(shape: tuple[int, ...], kind: str) -> dict[str, Step]:
    """The unmasked layer, the masked one and the formula; each returns the output and its gradients."""
    samples, channels, *positions = shape
    x, dy = torch.randn(shape, requires_grad=True), torch.randn(shape)
    layer = (nn.BatchNorm1d if len(positions) == 1 else nn.BatchNorm2d)(channels)
    lengths = torch.randint(positions[-1] // 2, positions[-1] + 1, (samples,))
    mask = torch.rand(samples, *positions) < 0.7
    if kind == "lengths":
        mask = torch.arange(positions[-1]) < lengths.view(-1, *(1,) * len(positions))
        mask = mask.expand(samples, *positions)
    masking = {"lengths": lengths} if kind == "lengths" else {"mask": mask}

    def step(call: Callable[[], Tensor]) -> list[Tensor]:
        y = call()
        return [y, *torch.autograd.grad(y, [x, layer.weight, layer.bias], dy)]

    return {
        "unmasked": lambda: step(lambda: layer(x)),
        "masked": lambda: step(lambda: layer(x, **masking)),
        "formula": lambda: step(lambda: masked_batch_norm(x, mask, layer.weight, layer.bias)),
    }


def check(of: dict[str, Step]) -> None:
    """Raise if the masked layer and the formula differ."""
    for ours, theirs in zip(of["masked"](), of["formula"](), strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * scale)


def seconds(of: dict[str, Step], rounds: int) -> dict[str, float]:
    """The lower quartile of each side's CPU time; the sides alternate."""
    spent: dict[str, list[float]] = {name: [] for name in of}
    for _ in range(rounds):
        for name, step in of.items():
            began = time.process_time()
            step()
            spent[name].append(time.process_time() - began)
    return {name: sorted(times)[len(times) // 4] for name, times in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=KINDS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    print(f"{'shape':20} {'kind':8} {'unmasked':>11} {'masked':>11} {'ratio':>6} {'formula ratio':>15}")
    for shape in SHAPES:
        for kind in KINDS if options.only is None else (options.only,):
            torch.manual_seed(0)
            of = sides(shape, kind)
            check(of)
            took = seconds(of, options.rounds)
            ratio, other = took["masked"] / took["unmasked"], took["masked"] / took["formula"]
            times = f"{took['unmasked'] * 1e3:8.2f} ms {took['masked'] * 1e3:8.2f} ms"
            print(f"{shape!s:20} {kind:8} {times} {ratio:6.2f} {other:15.2f}", flush=True)


if __name__ == "__main__":
    main()
