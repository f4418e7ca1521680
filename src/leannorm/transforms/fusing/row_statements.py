"""Statements around a norm, rewritten as steps: a sum before it, a scale and a shift behind it."""

from __future__ import annotations

import ast
from collections import Counter

from leannorm.transforms.fusing.expressions import (
    Scope,
    loads,
    modulated_call,
    modulation,
    unary,
    with_steps,
)


class RowStatements:
    """Rewrites statements in a row; `count` is how often each name of the function is read."""

    def __init__(self, scope: Scope, count: Counter[str]) -> None:
        self.scope, self.count = scope, count

    def added_norm(self, body: list[ast.stmt], at: int) -> tuple[list[ast.stmt], int] | None:
        """`total = a + b`, perhaps `kept = total`, then `y = norm(total)`, perhaps modulated, as one step."""
        total, value = assigned(body[at]), getattr(body[at], "value", None)
        if (
            total not in self.scope.local
            or not isinstance(value, ast.BinOp)
            or not isinstance(value.op, ast.Add)
        ):
            return None
        names, next_at = [total], at + 1
        while next_at < len(body) and (kept := assigned(body[next_at])) in self.scope.local:
            if not is_name(body[next_at].value, total):  # type: ignore[attr-defined]
                break
            names, next_at = [*names, str(kept)], next_at + 1
        y = assigned(body[next_at]) if next_at < len(body) else None
        call = unary(body[next_at].value) if y in self.scope.local else None  # type: ignore[attr-defined]
        if call is None or call.keywords or self.scope.path(call.func) not in self.scope.roles.rows:
            return None
        if not is_name(call.args[0], names[0]) or y in names[1:]:
            return None
        sides = (with_steps(self.scope, side) for side in (value.left, value.right))
        behind, after = list[ast.expr](), assigned(body[next_at + 1]) if next_at + 1 < len(body) else None
        found = self.modulation_of(body, next_at + 1, str(y))
        read = {name for part in found for name in loads(part)}
        if found and after in self.scope.local and after not in names[1:] and not read & {total, *names}:
            behind, y, next_at = found, after, next_at + 1
        step = self.scope.call("add_then_norm", *sides, call.func, *behind)
        first = names[-1] if y == total else names[0]
        targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in (first, str(y))]
        if y == total and len(names) == 1:  # the sum itself is read by nobody else
            step = ast.Subscript(step, ast.Constant(1), ast.Load())
            return [ast.copy_location(ast.Assign(targets[1:], step), body[at])], next_at + 1 - at
        new = [ast.Assign([ast.Tuple(targets, ast.Store())], step)]
        new += [
            ast.Assign([ast.Name(n, ast.Store())], ast.Name(first, ast.Load()))
            for n in names
            if n not in (first, y)
        ]
        return [ast.copy_location(s, body[at]) for s in new], next_at + 1 - at

    def modulated_norm(self, body: list[ast.stmt], at: int) -> tuple[list[ast.stmt], int] | None:
        """`y = norm(x)`, then `z = y * (1 + scale) + shift`, perhaps several of them, as one step."""
        y = assigned(body[at])
        if y not in self.scope.local:
            return None
        value: ast.expr = body[at].value  # type: ignore[attr-defined]
        found = self.modulation_of(body, at + 1, y)
        if found:
            step = modulated_call(self.scope, value, found)
            return None if step is None else ([with_value(body[at + 1], step)], 2)
        call, several = unary(value), self.modulations_of(body, at + 1, y)
        if not several or call is None or call.keywords:
            return None
        if self.scope.path(call.func) not in self.scope.roles.rows:
            return None
        each = [ast.Tuple(found, ast.Load()) for found in several]
        x = with_steps(self.scope, call.args[0])
        step = self.scope.call("norm_then_modulate_each", call.func, x, *each)
        last = at + 1 + len(several)
        targets: list[ast.expr] = [ast.Name(str(assigned(s)), ast.Store()) for s in body[at + 1 : last]]
        new = ast.Assign([ast.Tuple(targets, ast.Store())], step)
        return [ast.copy_location(new, body[at])], 1 + len(several)

    def modulations_of(self, body: list[ast.stmt], at: int, name: str) -> list[list[ast.expr]]:
        """1, scale and shift of each of the statements from `at` on that modulate the value of `name`, if
        nothing else reads it, nor one of them what another makes; else nothing."""
        several, made = list[list[ast.expr]](), set[str]()
        for statement in body[at:]:
            target = assigned(statement)
            found = None if target is None else modulation(self.scope, statement.value)  # type: ignore
            read = {} if found is None else loads(statement)
            if found is None or not is_name(found.value, name) or read[name] != 1 or made & read.keys():
                break
            if target not in self.scope.local or target == name:
                return []
            several.append(found.arguments())
            made.add(str(target))
        return several if 1 < len(several) == self.count[name] else []

    def modulation_of(self, body: list[ast.stmt], at: int, name: str) -> list[ast.expr]:
        """1, scale and shift of the statement at `at`, if it modulates the value of `name`, which nothing
        else reads; else nothing."""
        statement = body[at] if at < len(body) else None
        if not isinstance(statement, (ast.Assign, ast.Return)) or statement.value is None:
            return []
        target, found = assigned(statement), modulation(self.scope, statement.value)
        if found is None or not is_name(found.value, name) or loads(statement.value)[name] != 1:
            return []
        if isinstance(statement, ast.Assign) and target != name and (target is None or self.count[name] != 1):
            return []
        return found.arguments()


def assigned(statement: ast.stmt) -> str | None:
    """The one name that this statement assigns."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else None
    return None


def is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def with_value(statement: ast.stmt, value: ast.expr) -> ast.stmt:
    fields = {**dict(ast.iter_fields(statement)), "value": value}
    return ast.copy_location(type(statement)(**fields), statement)
