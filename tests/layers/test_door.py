"""Public functions hand their arguments over by name, which a compiler reads only where all have a value."""

import inspect
from types import FunctionType

import pytest

from leannorm import functional

FUNCTIONS = {name: f for name, f in vars(functional).items() if isinstance(f, FunctionType)}


@pytest.mark.parametrize("name", [n for n, f in FUNCTIONS.items() if "locals" in f.__code__.co_names])
def test_what_is_handed_over_has_a_value(name):
    """A variable that an inner function shares has none before it is set."""
    function = FUNCTIONS[name]
    assert {*function.__code__.co_cellvars} <= {*inspect.signature(function).parameters}
