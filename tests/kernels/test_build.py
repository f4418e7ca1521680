"""Building: optional, and where it was not done the package works and says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import setuptools

from leannorm.ops.backends import library

ROOT = Path(__file__).parents[2]
USE = """
import torch
from leannorm.ops.select import backends, pick
x = torch.randn(4, 3)
print(pick(x).name, "|", *backends(x)["cpu"])
"""


def install(tmp_path: Path, python: str | Path = sys.executable, **environment: str) -> str:
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
        [python, "setup.py", "-q", "build", "--build-lib", str(library)],
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
        pytest.param({"LEANNORM_BUILD_CPP": "0"}, "LEANNORM_BUILD_CPP=0", marks=pytest.mark.conformance),
        ({"CC": "no-such-compiler", "CXX": "no-such-compiler"}, "no-such-compiler"),
    ],
    ids=["switched off", "no compiler"],
)
def test_an_install_without_the_kernels_says_why(tmp_path, environment, words):
    said = install(tmp_path, **environment)
    assert said.startswith("aten | the C++ kernels are not built")
    assert words in said


@pytest.mark.parametrize("torch_is_there", [True, False])
def test_an_isolated_build_finds_the_torch_that_it_is_installed_beside(tmp_path, torch_is_there):
    """As pip isolates: by a PYTHONPATH behind which the environment's packages are not seen."""
    (tmp_path / "isolated" / "torch").mkdir(parents=True)
    (tmp_path / "isolated" / "torch" / "__init__.py").write_text("raise ImportError('not here')")
    for name in ("setuptools", "_distutils_hack"):
        (tmp_path / "isolated" / name).symlink_to(Path(setuptools.__file__).parents[1] / name)
    python, words = sys.executable, "no-such-compiler"
    if not torch_is_there:
        venv.create(tmp_path / "venv")
        python, words = tmp_path / "venv" / "bin" / "python", "no torch was found while building"
    no_compiler = {"CC": "no-such-compiler", "CXX": "no-such-compiler"}
    said = install(tmp_path, python, PYTHONPATH=str(tmp_path / "isolated"), **no_compiler)
    assert said.startswith("aten | the C++ kernels are not built")
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


STAMP = b"leannorm schemas " + library.schema_digest()
BROKEN = {
    "empty": (lambda data: b"", "is not whole"),
    "no library": (lambda data: b"junk " * 1000, "was built for other operators"),
    "junk that has the digest": (lambda data: b"junk " * 99 + STAMP, "cannot be loaded"),
    "the first third": (lambda data: data[: len(data) // 3], "is not whole"),
    "all but the last byte": (lambda data: data[:-1], "is not whole"),
    "of other operators": (lambda data: data.replace(STAMP, STAMP[:-16] + b"0" * 16), "build it again"),
}


@pytest.mark.sampled(of=3)
@pytest.mark.skipif(not library.PATH.exists(), reason="the kernels are not built here")
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_library_is_left_alone_and_named(tmp_path, broken):
    """Loading the first third would end the process with a bus error."""
    break_it, words = BROKEN[broken]
    package = tmp_path / "leannorm"
    shutil.copytree(library.PATH.parent, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (package / library.PATH.name).write_bytes(break_it(library.PATH.read_bytes()))
    said = subprocess.run(
        [sys.executable, "-c", USE],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert said.startswith("aten | the C++ kernels cannot be loaded: ")
    assert words in said


# The oldest Linux that the wheel runs on is decided by the newest symbol that it asks for.
NEWEST = {"GLIBC": (2, 17), "GLIBCXX": (3, 4, 21), "CXXABI": (1, 3, 9)}


@pytest.mark.skipif(not library.PATH.exists() or sys.platform != "linux", reason="no library, or no glibc")
def test_the_library_asks_for_no_newer_system():
    elf = pytest.importorskip("elftools.elf.elffile").ELFFile(library.PATH.open("rb"))
    needs = elf.get_section_by_name(".gnu.version_r")
    asked = {version.name for _, versions in needs.iter_versions() for version in versions}
    assert any(name.startswith("GLIBC_") for name in asked)
    for name in asked:
        system, _, numbers = name.partition("_")
        if system in NEWEST:
            assert tuple(int(number) for number in numbers.split(".")) <= NEWEST[system], name
