"""Every public docstring follows one template, in this order.

    One sentence on one line.

        y = a formula in plain text, indented, readable as `help()` shows it: no LaTeX

    What else must be known, in short plain sentences.

    Args: arguments whose names and types do not say enough.
    Returns: the same of results.
    Shapes: of every tensor, in and out.
    Dtypes: which are taken, and the output's.
    Kept: what is kept for the backward pass, in bytes per element and bytes per statistic.
    Raises: which errors, and when; "nothing" where there are none.
    Source: the paper, or what it follows.

    >>> an example with its imports, which runs when pasted

The functions of `leannorm.functional` and the layers of `leannorm.nn` have every part but Args and Returns.
Other functions and classes have the sentence, Raises and the example; errors, warnings and records
(dataclasses) the sentence and the example. Each fact stands once: several parts may share a line ("Dtypes,
Kept: as `batch_norm`."), and a part that begins with "as `name`" is found in that docstring (of the same
room, or `functional.name`), where it is not a bare reference again.
"""

import dataclasses
import doctest
import importlib
import inspect
import re
from types import ModuleType

import pytest

import leannorm

LABELS = ["Args", "Returns", "Shapes", "Dtypes", "Kept", "Raises", "Source"]
COMPUTED = {"Shapes", "Dtypes", "Kept", "Raises", "Source"}
ROOMS = [
    "leannorm",
    *(f"leannorm.{n}" for n in leannorm.__all__ if isinstance(getattr(leannorm, n), ModuleType)),
]
PUBLIC = {
    f"{room}.{name}": value
    for room in ROOMS
    for name in importlib.import_module(room).__all__
    if inspect.isroutine(value := getattr(importlib.import_module(room), name)) or inspect.isclass(value)
}
TENSORS = [name for name in PUBLIC if name.startswith(("leannorm.functional.", "leannorm.nn."))]
LABEL = re.compile(r"^([A-Z]\w+(?:, [A-Z]\w+)*):(?:\s|$)", re.M)
BARE = re.compile(r"as `[\w.]+`\.")
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def text_of(name):
    """The docstring up to its example."""
    return inspect.getdoc(PUBLIC[name]).partition(">>>")[0]


def parts_of(name):
    """Each part by its label, in the order written."""
    _, *pieces = LABEL.split(text_of(name))
    return {
        label: " ".join(value.split())
        for labels, value in zip(pieces[::2], pieces[1::2], strict=True)
        for label in labels.split(", ")
    }


def needed_by(name):
    value = PUBLIC[name]
    if name in TENSORS:
        return COMPUTED
    recorded = dataclasses.is_dataclass(value) or (inspect.isclass(value) and issubclass(value, Exception))
    return set() if recorded else {"Raises"}


def referred_to(name, value):
    """The public name in "as `name`", with which a part may begin."""
    found = re.match(r"as `([\w.]+)`", value)
    if found is None:
        return None
    room = "leannorm" if "." in found[1] else name.rpartition(".")[0]
    return f"{room}.{found[1]}"


def test_many_names_are_public():
    assert len(PUBLIC) > 55
    assert len(TENSORS) > 25


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_begins_with_one_sentence(name):
    first, *rest = inspect.getdoc(PUBLIC[name]).splitlines()
    assert first.endswith(".")
    assert not re.search(r"\. [A-Z`]", first)
    assert not rest or rest[0] == ""


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_is_plain_text(name):
    text = inspect.getdoc(PUBLIC[name])
    assert not re.search(r"\\|\$|::|:math:|``", text)
    assert max(map(len, text.splitlines())) <= 106


@pytest.mark.parametrize("name", PUBLIC)
def test_the_parts_stand_under_the_template_s_labels_in_its_order(name):
    parts = list(parts_of(name))
    assert parts == [label for label in LABELS if label in parts]
    assert needed_by(name) <= set(parts)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_part_that_is_found_elsewhere_is_written_out_there(name):
    for label, value in parts_of(name).items():
        assert value
        there = referred_to(name, value)
        if there is not None:
            assert BARE.fullmatch(parts_of(there)[label]) is None, (label, there)


@pytest.mark.parametrize("name", [name for name in PUBLIC if needed_by(name)])
def test_raises_names_errors(name):
    value = parts_of(name)["Raises"]
    assert referred_to(name, value) or value == "nothing." or re.search(r"`\w+Error`", value)


@pytest.mark.parametrize("name", TENSORS)
def test_a_norm_shows_its_formula(name):
    before = LABEL.split(text_of(name))[0]
    assert re.search(r"(?m)^    [\w(), ]+ = .+$", before)


@pytest.mark.parametrize("name", TENSORS)
def test_kept_is_in_bytes(name):
    value = parts_of(name)["Kept"]
    assert referred_to(name, value) or re.search(r"\d bytes per element.* \d+ bytes per ", value)


@pytest.mark.parametrize("name", PUBLIC)
def test_an_example_runs_when_pasted(name):
    text = inspect.getdoc(PUBLIC[name])
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    assert example.examples
    assert doctest.DocTestRunner(optionflags=OPTIONS).run(example).failed == 0
