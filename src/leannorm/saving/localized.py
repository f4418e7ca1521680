"""A step on DTensors becomes a step on local tensors: what this rank runs of it, as it was recorded once.

The step runs once on DTensors without memory, and every operation on local tensors is written down. A rebuild
runs those, so no rebuild can send anything: a step that would is refused while it is recorded, before
anything was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from leannorm.saving.graph import exact
from leannorm.saving.shards import local_of, shared_as, spec_of
from leannorm.saving.steps import Step
from leannorm.saving.trial import layout, without_autocast
from leannorm.saving.values import Value

_aten = torch.ops.aten
_SHARES_MEMORY = {_aten._unsafe_view.default, _aten.lift_fresh.default}  # though their schema does not say so
_MAX_PROGRAMS = 1 << 12


class _Ref(int):
    """In a recorded operation, the place of a tensor among the inputs and the results so far."""


class _Call(NamedTuple):
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[int, _Ref], ...]  # index among what the function returns (-1: all of it), and place


class Program:
    """Operations on local tensors; `like` is a result without memory, `spec` how the ranks share it."""

    def __init__(self, calls: list[_Call], result: int, like: Tensor, spec: Any) -> None:
        self._calls, self._result, self.like, self.spec = calls, result, like, spec

    def run(self, inputs: tuple[Tensor | None, ...]) -> Tensor:
        """The result of the local tensors."""
        known = dict(enumerate(inputs))

        def value(x: Any) -> Any:
            return known[x] if type(x) is _Ref else x

        for function, args, kwargs, results in self._calls:
            made = function(*tree_map(value, args), **tree_map(value, kwargs))
            for index, place in results:
                known[place] = made if index < 0 else made[index]
        result = known[self._result]
        assert result is not None
        return result


class _Recorder(TorchDispatchMode):
    """Writes down the operations on tensors that come from `inputs`; refuses all that is not local."""

    def __init__(self, inputs: list[Tensor | None]) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.communicates = self.unknown = False
        self._tensors = [t for t in inputs if t is not None]  # alive, so that an id stays its own
        self._places = {id(t): i for i, t in enumerate(inputs) if t is not None}
        self._own: set[int] = set()  # places of memory that no input has
        self._next = len(inputs)

    def place(self, tensor: Tensor) -> int | None:
        return self._places.get(id(tensor))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(local_of(x) is not None for x in leaves):
            return NotImplemented  # DTensor runs this mode again with local tensors
        if function.namespace != "aten":
            self.communicates = True
            raise _RefusedError(f"{function} is not local")
        places = [self.place(x) for x in leaves]
        if all(place is None for place in places):  # shapes and indices of the whole
            return function(*args, **kwargs)
        if None in places or torch.Tag.nondeterministic_seeded in function.tags:
            self.unknown = True
            raise _RefusedError(f"{function} reads more than the step does")
        if function._schema.is_mutable and not self._writes_its_own(function, args):
            self.unknown = True
            raise _RefusedError(f"{function} writes what the step reads")
        made = function(*args, **kwargs)
        self._write(function, args, kwargs, made)
        return made

    def _writes_its_own(self, function: Any, args: Any) -> bool:
        first = function._schema.arguments[0].alias_info
        others = function._schema.arguments[1:]
        if first is None or not first.is_write or any(a.alias_info and a.alias_info.is_write for a in others):
            return False
        return self.place(args[0]) in self._own

    def _write(self, function: Any, args: Any, kwargs: Any, made: Any) -> None:
        def reference(x: Any) -> Any:
            return _Ref(self._places[id(x)]) if isinstance(x, Tensor) else x

        shares = any(r.alias_info for r in function._schema.returns) or function in _SHARES_MEMORY
        written = tree_map(reference, tuple(args)), tree_map(reference, kwargs)
        results = list[tuple[int, _Ref]]()
        several = isinstance(made, (tuple, list))
        for index, tensor in enumerate(made if several else (made,)):
            if not isinstance(tensor, Tensor):
                continue
            if id(tensor) not in self._places:
                self._tensors.append(tensor)
                self._places[id(tensor)] = self._next
                if not shares:
                    self._own.add(self._next)
                self._next += 1
            results.append((index if several else -1, _Ref(self._places[id(tensor)])))
        self.calls.append(_Call(function, *written, tuple(results)))


class _RefusedError(RuntimeError):
    """The step does more than run operations on what it reads."""


class Refused(NamedTuple):
    """Why a step cannot be one on local tensors: it `communicates`, or does what was not followed."""

    communicates: bool


_PROGRAMS: dict[Hashable, Program | Refused] = {}


def localized(step: Step, like: Tensor | None) -> Step | Refused:
    """The step on local tensors; `like` is a DTensor that the result must be shared as, if one is known."""
    captured = tuple([_split(t) for t in step.captured])
    signs = tuple([sign(value) for value in step.inputs])
    of_captured = tuple([None if t is None else (*layout(t), spec) for t, spec in captured])
    key = step.function, exact(step.constants), signs, of_captured
    program = _PROGRAMS.get(key)
    if program is None:
        if len(_PROGRAMS) >= _MAX_PROGRAMS:
            _PROGRAMS.clear()
        program = _PROGRAMS[key] = _record(step.function, (*signs, *of_captured), step.constants)
    if isinstance(program, Refused):
        return program
    if like is not None and local_of(like) is not None and program.spec != spec_of(like):
        return Refused(False)
    locals_of_captured = tuple([t for t, _ in captured])
    share = _share(program.like, program.spec)
    return Step(
        run_locally,
        step.inputs,
        locals_of_captured,
        (program,),
        kind=step.kind,
        flops=int(step.flops * share),
        costly=step.costly,
        flags=step.flags,
        proved=step.proved,
        identity=step.identity,
        tells_layout=step.tells_layout,
        spec=program.spec,
    )


def run_locally(*tensors_and_program: Any) -> Tensor:
    """A step's function: the recorded operations."""
    *tensors, program = tensors_and_program
    made: Tensor = program.run(tensors)
    return made


def _program(step: Step) -> Program:
    program = step.constants[0]
    assert isinstance(program, Program)
    return program


def shape_of(step: Step) -> torch.Size:
    """The shape of the local tensor that the step makes, or passes on."""
    if step.function is run_locally:
        return _program(step).like.shape
    return torch.Size(sign(step.inputs[0])[0])


def _share(local: Tensor, spec: Any) -> float:
    """How much of the whole this rank has."""
    return float(local.numel() / max(spec.shape.numel(), 1))


def _split(tensor: Tensor | None) -> tuple[Any, Any]:
    local = None if tensor is None else local_of(tensor)
    return (tensor, None) if tensor is None or local is None else (local, spec_of(tensor))


def sign(value: Value) -> tuple[Any, ...]:
    """Shape, strides, dtype and spec of what the step reads."""
    if value.tensor is not None:
        return (*layout(value.tensor), value.spec)
    if isinstance(value.layout, tuple):
        return (*value.layout[:3], value.spec)
    if value.step is not None and value.step.function is run_locally:
        return (*layout(_program(value.step).like), value.spec)
    contiguous = torch.empty(value.shape, device="meta").stride()
    return value.shape, contiguous, value.dtype, value.spec


def _record(
    function: Callable[..., Tensor], signs: tuple[Any, ...], constants: tuple[Hashable, ...]
) -> Program | Refused:
    """Run the function on tensors without memory, and write down what it does with local ones."""
    if any(sign is not None and sign[3] is None for sign in signs):
        return Refused(False)  # a plain tensor among them
    bare = [None if s is None else torch.empty_strided(*s[:2], dtype=s[2], device="meta") for s in signs]
    whole = [None if t is None else shared_as(t, s[3]) for t, s in zip(bare, signs, strict=True)]
    # what a DTensor hands to an operation is its local tensor itself, or that of a detached one
    recorder = _Recorder([None if t is None else t._local_tensor for t in whole])  # type: ignore[attr-defined]
    try:
        with torch.no_grad(), without_autocast(), recorder:
            made = function(*whole, *constants)
    except Exception:
        return Refused(recorder.communicates)
    local = local_of(made)
    place = None if local is None else recorder.place(local)
    if local is None or place is None or recorder.communicates or recorder.unknown:
        return Refused(recorder.communicates)
    return Program(recorder.calls, place, local, spec_of(made))
