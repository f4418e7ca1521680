"""`make fuzz`: many random programs, and a short listing of each that fails.

python -m programs --count 100000 --jobs 2      from seed 0 on, in two processes
python -m programs --seed 1234                  one program and its verdict
python -m programs --file listing.txt           a program that was written down
"""

import argparse
import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"


def main():
    parser = argparse.ArgumentParser(prog="programs", description="Random programs for lean().")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--file")
    parser.add_argument("--warm", action="store_true", help="keep lean()'s caches over all programs")
    parser.add_argument("--most", type=int, default=10, help="failures to shrink, per process")
    parser.add_argument("--python", action="store_true", help="the log in Python, as without the C++ nodes")
    parser.add_argument("--late", action="store_true", help="nodes get stand-ins for tensors of any size")
    options = parser.parse_args()
    if options.late:
        os.environ["PROGRAMS_LATE"] = "1"
    if options.python:
        os.environ["PROGRAMS_LOG"] = "python"
    from programs.campaign import campaign, show

    if options.seed is not None or options.file:
        return show(options.seed, options.file)
    return campaign(options.start, options.count, options.jobs, options.warm, options.most)


if __name__ == "__main__":
    sys.exit(main())
