"""Every Triton kernel compiled for GPUs that are not there: nothing spills, and how much each takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
HERE = Path(__file__).parent
# limits of registers are chosen for this release; another compiler may put two of them aside
SPILLED = 0 if triton.__version__.startswith("3.6.") else 16  # bytes of a thread
# where a limit that keeps more programs resident is worth some bytes, on GPUs that nothing was tuned for; the
# gated one takes half the time of three launches on an H100
SPILLS = {
    80: {"gated_backward_tile, gated 32768x8192 silu bfloat16 before": 8},
    90: {"gated_backward_tile, gated 32768x8192 silu bfloat16 before": 24},
    86: {
        "backward_long, layer 32768x16384 float32": 16,
        "gated_backward_tile, gated 32768x8192 silu bfloat16 before": 16,
    },
    100: {"gated_backward_tile, gated 32768x8192 silu bfloat16 before": 16},
    120: {
        "forward_tile, layer 32768x4096 float32": 8,
        "gated_backward_tile, gated 32768x8192 silu bfloat16 before": 32,
        "grad_sums_kernel, channels 128x64x56x56 bfloat16 gelu channels_last": 40,
    },
}
REGISTERS, SHARED, WARPS = 65536, 227 << 10, 64  # of a Hopper multiprocessor


def why_not():
    for tool in ("ptxas", "cuobjdump"):
        try:
            getattr(triton.knobs.nvidia, tool).path  # noqa: B018
        except RuntimeError as error:
            return f"this Triton brings no {tool}: {error}"
    return ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def said_by(script, architecture, *arguments):
    """The lines of a process that does not interpret."""
    command = [sys.executable, str(HERE / script), str(architecture), *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found
    return found


@cache
def table(architecture, *arguments, script="triton_variants.py"):
    """What each variant takes."""
    found = said_by(script, architecture, *arguments)
    for row in found:
        print(f"sm_{architecture} {row['registers']:4} registers {row['shared']:7} shared  {row['name']}")
    return found


def assert_nothing_spills(found):
    assert not [f"{row['name']}: {row['stack']} bytes" for row in found if row["stack"] > SPILLED]


def test_nothing_spills():
    assert_nothing_spills(table(90))


def test_triton_understands_every_kernel_in_every_dtype():
    """The interpreter runs what the compiler refuses: a number in float32 where float64 was before, say."""
    found = said_by("triton_covering.py", 90, "front")
    assert {"forward_long", "gated_forward"} <= {row["kernel"] for row in found if "float64" in row["name"]}


def test_programs_that_share_the_rows_are_there_at_a_time():
    """A rest of them would run alone, after all others: as long again."""
    for row in table(90):
        if row["kernel"] != "backward_tile":
            continue
        registers = -(-row["registers"] // 8) * 8 * 32 * row["warps"]
        at_a_time = min(REGISTERS // registers, SHARED // (row["shared"] + 1024), WARPS // row["warps"])
        assert row["programs"] <= 132 * at_a_time, row["name"]


def test_programs_that_share_a_channel_are_there_at_a_time():
    """But of groups: they are many, and not cut."""
    found = [row for row in table(90) if row["kernel"] in ("moments_kernel", "grad_sums_kernel")]
    found = [row for row in found if not re.search("statistics|groups", row["name"])]
    assert found
    for row in found:
        registers = -(-row["registers"] // 8) * 8 * 32 * row["warps"]
        assert row["programs"] <= 132 * min(REGISTERS // registers, WARPS // row["warps"]), row["name"]


def test_a_kernel_without_registers_is_seen_to_spill():
    with pytest.raises(AssertionError, match="bytes"):
        assert_nothing_spills(table(90, "one", "32"))


@pytest.mark.conformance
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_nothing_spills_anywhere(architecture):
    assert_nothing_spills(table(architecture, "all"))


@pytest.mark.conformance
@pytest.mark.parametrize("architecture", [80, 86, 90, 100, 120])
def test_nothing_else_spills_in_a_part_that_has_of_each_kind_one(architecture):
    found = table(architecture, script="triton_covering.py")
    known = SPILLS.get(architecture, {}) if SPILLED == 0 else {}
    assert {row["name"]: row["stack"] for row in found if row["name"] in known} == known
    assert_nothing_spills([row for row in found if row["name"] not in known])
    assert not [row["name"] for row in found if row["shared"] + 1024 > row["limit"]]
