"""The verdict on a program: does anything that it could see differ between stock autograd and `lean()`?"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from programs.caches import forget
from programs.language import parse
from programs.observe import observe
from programs.run import CopyingRun, HooksLeftOpen, LeanRun, Run, SharingRun

_EDIT = re.compile(r"\.data(\.| = )")  # that changes what a leaf has, and no version
_SWAP = re.compile(r"\.data = |swapped\(")  # that gives a leaf other memory
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Verdict(NamedTuple):
    """`kind`: "same", "refused" (by lean's own error, which says so), "lenient", or what failed."""

    kind: str
    text: str = ""

    @property
    def failed(self):
        return self.kind not in ("same", "refused", "lenient")


SAME = Verdict("same")
_SWAPPED = "Expected use_count of t1"
"""`swap_tensors` refuses a weight that somebody refers to: plain PyTorch's nodes, or those of a pass that was
left as it is. Where only one of two steps under `lean()` refers to it, no oracle swaps in the same steps."""


def judge(program, warm=False):
    """Run the program both ways and compare; `warm` leaves what `lean()` remembers from other programs."""
    if not warm:
        forget()
    stock, ours = Run(program)(), LeanRun(program)()
    verdict = compared(stock, ours)
    if verdict.kind == "backward passes where stock raises":
        return _lenient(program, ours, verdict)
    if verdict.kind == "refused" and not observe(program).edits_what_was_read:
        return Verdict("refused without an edit", verdict.text)
    if verdict.kind == "numbers" and compared(stock, Run(program)()).kind == "numbers":
        return SAME  # of stock too: memory that torch never filled, say
    if verdict.kind == "numbers" and "held=COPIES" in str(program):
        return _edits_of_copies(program, warm, verdict)
    return verdict


def _edits_of_copies(program, warm, found):
    """No edit through .data reaches a copy that hooks keep: without such edits copies must do, and with them
    aliases, of which each reader must see them or raise. A leaf whose data is swapped is kept as it was read,
    by copies and by aliases. `found`: the verdict where nothing is edited."""
    swaps = _SWAP.search(str(program))
    if not swaps and not _EDIT.search(str(program)):
        return found
    rows = str(program).replace("swapped(", "swapped(False and ").splitlines()
    without = [row[: len(row) - len(row.lstrip())] + "pass" if _EDIT.search(row) else row for row in rows]
    verdict = judge(parse("\n".join(without)), warm)
    if verdict.failed or swaps:
        return verdict
    return judge(parse(str(program).replace("held=COPIES", "held=ALIASES")), warm)


def _lenient(program, ours, verdict):
    """Stock refuses because of an edit; `lean()`, which rebuilds, may go through with the right numbers."""
    for oracle in (CopyingRun, SharingRun):
        again = compared(oracle(program)(), ours)
        if again.kind in ("same", "refused") or _raises_as_stock(again):
            return Verdict("lenient", verdict.text)
    if _SWAPPED in again.text:
        return Verdict("lenient", verdict.text)
    if again.kind == "backward passes where stock raises":  # for another reason than an edit
        return again
    return Verdict("wrong where stock raises", again.text)


def _raises_as_stock(verdict):
    """Does a later pass, in which nothing is rebuilt, raise autograd's own error?"""
    return verdict.kind == "backward raises" and "modified by an inplace operation" in verdict.text


def compared(stock, ours):
    """The first difference between two traces."""
    for expected, seen in zip(stock, ours):  # noqa: B905  (the shorter trace shows in what comes last)
        if expected.kind == seen.kind == "seen":
            different = _different(expected.value, seen.value)
            if different:
                return Verdict("numbers", f"{seen.where}: {different}")
        elif (expected.where, expected.kind, expected.at) != (seen.where, seen.kind, seen.at):
            return _raised_apart(expected, seen)
        elif expected.kind == "raised" and not issubclass(seen.value[0], expected.value[0]):
            return Verdict("another error", f"{seen.where}: {seen.value} where stock raises {expected.value}")
    return SAME if len(stock) == len(ours) else Verdict("another end", f"{len(stock)} events, {len(ours)}")


def _raised_apart(expected, seen):
    if seen.kind == "raised" and (expected.kind == "seen" or seen.at < expected.at):
        where, (error, text) = seen.where, seen.value
        what = f"{where}: {error.__name__}: {text}"
        if error is HooksLeftOpen:
            return Verdict("hooks were left open", where)
        if "backward pass" in where:
            refused = issubclass(error, RuntimeError) and "leannorm.lean()" in text
            return Verdict("refused" if refused else "backward raises", what)
        return Verdict("forward raises", what)
    kind = "backward" if "backward pass" in expected.where else "forward"
    return Verdict(f"{kind} passes where stock raises", f"{expected.where}: {expected.value}")


def _different(expected, seen):
    if expected.keys() != seen.keys():
        return f"the program sees {sorted(expected.keys() ^ seen.keys())} in one run only"
    wrong = [name for name in expected if not same(expected[name], seen[name])]
    if not wrong:
        return ""
    a, b = expected[wrong[0]], seen[wrong[0]]
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{wrong}: {tuple(a.shape)}, {a.dtype} in stock, {tuple(b.shape)}, {b.dtype} here"
    count, far = int((a != b).sum()), (a.double() - b.double()).norm() / a.double().norm()
    return f"{', '.join(wrong)}: {wrong[0]} in {count} of {a.numel()} elements, {far:.2g} of its norm"


def same(a, b):
    """Bit for bit; one NaN is as good as another."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    bits = _INTEGERS[a.element_size()]
    equal = a.contiguous().view(bits) == b.contiguous().view(bits)
    return bool(equal.all()) or bool((equal | (a.isnan() & b.isnan())).all())
