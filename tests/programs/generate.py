"""Random programs: every line is run as it is made, so that the next one knows what there is to work on."""

from __future__ import annotations

import contextlib
import random
import re
import warnings

import torch
from torch import Tensor

from programs.functions import own_settings
from programs.language import Line, Program
from programs.norms import may_crash_torch
from programs.observe import may_hide_edits, observe
from programs.operations import BLOCKS, OPERATIONS
from programs.run import SharingRun, is_leaf

STATIC = {8, 16, 24, 32, 48, 64, 96, 128}  # sizes that are not those of a batch
_SIZES = [(4, 6), (5, 6), (4, 7), (5, 7), (3, 9), (4, 9)]
_SETTINGS = [
    "",
    "",
    '"norm"',
    '"norm"',
    '"conv"',
    '"conv"',
    "budget=0.3",
    "budget=0.7",
    "overhead=0.2",
    "held=COPIES",
]


def _has_graph(t):
    """Whether autograd answers: of one of several views it does not, once their base was edited."""
    try:
        return t.is_leaf or t.grad_fn is not None
    except RuntimeError:
        return False


class Maker:
    """A program in the making. `rng` decides everything."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        n, s = rng.choice(_SIZES)
        if rng.random() < 0.15:
            n, s = 3, 5  # mostly below what lean() looks at
        steps = rng.choice([2, 2, 3])
        other = (n, s) if rng.random() < 0.6 else rng.choice(_SIZES)
        sizes = [(n, s)] * (steps - 1) + [other]
        self.program = Program(
            n=tuple(a for a, _ in sizes),
            s=tuple(b for _, b in sizes),
            forwards=rng.choice([1, 1, 1, 1, 2]),
            threads=rng.choice([0, 0, 0, 0, 0, 1, 2]),
            around=rng.choice(["", "", "", "", "", "autocast()"]),
            seed=rng.randrange(1000),
        )
        self.run = SharingRun(self.program)
        self.run.shared.update(i=0, n=n, s=s)
        # each program does much of some things and nothing of others
        self._weights = [weight * rng.choice([0, 1, 1, 4]) + 0.01 for weight in OPERATIONS.values()]
        self.names, self.lines, self.before, self.backward = {}, [], [], []
        self.depth, self._count = 0, 0
        self.focus = None  # what the next line works on, if it can

    # ------------------------------------------------ what operations ask for

    def pick(self, *choices):
        return self.rng.choice(choices)

    def chance(self, p):
        return self.rng.random() < p

    def fresh(self, letter="y"):
        self._count += 1
        return f"{letter}{self._count}"

    def tensors(self, fits=lambda t: True):
        return [
            name
            for name, t in self.names.items()
            if isinstance(t, Tensor) and t.is_floating_point() and t.dim() and _has_graph(t) and fits(t)
        ]

    def tensor(self, fits=lambda t: True):
        """The name of one that fits, mostly a recent one that has a gradient; or None."""
        names = self.tensors(lambda t: 256 < t.numel() < 30_000 and fits(t))
        if self.focus in names:
            return self.focus
        trained = [name for name in names if self.names[name].requires_grad]
        if trained and self.chance(0.9):
            names = trained
        return names[-1 - min(int(self.rng.expovariate(0.7)), len(names) - 1)] if names else None

    def leaf(
        self, shape, dtype=torch.float32, kinds=("parameter", "parameter", "frozen", "buffer"), letter="w"
    ):
        """The name of a leaf of this shape: one of those there, or a new one.

        Statistics have letters of their own: torch moves them without a new version, so that sharing them
        with a weight would be an edit that nobody sees.
        """
        there = [
            name
            for name, t in self.run.shared.items()
            if isinstance(t, Tensor) and t.shape == tuple(shape) and t.dtype == dtype and is_leaf(t)
            if name.startswith(letter)
        ]
        if there and self.chance(0.5):
            return self.rng.choice(there)
        name, kind = self.fresh(letter), self.rng.choice(kinds)
        of_dtype = "" if dtype == torch.float32 else f", dtype={dtype}"
        self.set_up(f"{name} = {kind}({', '.join(map(str, shape))}{of_dtype})")
        return name

    def leaves(self):
        return [name for name, t in self.run.shared.items() if isinstance(t, Tensor) and is_leaf(t)]

    def set_up(self, text):
        """A line before the loop."""
        exec(text, self.run.shared)
        self.before.append(Line(0, text))

    def autocast(self):
        return torch.is_autocast_enabled("cpu")

    # ------------------------------------------------ lines

    def add(self, text):
        """The line, if there is one and it runs."""
        if text is None:
            return False
        try:
            if not text.startswith("interrupt("):
                self.run.line(Line(self.depth, text), self.names)
        except Exception:
            if self.chance(0.05):
                self.lines += [Line(self.depth, "with suppressed():"), Line(self.depth + 1, text)]
            return False
        self.lines.append(Line(self.depth, text))
        return True

    @contextlib.contextmanager
    def block(self, text):
        self.lines.append(Line(self.depth, text))
        self.depth += 1
        with (
            contextlib.nullcontext()
            if " model" in text
            else eval(text.removeprefix("with ").rstrip(":"), self.run.shared, self.names)
        ):
            yield
        self.depth -= 1
        if self.lines[-1].opens:
            self.lines.pop()

    def some(self, count):
        """So many lines, some of them in blocks of their own."""
        while count > 0:
            if count > 1 and self.depth < 3 and self.chance(0.12):
                inner = self.rng.randint(1, count)
                with self.block(f"with {BLOCKS[self.rng.randrange(len(BLOCKS))]}:"):
                    self.some(inner)
                count -= inner
                continue
            operation = self.rng.choices(list(OPERATIONS), self._weights)[0]
            made = operation(self)
            for text in [made] if isinstance(made, str) else made or ():
                if not self.add(text):
                    break
                match = re.match(r"(y\d+)(?:, y\d+)* = ", text)
                self.focus = match[1] if match and self.chance(0.7) else None
            count -= 1


def generate(seed):
    """The program of that seed."""
    maker = Maker(seed)
    torch.manual_seed(seed)
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings(), own_settings(), contextlib.ExitStack() as around:
        warnings.simplefilter("ignore")
        if maker.program.around:
            around.enter_context(eval(maker.program.around, dict(maker.run.shared)))
        _forward(maker)
    torch.use_deterministic_algorithms(before)
    _backward(maker)
    return _documented(
        maker.program.with_(
            before=tuple(maker.before), forward=tuple(maker.lines), backward=tuple(maker.backward)
        )
    )


def _forward(maker):
    rng = maker.rng
    for _ in range(rng.choice([1, 1, 2])):
        kind = rng.choice(["leaf", "leaf", "tensor"])
        shape = rng.choice(
            ["n, 8, s, s"] * 4 + ["n, 16, s, s", "n, s, 48", "n, s, 64"] * 2 + ["n, 8, 3, s, s"]
        )
        dtype = rng.choice(["", "", "", "", ", dtype=torch.bfloat16", ", dtype=torch.float64"])
        made = f"{kind}({shape}{dtype})"
        if maker.chance(0.1):
            made = f"at_first(i, {made}, {maker.pick(0.0, 0.0, 0.5, 1e-40)})"
        maker.add(f"{maker.fresh('x')} = {made}")
    if maker.chance(0.15):
        maker.some(rng.randint(1, 2))
    setting = rng.choice(_SETTINGS)
    if maker.chance(0.1):
        maker.set_up("small_passes(30_000)")
    if maker.chance(0.1):
        maker.set_up(f"busy({maker.pick(20, 300)})")
    header = f"with lean({setting}):"
    if maker.chance(0.2):
        maker.set_up(f"model = make_lean(Body(){setting and ', ' + setting})")
        header = "with model:"
    elif maker.chance(0.15):
        maker.set_up(f"saver = lean({setting})")
        header = "with saver:"
    inside = maker.chance(0.7)
    with maker.block(header):
        maker.some(rng.randint(3, 12))
        if inside:
            _loss(maker)
    if not inside:
        maker.some(rng.choice([0, 0, 1, 2]))
        _loss(maker)


def _loss(maker):
    names = maker.tensors(lambda t: t.requires_grad)[-6:]
    chosen = maker.rng.sample(names, min(len(names), maker.pick(1, 2, 2, 3))) if names else []
    if names and names[-1] not in chosen:
        chosen.append(names[-1])
    forms = "{}.float().square().mean()", "{}.sum()", "({}.float() * 0.1).sin().sum()", "{}.mean()"
    terms = [maker.pick(*forms).format(name) for name in chosen]
    if not terms:
        terms = [f"({maker.leaf((64,), kinds=('parameter',))} * 1).sum()"]
    maker.add(f"loss = {' + '.join(terms)}")


def _backward(maker):
    rng, lines = maker.rng, maker.backward
    passes = [
        ["loss.backward()"],
        ["loss.backward()"],
        ["loss.backward()"],
        ["loss.backward(retain_graph=True)", "loss.backward()"],
    ]
    trained = [name for name in maker.leaves() if maker.run.shared[name].requires_grad]
    trained += maker.tensors(lambda t: t.requires_grad)
    if trained:
        some = ", ".join(rng.sample(trained, min(len(trained), 3)))
        grad = f"slopes = torch.autograd.grad(loss, [{some}], allow_unused=True, "
        penalty = "(loss + sum(g.float().square().sum() for g in slopes if g is not None)).backward()"
        passes += [[grad + "create_graph=True)", penalty], [grad + "retain_graph=True)", "loss.backward()"]]
    if maker.chance(0.08):
        name = rng.choice(maker.leaves() or maker.tensors())
        form = maker.pick("{}.data.mul_(1.5)", "{}.data.add_(0.25)", "with torch.no_grad(): {}.mul_(1.5)")
        lines.append(Line(0, form.format(name)))
    elif maker.chance(0.05) and maker.tensors():
        name = rng.choice(maker.tensors())
        lines.append(Line(0, maker.pick("{}.mul_(2)", "with torch.no_grad(): {}.mul_(2)").format(name)))
    once = any("doubled_sin" in line.text for line in maker.lines)
    if once:
        passes = passes[:1]  # a second pass would read what the first has written
    logs = [name for name in maker.names if name.startswith("log") and len(name) > 3]
    if (
        logs and not once and maker.chance(0.1)
    ):  # a first loss, whose backward pass is done when the second's begins
        lines.append(Line(0, f"if {logs[0]}.requires_grad: {logs[0]}.backward(retain_graph=True)"))
        if maker.tensors() and maker.chance(0.25):
            lines.append(Line(0, f"{maker.rng.choice(maker.tensors())}.mul_(2)"))
    depth = 0
    if maker.chance(0.1):
        lines.append(Line(0, f"with {rng.choice([b for b in BLOCKS if 'lean' not in b])}:"))
        depth = 1
    chosen = rng.choice(passes)
    if may_crash_torch("\n".join(line.text for line in (*maker.before, *maker.lines))):
        chosen = passes[0]  # every input that has a gradient gets it
    lines += [Line(depth, text) for text in chosen]
    if maker.chance(0.7):
        lines.append(Line(0, maker.pick("sgd(0.1)", "sgd(0.1, data=True)", "sgd(1.0)")))
        if trained and maker.program.forwards == 1 and maker.chance(0.05):
            lines.append(Line(0, f"exchanged({rng.choice(trained)})"))


def _documented(program):
    """Without the hidden edits that `lean()` documents as unseen."""
    while may_hide_edits(program) and not (observed := observe(program)).documented:
        unseen = observed.unseen
        program = program.with_(
            forward=tuple(line for line in program.forward if line.text not in unseen),
            backward=tuple(line for line in program.backward if line.text not in unseen),
        )
    return program
