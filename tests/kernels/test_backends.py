"""What a backend is: its verbs, who is served, and that there is one of each."""

import copy
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import leannorm
from leannorm import use_backend
from leannorm.ops import schema
from leannorm.ops.backends import BACKENDS, CPU, REFERENCE, Backend
from leannorm.ops.backends.compiled_gated import CompiledGated
from leannorm.ops.select import pick

ROOT = Path(__file__).parents[2]
EACH = pytest.mark.parametrize("backend", BACKENDS.values(), ids=list(BACKENDS))


@EACH
def test_a_copy_is_the_backend_itself(backend):
    assert pickle.loads(pickle.dumps(backend)) is copy.deepcopy(backend) is BACKENDS[backend.name] is backend
    assert backend.name in repr(backend)
    assert len({backend, copy.copy(backend)}) == 1


@EACH
def test_reasons_are_a_list_of_sentences(backend):
    strange = torch.ones(2, device="meta"), torch.ones(2, dtype=torch.int8)
    for tensors in ((), (torch.ones(2), None), strange):
        reasons = backend.why_not(*tensors)
        assert isinstance(reasons, list)
        assert all(isinstance(reason, str) for reason in reasons)
        assert len(set(reasons)) == len(reasons)


@pytest.mark.parametrize("operator", [*schema.OPERATORS, *schema.BETWEEN])
def test_a_verb_that_has_an_operator_is_not_the_references(operator):
    """What a compiled backend does not replace it inherits, and a backend named never falls back."""
    verb = operator.removesuffix("_").removesuffix("_tracked")
    assert getattr(CompiledGated, verb) is not getattr(Backend, verb)
    assert getattr(type(REFERENCE), verb) is getattr(Backend, verb)


def test_each_verb_says_what_it_computes_in_one_place():
    for verb in (*schema.OPERATORS, *schema.BETWEEN):
        meaning = getattr(Backend, verb.removesuffix("_").removesuffix("_tracked"))
        assert meaning.__doc__, verb


@EACH
def test_a_backend_serves_by_its_name(backend):
    x = torch.ones(2, 3, device="cuda" if torch.cuda.is_available() else "cpu")
    if backend.why_not(x, named=True):
        pytest.skip("; ".join(backend.why_not(x, named=True)))
    with use_backend(backend.name):
        assert pick(x) is backend


@pytest.mark.skipif(bool(CPU.why_not()), reason="; ".join(CPU.why_not()))
def test_who_serves_is_found_while_a_compiler_traces():
    @torch.compile(fullgraph=True, backend="eager")
    def moments(x):
        return pick(x).channel_moments(x).mean

    x = torch.randn(4, 3, 5)
    torch.testing.assert_close(moments(x), REFERENCE.channel_moments(x).mean)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Runs Python with the package as it is where the C++ kernels could not be built."""
    folder = tmp_path_factory.mktemp("bare")
    package = shutil.copytree(
        Path(leannorm.__file__).parent,
        folder / "leannorm",
        ignore=shutil.ignore_patterns("*.so", "*.reason", "__pycache__"),
    )
    (package / "_C.reason").write_text("no-such-compiler")

    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        environment.pop("LEANNORM_BACKEND", None)
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_without_the_kernels_it_says_so_and_torchs_compute(bare):
    said = bare("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/without_kernels.py")
    assert "7 passed" in said


WINDOWS = """
import sys, warnings, torch
from leannorm import nn
sys.platform = "win32"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    nn.BatchNorm2d(4)(torch.randn(8, 4, 64, 64))
print(*(one.message for one in caught))
"""


def test_on_windows_no_compiler_is_recommended(bare):
    said = bare("-c", WINDOWS)
    assert "There are none for Windows" in said
    assert "pip install" not in said
