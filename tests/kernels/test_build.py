"""Building: optional, and where it was not done the package works and says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USE = """
import torch
from leannorm.ops.select import backends, pick
x = torch.randn(4, 3)
print(pick(x).name, "|", *backends(x)["cpu"])
"""


def install(tmp_path: Path, **environment: str) -> str:
    """What an install builds, in a copy of the sources; then what a fresh process says of the backends."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("*.so", "*.reason", "__pycache__", "*.egg-info")
    for name in ("src", "csrc"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "README.md").touch()
    library = tmp_path / "library"
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "--build-lib", str(library)],
        cwd=source,
        env=os.environ | environment,
        check=True,
        capture_output=True,
    )
    said = subprocess.run(
        [sys.executable, "-c", USE],
        env=os.environ | {"PYTHONPATH": str(library)},
        check=True,
        capture_output=True,
        text=True,
    )
    return said.stdout


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"LEANNORM_BUILD_CPP": "0"}, "LEANNORM_BUILD_CPP=0"),
        ({"CC": "no-such-compiler", "CXX": "no-such-compiler"}, "no-such-compiler"),
        ({"PYTHONPATH": "no-torch"}, "--no-build-isolation"),
    ],
    ids=["switched off", "no compiler", "no torch"],
)
def test_an_install_without_the_kernels_says_why(tmp_path, environment, words):
    if "PYTHONPATH" in environment:  # a torch that cannot be imported stands in front of the real one
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('not here')")
        environment = {"PYTHONPATH": str(tmp_path)}
    said = install(tmp_path, **environment)
    assert said.startswith("reference | the C++ kernels are not built")
    assert words in said


def test_the_kernel_sources_keep_to_one_instruction_set():
    """What is compiled several times must hold no code that the linker would merge."""
    allowed = {"cstdint", "cstring", "cstdlib", "immintrin.h", "type_traits"}
    seen, queue = set(), [path.name for path in (ROOT / "csrc").glob("*_kernels.cpp")]
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in (ROOT / "csrc" / name).read_text().splitlines():
            if line.startswith("#include <"):
                assert line[10:-1] in allowed, f"{name}: {line}"
            elif line.startswith('#include "'):
                queue.append(line[10:-1])
