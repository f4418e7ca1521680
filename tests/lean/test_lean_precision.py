"""The precision of cuDNN's convolutions is given for a rebuild and left as it was, whatever is set above it.

In a process of its own: the state that it begins in, no setter makes again.
"""

import itertools
import subprocess
import sys

import pytest
import torch

from leannorm.saving import flags

ABOVE = ("generic", "all"), ("cuda", "all")
PLACES = *ABOVE, *(("cuda", operation) for operation in ("conv", "rnn", "matmul"))
STARTS = (
    {},
    {("generic", "all"): "ieee"},
    {("generic", "all"): "tf32"},
    {("cuda", "all"): "ieee"},
    {("cuda", "all"): "tf32"},
    {("cuda", "matmul"): "tf32"},
    {("cuda", "all"): "ieee", ("cuda", "matmul"): "tf32"},
)
OWN = None, "ieee", "tf32", "none"  # of the convolutions; None: as they begin


@pytest.mark.skipif(flags._get_precision is None, reason="this torch has one setting for all")
def test_it_is_given_and_left_as_it_was():
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["checked", str(len(OWN) * len(STARTS) * 3 * 4)]


def get(place):
    return torch._C._get_fp32_precision_getter(*place)


def set_(place, precision):
    torch._C._set_fp32_precision_setter(*place, precision)


def in_force():
    """What is in force everywhere, now and as what is above changes."""
    seen, own = [[get(place) for place in PLACES]], {place: flags._own(*place) for place in ABOVE}
    for values in itertools.product(("none", "ieee", "tf32"), repeat=2):
        for place, value in zip(ABOVE, values, strict=True):
            set_(place, value)
        seen.append([get(place) for place in PLACES])
    for place, value in own.items():
        set_(place, value)
    return seen


def is_as_asked(found, asked):
    return found == asked or (asked == "none" and found == "ieee")


def check(wanted, products):
    """For a rebuild: the convolutions' precision and, unless None, that of cuBLAS's products."""
    (conv,), (matmul,) = flags._cudnn(), flags._precision(("cuda", "matmul"))
    before, asked = in_force(), products or get(("cuda", "matmul"))
    changes = [*([(matmul, products, matmul.state())] if products else []), (conv, wanted, conv.state())]
    for flag, value, _ in changes:
        flag.set(value)
    assert is_as_asked(get(("cuda", "conv")), wanted)
    assert is_as_asked(get(("cuda", "matmul")), asked)
    for flag, _, state in reversed(changes):
        flag.restore(state)
    assert in_force() == before


if __name__ == "__main__":
    count = 0
    for own, start in itertools.product(OWN, STARTS):
        for wanted, products in itertools.product(("none", "ieee", "tf32"), (None, "none", "ieee", "tf32")):
            if own is not None:
                set_(("cuda", "conv"), own)
            for place, value in start.items():
                set_(place, value)
            check(wanted, products)
            for place in start:
                set_(place, "none")
            count += 1
        assert own is not None or torch.backends.cudnn.allow_tf32  # raises where torch finds a mixture
    print("checked", count)
