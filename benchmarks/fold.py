"""Fold every architecture and compare the outputs: in float64 to 10,000 roundings, and as it is.

    python -m benchmarks.fold                  the architectures of architectures.py
    python -m benchmarks.fold --timm 'resnet*' those of timm whose names match, at 64 x 64

Statistics, scales and shifts are random, so that a norm that is left out or taken twice shows. Prints a
line for each architecture, and exits with 1 if any fold is wrong.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter

import torch

import leannorm
from benchmarks.architectures import ARCHITECTURES, Architecture


def randomized(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.uniform_(-0.2, 0.2, generator=generator)
            module.running_var.uniform_(0.7, 1.3, generator=generator)
            if module.affine:
                module.weight.data.uniform_(0.7, 1.3, generator=generator)
                module.bias.data.uniform_(-0.2, 0.2, generator=generator)
    return model


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--timm", metavar="PATTERN")
    options = parser.parse_args()
    chosen = [a for a in ARCHITECTURES if not options.names or a.name in options.names]
    if options.timm:
        import timm

        chosen = [Architecture(f"timm:{name}") for name in timm.list_models(options.timm)]
    verdicts: Counter[str] = Counter()
    for architecture in chosen:
        try:
            model = randomized(architecture.build())
        except Exception as error:
            print(f"{architecture.name:40} not made: {type(error).__name__}", flush=True)
            verdicts["not made"] += 1
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                report = leannorm.fold(model, (torch.randn(2, *architecture.image),))
        except leannorm.FoldError as error:
            verdicts["wrong"] += 1
            print(f"{architecture.name:40} WRONG: {error}", flush=True)
        except Exception as error:
            verdicts["not exported"] += 1
            print(f"{architecture.name:40} not exported: {str(error)[:120]}", flush=True)
        else:
            verdicts["right"] += 1
            verdicts["norms folded"] += len(report.folded)
            verdicts["norms skipped"] += len(report.skipped)
            reasons = Counter(s.reason for s in report.skipped).most_common(2)
            print(
                f"{architecture.name:40} {len(report.folded)} folded, {len(report.skipped)} skipped, "
                f"difference {report.difference:.1e} of {report.scale:.1e} ({report.checked:.1e} in float64)",
                reasons or "",
                flush=True,
            )
    print(dict(verdicts))
    return 1 if verdicts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
