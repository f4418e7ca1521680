"""Random blocks as source text: what is fused in them by `convert`, and every way to notice it.

A program is two classes, what is done to an instance before the conversion (hooks, freezing, sharing), and
what is changed after it (flags, globals, hooks, layers in the place of others).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from convert_phrases import ACTS, FLAGS, FREQUENT, KEEPS, LATER, LATER_GLOBAL, LAYER_NAMES, LAYERS, SETUP


@dataclass(frozen=True)
class Program:
    """`body` and `inner` are groups of lines, each of which may go when a failure is made smaller."""

    seed: int
    body: tuple[str, ...]
    inner: tuple[str, ...]
    result: str
    setup: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    later_global: tuple[str, ...] = ()

    def source(self) -> str:
        methods = (
            "    def normalized(self, x):\n        return self.bn1(self.conv1(x))\n"
            "    def both(self, x):\n        y = self.bn2(x)\n        return self.relu(y)\n"
        )
        more = "\n".join((*self.setup, *self.later)).replace("m.", "self.") + "\n".join(self.later_global)
        block = f"{text(self.body)}        return {self.result}\n"
        option = ', option={"on": True}' if "option" in block else ""
        used = [name for name in LAYERS if f"self.{name}" in block + more]
        if "self.normalized" in block or "self.both" in block:
            used = [name for name in LAYERS if name in {*used, "bn1", "bn2", "conv1", "relu"}]
        else:
            methods = ""
        inner = text(self.inner)
        within = inner + block.replace("self.child.", "self.")
        names = [n for n in LAYERS if f"self.{n}" in within and n != "child"]
        forward = f"    def forward(self, x):\n{START}{inner}        return y\n\n"
        child = f"class Inner(nn.Module):\n{layers(names)}{forward}" if "child" in used else ""
        return (
            f"{child}class Block(nn.Module):\n    CLASS = True\n{layers(used)}{methods}"
            f"    def forward(self, x{option}):\n{START}{block}"
        )

    def __str__(self) -> str:
        body, inner = text(self.body), text(self.inner)
        return (
            f"seed {self.seed}\nInner.forward:\n{inner}Block.forward:\n{body}        return {self.result}\n"
            f"before: {'; '.join(self.setup)}\nafter: {'; '.join((*self.later, *self.later_global))}"
        )

    def smaller(self):
        """Every program with one part less."""
        for name in ("later", "later_global", "setup", "inner", "body"):
            parts = getattr(self, name)
            for i in range(len(parts)):
                yield replace(self, **{name: (*parts[:i], *parts[i + 1 :])})


START = "        y = z = s = x * 1.0\n"


def text(groups: tuple[str, ...]) -> str:
    return "".join(indented(group, 2) for group in groups)


def layers(names: list[str]) -> str:
    """The constructor of a class with these layers."""
    lines = [
        "super().__init__()",
        "self.items, self.table, self.flag, self.calls = [], {}, True, torch.zeros(())",
    ]
    lines += ["self.feat = self.log = self.down = self.se = None"]
    lines += [f"self.{name} = {LAYERS[name]}" for name in names]
    return "    def __init__(self):\n" + "".join(f"        {line}\n" for line in lines)


def indented(group: str, depth: int) -> str:
    return "".join(f"{'    ' * depth}{line}\n" for line in group.splitlines())


class Writer:
    """Writes statements over the names x, y, z, s, all of one shape."""

    def __init__(self, rng: random.Random, inner: bool) -> None:
        self.rng, self.inner = rng, inner

    def name(self) -> str:
        return self.rng.choice(["y", "y", "y", "z", "s"])

    def act(self, value: str) -> str:
        return self.rng.choice(ACTS).format(value)

    def norm(self, value: str) -> str:
        return f"{self.rng.choice(FREQUENT)}({value})"

    def flag(self) -> str:
        flags = FLAGS[:1] + FLAGS[1:4] + FLAGS[6:8] + FLAGS[9:] if self.inner else FLAGS
        return self.rng.choice(flags)

    def keep(self, name: str) -> str:
        text = self.rng.choice(KEEPS)
        if "{!r}" in text:
            return text.format(name)
        return text.replace("{}", name)

    def group(self, depth: int = 0) -> str:
        rng, v, u = self.rng, self.name(), self.name()
        kinds = [self.pair] * 4 + [self.residual] * 3 + [self.simple] * 3 + [self.keeping] * 2
        if depth < 2:
            kinds += [self.branch, self.branch, self.loop, self.guarded]
        kind = rng.choice(kinds)
        return kind(v, u, depth)

    def several(self, depth: int) -> str:
        return "\n".join(self.group(depth + 1) for _ in range(self.rng.randint(1, 2)))

    def pair(self, v: str, u: str, depth: int) -> str:
        """Norm and activation, perhaps with something between."""
        rng = self.rng
        if rng.random() < 0.35:
            return f"{v} = {self.act(self.norm(rng.choice([u, f'self.conv0({u})'])))}"
        w = rng.choice([v, v, v, self.name()])
        lines = [f"{v} = {self.norm(rng.choice([u, f'self.conv1({u})']))}"]
        if rng.random() < 0.4:
            middle = [self.keep(v), f"{self.name()} = {v}", f"{v} = self.idle({v})", "x.data.mul_(0.9)"]
            middle += [f"if {self.flag()}:\n" + indented(self.keep(v), 1).rstrip("\n"), f"s = {u} * 2"]
            lines.append(rng.choice(middle))
        lines.append(f"{w} = {self.act(v)}")
        if rng.random() < 0.2:
            lines.append(self.keep(v))
        return "\n".join(lines)

    def residual(self, v: str, u: str, depth: int) -> str:
        rng, w = self.rng, self.name()
        head = rng.choice([f"{v} = self.conv1({u})\n{v} = self.bn1({v})", f"{v} = self.bn0(self.conv0({u}))"])
        between = [
            f"if self.down is not None:\n    {w} = self.down({w})",
            f"if self.se is not None:\n    {v} = self.se({v})",
            f"if self.down:\n    {w} = self.down({u})\nelse:\n    {w} = {u}",
            f"{w} = self.pair({w})",
            f"{w} = self.bn1({w})",
            self.keep(v),
            f"if {self.flag()}:\n    {v} = self.idle({v})",
        ]
        middle = rng.sample(between, rng.choice([0, 0, 1, 1, 2]))
        add = rng.choice(
            [f"{v} += {w}", f"{v} += {w}", f"{v} = {v} + {w}", f"{v} = {w} + {v}", f"{v} += self.pair({w})"]
        )
        if rng.random() < 0.25:
            end = f"{v} = {self.act(f'(self.bn0({u}) + {w})')}"
            return rng.choice([end, f"{v} = {self.act(f'({w} + self.bn1({u}))')}"])
        ends = [
            f"{v} = self.relu({v})",
            f"{v} = F.relu({v})",
            f"{v} = {self.act(v)}",
            f"return {self.act(v)}",
        ]
        return "\n".join([head, *middle, add, rng.choice(ends[:3] if rng.random() < 0.9 else ends)])

    def simple(self, v: str, u: str, depth: int) -> str:
        calls = [
            f"{v} = self.conv0({u})",
            f"{v} = {self.norm(u)}",
            f"{v} = {self.act(u)}",
            f"{v} = {u} + {self.name()}",
            f"{v} += {u}",
            f"{v} = {u} * 0.5",
            f"{v} = self.drop({u})",
            f"{v} = self.idle({u})",
            f"{v} = self.seq({u})",
            f"{v} = self.deep({u})",
            f"{v} = self.act(self.pair({u}))",
            f"{v} = {u}",
            f"{v}.add_(0.1)",
            f"{v} = {u}.clone()",
            f"with torch.no_grad():\n    {v} = {self.act(self.norm(u))}",
            f"{v} = self.relu(self.bn0(self.relu(self.bn0({u}))))",
            f"norm, act = self.bn0, F.relu\n{v} = norm({u})\n{v} = act({v})",
        ]
        if not self.inner:
            calls += [f"{v} = self.child({u})", f"{v} = self.child.bn0({u})"]
            calls += [f"{v} = {self.act(f'self.normalized({u})')}", f"{v} = self.both({u})"]
        return self.rng.choice(calls)

    def keeping(self, v: str, u: str, depth: int) -> str:
        return self.keep(v)

    def branch(self, v: str, u: str, depth: int) -> str:
        rng = self.rng
        if rng.random() < 0.3:
            lines = f"{v} = {self.norm(u)}\nif {self.flag()}:\n    {v} = {self.act(v)}"
            return lines
        if rng.random() < 0.2:
            return f"{v} = {self.norm(u)}\n{v} = {self.act(v)} if {self.flag()} else {v}"
        text = f"if {self.flag()}:\n" + indented(self.several(depth), 1)
        if rng.random() < 0.3:  # a norm at the end of each way, the activation behind them
            w, add = self.name(), rng.choice(["", "", f" + {u}"])
            one, two = (indented(f"{v} = {self.norm(u)}{end}", 1) for end in (add, ""))
            text += one + rng.choice(["", f"else:\n{two}", f"elif {self.flag()}:\n{two}else:\n{one}"])
            return text + f"{rng.choice([v, w])} = {self.act(v)}"
        if rng.random() < 0.4:
            text += "else:\n" + indented(self.several(depth), 1)
        if rng.random() < 0.15:
            text += f"if {self.flag()}: return {v}"
        return text.rstrip("\n")

    def loop(self, v: str, u: str, depth: int) -> str:
        heads = [
            "for _ in range(2):\n" + indented(self.several(depth), 1),
            f"for layer in self.list:\n    {v} = layer({v})\n",
            "for norm, act in [(self.bn0, self.relu), (self.bn1, F.silu)]:\n"
            f"    {v} = norm({u})\n    {v} = act({v})\n",
            f"for layer in self.seq:\n    {v} = layer({v})\n    KEPT.append({v})\n",
            f"for layer in self.deep:\n    {u} = layer({u})\n",
        ]
        return self.rng.choice(heads).rstrip("\n")

    def guarded(self, v: str, u: str, depth: int) -> str:
        return "try:\n" + indented(self.several(depth), 1) + f"finally:\n    KEPT.append({v})"


def program(seed: int) -> Program:
    rng = random.Random(seed)
    block, inner = Writer(rng, False), Writer(rng, True)
    results = [
        "y",
        "y",
        "y + z",
        "(y, s)",
        '{"a": [y, z], "b": s}',
        "self.relu(self.bn2(y))",
        "F.relu(self.bn0(y + s))",
    ]

    def some(lines: list[str], most: int) -> tuple[str, ...]:
        picked = rng.choices(lines, k=rng.randint(0, most))
        return tuple(
            line.format(rng.choice(LAYER_NAMES), rng.choice(LAYER_NAMES[:9])) if "{0}" in line else line
            for line in picked
        )

    return Program(
        seed,
        tuple(block.group() for _ in range(rng.randint(1, 4))),
        tuple(inner.group() for _ in range(rng.randint(1, 2))),
        rng.choice(results),
        some(SETUP, 2),
        some(LATER, 2),
        some(LATER_GLOBAL, 2),
    )
