"""Run a model without changing it: tensors, attributes, modes, hooks, gradients, random numbers.

Code that runs a user's model to examine it does so within `untouched`.
"""

from __future__ import annotations

import copy
import itertools
import operator
import random
import sys
import types
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.jit import ScriptModule
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from leannorm._batch import unwrapped

Instead = Callable[[Tensor], Tensor | None]

_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque, bytearray)
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type)
_PLAIN = (Tensor, Parameter, torch.nn.Buffer)
_TABLES = [name for name, value in vars(Module()).items() if isinstance(value, (dict, set))]
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # the attributes of a tensor
# objects of these packages are not a model's state, except for a namespace and collections in Python
_STRANGERS = (sys.stdlib_module_names | {"torch", "numpy"}) - {"types", "collections"}


class Copies:
    """A copy for each tensor; tensors that share memory have copies that share it.

    None if a copy cannot replace a tensor: a result of autograd, which belongs to its graph; a parameter made
    of tensors, to which FSDP2 has references of its own; a class of another package. With `parameters=False`
    None for every parameter.
    """

    def __init__(self, parameters: bool = True) -> None:
        self._parameters = parameters
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, tensor: Tensor) -> Tensor | None:
        is_parameter, made_of_tensors = isinstance(tensor, Parameter), is_traceable_wrapper_subclass(tensor)
        if tensor.grad_fn is not None or (is_parameter and (made_of_tensors or not self._parameters)):
            return None
        if not made_of_tensors and type(tensor) not in _PLAIN:
            return None
        values = tensor.detach()
        if made_of_tensors or not _has_memory(values) or values.is_conj() or values.is_neg():
            return values.clone()
        storage = values.untyped_storage()
        if storage.data_ptr() not in self._storages:
            self._storages[storage.data_ptr()] = storage.clone()
        copied = torch.empty(0, dtype=values.dtype, device=values.device)
        held: Any = self._storages[storage.data_ptr()]
        return copied.set_(held, values.storage_offset(), values.shape, values.stride())


def themselves(tensor: Tensor) -> None:
    """Every tensor stays and gets its values back: for code that knows tensors by identity."""


def left_alone(tensor: Tensor) -> Tensor:
    """Every tensor is left alone, for a block that does not run the model's code."""
    return tensor


@contextmanager
def untouched(model: Module, instead: Instead | None = None) -> Iterator[ExitStack]:
    """When the block ends, however it ends, the model is bit for bit what it was.

    Within it, `instead(tensor)` replaces each tensor, by default with a copy (`Copies`); where that is None
    the tensor itself stays and gets its values back. Afterwards modules have their tensors (the same
    objects), gradients, attributes, containers, hooks, classes and modes; so do modules and objects that are
    only attributes, except those that refer back to the model, as a trainer does. Random numbers continue as
    if nothing had run, including those of the model's own generators. What FSDP2 has gathered is freed before
    and after.

    Yields the stack that undoes all this at the end; its `pop_all()` keeps the changes.
    """
    units: list[Any] = [m for m in model.modules() if hasattr(m, "set_reshard_after_forward")]
    with ExitStack() as undo:
        for unit in units:  # so that the tables of parameters contain shards
            unit.reshard()
        if instead is left_alone:  # none of the model's code runs, so only modules can change
            reached = list[Any](model.modules())
        else:
            reached = _reached(model)
            _keep_random_state(undo, reached)
        for value in reached:
            if isinstance(value, Parameter):
                undo.callback(_put_back_gradient, value, value.grad)
        places = _Places(undo, instead or Copies())
        for value in reached:
            places.exchange(value)
        for unit in units:
            undo.callback(unit.reshard)
        yield undo


@contextmanager
def random_state(model: Module | None = None) -> Iterator[None]:
    """Every generator that a forward pass may use gets its state back at the end."""
    with ExitStack() as undo:
        _keep_random_state(undo, [] if model is None else _reached(model))
        yield


def _reached(model: Module) -> list[Any]:
    """The model and everything it contains, each object once, without references back to the model."""
    known: dict[int, Any] = {id(model): model}
    parts: dict[int, list[Any]] = {}
    holders: dict[int, list[Any]] = defaultdict(list)
    for value in (order := [model]):
        parts[id(value)] = [part for part in _parts(value) if not isinstance(part, _ATOMS)]
        for part in parts[id(value)]:
            holders[id(part)].append(value)
            if id(part) not in known:
                known[id(part)] = part
                order.append(part)
    leading: set[int] = set()
    for value in (led := [model, unwrapped(model)]):
        for holder in holders[id(value)]:
            if not isinstance(holder, Module) and id(holder) not in leading:
                leading.add(id(holder))
                led.append(holder)
    seen = {id(model), *leading}
    for value in (reached := [model]):
        for part in parts[id(value)]:
            if id(part) not in seen:
                seen.add(id(part))
                reached.append(part)
    return reached


def _parts(value: Any) -> Iterable[Any]:
    """What an object contains; for a module also what its tables contain."""
    if isinstance(value, ScriptModule):
        return [*value.children()]
    if isinstance(value, Module):
        tables = [vars(value)[name] for name in _TABLES if name in vars(value)]
        others = (held for name, held in vars(value).items() if name not in _TABLES)
        return itertools.chain(others, *(t.values() if isinstance(t, dict) else t for t in tables))
    if _is_object(value):
        return [*getattr(value, "__dict__", {}).values(), *_slots_of(value).values(), *_entries(value)]
    return _entries(value)


def _entries(value: Any) -> list[Any]:
    kind = tuple if isinstance(value, tuple) else _kind_of(value)
    return [] if kind is None else _contents(kind, value)


def _is_object(value: Any) -> bool:
    """Whether it is an object with known attributes, of a class that somebody wrote for a model."""
    if isinstance(value, (Tensor, type, types.ModuleType)):
        return False
    return type(value).__module__.partition(".")[0] not in _STRANGERS


def _slots_of(value: Any) -> dict[Any, Any]:
    """Attributes in slots, read by the descriptors of the class."""
    of = {}
    for cls in type(value).__mro__:
        for slot in vars(cls).values() if "__slots__" in vars(cls) else ():
            if isinstance(slot, types.MemberDescriptorType):
                with suppress(AttributeError):  # a slot that is not set
                    of[slot] = slot.__get__(value)
    return of


class _Places:
    """Replaces values in attributes and containers, and records how to put them back."""

    def __init__(self, undo: ExitStack, instead: Instead) -> None:
        self._undo, self._instead = undo, instead
        # kept together with the original, whose id could be reused otherwise
        self._made: dict[int, tuple[Any, Any]] = {}

    def exchange(self, value: Any) -> None:
        if isinstance(value, ScriptModule):
            self._script(value)
            return
        if isinstance(value, Module) or _is_object(value):
            self._owner(value)
        if isinstance(value, Module):
            for name in _TABLES:
                self._container(vars(value).get(name))
        else:
            self._container(value)

    def _owner(self, owner: Any) -> None:
        slots = _slots_of(owner)
        self._undo.callback(_put_back, owner, type(owner), slots)
        self._container(getattr(owner, "__dict__", None))
        for slot, held in slots.items():
            if (new := self._of(held)) is not held:
                slot.__set__(owner, new)

    def _container(self, container: Any) -> None:
        kind = _kind_of(container)
        if kind is not None:
            self._note(container)
            _refill(kind, container, [self._of(entry) for entry in _contents(kind, container)])

    def _note(self, container: Any) -> None:
        kind = _kind_of(container)
        if kind is not None:
            self._undo.callback(_refill, kind, container, _contents(kind, container))

    def _script(self, module: Any) -> None:
        """Python cannot replace what a scripted module contains."""
        for name in module._concrete_type.get_attributes():
            value = module._c.getattr(name)
            if isinstance(value, Tensor):
                self._keep(value)
            else:
                self._undo.callback(module._c.setattr, name, value)
        for tensor in itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False)):
            self._keep(tensor)

    def _of(self, value: Any) -> Any:
        """The replacement of a value; for a tuple, a tuple of the replacements of its entries."""
        if self._instead is left_alone or isinstance(value, _ATOMS):
            return value
        if id(value) in self._made:
            return self._made[id(value)][1]
        new = value
        if isinstance(value, Tensor):
            new = self._tensor(value)
        elif isinstance(value, np.ndarray):
            new = value.copy()
        elif isinstance(value, itertools.count):
            with warnings.catch_warnings(), suppress(TypeError):  # Python 3.14 does not copy these
                warnings.simplefilter("ignore")
                new = copy.copy(value)
        elif isinstance(value, tuple):
            entries = [self._of(entry) for entry in value]
            if not all(map(operator.is_, value, entries)):
                make = getattr(value, "_make", tuple if type(value) is tuple else lambda _: value)
                new = make(entries)
        self._made[id(value)] = value, new
        return new

    def _tensor(self, tensor: Tensor) -> Tensor:
        if is_lazy(tensor):  # the class would change
            of: Any = type(tensor)
            lazy: Tensor = of(tensor.requires_grad, tensor.data.device, tensor.data.dtype)
            return lazy
        new = self._instead(tensor)
        if new is None:
            self._keep(tensor)
            return tensor
        new = new.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, Parameter):
            new = Parameter(new, requires_grad=tensor.requires_grad)
        if not is_traceable_wrapper_subclass(tensor):
            vars(new).update(vars(tensor))
        return new

    def _keep(self, tensor: Tensor) -> None:
        values = _values_of(tensor)
        held = None if values is None else values.clone()
        data = tensor.data if type(tensor) in _PLAIN and _has_memory(tensor) else None
        self._undo.callback(_put_back_values, tensor, data, values, held, tensor.requires_grad)
        for name in _HOOKS if tensor.is_leaf else ():
            hooks = getattr(tensor, name, None)
            self._undo.callback(setattr, tensor, name, hooks)
            self._note(hooks)
        self._note(vars(tensor))
        if tensor.is_leaf and tensor.grad is not None:
            self._keep(tensor.grad)


def _kind_of(container: Any) -> Any:
    return next((kind for kind in _CONTAINERS if isinstance(container, kind)), None)


def _contents(kind: Any, container: Any) -> list[Any]:
    """The entries of a container; for a mapping each key before its value."""
    if issubclass(kind, dict):
        return [*itertools.chain.from_iterable(kind.items(container))]
    return [*kind.__iter__(container)]


def _refill(kind: Any, container: Any, entries: list[Any]) -> None:
    """Writes only if the value differs, since other threads may read it meanwhile."""
    there = _contents(kind, container)
    if len(there) == len(entries) and all(map(operator.is_, there, entries)):
        return
    kind.clear(container)
    if issubclass(kind, dict):
        kind.update(container, zip(entries[::2], entries[1::2], strict=True))
    else:
        (kind.update if kind is set else kind.extend)(container, entries)


def _put_back(owner: Any, cls: type, slots: dict[Any, Any]) -> None:
    if type(owner) is not cls:
        object.__setattr__(owner, "__class__", cls)
    for slot in _slots_of(owner).keys() - slots.keys():
        slot.__delete__(owner)
    for slot, value in slots.items():
        slot.__set__(owner, value)


def _put_back_gradient(parameter: Parameter, gradient: Tensor | None) -> None:
    if parameter.grad is not gradient:
        parameter.grad = gradient


def _put_back_values(
    tensor: Tensor,
    data: Tensor | None,
    values: Tensor | None,
    held: Tensor | None,
    requires_grad: bool,
) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if values is not None and held is not None and not _same(values, held):
            values.copy_(held)
        if data is not None and _place(tensor) != _place(data):
            tensor.data = data
    if tensor.is_leaf and tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)


def _values_of(tensor: Tensor) -> Tensor | None:
    """This rank's part, in the tensor's own memory; None if there are no values to read (meta, fake)."""
    local: Any = tensor.detach()
    if hasattr(local, "to_local"):
        local = local.to_local()
    if local.is_meta or isinstance(local, FakeTensor) or local.numel() == 0:
        return None
    values: Tensor = local
    return values


def _has_memory(tensor: Tensor) -> bool:
    """Whether it has plain memory, which a view of its storage shows."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    return tensor.untyped_storage().data_ptr() != 0


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether both are equal bit for bit; False if they cannot be compared."""
    if a.layout != torch.strided or a.is_quantized:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.is_floating_point():
        whole = getattr(torch, f"int{8 * a.element_size()}")
        a, b = a.view(whole), b.view(whole)
    return torch.equal(a, b)


def _keep_random_state(undo: ExitStack, reached: list[Any]) -> None:
    undo.callback(torch.set_rng_state, torch.get_rng_state())
    undo.callback(random.setstate, random.getstate())
    undo.callback(np.random.set_state, np.random.get_state())
    tensors = [v for v in reached if isinstance(v, Tensor) and not isinstance(v, FakeTensor)]
    for kind, index in {(t.device.type, t.device.index or 0) for t in tensors if t.device.type != "cpu"}:
        if kind != "meta":
            device: Any = torch.get_device_module(kind)
            undo.callback(device.set_rng_state, device.get_rng_state(index), index)
    for value in reached:
        if isinstance(value, torch.Generator):
            undo.callback(value.set_state, value.get_state())
        elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
            undo.callback(value.setstate, value.getstate())
        elif isinstance(value, np.random.RandomState):
            undo.callback(value.set_state, value.get_state())
        elif isinstance(value, np.random.Generator):
            undo.callback(setattr, value.bit_generator, "state", value.bit_generator.state)
