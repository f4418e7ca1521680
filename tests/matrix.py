"""The wheel beside each release of torch: the whole suite, in an environment of its own.

    python tests/matrix.py                  # every one of RELEASES
    python tests/matrix.py 2.10.0 2.15.0
    python tests/matrix.py --bare           # `make wheel`: beside the pinned one, nothing else and no suite

An environment has torch, what the tests need (constraints.txt) and the wheel: the newest one in dist/. They
are installed with no compiler on the PATH, and `leannorm check` runs so. Then the suite runs in a copy of the
tree, in which leannorm's source is not found: what is tested is the wheel. (Here the PATH is as it is, since
torch.compile writes C++ for CPUs.) One environment takes some 6 GB of disk; it is removed before the next is
made. The logs stay in build/matrix/. Of long sweeps each release runs another sample (tests/sampling.py).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

RELEASES = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
LARGEST = 6 << 20  # bytes of a wheel
ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "matrix"
TORCHS = ("torch", "triton")  # of whom the release decides
WITHOUT_THEIR_NEEDS = ("lightning", "lightning-utilities", "timm", "torchmetrics", "torchvision")
HAS_KERNELS = """
import leannorm, pathlib, sys
reasons, nodes = leannorm.backends()["cpu"], pathlib.Path(leannorm.__file__).with_name("_nodes.so")
if nodes.exists():
    reasons = *reasons, "the wheel is for every torch, and _nodes.so for one"
sys.exit("; ".join(reasons) or "site-packages" not in leannorm.__file__ and leannorm.__file__)
"""


class Row(NamedTuple):
    """What came of one release; `failed` counts errors too."""

    release: str
    passed: int
    skipped: int
    failed: int
    seconds: int

    def __str__(self) -> str:
        return f"| {' | '.join(map(str, self))} |"


HEADER = f"| {' | '.join(Row._fields).replace('release', 'torch')} |\n|---|--:|--:|--:|--:|"


class Environment:
    """A venv with one release of torch and the wheel; its folder is removed on the way out."""

    def __init__(self, release: str, keep: bool = False) -> None:
        self.release, self.keep, self.folder = release, keep, WORK / release
        self.log = WORK / f"{release}.log"
        self.python, self.tree = self.folder / "venv" / "bin" / "python", self.folder / "tree"
        # of the commands on the PATH this has pip and python, and no compiler
        self.bare = os.environ | {"PATH": str(self.python.parent), "PYTHONPATH": ""}

    def __enter__(self) -> Environment:
        shutil.rmtree(self.folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", self.folder / "venv"], check=True)
        return self

    def __exit__(self, *_: object) -> None:
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def install(self, wheel: Path) -> None:
        pins = self.folder / "constraints.txt"
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        pins.write_text("\n".join(line for line in lines if line.split("==")[0] not in TORCHS))
        self._pip("-c", pins, f"torch=={self.release}", "setuptools>=77", "wheel")
        self._pip("-c", pins, f"{wheel}[demo,dev,interop]", f"torch=={self.release}")
        self._pip("-c", pins, "--no-deps", *WITHOUT_THEIR_NEEDS)
        triton = subprocess.run([self.python, "-c", "import triton"], env=self.bare, capture_output=True)
        if triton.returncode and sys.platform == "linux":  # a torch for CPUs brings none
            self._pip("--no-deps", "triton==3.6.0")

    def install_alone(self, wheel: Path) -> None:
        """The wheel and what its command asks for, as a user does it."""
        self._pip("-c", ROOT / "constraints.txt", f"{wheel}[cli]")

    def _pip(self, *arguments: object) -> None:
        command = [self.python, "-m", "pip", "install", "-qq", "--no-cache-dir", "--no-compile"]
        subprocess.run([*command, *arguments], env=self.bare, check=True)

    def copy(self) -> None:
        """The tree as it is now, without what is ignored."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.tree / name)

    def check(self) -> None:
        """The wheel has brought its kernels, and they compute what they should."""
        with self.log.open("w") as out:
            for command in (["-c", HAS_KERNELS], ["-m", "leannorm", "check"]):
                subprocess.run(
                    [self.python, *command],
                    cwd=self.tree,
                    env=self.bare,
                    check=True,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )

    def suite(self, *options: str) -> Row:
        report = self.folder / "report.xml"
        command = [self.python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *options]
        start = time.monotonic()
        with self.log.open("a") as out:
            environment = os.environ | {"PYTHONPATH": "", "LEANNORM_SAMPLE": str(turn_of(self.release))}
            subprocess.run(command, cwd=self.tree, env=environment, stdout=out, stderr=subprocess.STDOUT)
        return row_of(self.release, report, time.monotonic() - start)


def turn_of(release: str) -> int:
    """Whose turn it is in the sampled tests (sampling.py): all releases together run every case."""
    return RELEASES.index(release) if release in RELEASES else 0


def row_of(release: str, report: Path, seconds: float) -> Row:
    """The counts of a report of pytest's; one that is not there, or is empty, is a failure."""
    suites = list(ElementTree.parse(report).iter("testsuite")) if report.exists() else []
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors if tests else 1
    return Row(release, max(tests - failures - errors - skipped, 0), skipped, failed, round(seconds))


def newest_wheel() -> Path:
    wheels = sorted((ROOT / "dist").glob("leannorm-*.whl"), key=lambda path: path.stat().st_mtime)
    return wheels[-1] if wheels else sys.exit("there is no wheel in dist/: make wheel")


def serves_alone(wheel: Path, keep: bool) -> bool:
    """Does the wheel bring its kernels where there is torch and no compiler, and is it small enough?"""
    size = wheel.stat().st_size
    print(f"{size / 2**20:.1f} MiB, at most {LARGEST >> 20}")
    with Environment("bare", keep) as environment:
        environment.install_alone(wheel)
        environment.tree.mkdir()
        try:
            environment.check()
        except subprocess.CalledProcessError as error:
            print(f"{error}: see {environment.log}", file=sys.stderr)
            return False
    print("leannorm check passed beside torch and nothing else, without a compiler")
    return size <= LARGEST


def rows(releases: list[str], wheel: Path, keep: bool, *options: str) -> Iterator[Row]:
    for release in releases:
        try:
            with Environment(release, keep) as environment:
                environment.install(wheel)
                environment.copy()
                environment.check()
                yield environment.suite(*options)
        except subprocess.CalledProcessError as error:
            print(f"torch {release}: {error}", file=sys.stderr)
            yield Row(release, 0, 0, 1, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("releases", nargs="*", help="in place of every one that was tested")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="leave the environments, for a look")
    parser.add_argument("--bare", action="store_true", help="beside the pinned torch alone, no suite")
    parser.add_argument("--wheel", type=Path, help="in place of the newest in dist/")
    parser.add_argument("--only", nargs="*", default=[], metavar="TEST", help="in place of the whole suite")
    given = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    wheel = given.wheel.resolve() if given.wheel else newest_wheel()
    print(wheel.name, flush=True)
    if given.bare:
        return int(not serves_alone(wheel, given.keep))
    print(f"\n{HEADER}", flush=True)
    failed = 0
    options = ["-n", str(given.jobs), "--dist", "worksteal", "-q", "-rfE", *given.only]
    for row in rows(given.releases or list(RELEASES), wheel, given.keep, *options):
        print(row, flush=True)
        failed += row.failed
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
