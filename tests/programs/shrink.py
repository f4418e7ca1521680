"""A failing program made short: lines and parts of expressions go as long as it fails in the same way."""

from __future__ import annotations

import ast
import copy
import re

from programs.compare import judge
from programs.language import SECTIONS, Line
from programs.norms import may_crash_torch
from programs.observe import may_hide_edits, names_read, observe

_MOST = 600  # programs tried


def shrink(program, verdict, warm=False):
    """The shortest that was found, and its verdict."""
    tried = {str(program)}
    better = True
    while better and len(tried) < _MOST:
        better = False
        for candidate in _smaller(program):
            if len(tried) >= _MOST:
                break
            listing = str(candidate)
            if listing in tried or _crashes_torch(listing):
                continue
            tried.add(listing)
            again = judge(candidate, warm)
            if again.kind == verdict.kind and _is_documented(candidate):
                program, verdict, better = candidate, again, True
                break
    return program, verdict


def _is_documented(program):
    return not may_hide_edits(program) or observe(program).documented


def _crashes_torch(listing):
    return may_crash_torch(listing) and "tensor(" in listing


def _smaller(program):
    yield from _with_fewer_options(program)
    for section in reversed(SECTIONS):
        lines = getattr(program, section)
        size = -(-len(lines) // 2)
        while size:
            for start in range(len(lines) - size, -1, -size):
                kept = lines[:start] + lines[start + size :]
                if size > 1 or not lines[start].opens:
                    yield _indented(program.with_(**{section: kept}))
            size = size // 2 if size > 1 else 0
        for k in range(len(lines) - 1, -1, -1):
            for rest in _without(lines, k):
                yield _indented(program.with_(**{section: rest}))
    for section in reversed(SECTIONS):
        lines = getattr(program, section)
        for k, line in enumerate(lines):
            for text in _simpler(line.text):
                yield program.with_(**{section: (*lines[:k], Line(line.depth, text), *lines[k + 1 :])})


def _with_fewer_options(program):
    if program.forwards > 1:
        yield program.with_(forwards=1)
    if program.around:
        yield program.with_(around="")
    for cut in (slice(0, 1), slice(0, -1), slice(1, None)):
        if 0 < len(program.n[cut]) < program.steps:
            yield program.with_(n=program.n[cut], s=program.s[cut])
    if len({*zip(program.n, program.s, strict=True)}) > 1:
        yield program.with_(n=program.n[:1] * program.steps, s=program.s[:1] * program.steps)
    if program.seed:
        yield program.with_(seed=0)


def _without(lines, k):
    """Line k goes: a block's head alone, or a line whose value is replaced by what it was made of."""
    line, before, after = lines[k], lines[:k], lines[k + 1 :]
    if line.opens:
        end = next((j for j, other in enumerate(after) if other.depth <= line.depth), len(after))
        yield before + tuple(Line(d - 1, text) for d, text in after[:end]) + after[end:]
        yield before + after[end:]
        return
    match = re.match(r"(\w+) = ", line.text)
    for name in sorted(names_read(line.text)) if match else ():
        if re.fullmatch(r"[a-z]+\d+", name):
            yield before + tuple(Line(d, re.sub(rf"\b{match[1]}\b", name, text)) for d, text in after)


def _indented(program):
    """No block is empty, and no line stands deeper than one block below its neighbour."""
    fields = {}
    for section in SECTIONS:
        lines, kept, most = getattr(program, section), [], 0
        for k, line in enumerate(lines):
            follows = lines[k + 1] if k + 1 < len(lines) else None
            if line.opens and (follows is None or follows.depth <= line.depth):
                continue
            depth = min(line.depth, most)
            kept.append(Line(depth, line.text))
            most = depth + line.opens
        fields[section] = tuple(kept)
    return program.with_(**fields)


def _simpler(text):
    """The line with one operation less."""
    if text.endswith(":"):
        yield from (
            text.replace(setting, "") for setting in ('"conv"', "budget=0.3", "budget=0.7") if setting in text
        )
        return
    if text.startswith("if i: "):
        yield text.removeprefix("if i: ")
    tree = ast.parse(text)
    for k, node in enumerate(ast.walk(tree)):
        for part in _parts(node):
            other = copy.deepcopy(tree)
            target = list(ast.walk(other))[k]
            yield ast.unparse(_Replace(target, part).visit(other)).replace("\n    ", " ")


def _parts(node):
    if isinstance(node, ast.BinOp):
        yield from (node.left, node.right)
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and not (
            isinstance(node.func.value, ast.Name) and node.func.value.id in ("F", "torch", "LF", "lnn", "nn")
        ):
            yield node.func.value
        yield from (v for v in node.args if not isinstance(v, (ast.Lambda, ast.Constant)))
        yield from (_with_none(node, i) for i, v in enumerate(node.args) if i and isinstance(v, ast.Name))
    elif isinstance(node, ast.Subscript) and isinstance(node.value, (ast.Name, ast.Call)):
        yield node.value


def _with_none(call, i):
    other = copy.deepcopy(call)
    other.args[i] = ast.Constant(None)
    return other


class _Replace(ast.NodeTransformer):
    def __init__(self, target, part):
        self.target, self.part = target, part

    def visit(self, node):
        return copy.deepcopy(self.part) if node is self.target else super().visit(node)
