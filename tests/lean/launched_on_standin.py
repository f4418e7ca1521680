"""What passes under `lean()` launch on the stand-in for a GPU: as a script it prints what it found as JSON.

An operator that a plain forward pass calls is *called again* in a backward pass; copies, casts and checks are
the others.
"""

import warnings
from collections import Counter
from contextlib import nullcontext

import standin
import torch
from on_standin import DEVICE, LIBRARY, opened
from standin_cases import LAUNCHED, MODELS, SETTINGS

from leannorm.ops import modes

PASSES = 4


def launched(name, setting, passes):
    """The launches of each pass, forward and backward, by operator, and what the host waited for."""
    torch.manual_seed(0)
    model = MODELS[name][0]().to(DEVICE)
    found = []
    for turn in range(passes):
        torch.manual_seed(turn)
        x = torch.randn(MODELS[name][1]).to(DEVICE)
        LIBRARY.forget()
        with nullcontext() if setting is None else opened(**setting):
            loss = model(x).float().square().mean()
        forward, waits = Counter(LIBRARY.launches()), Counter(LIBRARY.waits())
        LIBRARY.forget()
        loss.backward()
        waits += Counter(LIBRARY.waits())
        found.append((forward, Counter(LIBRARY.launches()), waits))
        model.zero_grad()
    return found


def added(name, which):
    """What each pass launches more than a plain one, by operator, and what the host waited for."""
    found, plain = [], launched(name, None, PASSES)
    for ours, theirs in zip(launched(name, SETTINGS[which], PASSES), plain, strict=True):
        backward = ours[1] - theirs[1]
        again = {one: n for one, n in backward.items() if one in theirs[0] and not one.startswith("cop")}
        others = {one: n for one, n in backward.items() if one not in again}
        found.append({"forward": ours[0] - theirs[0], "again": again, "others": others, "waits": ours[2]})
    return found


def main():
    modes.capturing = lambda tensor: LIBRARY.is_capturing()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    standin.print_and_end({", ".join(case): added(*case) for case in LAUNCHED})


if __name__ == "__main__":
    main()
