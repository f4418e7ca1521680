"""Public functions list their arguments once, in the order of their signatures."""

import inspect

import pytest
from torch.overrides import TorchFunctionMode

from leannorm import functional
from leannorm.functional.batch import tracked_batch_norm
from leannorm.functional.group import layer_instance_norm

FUNCTIONS = [getattr(functional, name) for name in functional.__all__]
FUNCTIONS += [tracked_batch_norm, layer_instance_norm]


class Seen(TorchFunctionMode):
    """Every call under it gives what it was called with."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func, args, kwargs


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_mode_gets_every_argument_under_its_name(function):
    parameters = inspect.signature(function).parameters.values()
    given = {p.name: object() for p in parameters}
    with Seen():
        called, args, kwargs = function(**given)
    named = {p.name: given[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert called is function
    assert (args, kwargs) == (tuple(v for name, v in given.items() if name not in named), named)
