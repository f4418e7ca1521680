"""What `lean()` does on the stand-in for a GPU. Run as a script: it prints what it found as JSON.

`python on_standin.py [--python] [CASE ...]`, with `--python` of the log in Python: in a process of its own,
since a device that is registered stays.
"""

import sys
import threading
import warnings
from contextlib import nullcontext

import standin
import torch
import torch.nn.functional as F
from standin_cases import CASTS, IMAGE, MODELS, SETTINGS, cnn
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from leannorm import lean
from leannorm.autograd.nodes import NODES
from leannorm.saving import log, plans, recorded_pass, small

LIBRARY = standin.register()
DEVICE = torch.device("standin")
PASSES, LOOKED = 6, 2  # of these the first may look


class Passing(TorchDispatchMode):
    """What torch computes under any mode: it may choose other operators than without one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Frames:
    """Counts calls of Python functions of `leannorm.saving`."""

    def __init__(self):
        self.names = []

    def __call__(self, frame, event, argument):
        if event == "call" and "/leannorm/saving/" in frame.f_code.co_filename:
            self.names.append(frame.f_code.co_qualname)


def opened(*arguments, **setting):
    """`lean()` whose pass is looked at however small it is."""
    around = lean(*arguments, **setting)
    around.place = small.NEVER_SMALL
    return around


def trained(name, setting, device, cast):
    """Gradients of some passes, the last one's `lean` object, and what later passes looked at and called."""
    make, shape = MODELS[name]
    plans.KNOWN.clear()  # those of another model
    torch.manual_seed(0)
    model, frames, waits, gradients = make().to(device), Frames(), {}, []
    for turn in range(PASSES):
        torch.manual_seed(turn)
        x = torch.randn(shape).to(device)
        plain = Passing if recorded_pass.LOG is log else nullcontext
        around = plain() if setting is None else opened(**setting)
        counts = turn >= LOOKED and device == DEVICE
        LIBRARY.forget()
        with torch.autocast(device.type, torch.bfloat16, enabled=cast), around as saved:
            sys.setprofile(frames if counts else None)
            loss = model(x).float().square().mean()
            sys.setprofile(None)
        if counts:
            loss.register_hook(lambda _: sys.setprofile(frames))  # in the thread of the engine
            model.get_parameter(next(n for n, _ in model.named_parameters())).register_hook(
                lambda _: sys.setprofile(None)
            )
        loss.backward()
        sys.setprofile(None)
        if counts:
            for what, n in LIBRARY.waits().items():
                waits[f"{what}, pass {turn + 1}"] = n
        gradients.append([p.grad.cpu() for p in model.parameters()])
        model.zero_grad()
        for p in model.parameters():
            p._backward_hooks = None
    return gradients, saved, waits, frames.names


def same(one, two):
    """Are all numbers of all passes equal, to the bit?"""
    return all(
        torch.equal(a, b) for us, them in zip(one, two, strict=True) for a, b in zip(us, them, strict=True)
    )


def found(name, which, cast):
    """What a test asks of one model under one setting."""
    setting = SETTINGS[which]
    stock, *_ = trained(name, None, DEVICE, cast)
    ours, saved, waits, frames = trained(name, setting, DEVICE, cast)
    on_cpu = trained(name, setting, torch.device("cpu"), cast)[1]
    small_ones = [p.nbytes for p in MODELS[name][0]().parameters() if p.nbytes <= 1 << 14]
    return {
        "same": same(ours, stock),
        "small_weights": sum(small_ones),
        "kept": saved.kept_bytes,
        "rebuilt": saved.rebuilt_bytes,
        "kept_on_cpu": on_cpu.kept_bytes,
        "rebuilt_on_cpu": on_cpu.rebuilt_bytes,
        "reasons": saved.reasons,
        "waits": waits,
        "frames": sorted(set(frames)),
    }


def a_look_is_counted():
    """The trials of a first pass wait for the device."""
    NODES.forget_trials()
    model, x = cnn().to(DEVICE), torch.randn(IMAGE, device=DEVICE)
    LIBRARY.forget()
    with opened("conv"):
        model(x)
    return LIBRARY.waits()


def in_a_capture():
    """What was tried before is dropped; what was not is kept, and nothing is looked at."""
    NODES.forget_trials()
    model, told = cnn().to(DEVICE), []
    for is_tried in (False, True):
        if is_tried:
            for x in torch.randn(3, *IMAGE):
                with opened("conv"):
                    loss = model(x.to(DEVICE)).sum()
                loss.backward()
        x = torch.randn(IMAGE).to(DEVICE)
        with standin.capture(LIBRARY, standin.Graph()):
            with opened("conv") as saved:
                loss = model(x).sum()
            loss.backward()
        told.append([saved.rebuilt_bytes, saved.reasons])
    return told


def values_that_tell_nothing():
    """Passes of zeros: after some trials the host waits no more, and it is said why tensors are kept."""
    NODES.forget_trials()
    w = torch.zeros(64, 64, device=DEVICE, requires_grad=True)
    for _ in range(80):
        LIBRARY.forget()
        with opened("norm") as saved:
            loss = (F.silu(torch.zeros(64, 64, device=DEVICE) @ w) @ w).sum()
        waits = LIBRARY.waits()
        loss.backward()
    return waits, saved.reasons


def on_two_streams(second):
    """x on stream 1; silu(x), rebuilt, is read by two products, the other of which runs on `second`."""
    told = []
    for _ in range(4):
        x, w = (torch.randn(64, 64, device=DEVICE, requires_grad=True) for _ in range(2))
        LIBRARY.set_stream(1)
        with opened("norm") as saved:
            y = F.silu(x.sin())
            LIBRARY.set_stream(second)
            b = y @ w
            LIBRARY.set_stream(1)
            a = y @ w
        loss = (a + 2 * b).sum()
        LIBRARY.forget()
        loss.backward()
        told = [one for one in LIBRARY.streams() if saved.rebuilt_bytes]
        LIBRARY.set_stream(0)
    return {
        "waits": [one[1:] for one in told if one[0] == "waits"],
        "used": [one[2] for one in told if one[0] == "used"],
    }


def with_timed_algorithms():
    """`torch.backends.cudnn.benchmark`: convolutions are kept."""
    torch.backends.cudnn.benchmark = True
    model = cnn().to(DEVICE)
    for x in torch.randn(3, *IMAGE):
        with opened("conv") as saved:
            loss = model(x.to(DEVICE)).sum()
        loss.backward()
    torch.backends.cudnn.benchmark = False
    return [r.node for r in saved.records if r.rebuilt], saved.reasons


def added_in_any_order():
    """What threads of a device add in any order is not called again; asked for determinism, it is."""
    told = {}
    for is_asked in (False, True):
        torch.use_deterministic_algorithms(is_asked, warn_only=True)
        at = torch.arange(128, device=DEVICE)
        for _ in range(3):
            x = torch.randn(128, 128, device=DEVICE, requires_grad=True)
            with opened("norm") as saved:
                y = (x * 2).index_add(0, at, x)
                loss = (y.exp() @ x).sum()
            loss.backward()
        told[str(is_asked)] = [r.node for r in saved.records if r.rebuilt], saved.reasons
    torch.use_deterministic_algorithms(False)
    return told


def by_convolutions():
    """Of a transposed one a device may add in any order: is it made again, and the other kind?"""
    rebuilt = []
    for layer in (nn.Conv2d, nn.ConvTranspose2d):
        model = nn.Sequential(layer(8, 16, 1), nn.SiLU(), layer(16, 8, 1), nn.SiLU()).to(DEVICE)
        for _ in range(3):
            with opened("conv") as saved:
                loss = model(torch.randn(2, 8, 16, 16, device=DEVICE)).sum()
            loss.backward()
        rebuilt.append(any(r.node == "aten::convolution" for r in saved.records if r.rebuilt))
    return rebuilt


def copies_of_weights(norm):
    """What a pass copies of the weights that its norms read: launches of passes 3 and later."""
    blocks = (nn.Sequential(nn.Linear(32, 32), norm(32), nn.SiLU()) for _ in range(6))
    model = nn.Sequential(*blocks).to(DEVICE)
    for x in torch.randn(4, 64, 32):
        LIBRARY.forget()
        with opened("norm"):
            loss = model(x.to(DEVICE)).sum()
            LIBRARY.forget()
        launches = LIBRARY.launches()
        loss.backward()
    return launches


def an_optimizer_steps_first():
    """Weights that change between a pass and its backward pass: rebuilds read what they were."""
    gradients = []
    for setting in (None, {}):
        torch.manual_seed(0)
        norm, w = nn.BatchNorm1d(64).to(DEVICE), torch.randn(64, 64, device=DEVICE, requires_grad=True)
        for turn in range(4):
            torch.manual_seed(turn)
            x = torch.randn(64, 64, device=DEVICE, requires_grad=True)
            with nullcontext() if setting is None else opened("norm"):
                y = F.silu(norm(x)) @ w
            with torch.no_grad():
                norm.bias.add_(1.0)  # which no node saves
            y.square().sum().backward()
            gradients.append([x.grad.cpu(), w.grad.cpu()])
    return same(gradients[:4], gradients[4:])


OTHERS = {
    "a look": a_look_is_counted,
    "a capture": in_a_capture,
    "zeros": values_that_tell_nothing,
    "two streams": lambda: on_two_streams(2),
    "one stream": lambda: on_two_streams(1),
    "timed": with_timed_algorithms,
    "any order": added_in_any_order,
    "convolutions": by_convolutions,
    "copies of layer norms": lambda: copies_of_weights(nn.LayerNorm),
    "copies of batch norms": lambda: copies_of_weights(nn.BatchNorm1d),
    "an optimizer": an_optimizer_steps_first,
}


def main():
    """All cases, by name; of one that raised, the error."""
    from leannorm.ops import modes

    modes.capturing = lambda tensor: LIBRARY.is_capturing()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "--python" in sys.argv:
        sys.argv.remove("--python")
        recorded_pass.LOG = log
        del SETTINGS["limit"]  # which the C++ nodes watch
    cases = {f"{name}, {which}": (found, name, which, False) for name in MODELS for which in SETTINGS}
    cases |= {
        f"{name}, {which}, autocast": (found, name, which, True) for name in CASTS for which in SETTINGS
    }
    cases |= {name: (run,) for name, run in OTHERS.items()}
    parts = sys.argv[1:]
    standin.print_found(cases, lambda case: not parts or any(part in case for part in parts))


if __name__ == "__main__":
    threading.current_thread().name = "on the stand-in"
    main()
