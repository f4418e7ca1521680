"""Fold the batch norms of every architecture, and compare the outputs before and after.

    python -m benchmarks.fold                   the architectures of architectures.py
    python -m benchmarks.fold timm:resnet18     any of timm's and torchvision's
    python -m benchmarks.fold --timm 'resnet*'  those of timm whose names match, at 64 x 64 if they accept it

Outputs are compared in float64, where they may differ by 10,000 roundings, and in the network's own dtype.
Statistics, scales and shifts are random, so that a norm that is lost or applied twice changes the output.
Networks with more than `--largest` million parameters, or without batch norm, are counted and not folded.
Prints one line for each of the others, and exits with 1 if any fold is wrong.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter

import torch
from torch.nn.modules.batchnorm import _BatchNorm

import leannorm
from benchmarks.architectures import ARCHITECTURES, Architecture

KNOWN = {a.name: a for a in ARCHITECTURES}


def randomized(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            assert module.running_var is not None
            module.running_mean.uniform_(-0.2, 0.2, generator=generator)
            module.running_var.uniform_(0.7, 1.3, generator=generator)
            if module.affine:
                module.weight.data.uniform_(0.7, 1.3, generator=generator)
                module.bias.data.uniform_(-0.2, 0.2, generator=generator)
    return model


def parameters_and_norms(architecture: Architecture) -> tuple[int, int]:
    """The number of parameters and of batch norms, counted on the meta device if possible."""
    try:
        with torch.device("meta"):
            model = architecture.build()
    except Exception:
        model = architecture.build()
    norms = sum(isinstance(m, _BatchNorm) for m in model.modules())
    return sum(p.numel() for p in model.parameters()), norms


def images(architecture: Architecture, model: torch.nn.Module) -> list[tuple[int, ...]]:
    """The image sizes to try: the architecture's, then the one that timm trained with."""
    default = getattr(model, "default_cfg", {}).get("input_size", architecture.image)
    return list(dict.fromkeys((architecture.image, tuple(default))))


def measure(architecture: Architecture, largest: float) -> tuple[str, str, leannorm.FoldReport | None]:
    """The verdict, one line of details, and the report if the fold is correct."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            parameters, norms = parameters_and_norms(architecture)
            if not norms:
                return "without batch norm", "", None
            if parameters > largest * 1e6:
                return "too large", f"{parameters / 1e6:.0f} million parameters", None
            model = randomized(architecture.build())
        except Exception as error:
            return "not made", f"{type(error).__name__}: {str(error)[:120]}", None
        problem = ""
        for image in images(architecture, model):
            try:
                report = leannorm.fold(model, (torch.randn(2, *image),))
            except leannorm.FoldError as error:
                return "wrong", f"WRONG: {error}", None
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error)[:200]}".replace("\n", " ")
            else:
                reasons = Counter(s.reason for s in report.skipped).most_common(2)
                line = (
                    f"{len(report.folded)} folded, {len(report.skipped)} skipped, difference "
                    f"{report.difference:.1e} of {report.scale:.1e} ({report.checked:.1e} in float64)"
                )
                return "right", f"{line} {reasons or ''}", report
        return "not exported", f"not exported: {problem}", None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--timm", metavar="PATTERN")
    parser.add_argument("--largest", metavar="MILLIONS", type=float, default=100)
    options = parser.parse_args()
    chosen = [KNOWN.get(name, Architecture(name)) for name in options.names] or list(ARCHITECTURES)
    if options.timm:
        import timm

        chosen = [Architecture(f"timm:{name}") for name in timm.list_models(options.timm)]
    verdicts: Counter[str] = Counter()
    for architecture in chosen:
        verdict, line, report = measure(architecture, options.largest)
        verdicts[verdict] += 1
        if line:
            print(f"{architecture.name:40} {line}", flush=True)
        if report is not None:
            verdicts["norms folded"] += len(report.folded)
            verdicts["norms skipped"] += len(report.skipped)
    print(dict(verdicts))
    return 1 if verdicts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
