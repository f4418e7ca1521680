"""What is a batch, and how does a model take it?

A batch is a tensor, a tuple of positional arguments, or a mapping by name. Where several batches are
accepted, a list is several batches, as a loader or a generator is; each of the three forms above is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only

from leannorm._errors import InputError

_ONE = Tensor | PackedSequence  # a single argument, although it is the second and is a tuple
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_SHOWN = 3  # arguments that a message describes


class Arguments(NamedTuple):
    """The arguments that a model is called with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}

    def call(self, model: Callable[..., Any]) -> Any:
        return model(*self.args, **self.kwargs)

    def checked(self, model: Module, remedy: str = "pass a tuple in its order, or its names") -> Arguments:
        """The arguments to call the model with. Raises `InputError` if its forward has no place for them."""
        written = unwrapped(model)
        if type(written).__call__ is not Module.__call__:  # which may take other arguments
            return self
        try:
            signature = inspect.signature(written.forward)
        except (TypeError, ValueError):
            return self
        try:
            signature.bind(*self.args, **self.kwargs)
        except TypeError as error:
            if not written._forward_pre_hooks:  # which may change the arguments
                given = self.described()
                if len(given) > _SHOWN:  # a tuple of batches has one for each
                    given[_SHOWN:] = [f"and {len(given) - _SHOWN} more"]
                raise InputError(
                    f"inputs must be those of {type(written).__name__}.forward "
                    f"({', '.join(signature.parameters)}), got {', '.join(given)}: {error}; {remedy}"
                ) from None
        return self

    def reversed(self) -> Arguments:
        """The same samples in reverse order, so that tensors have other values."""
        args, kwargs = tree_map_only(Tensor, _reversed, (self.args, dict(self.kwargs)))
        return Arguments(args, kwargs)

    def copied(self) -> Arguments:
        """Copies with memory of their own, for a model that edits its inputs."""
        made: dict[Tensor, Tensor] = {}  # by identity, so that a tensor given twice stays one tensor

        def copied(tensor: Tensor) -> Tensor:
            if tensor not in made:
                made[tensor] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            return made[tensor]

        args, kwargs = tree_map_only(Tensor, copied, (self.args, dict(self.kwargs)))
        return Arguments(args, kwargs)

    def described(self) -> list[str]:
        """Describe each argument in a few words.

        >>> import torch
        >>> inputs_of({"x": torch.ones(2, 3), "ids": torch.ones(2, dtype=torch.int64)}).described()
        ['x=2x3', 'ids=2:int64']
        """
        named = [("", value) for value in self.args]
        named += [(f"{name}=", value) for name, value in self.kwargs.items()]
        return [name + _described(value) for name, value in named]


def unwrapped(model: Module) -> Module:
    """The model itself, without wrappers that communicate or compile."""
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        else:
            return model


def _reversed(tensor: Tensor) -> Tensor:
    """Concatenates along the first axis."""
    axis = next((d for d, size in enumerate(tensor.shape) if size > 1), None)
    return tensor if axis is None else tensor.flip(axis)


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    dtype = str(value.dtype).removeprefix("torch.")
    return "x".join(map(str, value.shape)) + ("" if dtype == "float32" else f":{dtype}")


def inputs_of(inputs: Any, name: str = "inputs") -> Arguments:
    """A model's inputs: a tensor, all of its arguments in a tuple or list, or a mapping of them by name.

    Raises: `InputError` for anything else.
    """
    if isinstance(inputs, _ONE):
        return Arguments((inputs,))
    if isinstance(inputs, Mapping):
        return Arguments((), _by_name(inputs))
    if isinstance(inputs, (tuple, list)) and inputs:
        return Arguments(tuple(inputs))
    raise InputError(
        f"{name} must be a tensor, a tuple or a mapping, got {_named(inputs)}; {_remedy(inputs)}"
    )


def positional(model: Module, inputs: Any, name: str = "example_inputs") -> tuple[Any, ...]:
    """The same as one tuple, in the order of the model's forward; names left out have its defaults.

    >>> import torch
    >>> positional(torch.nn.Bilinear(1, 1, 1), {"input2": 2, "input1": 1})
    (1, 2)
    """
    arguments = inputs_of(inputs, name)
    if not arguments.kwargs:
        return arguments.args
    parameters = inspect.signature(model.forward).parameters
    names = [key for key, parameter in parameters.items() if parameter.kind in _POSITIONAL]
    missing = sorted(arguments.kwargs.keys() - set(names))
    if missing:
        raise InputError(
            f"{name} must have names of {type(model).__name__}.forward ({', '.join(names)}), "
            f"got {missing[0]!r}; pass a tuple in its order"
        )
    last = max(names.index(key) for key in arguments.kwargs)
    values = {key: arguments.kwargs.get(key, parameters[key].default) for key in names[: last + 1]}
    for key, value in values.items():
        if value is inspect.Parameter.empty:
            raise InputError(f"{name} must have {key!r}, which {type(model).__name__}.forward needs; add it")
    return tuple(values.values())


def call(model: Module, batch: Any) -> Any:
    """The model on one batch of a loader: as `inputs_of`, but only with the entries of a tuple that its
    forward requires.

    Given (images, labels), a model with one input gets the images, and a model with two gets both.

    Raises: `InputError` for anything that is not a batch.
    """
    if not (isinstance(batch, _ONE | Mapping) or (isinstance(batch, (tuple, list)) and batch)):
        raise InputError(
            f"a batch must be a tensor, a tuple or a mapping, got {_named(batch)}; pass "
            "forward=lambda model, batch: model(...)"
        )
    arguments = inputs_of(batch)
    taken = arguments.args if len(arguments.args) < 2 else arguments.args[: _needed(model)]
    taken_of = Arguments(taken, arguments.kwargs)
    return (taken_of.checked(model) if arguments.kwargs else taken_of).call(model)


def call_for(batches: Any) -> Callable[[Module, Any], Any]:
    """How the model takes each of these batches: as `call`, but with all entries of a single tuple."""
    return _call_in_full if isinstance(batches, tuple) and not isinstance(batches, _ONE) else call


def _call_in_full(model: Module, batch: Any) -> Any:
    """The model called with all entries of a tuple. Raises `InputError` if its forward does not take as
    many."""
    remedy = "a tuple is one batch, pass several in a list, and one with labels too as [batch]"
    return inputs_of(batch).checked(model, remedy).call(model)


def _needed(model: Module) -> int:
    """How many positional arguments without a default its forward has; at least one."""
    try:
        parameters = inspect.signature(unwrapped(model).forward).parameters.values()
    except (TypeError, ValueError):
        return 1
    return max(1, sum(p.kind in _POSITIONAL and p.default is inspect.Parameter.empty for p in parameters))


def batches_of(batches: Any) -> Iterator[Any]:
    """Several batches, one after the other; a tensor, a tuple and a mapping are one.

    Raises: `InputError` for what is neither a batch nor an iterable of them.

    >>> import torch
    >>> [*batches_of([1, 2])], [*batches_of((1, 2))], [len(batch) for batch in batches_of(torch.ones(8, 2))]
    ([1, 2], [(1, 2)], [8])
    """
    if isinstance(batches, _ONE | Mapping) or (isinstance(batches, tuple) and batches):
        return iter([batches])
    if isinstance(batches, (str, bytes)) or _is_array(batches) or not isinstance(batches, Iterable):
        raise InputError(
            f"batches must be a tensor, a tuple, a mapping or an iterable of batches, got {_named(batches)}; "
            + _remedy(batches)
        )
    return iter(batches)


def _by_name(inputs: Mapping[Any, Any]) -> dict[str, Any]:
    for name in inputs:
        if not isinstance(name, str):
            raise InputError(f"a mapping of inputs must have names, got the key {name!r}; pass a tuple")
    if not inputs:
        raise InputError("inputs must hold a tensor at least, got an empty mapping; add one by its name")
    return dict(inputs)


def _is_array(value: object) -> bool:
    return hasattr(value, "__array__") and not isinstance(value, Tensor)


def _named(value: object) -> str:
    if value is None or (isinstance(value, (tuple, list)) and not value):
        return repr(value)
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _remedy(value: object) -> str:
    if _is_array(value):
        return "make a tensor of it with torch.as_tensor"
    return "as torch.randn(8, 3, 224, 224), (ids, mask), or {'input_ids': ids}"
