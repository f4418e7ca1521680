"""Rewrites expressions in which a norm's output goes straight on as calls of `steps`.

There are three kinds of expression. The value of a deferred one may be a norm that has not run yet: the
norm's call, an `Identity` around it, a sum with it, a scale and a shift of it. The value of a finished one is
a tensor: the activation of a deferred one. A modulated one is `norm(x) * (1 + scale) + shift`. The parts of
an expression are evaluated in their original order, but for views of names, which are made before the norm
runs.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections import Counter
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch.nn import Module

from leannorm.transforms.fusing.steps import METHODS, is_activation_function


class Roles(NamedTuple):
    """Attribute paths below `self` of the modules that may be fused.

    Batch and group norms, activations, identities; `rows` are layer and RMS norms, which may have an addition
    before them or a modulation behind.
    """

    norms: frozenset[str]
    acts: frozenset[str]
    identities: frozenset[str]
    rows: frozenset[str] = frozenset()


class Scope(NamedTuple):
    """What the names in a method refer to."""

    cls: type[Module]
    self: str
    local: frozenset[str]
    globals: dict[str, Any]
    roles: Roles
    steps: str

    def path(self, node: ast.expr) -> str | None:
        """The path of `self.a.b`; None for other expressions, and if the class defines `a` (a property)."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if not names or not isinstance(node, ast.Name) or node.id != self.self:
            return None
        plain = inspect.getattr_static(self.cls, names[0], None) is None
        return ".".join(names) if plain else None

    def is_pure(self, node: ast.expr, *except_for: str) -> bool:
        """Is it free of side effects, and none of the names in `except_for`?"""
        if isinstance(node, ast.Name):
            return node.id not in except_for
        return isinstance(node, ast.Constant) or self.path(node) is not None

    def is_local(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self.local

    def is_norm(self, node: ast.expr) -> bool:
        return self.is_local(node) or self.path(node) in self.roles.norms

    def is_identity(self, node: ast.expr) -> bool:
        return self.path(node) in self.roles.identities

    def is_act(self, node: ast.expr) -> bool:
        return (
            self.is_local(node)
            or self.path(node) in self.roles.acts
            or is_activation_function(self._global(node))
        )

    def is_group_norm(self, node: ast.expr) -> bool:
        return self._global(node) is F.group_norm

    def _global(self, node: ast.expr) -> Any:
        """The value of a global name, or of an attribute of a global Python module; else None."""
        if isinstance(node, ast.Name):
            return None if node.id in self.local else self.globals.get(node.id)
        if isinstance(node, ast.Attribute):
            holder = self._global(node.value)
            return vars(holder).get(node.attr) if isinstance(holder, types.ModuleType) else None
        return None

    def call(self, name: str, *arguments: ast.expr, keywords: list[ast.keyword] | None = None) -> ast.expr:
        """An expression that calls the function `name` of `steps`."""
        function = ast.Attribute(ast.Name(self.steps, ast.Load()), name, ast.Load())
        return ast.copy_location(ast.Call(function, list(arguments), keywords or []), arguments[0])


def unary(node: ast.AST) -> ast.Call | None:
    """The node, if it is a call with one positional argument; it may have keywords."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and not isinstance(node.args[0], ast.Starred):
        return node
    return None


def deferred(scope: Scope, node: ast.expr, leaf: str | None = None) -> ast.expr | None:
    """A deferred expression around a norm's call or the name `leaf`, rewritten; None if it is no such one."""
    if leaf is not None and isinstance(node, ast.Name) and node.id == leaf:
        return node
    call = unary(node)
    if call is not None and not call.keywords:
        if leaf is None and scope.is_norm(call.func):
            return scope.call("step", call.func, with_steps(scope, call.args[0]))
        if scope.is_identity(call.func):
            inner = deferred(scope, call.args[0], leaf)
            return inner and scope.call("step", call.func, inner)
    found = modulation(scope, node)
    inner = None if found is None else deferred(scope, found.value, leaf)
    if found is not None and inner is not None:
        return scope.call("modulate", inner, *found.arguments())
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _sum(scope, node, leaf)
    return None


def _sum(scope: Scope, node: ast.BinOp, leaf: str | None) -> ast.expr | None:
    """A sum with a deferred operand. The other operand must be a name or be evaluated before the norm."""
    right = deferred(scope, node.right, leaf)
    if right is not None and leaf is None:
        return scope.call("plus", with_steps(scope, node.left), right)
    if right is not None and isinstance(node.left, ast.Name) and node.left.id != leaf:
        return scope.call("plus", node.left, right)
    left = deferred(scope, node.left, leaf)
    if left is not None and isinstance(node.right, ast.Name) and node.right.id != leaf:
        return scope.call("plus", left, node.right)
    return None


def finished(scope: Scope, node: ast.expr, leaf: str | None = None) -> ast.expr | None:
    """The activation of a deferred expression, rewritten; None if it is no such one."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        inner = None if node.args or node.keywords else deferred(scope, node.func.value, leaf)
        if inner is not None:
            return scope.call("finish_method", ast.Constant(node.func.attr), inner)
    call = unary(node)
    if call is None or not scope.is_act(call.func):
        return None
    if not all(k.arg is not None and scope.is_pure(k.value, leaf or "") for k in call.keywords):
        return None
    inner = deferred(scope, call.args[0], leaf)
    return inner and scope.call("finish", call.func, inner, keywords=call.keywords)


class Modulation(NamedTuple):
    """`value * (one + scale) + shift`; without shift a product."""

    value: ast.expr
    one: ast.expr
    scale: ast.expr
    shift: ast.expr | None

    def arguments(self) -> list[ast.expr]:
        return [self.one, self.scale, *([] if self.shift is None else [self.shift])]


def modulation(scope: Scope, node: ast.expr) -> Modulation | None:
    """The node, if it is one whose scale and shift are names, or views of them."""
    shift, product = None, node
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        product, shift = node.left, node.right
    if not isinstance(product, ast.BinOp) or not isinstance(product.op, ast.Mult):
        return None
    factor: ast.expr = product.right
    index: ast.expr | None = None
    if isinstance(factor, ast.Subscript):  # (1 + scale)[:, None] is 1 + scale[:, None]
        index, factor = factor.slice, factor.value
    if not isinstance(factor, ast.BinOp) or not isinstance(factor.op, ast.Add):
        return None
    one, scale = factor.left, factor.right
    if not isinstance(one, ast.Constant) or type(one.value) not in (int, float) or one.value != 1:
        return None
    if index is not None:
        scale = ast.copy_location(ast.Subscript(scale, index, ast.Load()), scale)
    if not _is_view(scope, scale) or (shift is not None and not _is_view(scope, shift)):
        return None
    return Modulation(product.left, one, scale, shift)


def _is_view(scope: Scope, node: ast.expr) -> bool:
    """Is it a name, or a name's `[:, None]` or `.unsqueeze(1)`?"""
    if isinstance(node, ast.Subscript):
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return _is_view(scope, node.value) and all(map(_is_fixed, parts))
    if isinstance(node, ast.Call):
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr == "unsqueeze"
        fixed = not node.keywords and all(map(_is_fixed, node.args))
        return is_method and fixed and _is_view(scope, node.func.value)  # type: ignore[attr-defined]
    return scope.is_local(node) or scope.path(node) is not None


def _is_fixed(node: ast.expr) -> bool:
    """Is it an index of constants?"""
    if isinstance(node, ast.Slice):
        return all(part is None or _is_fixed(part) for part in (node.lower, node.upper, node.step))
    if isinstance(node, ast.UnaryOp):
        return _is_fixed(node.operand)
    return isinstance(node, ast.Constant)


def modulated(scope: Scope, node: ast.expr) -> ast.expr | None:
    """The modulation of a norm's call, rewritten; None if it is no such one."""
    found = modulation(scope, node)
    return None if found is None else modulated_call(scope, found.value, found.arguments())


def modulated_call(scope: Scope, value: ast.expr, found: list[ast.expr]) -> ast.expr | None:
    """A norm's call `value`, modulated as `found` says, as one step; None if it is no such call."""
    call = unary(value)
    path = None if call is None or call.keywords else scope.path(call.func)
    if call is not None and path is not None and path in scope.roles.norms | scope.roles.rows:
        x = with_steps(scope, call.args[0])
        if path in scope.roles.rows:
            return scope.call("norm_then_modulate", call.func, x, *found)
        return scope.call("now", scope.call("modulate", scope.call("step", call.func, x), *found))
    if not isinstance(value, ast.Call) or not scope.is_group_norm(value.func):
        return None
    if any(isinstance(a, ast.Starred) for a in value.args) or any(k.arg is None for k in value.keywords):
        return None
    given = ast.Tuple([with_steps(scope, a) for a in value.args], ast.Load())
    names: list[ast.expr | None] = [ast.Constant(k.arg) for k in value.keywords]
    named = ast.Dict(names, [with_steps(scope, k.value) for k in value.keywords])
    return scope.call("function_then_modulate", value.func, given, named, *found)


def with_steps(scope: Scope, node: ast.expr) -> ast.expr:
    """The expression with every finished or modulated expression in it rewritten."""
    new = finished(scope, node) or modulated(scope, node)
    return _Inside(scope).generic_visit(node) if new is None else new  # type: ignore[return-value]


class _Inside(ast.NodeTransformer):
    """Rewrites finished and modulated expressions among an expression's parts, into new nodes."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr):
            new = finished(self.scope, node) or modulated(self.scope, node)
            if new is not None:
                return new
        return self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        fields = {field: self._new(value) for field, value in ast.iter_fields(node)}
        return ast.copy_location(type(node)(**fields), node)

    def _new(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._new(v) for v in value]
        return self.visit(value) if isinstance(value, ast.AST) else value


def loads(node: ast.AST) -> Counter[str]:
    """How often each name is read or deleted."""
    return Counter(
        name.id
        for n in ast.walk(node)
        for name in ([n.target] if isinstance(n, ast.AugAssign) else [n])
        if isinstance(name, ast.Name) and (name is not n or not isinstance(name.ctx, ast.Store))
    )


def stores(node: ast.AST) -> set[str]:
    """The names that are assigned or deleted."""
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load))
    return {n.id for n in names}
