"""The time of `import leannorm` after `import torch`.

    python -m benchmarks.import_time [--runs 7]

Starts fresh processes with and without the import, alternating, and prints the median difference.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median

REACH = 0.15  # seconds
CODE = "import time, torch; start = time.perf_counter(); {0}; print(time.perf_counter() - start)"


def seconds(statement: str) -> float:
    command = [sys.executable, "-c", CODE.format(statement)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    empty, ours = zip(*((seconds("pass"), seconds("import leannorm")) for _ in range(runs)), strict=True)
    cost = median(b - a for a, b in zip(empty, ours, strict=True))
    print(f"import leannorm takes {cost:.3f} s after import torch (median of {runs}; goal {REACH} s)")


if __name__ == "__main__":
    main()
