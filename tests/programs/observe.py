"""What autograd saves of a program's tensors, and whether its edits are such as `lean()` sees.

`lean()` documents edits that it cannot see: hidden ones (under no_grad, through .data) of a tensor in the
middle that no node has saved. Such programs are not made, and failures are not shrunk to them.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from programs.run import HookedRun, is_leaf


class Edit(NamedTuple):
    name: str
    kind: str  # "hidden", "data" or "visible"


@lru_cache(maxsize=1 << 14)
def edit_of(text):
    """Which name the line edits in place, and how; None if it edits nothing."""
    if text.endswith(":"):
        return None
    no_grad = "no_grad()" in text
    for node in ast.walk(ast.parse(text)):
        place = _edited(node)
        words = set()
        while isinstance(place, (ast.Attribute, ast.Subscript, ast.Call)):
            place, word = _inside(place)
            words.add(word)
        if isinstance(place, ast.Name):
            return Edit(
                place.id,
                "data" if "data" in words else "hidden" if no_grad or "detach" in words else "visible",
            )
    return None


def _edited(node):
    """The expression that this node writes to."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Subscript, ast.Attribute)):
        return node.targets[0]
    if isinstance(node, ast.AugAssign):
        return node.target
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    written = any(k.arg == "inplace" for k in node.keywords) or ast.unparse(node.func) == "Negate.apply"
    of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id in ("F", "torch")
    if node.func.attr.endswith("_") and not node.func.attr.endswith("__"):
        return node.args[0] if of_torch else node.func.value
    return node.args[0] if written else None


def _inside(node):
    if isinstance(node, ast.Call):
        return node.func, ""
    return node.value, node.attr if isinstance(node, ast.Attribute) else ""


def may_hide_edits(program):
    """Can any line edit what autograd does not see? For most programs this is told without running them."""
    return any(word in str(program) for word in ("no_grad()", ".detach()", ".data"))


@lru_cache(maxsize=1 << 14)
def names_read(text):
    tree = ast.parse(f"{text} pass" if text.endswith(":") else text)
    return frozenset(
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    )


class Seen(NamedTuple):
    """One line as it was run: the memory of every tensor in the middle that has a name, before it."""

    text: str
    memory: dict[str, int]
    leaves: frozenset[str]
    saved: frozenset[str]
    no_grad: bool = False  # of a block around the line


class Observed(NamedTuple):
    lines: tuple[Seen, ...] = ()
    complete: bool = False
    updates: bool = False  # of parameters, before a backward pass
    in_part: bool = False  # is a backward pass told where to end?

    @property
    def edits_what_was_read(self):
        """Does the program edit anything of which `lean()` says that it may refuse: where autograd does not
        see it, or leaves before a backward pass? Not what torch allows else, unless a backward pass goes
        through a part of the graph alone."""
        read: set[int] = set()
        if self.updates:
            return True
        for line in self.lines:
            edit = edit_of(line.text)
            hidden = edit is not None and (edit.kind != "visible" or line.no_grad)
            again = edit is not None and line.memory.get(edit.name) in read
            if hidden or (again and (self.in_part or edit.name in line.leaves)):
                return True
            read |= {line.memory[name] for name in names_read(line.text) if name in line.memory}
        return False

    @property
    def documented(self):
        """Are all hidden edits such that `lean()` says that it sees them?"""
        return not self.unseen

    @property
    def unseen(self):
        """The lines that edit what `lean()` does not see."""
        return {line.text for k, line in enumerate(self.lines) if not self._is_seen(k, edit_of(line.text))}

    def _is_seen(self, k, edit):
        line = self.lines[k]
        if edit is None or edit.name not in line.memory:
            return True
        place = line.memory[edit.name]
        sharing = [name for name, memory in line.memory.items() if memory == place]
        if edit.kind == "visible" and line.no_grad:
            edit = Edit(edit.name, "hidden")
        if edit.kind == "visible":
            if edit.name not in line.leaves or line.leaves.issuperset(sharing):
                return True
            edit = Edit(edit.name, "hidden")  # through a tensor that detach() gave
        for name in sharing:
            if name in line.leaves:
                continue
            before = any(name in other.saved for other in self._since_made(k, name, place))
            readers = [other for other in self.lines[k + 1 :] if self._reads(other, name, place)]
            after = bool(readers) and name in readers[0].saved
            if edit.kind == "data" and not (before and after):
                return False
            if edit.kind == "hidden" and readers and not (before or after):
                return False
        return True

    def _since_made(self, k, name, place):
        for other in reversed(self.lines[:k]):
            if other.memory.get(name) != place:
                return
            yield other

    @staticmethod
    def _reads(line, name, place):
        edit = edit_of(line.text)
        hidden = edit is not None and (edit.kind != "visible" or line.no_grad) and edit.name == name
        return line.memory.get(name) == place and name in names_read(line.text) and not hidden


class Observer(HookedRun):
    """Runs forward passes and notes what autograd saves as a node's input."""

    def __init__(self, program):
        super().__init__(program)
        self.seen, self._packed = [], set()

    def pack(self, tensor):
        self._packed.add(_place(tensor))
        return tensor.detach()

    def line(self, line, names):
        tensors = {name: v for name, v in {**self.shared, **names}.items() if _is_tensor(v)}
        memory = {name: t.untyped_storage().data_ptr() for name, t in tensors.items()}
        places = {name: _place(t) for name, t in tensors.items()}
        leaves = frozenset(name for name, t in tensors.items() if is_leaf(t))
        self._packed.clear()
        grad = torch.is_grad_enabled()
        try:
            super().line(line, names)
        finally:
            edit, read = edit_of(line.text), names_read(line.text)
            saved = {name for name in read if places.get(name) in self._packed}
            if edit is not None:
                saved.discard(edit.name)
            if names is not self.shared:
                self.seen.append(Seen(line.text, memory, leaves, frozenset(saved), not grad))


def _is_tensor(value):
    return isinstance(value, Tensor) and value.layout == torch.strided


def _place(tensor):
    """A tensor and no view of it, even one of the same shape."""
    try:
        made_by = type(tensor.grad_fn), tensor.requires_grad
    except RuntimeError:  # a function's output of which another view was edited
        made_by = ()
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), made_by


def observe(program):
    """The longest of the steps' first forward passes, as it was run, with the backward lines behind it."""
    best, after = Observed(), [line.text for line in program.backward]
    updates = any(
        text.startswith("sgd(") and (program.forwards > 1 or after[k + 1 :]) for k, text in enumerate(after)
    )
    for i in range(program.steps):
        one = program.with_(n=program.n[i : i + 1], s=program.s[i : i + 1], forwards=1)
        observer = _OneStep(one, i)
        observer()
        if len(observer.seen) > len(best.lines):
            best = Observed(tuple(observer.seen), observer.complete)
        if observer.complete:
            break
    return best._replace(updates=updates, in_part=any("autograd.grad(" in text for text in after))


class _OneStep(Observer):
    complete = False

    def __init__(self, program, number):
        super().__init__(program)
        self.number = number

    def step(self, i):
        self.shared.update(i=self.number, n=self.program.n[0], s=self.program.s[0])
        names = {}
        self.complete = self.section(self.program.forward, names, "forward")
        self._close("forward")
        for line in self.program.backward:  # what they edit counts; they are not run
            edit = edit_of(line.text)
            t = edit and {**self.shared, **names}.get(edit.name)
            if _is_tensor(t):
                place = {edit.name: t.untyped_storage().data_ptr()}
                leaves = frozenset([edit.name] if is_leaf(t) else [])
                self.seen.append(Seen(line.text, place, leaves, frozenset()))
