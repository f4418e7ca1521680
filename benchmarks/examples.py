"""What the scripts in `examples/` keep for backward, what some print, and batch sizes of `leannorm fit`.

    python -m benchmarks.examples [NAME ...]

Runs each script once, on one thread, and reads what it reports about its forward pass. The results go to
`benchmarks/results/examples.json`, from which `make pages` fills the pages.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import record

FOLDER = Path(__file__).parent.parent / "examples"
SCRIPTS = ("digits", "timm_loop", "transformers_trainer", "mixture_of_experts", "lightning_digits",
           "two_ranks", "unet_denoising", "segment_a_volume", "deploy", "memory_over_a_step",
           "padded_speech", "never_out")  # fmt: skip
# MB of the baseline and of `lean()`, as `examples/measure.py` and the notebook print them
HELD = re.compile(
    r"kept after forward: plain PyTorch ([\d.]+) MB, lean ([\d.]+) MB|^(\S+) +kept +([\d.]+) MB", re.M
)
SETTINGS = {1: ("lean",), 2: ("norm", "conv")}  # for scripts that print one ratio, or two
SHOWN = ("digits", "two_ranks", "padded_speech", "never_out")  # a page shows what they print
MODEL, MEMORY = "timm:resnet18", "8GiB"


def of_script(name: str) -> list[dict[str, Any]]:
    """A row for each setting, with the baseline's MB and our share, and one with the output for a page."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *(ranks if name == "two_ranks" else []), str(FOLDER / f"{name}.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    pairs = [(float(a), float(b)) for a, b, *_ in HELD.findall(ran.stdout) if a]
    alone = [float(megabytes) for *_, setting, megabytes in HELD.findall(ran.stdout) if setting]
    pairs += [(alone[0], ours) for ours in alone[1:]]
    rows: list[dict[str, Any]] = [
        {"script": name, "setting": setting, "stock": stock, "held": round(ours / stock, 3)}
        for setting, (stock, ours) in zip(SETTINGS.get(len(pairs), ()), pairs, strict=False)
    ]
    if name in SHOWN:
        rows.append({"script": name, "setting": "printed", "lines": ran.stdout.strip().splitlines()})
    return rows


def of_fit() -> list[dict[str, Any]]:
    """The largest batch that `leannorm fit` finds for each setting."""
    from leannorm import fit
    from leannorm.cli.models import model_named

    report = fit(lambda: model_named(MODEL), (3, 224, 224), MEMORY)
    return [
        {"script": f"fit {MODEL} {MEMORY}", "setting": one.name, "batch": one.batch} for one in report.fits
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", default=[*SCRIPTS, "fit"], help="scripts without .py, or fit; all by default"
    )
    for name in parser.parse_args().names:
        rows = of_fit() if name == "fit" else of_script(name)
        print(*rows, sep="\n", flush=True)
        record.write(record.FOLDER / "examples.json", rows, "script", "setting")


if __name__ == "__main__":
    main()
