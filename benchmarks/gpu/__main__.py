"""The norms and whole training steps on a GPU: results are checked, then timed, within a time limit.

    python -m benchmarks.gpu [--only SECTION] [--minutes 8.5] [--out FOLDER] [--device cuda] [--smoke]
    python -m benchmarks.gpu --report [RESULTS.json] [--out FOLDER]
    python -m benchmarks.gpu --tune [FILE.json]

Needs torch, Triton, numpy and a copy of this tree; leannorm need not be installed. Every result is first
compared with float64's, with memory filled with NaN before: it may have twice torch's error plus one
rounding. Wrong results are reported and not timed, and the exit status is 1. Times are medians between device
events, on inputs that are not in the cache. Shares are relative to the bandwidth of a copy in the same run.
The results file, benchmarks/results/gpu-NAME.json, is rewritten after every number. Measurements that no time
is left for are noted and left out.

Sections: channels, rows, modern (scales and shifts per sample, gates, offsets, heads), small, resnet50, vit,
blocks (of a Llama, a ViT and a UNet with parameters in bfloat16), and compiled (torch.compile of everything).

`--smoke` runs the same code on the CPU, with tiny sizes and interpreted kernels. `--report` measures nothing:
it writes tables and two plots from a results file, by default the newest one. `--tune` searches for the best
tiles, programs and loads in flight of the per-channel kernels on this device. It writes them where the
kernels read them, by default `leannorm/tuned.json` in the user's cache folder.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before the kernels are imported
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by torch's deterministic mode
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch

from benchmarks.gpu import page, shapes, steps, tune
from benchmarks.gpu.blocks import BLOCKS
from benchmarks.gpu.report import OutOfTimeError, Report
from benchmarks.record import shown
from leannorm.ops.backends.triton import tuned
from leannorm.report.memory import check_device
from leannorm.report.timing import device_seconds

NEWEST, USERS = Path("newest"), Path("user's")
SECTIONS = ("channels", "rows", "modern", "small", "resnet50", "vit", "blocks", "compiled")


def copy_bandwidth(report: Report, smoke: bool) -> float:
    """TB/s of a copy within device memory, counting bytes read and written."""
    source = torch.empty(1 << (12 if smoke else 30), dtype=torch.uint8, device=report.device).random_()
    calls = [partial(torch.empty_like(source).copy_, source)]
    device_seconds(calls, report.device, 3)
    rate = 2 * source.nbytes / median(device_seconds(calls, report.device, 16)) / 1e12
    print(f"a copy moves {rate:.3f} TB/s", flush=True)
    return rate


def run(report: Report, only: str, smoke: bool) -> None:
    report.data["copy_tb_s"] = copy_bandwidth(report, smoke)
    cases = shapes.cases(smoke)
    wanted = [name for name in SECTIONS if only in ("", name)]
    for section in wanted:
        for case in cases.get(section, ()):
            if report.has(5, str(case)):
                if section == "small":
                    what = partial(shapes.run_small, case, report, smoke)
                else:
                    what = partial(shapes.run_case, case, report, False, smoke)
                report.attempt(str(case), what)
        if section in ("resnet50", "vit") and report.has(40, section):
            names = steps.SMOKE if smoke else steps.SETTINGS
            eager = tuple(name for name in names if name != "compile")
            report.attempt(section, partial(steps.run_network, section, report, eager, smoke))
        if section == "blocks":
            settings = steps.SMOKE_BLOCKS if smoke else steps.OF_BLOCKS
            for name in BLOCKS:
                if report.has(30, name):
                    blocks = partial(steps.run_blocks, name, report, settings, smoke)
                    report.attempt(name, blocks)
    if "compiled" in wanted:  # last, as it takes longest
        compiled(report, smoke)
    report.data["copy_tb_s_after"] = copy_bandwidth(report, smoke)


def compiled(report: Report, smoke: bool) -> None:
    from torch._functorch import config

    if report.has(180, "resnet50, compile") or smoke:
        step = partial(steps.run_network, "resnet50", report, ("compile",), smoke)
        report.attempt("resnet50, compile", step)
    with config.patch(donated_buffer=False):  # each graph runs backward several times here
        for case in (case for name in ("channels", "rows", "modern") for case in shapes.cases(smoke)[name]):
            if report.has(25, f"{case}, compile"):
                report.attempt(f"{case}, compile", partial(shapes.run_case, case, report, True, smoke))
    if report.has(150, "vit, compile") or smoke:
        step = partial(steps.run_network, "vit", report, ("compile",), smoke)
        report.attempt("vit, compile", step)


def summary(report: Report) -> None:
    """Print the short table at the end."""
    data = report.data
    print(f"\n{data['device']}, {data['date']}, torch {data['torch']}, triton {data['triton']}")
    rows = {(r["case"], r["direction"], r["side"], tuple(r["shape"])): r for r in data["rows"]}
    for name, direction in dict.fromkeys(key[:2] for key in rows if key[1] != "both"):
        ours = {key[3]: row for key, row in rows.items() if key[:3] == (name, direction, "ours")}
        if not ours:
            continue
        shares, asked = [row["share"] for row in ours.values()], next(iter(ours.values()))["reach"]
        line = f"{name:24} {direction:8} share {min(shares):.2f} to {max(shares):.2f} (goal {asked:.2f})"
        for side in ("torch", "compile", "plain"):
            theirs = {shape: rows.get((name, direction, side, shape)) for shape in ours}
            ratios = [r["microseconds"] / ours[k]["microseconds"] for k, r in theirs.items() if r]
            line += f", {_mean(ratios):.2f}x {side} (least {min(ratios):.2f})" if ratios else ""
        print(line)
    small = {(r["case"], r["side"]): r for r in data["small"]}
    for (name, side), row in small.items():
        if side == "ours" and (torchs := small.get((name, "torch"))):
            ratio = row["microseconds"] / torchs["microseconds"]
            print(
                f"{name:35} time {ratio:.2f} of torch's, launches {row['launches']}, not {torchs['launches']}"
            )
    for row in data["steps"]:
        time, peak = row["milliseconds_of_stock"], row["max_memory_allocated_of_stock"]
        asked = f" (goal {row['reach'][0]}, {row['reach'][1]})" if row["reach"] else ""
        if time is not None:
            print(
                f"{row['network']:9} {shown(row['setting']):16} of the baseline: "
                f"time {time:.3f}, peak {peak:.3f}{asked}"
            )
    print(f"{len(data['wrong'])} wrong, {len(data['notes'])} notes, {data['seconds']:.0f} s; {report.path}")


def results_in(folder: Path, named: Path) -> Path:
    """The results file to report: the one named, or the newest of this folder."""
    if named != NEWEST:
        return named
    there = sorted(folder.glob("gpu-*.json"), key=lambda path: path.stat().st_mtime)
    if not there:
        raise SystemExit(f"there are no results gpu-*.json in {folder}: run python -m benchmarks.gpu first")
    return there[-1]


def _mean(ratios: Any) -> float:
    logarithms = [log(ratio) for ratio in ratios]
    return exp(sum(logarithms) / len(logarithms))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", choices=("", *SECTIONS), metavar="SECTION")
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--report", type=Path, nargs="?", const=NEWEST, metavar="RESULTS.json")
    parser.add_argument("--tune", type=Path, nargs="?", const=USERS, metavar="FILE.json")
    options = parser.parse_args()
    if options.report is not None:
        for path in page.write(results_in(options.out, options.report), options.out):
            print(path)
        return 0
    device = "cpu" if options.smoke else options.device
    check_device(device)
    if options.smoke:
        torch.set_num_threads(1)
    only = "tune" if options.tune else options.only
    report = Report(torch.device(device), options.out, options.minutes, only)
    print(", ".join(f"{k} {v}" for k, v in report.data.items() if isinstance(v, (str, int, float))))

    def stop(*_: Any) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60 * options.minutes)
    try:
        torch.manual_seed(0)
        if options.tune:
            file = tuned.path() if options.tune == USERS else options.tune
            if file is None:
                raise SystemExit("LEANNORM_TUNED is empty, so no file is read: name one, or unset it")
            report.attempt("tune", partial(tune.tune, report, file, options.smoke))
        else:
            run(report, options.only, options.smoke)
    except (OutOfTimeError, KeyboardInterrupt) as stopped:
        report.note(f"stopped by {type(stopped).__name__}; all results in the file are complete")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        with suppress(BrokenPipeError):
            report.flush()
            summary(report)
    return 1 if report.data["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
