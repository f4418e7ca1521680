"""Many programs, in several processes, with a summary."""

from __future__ import annotations

import concurrent.futures
import gc
import multiprocessing
import time
from collections import Counter
from itertools import islice, repeat
from pathlib import Path

import torch

from programs.compare import judge
from programs.generate import generate
from programs.language import parse
from programs.shrink import shrink

_CHUNK = 250


class Failure:
    def __init__(self, seed, verdict, program, short=None):
        self.seed, self.verdict, self.program, self.short = seed, verdict, program, short

    def __str__(self):
        rows = [f"seed {self.seed}: {self.verdict.kind}: {self.verdict.text}"]
        return "\n".join([*rows, str(self.short or self.program)])


def run_seeds(seeds, warm=False, most=10):
    """What became of the programs of these seeds, and the failures, of which `most` are made short."""
    torch.use_deterministic_algorithms(True)  # torch fills new memory with NaN then
    gc.collect()  # what other tests left would go while a program runs, and hide what that one leaves
    counts, failures = Counter(), []
    for seed in seeds:
        program = generate(seed)
        verdict = judge(program, warm)
        counts[verdict.kind] += 1
        counts["programs"] += 1
        counts["steps"] += program.steps
        if verdict.failed:
            short = None
            if len(failures) < most and not warm:
                short, verdict = shrink(program, verdict)
            failures.append(Failure(seed, verdict, program, short))
    return counts, failures


def _one_thread_of_each_kind():
    """Each thread of a pool numbers its nodes by itself, and autograd adds up gradients in that order: of two
    threads, which one takes a forked part is chance."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)


def _chunk(start, stop, warm, most):
    return run_seeds(range(start, stop), warm, most)


def campaign(start, count, jobs, warm, most):
    """Runs the programs of seeds from `start` on; the exit status says whether any failed."""
    began, counts, failures, shown = time.time(), Counter(), [], 0
    starts = range(start, start + count, _CHUNK)
    stops = [min(at + _CHUNK, start + count) for at in starts]
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, spawn, _one_thread_of_each_kind) as pool:
        for part, failed in pool.map(_chunk, starts, stops, repeat(warm), repeat(most)):
            counts += part
            failures += failed
            for failure in islice((f for f in failed if f.short or warm), max(0, most - shown)):
                shown += 1
                print(f"\n{failure}\n", flush=True)
            seconds = time.time() - began
            print(f"{summary(counts)}; {seconds:.0f} s", flush=True)
    seeds = Counter()
    for failure in failures:
        seeds[failure.verdict.kind] += 1
    for kind, number in seeds.items():
        some = [str(f.seed) for f in failures if f.verdict.kind == kind][:20]
        print(f"{kind}: {number} programs, of seeds {', '.join(some)}")
    return int(bool(failures))


def summary(counts):
    share = counts["refused"] / max(counts["programs"], 1)
    return (
        f"{counts['programs']} programs, {counts['steps']} steps, {counts['same']} the same,"
        f" {counts['refused']} refused ({share:.1%}), {counts['lenient']} pass rightly where stock raises,"
        f" {counts['programs'] - counts['same'] - counts['refused'] - counts['lenient']} failed"
    )


def show(seed, file):
    """One program, its verdict, and what it shrinks to."""
    _one_thread_of_each_kind()
    torch.use_deterministic_algorithms(True)
    program = parse(Path(file).read_text()) if file else generate(seed)
    verdict = judge(program)
    print(program, verdict.kind, verdict.text, sep="\n")
    if verdict.failed:
        short, verdict = shrink(program, verdict)
        print("\nwhich shrinks to", short, verdict.text, sep="\n")
    return int(verdict.failed)
