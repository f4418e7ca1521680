"""`held="host"` on the stand-in for a GPU. Run as a script: it prints what it found as JSON."""

import warnings
from contextlib import nullcontext

import standin
import torch
from on_standin import DEVICE, LIBRARY, opened, same
from standin_cases import MODELS

from leannorm.ops import modes
from leannorm.saving import host, plans

PASSES = 5


def pageable(self, nbytes):
    """The stand-in cannot pin memory."""
    return torch.empty(nbytes, dtype=torch.uint8)


def trained(name, setting):
    """Gradients of some passes, each pass's `lean` object, and what the host waited for in later ones."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, gradients, passes, waits = make().to(DEVICE), [], [], {}
    for turn in range(PASSES):
        torch.manual_seed(turn)
        x = torch.randn(shape).to(DEVICE)
        LIBRARY.forget()
        with nullcontext() if setting is None else opened(**setting, held="host") as saved:
            loss = model(x).float().square().mean()
        passes.append(saved)
        moved = 0 if saved is None else saved.moved_bytes
        loss.backward()
        if turn >= 3:
            waits |= {f"{what}, pass {turn + 1}": n for what, n in LIBRARY.waits().items()}
        gradients.append([p.grad.cpu() for p in model.parameters()])
        model.zero_grad()
    return gradients, passes, waits, moved


def found(name, setting):
    plans.KNOWN.clear()
    stock, ours = trained(name, None)[0], trained(name, setting)
    return {
        "same": same(ours[0], stock),
        "moved": ours[3],
        "kept": ours[1][-1].kept_bytes,
        "reasons": ours[1][-1].reasons,
        "waits": ours[2],
    }


def streams():
    """What streams do for values that leave and come back, the last one for a reader on another stream."""
    LIBRARY.set_stream(1)
    moves, values = host.Moves({}), [torch.randn(64, 64, device=DEVICE) for _ in range(5)]
    LIBRARY.forget()
    held = [moves.hold(value) for value in values]
    out = LIBRARY.streams()
    LIBRARY.forget()
    held[0]()
    back = LIBRARY.streams()
    held[1].fetch()
    LIBRARY.set_stream(2)
    LIBRARY.forget()
    other = held[1]().untyped_storage().data_ptr()
    seen = {"out": out, "back": back, "other": LIBRARY.streams(), "memory": other}
    LIBRARY.set_stream(0)
    return {**seen, "side": host.link_of(values[0].device)._stream.stream_id}


def on_two_streams():
    """Two branches on streams of their own read a value that hooks keep, which is brought once."""
    brought, losses = [], []

    def unpack(tensor):
        brought.append(tensor.clone())
        return brought[-1]

    x = torch.randn(64, 64, device=DEVICE, requires_grad=True)
    with opened("norm", held=(torch.clone, unpack)):
        y = x @ x
        for stream in (1, 2):
            LIBRARY.set_stream(stream)
            losses.append(y.square().sum())
        LIBRARY.set_stream(0)
    brought.clear()
    LIBRARY.forget()
    torch.autograd.backward(losses)
    memory = brought[0].untyped_storage().data_ptr()
    return len(brought), [
        stream for what, one, stream in LIBRARY.streams() if what == "used" and one == memory
    ]


def main():
    """All cases, by name; of one that raised, the error."""
    host.Buffers.allocate = pageable
    modes.capturing = lambda tensor: LIBRARY.is_capturing()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    settings = {
        "plain": {},
        "norm": {"recompute": "norm"},
        "conv": {"recompute": "conv"},
        "budget": {"budget": 0.3},
    }
    cases = {f"{name}, {which}": (found, name, settings[which]) for name in MODELS for which in settings}
    cases |= {"streams": (streams,), "two streams": (on_two_streams,)}
    standin.print_found(cases, lambda case: True)


if __name__ == "__main__":
    main()
