"""One run of a program, and the trace of all that a user could see of it."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
import weakref
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from leannorm.saving import lean, make_lean, recorded_pass
from programs.functions import Interrupt, gradient_of, own_settings, settings
from programs.language import NAMESPACE


class Event(NamedTuple):
    """`kind` is "raised" (value: the error's class and text) or "seen" (value: every tensor by name).

    `at` counts the lines before it, so that of two runs the first to raise is known.
    """

    where: str
    kind: str
    value: object
    at: int


@lru_cache(maxsize=1 << 14)
def _compiled(text):
    return compile(text, "<program>", "exec")


@lru_cache(maxsize=1 << 10)
def _context(text):
    return compile(text.removeprefix("with ").removesuffix(":"), "<program>", "eval")


class HooksLeftOpen:
    """Noted in place of an error, where a forward pass leaves saved-tensor hooks behind."""


class Run:
    """Stock autograd; subclasses say what `lean` and `make_lean` mean in the program."""

    def __init__(self, program):
        self.program, self.trace, self.parameters = program, [], []
        self.shared = {
            **NAMESPACE,
            "lean": self.lean,
            "make_lean": self.make_lean,
            "sgd": self._sgd,
            "cached": self._cached,
        }
        self._cache, self._at, self._began = {}, 0, 0

    def lean(self, *settings, **named):
        return contextlib.nullcontext()

    def make_lean(self, model, *settings, **named):
        return model

    def __call__(self):
        """The trace."""
        torch.manual_seed(self.program.seed)
        with warnings.catch_warnings(), own_settings(), contextlib.ExitStack() as around:
            warnings.simplefilter("ignore")
            if self.program.around:
                around.enter_context(eval(self.program.around, dict(NAMESPACE)))
            if self.section(self.program.before, self.shared, "before"):
                for step in range(self.program.steps):
                    self._in_its_thread(step)
        self.end()
        return self.trace

    def _in_its_thread(self, i):
        every = self.program.threads
        if not every or i % every:
            return self.step(i)
        thread = threading.Thread(target=self.step, args=(i,))
        thread.start()
        thread.join()

    def end(self):
        """Nothing of the program is left but what it holds for all of its steps."""

    def step(self, i):
        """Forward passes, then their backward passes."""
        self.shared.update(i=i, n=self.program.n[i], s=self.program.s[i])
        passes = []
        for k in range(self.program.forwards):
            where, names = f"step {i}, forward pass {k}", {}
            if self.section(self.program.forward, names, where):
                passes.append((k, names))
            self._close(where)
        self.see(f"step {i}, before the backward passes", passes)
        for k, names in passes:
            self._began = len(self.trace)
            self.section(self.program.backward, names, f"step {i}, backward pass {k}")
            if self._raised():
                self._drop_gradients(passes)
        self.see(f"step {i}, after the backward passes", passes)

    def _raised(self):
        """Has anything in this backward pass, suppressed perhaps?"""
        return any(event.kind == "raised" for event in self.trace[self._began :])

    def _drop_gradients(self, passes):
        """How far a backward pass came before it raised is nobody's promise."""
        for names in (self.shared, *(names for _, names in passes)):
            for _, tensor in _tensors(names, ""):
                if is_leaf(tensor):
                    tensor.grad = None

    # ------------------------------------------------ lines

    def section(self, lines, names, where):
        """Did it come to its end?"""
        try:
            self.lines(lines, names, where)
        except (Exception, Interrupt):
            return False
        return True

    def lines(self, lines, names, where):
        """Lines one after the other, blocks within their contexts."""
        start = 0
        while start < len(lines):
            line, end = lines[start], start + 1
            self._at += 1
            while end < len(lines) and lines[end].depth > line.depth:
                end += 1
            if line.opens:
                with self.noted(line, where):
                    self.block(line, lines[start + 1 : end], names, where)
                start = end
            else:
                with self.noted(line, where):
                    self.line(line, names)
                start += 1

    def block(self, line, lines, names, where):
        context = eval(_context(line.text), self.shared, names)
        body = partial(self.lines, lines, names, where)
        if isinstance(context, nn.Module):
            context(body)
        else:
            with context:
                body()

    def line(self, line, names):
        exec(_compiled(line.text), self.shared, names)

    @contextlib.contextmanager
    def noted(self, line, where):
        """What a line raises is noted where it is raised, and goes on."""
        try:
            yield
        except (Exception, Interrupt) as error:
            if not getattr(error, "noted", False):
                error.noted = True
                self._note(f"{where}: {line.text}", "raised", (type(error), str(error)))
            raise

    def _note(self, where, kind, value):
        self.trace.append(Event(where, kind, value, self._at))

    # ------------------------------------------------ what the program sees

    def see(self, where, passes):
        seen = dict(_tensors(self.shared, ""))
        for k, names in passes:
            seen |= dict(_tensors(names, f"{k}:"))
        seen |= {**dict(_tensors(self._cache, "cached ")), "settings": settings()}
        self._note(where, "seen", {name: v.detach().clone() for name, v in seen.items()})

    def _close(self, where):
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            return
        self._note(where, "raised", (HooksLeftOpen, ""))
        while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()

    # ------------------------------------------------ what the program may call

    def _sgd(self, rate, data=False, momentum=False):
        """An optimizer's step over all parameters, seen by autograd's version counters or through .data."""
        for _, p in _tensors(self.shared, ""):
            if p.is_leaf and p.requires_grad and p.grad is not None:
                if self._raised():
                    pass
                elif data:
                    p.data.add_(p.grad.data, alpha=-rate)
                else:
                    with torch.no_grad():
                        p.sub_(p.grad, alpha=rate)
                p.grad = None

    def _cached(self, name, make):
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]


def _tensors(names, prefix):
    for name, v in list(names.items()):
        if isinstance(v, Tensor):
            yield from _with_gradient(prefix + name, v)
        elif isinstance(v, nn.Module):
            for inner, p in (*v.named_parameters(name), *v.named_buffers(name)):
                yield from _with_gradient(prefix + inner, p)
        elif isinstance(v, (tuple, list)) and not name.startswith("_"):
            for j, t in enumerate(v):
                if isinstance(t, Tensor):
                    yield from _with_gradient(f"{prefix}{name}[{j}]", t)


def _with_gradient(name, tensor):
    yield name, tensor
    if is_leaf(tensor) and tensor.grad is not None:
        yield f"{name}.grad", tensor.grad


def is_leaf(tensor):
    try:
        return tensor.is_leaf
    except RuntimeError:  # a function's output of which another view was edited
        return False


class Leaked:
    """Noted in place of an error, where values outlive what saved them."""


class LeanRun(Run):
    make_lean = staticmethod(make_lean)

    lean = staticmethod(lean)

    def __init__(self, program):
        self._before = recorded_pass.LOG.alive()
        super().__init__(program)

    def _left(self):
        """Tensors that are still saved in a pass of this program; what others had left, in cycles, may have
        been collected meanwhile, so that there are fewer than before."""
        return max(0, recorded_pass.LOG.alive() - self._before)

    def _held_by_torch(self):
        """After an error torch's engine keeps nodes that it had not come to, until it comes to the next of
        them; save_on_cpu keeps a node that saves its own output, by the graph of its copy."""
        raised = any(event.kind == "raised" and "backward pass" in event.where for event in self.trace)
        return raised or "save_on_cpu" in str(self.program)

    def end(self):
        if self._cache or not self._left() or self._held_by_torch():
            return
        gc.collect()  # errors hold frames
        if "save_on_cpu" in str(self.program):
            return  # on a CPU it keeps the tensor itself: a node that saves its output stays, in stock too
        if self._left() and not KeepingRun(self.program).leaves_something():
            self._note("the end", "raised", (Leaked, f"{self._left()} values are left"))


class HookedRun(Run):
    """With this object's `pack` as the saved-tensor hook wherever the program is lean."""

    def __init__(self, program):
        super().__init__(program)
        self.shared["gradient_of"] = self._gradient_of

    def _gradient_of(self, f, x):
        """Transforms admit no hooks, so these step aside, as lean() does."""
        hooks, autograd = [], torch._C._autograd
        while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
            hooks.append(top)
            autograd._pop_saved_tensors_default_hooks()
        try:
            return gradient_of(f, x)
        finally:
            for pair in reversed(hooks):
                autograd._push_saved_tensors_default_hooks(*pair)

    def lean(self, *settings, **named):
        return saved_tensors_hooks(self.pack, self.unpack)

    @staticmethod
    def unpack(packed):
        return packed

    def make_lean(self, model, *settings, **named):
        forward = type(model).forward

        def hooked(block):
            with self.lean():
                return forward(model, block)

        model.forward = hooked
        return model


class SharingRun(HookedRun):
    """Stock autograd that does not look at versions. Leaves are kept: their data may be replaced."""

    def pack(self, tensor):
        return tensor if is_leaf(tensor) else tensor.detach()


class CopyingRun(SharingRun):
    """Stock autograd that keeps copies: what it computes where stock refuses because of a later edit.

    An edit through .data changes no version, so that stock's backward pass sees it; as in stock, leaves are
    never read from copies.
    """

    def pack(self, tensor):
        alias = super().pack(tensor)
        if is_leaf(tensor if tensor._base is None else tensor._base):
            return alias, alias, alias._version
        return alias, tensor.detach().clone(memory_format=torch.preserve_format), alias._version

    @staticmethod
    def unpack(packed):
        alias, copy, version = packed
        return alias if alias._version == version else copy


class _Packed:
    def __init__(self, tensor):
        self.tensor = tensor


class KeepingRun(HookedRun):
    """Is what is saved still there at the end? In stock too, where a node comes to save what it has made, as
    that of `y.mul_(y)` does."""

    def __init__(self, program):
        self._saved = []
        super().__init__(program)

    def pack(self, tensor):
        packed = _Packed(tensor.detach())
        self._saved.append(weakref.ref(packed))
        return packed

    @staticmethod
    def unpack(packed):
        return packed.tensor

    def leaves_something(self):
        self()
        gc.collect()
        return any(packed() is not None for packed in self._saved)
