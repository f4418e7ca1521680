"""A block's methods with calls of `steps` where a norm's output goes to what follows; the rest is unchanged.

`self.act(self.bn(x))` becomes `finish(self.act, step(self.bn, x))`. Statements in a row are rewritten in the
same way if they pass the value on under a local name that nothing else in the function reads. The steps
compute what the calls compute, for any modules and functions; whether calls are fused is decided at run time.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from leannorm.transforms.fusing import steps
from leannorm.transforms.fusing.expressions import (
    Roles,
    Scope,
    deferred,
    finished,
    loads,
    stores,
    unary,
    with_steps,
)
from leannorm.transforms.fusing.row_statements import RowStatements, assigned, is_name, with_value
from leannorm.transforms.fusing.text import can_be_rewritten, function_like, read

_STEPS = "__leannorm_steps__"


def rewritten(cls: type[Module], roles: Roles) -> dict[str, Callable[..., Any]]:
    """The methods of `cls` that pass a norm's output straight on, rewritten with steps."""
    found = {}
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        if isinstance(function, types.FunctionType) and not str(function.__module__).startswith("torch.nn."):
            new = _rewritten(cls, name, function, roles)
            if new is not None:
                found[name] = new
    return found


def _rewritten(
    cls: type[Module], name: str, function: types.FunctionType, roles: Roles
) -> Callable[..., Any] | None:
    whole, function = function, inside(function)
    node, code = read(function), function.__code__
    if node is None or code.co_argcount == 0 or name.startswith("__") or not can_be_rewritten(node, code):
        return None
    local, me = frozenset(code.co_varnames) - frozenset(code.co_cellvars), code.co_varnames[0]
    if me not in local or me in stores(node):
        return None
    scope = Scope(cls, me, local, function.__globals__, roles, _STEPS)
    body = Statements(scope, loads(node)).block(node.body)
    if not any(isinstance(n, ast.Name) and n.id == _STEPS for s in body for n in ast.walk(s)):
        return None
    copy = ast.copy_location(ast.FunctionDef(node.name, node.args, body, [], None), node)
    return _unless_replaced(cls, name, whole, function_like(function, copy, {_STEPS: steps}))


def inside(function: types.FunctionType) -> types.FunctionType:
    """The function, or the one that transformers has wrapped to be checkpointed, as it wraps a subclass's."""
    wrapped = getattr(function, "__wrapped__", None)
    checkpointed = function.__code__.co_name == "forward_with_checkpointing"
    return wrapped if checkpointed and isinstance(wrapped, types.FunctionType) else function


def _unless_replaced(
    cls: type[Module], name: str, old: types.FunctionType, new: types.FunctionType
) -> Callable[..., Any]:
    """A method that calls `new`, unless the class's method is no longer `old`: then it calls that one."""
    code, defaults, keywords = old.__code__, old.__defaults__, old.__kwdefaults__

    @functools.wraps(old)
    def call(self: Module, *args: Any, **kwargs: Any) -> Any:
        now = getattr(cls, name)
        same = now is old and now.__code__ is code
        if same and now.__defaults__ is defaults and now.__kwdefaults__ is keywords:
            return new(self, *args, **kwargs)
        return now(self, *args, **kwargs)

    return call


class Statements(RowStatements):
    """Rewrites lists of statements."""

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """The statements with every chain rewritten."""
        new, at = list[ast.stmt](), 0
        while at < len(body):
            ways = self.added_norm, self.branches, self.chain, self.modulated_norm
            found, taken = next(filter(None, (way(body, at) for way in ways)), ([], 0))
            new += found or [self.single(body[at])]
            at += max(taken, 1)
        return new

    def branches(self, body: list[ast.stmt], at: int) -> tuple[list[ast.stmt], int] | None:
        """An `if` with a norm of the same name at the end of its branches, and the activation behind it."""
        if not isinstance(body[at], ast.If):
            return None
        for name in sorted(_last_assigned(body[at])):
            end, _, ends = self.link(body, at + 1, name, [])
            new = self.left_deferred([body[at]], name) if end is not None and ends else None
            if new is not None and end is not None:
                return [*new, end], 2
        return None

    def left_deferred(self, body: list[ast.stmt], name: str) -> list[ast.stmt] | None:
        """The statements, rewritten so that `name` may be left a norm that has not run; None if they leave
        no norm there."""
        last = body[-1] if body else None
        if isinstance(last, ast.If):
            branches = [self.left_deferred(part, name) for part in (last.body, last.orelse)]
            if branches == [None, None]:
                return None
            parts = (last.body, last.orelse)
            body_of, orelse = (b or self.block(part) for b, part in zip(branches, parts, strict=True))
            joined = ast.If(with_steps(self.scope, last.test), body_of, orelse)
            return [*self.block(body[:-1]), ast.copy_location(joined, last)]
        for at in range(max(len(body) - 2, 0), len(body)):
            head = assigned(body[at])
            value = deferred(self.scope, body[at].value) if head in self.scope.local else None  # type: ignore
            if head is None or value is None:
                continue
            new, paths = [with_value(body[at], value)], list[str]()
            if at + 1 < len(body):
                link, head, ends = self.link(body, at + 1, head, paths)
                if link is None or ends or paths:
                    continue
                new.append(link)
            if head == name:
                return [*self.block(body[:at]), *new]
        return None

    def single(self, statement: ast.stmt) -> ast.stmt:
        """A statement that starts no chain, with the expressions and statements in it rewritten."""
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return statement
        return ast.copy_location(
            type(statement)(**{k: self._in(v) for k, v in ast.iter_fields(statement)}), statement
        )

    def _in(self, value: Any) -> Any:
        if isinstance(value, ast.expr):
            return with_steps(self.scope, value)
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            return self.block(value)
        if isinstance(value, list):
            return [self._in(v) for v in value]
        if isinstance(value, (ast.withitem, ast.match_case)):
            return type(value)(**{k: self._in(v) for k, v in ast.iter_fields(value)})
        return value

    def chain(self, body: list[ast.stmt], at: int) -> tuple[list[ast.stmt], int] | None:
        """The statements from `at` on that pass a norm's output to its activation, rewritten, and their
        number; None if there is no such chain."""
        head = name = assigned(body[at])
        value = deferred(self.scope, body[at].value) if name in self.scope.local else None  # type: ignore
        if head is None or name is None or value is None:
            return None
        new, paths = [with_value(body[at], value)], list[str]()
        between = self.between(body, at + 1, name)
        if between is not None:
            new += between[0]
            paths += between[1]
        until, ends = len(new), False
        while not ends:
            known = len(paths)
            link, name, ends = self.link(body, at + len(new), name, paths)
            if link is None:
                return None
            new.append(link)
            until = len(new) if len(paths) > known else until
        if until == 1:
            return new, len(new)
        call = self.deferred_across(body, at, paths)
        if call is None:
            return None
        return [with_value(body[at], call), self.guarded(head, new[1:until]), *new[until:]], len(new)

    def guarded(self, name: str, body: list[ast.stmt]) -> ast.stmt:
        """Statements that run while the norm of `name` is deferred. If one raises, the norm still runs, as it
        would have before them."""
        norm = ast.copy_location(ast.Name(name, ast.Load()), body[0])
        fallback = ast.Expr(self.scope.call("run_if_deferred", norm))
        handler = ast.ExceptHandler(ast.Name("BaseException", ast.Load()), None, [fallback, ast.Raise()])
        return ast.copy_location(ast.Try(body, [handler], [], []), body[0])

    def link(
        self, body: list[ast.stmt], at: int, name: str, paths: list[str]
    ) -> tuple[ast.stmt | None, str, bool]:
        """The statement at `at`, rewritten if it uses the value of `name` (else None), the name under which
        the value goes on, and whether the chain ends here."""
        statement = body[at] if at < len(body) else None
        if isinstance(statement, ast.AugAssign):
            return self.in_place_add(statement, name, paths), name, False
        if not isinstance(statement, (ast.Assign, ast.Return)) or statement.value is None:
            return None, name, False
        target, value = assigned(statement), statement.value
        if loads(value)[name] != 1 or (target is None and isinstance(statement, ast.Assign)):
            return None, name, False
        if target not in (None, name) and self.count[name] != 1:
            return None, name, False
        end = finished(self.scope, value, name)
        call = unary(value)
        if end is not None and target in self.scope.local and self._is_local_call(call, name):
            # a local name may stand for a norm: then the next statement ends the chain
            following, _, ends = self.link(body, at + 1, str(target), [])
            if following is not None and ends:
                step = self.scope.call("step", call.func, call.args[0])  # type: ignore[union-attr]
                return with_value(statement, step), str(target), False
        if end is not None:
            return with_value(statement, end), name, True
        new = deferred(self.scope, value, name) if target in self.scope.local else None
        if new is None or target is None:
            return None, name, False
        return with_value(statement, new), target, False

    def _is_local_call(self, call: ast.Call | None, name: str) -> bool:
        return (
            call is not None
            and not call.keywords
            and self.scope.is_local(call.func)
            and is_name(call.args[0], name)
        )

    def in_place_add(self, statement: ast.AugAssign, name: str, paths: list[str]) -> ast.stmt | None:
        """`name += other`, where `other` is another name, or the call of one of the block's modules."""
        target, other = statement.target, statement.value
        if not isinstance(statement.op, ast.Add) or not isinstance(target, ast.Name) or target.id != name:
            return None
        if loads(other)[name]:
            return None
        if not isinstance(other, ast.Name):
            path = self._called(other, name)
            if path is None:
                return None
            paths.append(path)
        value = self.scope.call("plus_in_place", ast.Name(name, ast.Load()), other)
        return ast.copy_location(ast.Assign([target], value), statement)

    def between(self, body: list[ast.stmt], at: int, name: str) -> tuple[list[ast.stmt], list[str]] | None:
        """The statements up to the addition, which may run while the norm is deferred, and the paths of the
        modules that they call."""
        new, paths = list[ast.stmt](), list[str]()
        for i, statement in enumerate(body[at:], at):
            if self.link(body, i, name, [])[0] is not None:
                break
            passed = self.independent(statement, name, paths)
            if passed is None or assigned(passed) == name:
                return None
            new.append(passed)
        return (new, paths) if new else None

    def independent(self, statement: ast.stmt, name: str, paths: list[str]) -> ast.stmt | None:
        """A statement that may run while the norm of `name` is deferred: an `if` on names,
        `other = module(another)`, or `name = module(name)`, which runs the norm."""
        if isinstance(statement, ast.If):
            parts = statement.body, statement.orelse
            body, orelse = (self.all_independent(part, name, paths) for part in parts)
            if body is None or orelse is None or not self._is_test(statement.test, name):
                return None
            return ast.copy_location(ast.If(statement.test, body, orelse), statement)
        target = assigned(statement)
        if target is None or target not in self.scope.local:
            return None
        value: ast.expr = statement.value  # type: ignore[attr-defined]
        if target == name:
            call = unary(value)
            if call is None or call.keywords or not is_name(call.args[0], name):
                return None
            if self.scope.path(call.func) is None:
                return None
            return with_value(statement, self.scope.call("finish", call.func, call.args[0]))
        path = self._called(value, name)
        if path is not None:
            paths.append(path)
        elif not (isinstance(value, ast.Name) and value.id != name):
            return None
        return statement

    def all_independent(self, body: list[ast.stmt], name: str, paths: list[str]) -> list[ast.stmt] | None:
        passed = [self.independent(statement, name, paths) for statement in body]
        return None if None in passed else [s for s in passed if s is not None]

    def _called(self, value: ast.expr, name: str) -> str | None:
        """The module of `module(x)`, where x is another name."""
        call = unary(value)
        if call is None or call.keywords or not isinstance(call.args[0], ast.Name):
            return None
        return None if call.args[0].id == name else self.scope.path(call.func)

    def _is_test(self, test: ast.expr, name: str) -> bool:
        """Is it a test without side effects that does not read `name`?"""
        if isinstance(test, ast.BoolOp):
            return all(self._is_test(v, name) for v in test.values)
        if isinstance(test, ast.UnaryOp):
            return isinstance(test.op, ast.Not) and self._is_test(test.operand, name)
        if isinstance(test, ast.Compare):
            identity = all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops)
            return identity and all(self.scope.is_pure(v, name) for v in (test.left, *test.comparators))
        return self.scope.is_pure(test, name)

    def deferred_across(self, body: list[ast.stmt], at: int, paths: list[str]) -> ast.expr | None:
        """The norm's call, deferred while the modules at `paths` run: its input is a module's new output."""
        call = unary(body[at].value)  # type: ignore[attr-defined]
        if call is None or not self.scope.is_norm(call.func):
            return None
        given = call.args[0]
        if isinstance(given, ast.Name):
            if at == 0 or assigned(body[at - 1]) != given.id:
                return None
            if given.id != assigned(body[at]) and self.count[given.id] != 1:
                return None
            producer = unary(body[at - 1].value)  # type: ignore[attr-defined]
        else:
            producer = unary(given)
        if producer is None or self.scope.path(producer.func) is None:
            return None
        names = ast.Tuple([ast.Constant(path) for path in paths], ast.Load())
        me = ast.Name(self.scope.self, ast.Load())
        new = with_steps(self.scope, given)
        return self.scope.call("step_across", call.func, new, producer.func, me, names)


def _last_assigned(statement: ast.stmt) -> set[str]:
    """The names that the branches of an `if` assign last."""
    if not isinstance(statement, ast.If):
        name = assigned(statement)
        return set() if name is None else {name}
    ends = (part[-1] for part in (statement.body, statement.orelse) if part)
    return {name for end in ends for name in _last_assigned(end)}
