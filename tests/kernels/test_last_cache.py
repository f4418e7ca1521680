"""The last cache is the one that a core shares, on every machine; `leannorm info` says what was found."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import needs_kernels

from leannorm.ops.backends.library import last_cache

pytestmark = needs_kernels
HERE = Path("/sys/devices/system/cpu")
L1 = [(1, "Data", "32K"), (1, "Instruction", "64K")]


def machine(folder: Path, groups: list[tuple[str, list[tuple[int, str, str]]]]) -> Path:
    """A folder as Linux has it: for each list of processors their caches, the last of which they share."""
    for processors, caches in groups:
        numbers = []
        for part in processors.split(","):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
        for number in numbers:
            for index, (level, kind, size) in enumerate(caches):
                cache = folder / f"cpu{number}" / "cache" / f"index{index}"
                cache.mkdir(parents=True)
                own = level < max(other for other, _, _ in caches)
                for name, text in (
                    ("level", level),
                    ("type", kind),
                    ("size", size),
                    ("shared_cpu_list", number if own else processors),
                ):
                    (cache / name).write_text(f"{text}\n")
    for other in ("cpufreq", "cpuidle", "cpu99x"):
        (folder / other).mkdir(parents=True)
    return folder


def levels(*sizes: str) -> list[tuple[int, str, str]]:
    return [*L1, *((level, "Unified", size) for level, size in enumerate(sizes, 2))]


MACHINES = {
    "an EPYC of three dies": (
        [(cores, levels("1024K", "32768K")) for cores in ("0-7", "8-15", "16-23")],
        "32 MiB that 8 processors share (sysfs)",
    ),
    "two threads a core": (
        [(f"{n}-{n + 3},{n + 8}-{n + 11}", levels("2048K", "107520K")) for n in (0, 4)],
        "105 MiB that 8 processors share (sysfs)",
    ),
    "a core that is off": (
        [("0,2-3", levels("512K", "16384K"))],
        "16 MiB that 3 processors share (sysfs)",
    ),
    "hybrid, two cores without a third level": (
        [("0-11", levels("2048K", "24576K")), ("12-13", levels("40960K"))],
        "24 MiB that 12 processors share (sysfs)",
    ),
    "dies of unlike caches": (
        [("0-7", levels("1024K", "98304K")), ("8-15", levels("1024K", "32768K"))],
        "32 MiB that 8 processors share (sysfs)",
    ),
    "two levels": ([("0-3", levels("1536K"))], "1.5 MiB that 4 processors share (sysfs)"),
    "four levels": (
        [("0-3", levels("256K", "6144K", "128M"))],
        "128 MiB that 4 processors share (sysfs)",
    ),
    "one core": ([("0", levels("1024K", "8192K"))], "8 MiB (sysfs)"),
}


@pytest.mark.parametrize("kind", MACHINES)
def test_the_cache_that_a_core_shares(kind, tmp_path):
    groups, said = MACHINES[kind]
    assert last_cache(machine(tmp_path, groups)) == said


@pytest.mark.parametrize(
    "groups", [[], [("0", [])], [("0", levels("", "many"))], [("0", levels("-", "0K"))]], ids=str
)
def test_where_linux_tells_nothing_the_processor_is_asked(groups, tmp_path):
    found = last_cache(machine(tmp_path / "cpus", groups))
    if platform.machine() not in ("x86_64", "AMD64"):
        assert found == "unknown"
        return
    assert found.endswith("(cpuid)")
    if (HERE / "cpu0" / "cache" / "index3").exists():
        assert found.split(" MiB")[0] == last_cache(HERE).split(" MiB")[0]


@pytest.mark.skipif(not (HERE / "cpu0" / "cache" / "index0").exists(), reason="Linux does not tell it here")
@pytest.mark.parametrize("asked", [None, str(5 << 20)])
def test_info_says_what_the_kernels_go_by(asked):
    environment = {name: value for name, value in os.environ.items() if name != "LEANNORM_CACHE"}
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "from leannorm.report.info import installation; print(installation().facts['last cache'])",
        ],
        env=environment | ({} if asked is None else {"LEANNORM_CACHE": asked}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == (last_cache(HERE) if asked is None else "5 MiB (LEANNORM_CACHE)")
