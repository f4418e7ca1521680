"""The public surface: every name is found where it says, is documented, and nothing private shows."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import leannorm

ROOT = Path(__file__).parent.parent
ROOMS = [
    "leannorm",
    *(f"leannorm.{n}" for n in leannorm.__all__ if isinstance(getattr(leannorm, n), ModuleType)),
]
NAMES = [(room, name) for room in ROOMS for name in importlib.import_module(room).__all__]
MODULES = [
    m.name
    for m in pkgutil.walk_packages(leannorm.__path__, "leannorm.")
    if not m.name.endswith(("__main__", "._C", "._nodes"))
]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]


@pytest.mark.parametrize(("room", "name"), NAMES, ids=".".join)
def test_a_public_name_says_where_it_is_found(room, name):
    value = getattr(importlib.import_module(room), name)
    assert inspect.getdoc(value)
    if isinstance(value, ModuleType):
        assert value.__name__ == f"{room}.{name}"
    elif inspect.isroutine(value) or inspect.isclass(value):
        assert value.__name__ == value.__qualname__ == name
        assert value.__module__.startswith("leannorm.")
        assert getattr(importlib.import_module(value.__module__), name) is value


@pytest.mark.parametrize("room", [*ROOMS, "leannorm.interop.lightning", "leannorm.interop.transformers"])
def test_no_room_of_the_inside_shows(room):
    shown = importlib.import_module(room)
    assert sorted(n for n in dir(shown) if not n.startswith("_")) == shown.__all__
    assert {"__all__", "__doc__", "__version__"} <= set(dir(leannorm))


@pytest.mark.parametrize("name", leannorm.__all__)
def test_help_names_everything_by_what_it_is_for(name):
    assert re.search(rf"\b{name}\b", leannorm.__doc__)


@pytest.mark.parametrize("module", MODULES)
def test_no_function_stands_before_a_module_of_its_name(module):
    """`import leannorm.a.b as b` reads the attribute, which must be the module."""
    package, _, name = module.rpartition(".")
    assert getattr(importlib.import_module(package), name, None) in (None, importlib.import_module(module))


def test_every_dotted_name_on_a_page_is_there_after_a_bare_import():
    text = "\n".join(page.read_text() for page in PAGES)
    names = sorted(set(re.findall(r"(?<!-m )(?<![\w./])(leannorm(?:\.\w+)+)(?!\.\w*[/-])", text)))
    assert "leannorm.interop.lightning.layer_sync" in names
    assert len(names) > 25
    code = f"""
import leannorm, torch
for name in {names}:
    value = leannorm
    for part in name.split(".")[1:]:
        value = getattr(value, part, None)
    if value is None and not hasattr(torch.ops.leannorm, name.removeprefix("leannorm.")):
        print(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_name_that_comes_late_is_like_any_other():
    code = """
import pickle
from leannorm import doctor, FitReport
import leannorm, torch
from leannorm import *
assert leannorm.doctor is doctor and bench is leannorm.bench and program.fork is leannorm.program.fork
assert leannorm.fold is leannorm.transforms.fold is transforms.folding.fold.fold
for value in (doctor, FitReport, leannorm.fold, leannorm.interop.load, leannorm.transforms.FoldReport):
    assert pickle.loads(pickle.dumps(value)) is value
import leannorm.interop.lightning as lightning
assert leannorm.interop.lightning is lightning
for package in (leannorm, transforms, interop, leannorm.report):
    try:
        package.folds
    except AttributeError as error:
        assert str(error) == f"module '{package.__name__}' has no attribute 'folds'", error
    else:
        raise AssertionError(package)

@torch.compile(backend="eager", fullgraph=True)
def step(x):
    return leannorm.functional.layer_norm(x, (4,)) if isinstance(x, leannorm.MemoryReport) else x + 1
assert step(torch.zeros(1)).item() == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", leannorm.nn.__all__)
def test_help_of_forward_says_what_the_layer_does(name):
    forward = getattr(leannorm.nn, name).forward
    assert forward.__module__.startswith("leannorm.")
    assert forward.__doc__
    assert "``" not in forward.__doc__
