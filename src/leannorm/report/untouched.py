"""A model runs, and nothing of it is changed: tensors, modes, hooks, gradients, random numbers."""

from __future__ import annotations

import random
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


@contextmanager
def untouched(model: Module, *, parameters: bool = True) -> Iterator[None]:
    """Within it the model works on copies of its tensors; at the end it is bit for bit what it was.

    Modules get back their tensors (the same objects), attributes, containers, classes and modes, however the
    block ends. Parameters of classes of other packages are not copied, and with `parameters=False` parameters
    are not. Random numbers go on as if nothing had run. What FSDP2 has gathered is freed, before and after.
    """
    units: list[Any] = [m for m in model.modules() if hasattr(m, "set_reshard_after_forward")]
    with ExitStack() as stack:
        for unit in units:  # so that the tables of parameters hold shards
            unit.reshard()
        stack.enter_context(random_state(model))
        for owner in _owners(model):
            stack.callback(_put_back, owner, type(owner), dict(vars(owner)), _contents(owner))
        gradients = [(p, p.grad) for p in model.parameters()]
        stack.callback(_put_back_gradients, gradients)
        copies: dict[int, Tensor] = {}
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):  # its tensors are not Python's to exchange
                continue
            tables: list[dict[str, Any]] = [module._buffers, vars(module)]
            for of in [module._parameters, *tables] if parameters else tables:
                for name, value in list(of.items()):
                    copied = _copy(value, copies)
                    if copied is not None:
                        of[name] = copied
        for unit in units:
            stack.callback(unit.reshard)
        yield


def _owners(model: Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        yield module
        train = vars(module).get("train")  # a method of one's own, such as that of a frozen layer
        if train is not None and not isinstance(train, types.MethodType) and hasattr(train, "__dict__"):
            yield train


def _contents(owner: Any) -> list[tuple[Any, Any]]:
    return [(value, value.copy()) for value in vars(owner).values() if type(value) in _CONTAINERS]


def _put_back(owner: Any, cls: type, attributes: dict[str, Any], contents: list[tuple[Any, Any]]) -> None:
    if type(owner) is not cls:
        object.__setattr__(owner, "__class__", cls)
    vars(owner).clear()
    vars(owner).update(attributes)
    for container, before in contents:
        container.clear()
        if isinstance(container, (list, deque)):
            container.extend(before)
        else:
            container.update(before)


def _put_back_gradients(gradients: list[tuple[Parameter, Tensor | None]]) -> None:
    for parameter, gradient in gradients:
        if parameter.grad is not gradient:
            parameter.grad = gradient


def _copy(value: Any, copies: dict[int, Tensor]) -> Tensor | None:
    """A copy of a plain tensor, the same for every place that it stands in; None for everything else.

    Also of a buffer that is made of tensors, such as a DTensor. Not of such a parameter: FSDP2 has its own
    references to these.
    """
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return None  # a copy would not be of the graph that it belongs to
    made_of_tensors = is_traceable_wrapper_subclass(value) and not isinstance(value, Parameter)
    if type(value) not in (Tensor, Parameter, torch.nn.Buffer) and not made_of_tensors:
        return None
    if id(value) not in copies:
        copied = value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, Parameter):
            copied = Parameter(copied, requires_grad=value.requires_grad)
        copies[id(value)] = copied
    return copies[id(value)]


@contextmanager
def random_state(model: Module) -> Iterator[None]:
    """At its end every generator that a forward pass may use is in the state that it was in."""
    tensors = [*model.parameters(), *model.buffers()]
    places = sorted({(t.device.type, t.device.index or 0) for t in tensors} - {("cpu", 0), ("meta", 0)})
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind, index in places:
            stack.enter_context(torch.random.fork_rng(devices=[index], device_type=kind))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        for module in model.modules():
            for put_back in _generators(module):
                stack.callback(put_back)
        yield


def _generators(module: Module) -> Iterator[Callable[[], object]]:
    """What puts back the generators that are attributes of the module."""
    for held in vars(module).values():
        if isinstance(held, torch.Generator):
            yield partial(held.set_state, held.get_state())
        elif isinstance(held, random.Random):
            yield partial(held.setstate, held.getstate())
        elif isinstance(held, np.random.RandomState):
            yield partial(held.set_state, held.get_state())
        elif isinstance(held, np.random.Generator):
            yield partial(setattr, held.bit_generator, "state", held.bit_generator.state)
