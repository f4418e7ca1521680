"""Every example in a docstring and on a docs page runs and prints what it says."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import leannorm

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture
def no_pass_is_small():
    """In place of the fixture for all other tests: examples run as users run them, small passes included."""


def names():
    return [
        m.name
        for m in pkgutil.walk_packages(leannorm.__path__, "leannorm.")
        if not m.name.endswith(("__main__", "._C"))
    ]


@pytest.mark.parametrize("name", names())
def test_examples_in_docstrings(name):
    assert doctest.testmod(importlib.import_module(name), optionflags=OPTIONS).failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_examples_on_pages(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where examples write their files
    assert doctest.testfile(str(page), module_relative=False, optionflags=OPTIONS).failed == 0
