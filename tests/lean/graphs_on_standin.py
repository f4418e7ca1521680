"""Captured graphs under `lean()`, on the stand-in for a GPU. As a script it prints what it found as JSON.

A replay makes the calls of the capture again, in the same memory, on other inputs.
"""

import sys
import warnings
from contextlib import contextmanager, nullcontext
from unittest import mock

import standin
import torch
from on_standin import DEVICE, LIBRARY, NODES, opened, same
from standin_cases import GRAPHED, MODELS, REPLAYED, SETTINGS

from leannorm.ops import modes

WARM, REPLAYS = 5, 3  # a plan is followed from the second pass on, and its calls are tried in later ones


def prepared(name, x):
    """A model, its parameters, and one step of training it on x, which loses no memory to its gradients."""
    torch.manual_seed(0)
    model = MODELS[name][0]().to(DEVICE)
    parameters = list(model.parameters())

    def step(setting):
        around = nullcontext() if setting is None else opened(**setting)
        with around as saved:
            loss = model(x).float().square().mean()
        loss.backward()
        with torch.no_grad():
            for p in parameters:
                p.sub_(p.grad, alpha=0.1)
        return saved

    def ended():
        state = [t.cpu() for t in (*parameters, *model.buffers())]
        gradients = [p.grad.cpu() for p in parameters]
        return [*state, *gradients]

    return model, step, ended


def inputs(name):
    """Of some steps that are made ready for a capture, and of replays."""
    torch.manual_seed(1)
    return [torch.randn(MODELS[name][1]) for _ in range(WARM + REPLAYS)]


def in_eager(name):
    """What plain steps leave behind, after each that a graph replays."""
    xs = inputs(name)
    x = xs[0].to(DEVICE)
    model, step, ended = prepared(name, x)
    found = []
    for turn, values in enumerate(xs):
        torch.manual_seed(turn)
        x.copy_(values)
        model.zero_grad()
        step(None)
        if turn >= WARM:
            found.append(ended())
    return found


def replayed(name, which):
    """A whole step, with its backward pass and the optimizer's, captured and replayed."""
    NODES.forget_trials()
    xs = inputs(name)
    x = xs[0].to(DEVICE)
    model, step, ended = prepared(name, x)
    for turn in range(WARM):
        torch.manual_seed(turn)
        x.copy_(xs[turn])
        model.zero_grad()
        step(SETTINGS[which])
    before = [t.clone() for t in model.state_dict().values()]
    model.zero_grad()
    graph = standin.Graph()
    with standin.capture(LIBRARY, graph):
        saved = step(SETTINGS[which])
    for t, value in zip(model.state_dict().values(), before, strict=True):
        t.copy_(value)  # the stand-in has run what it captured
    found = []
    for turn in range(WARM, WARM + REPLAYS):
        torch.manual_seed(turn)
        x.copy_(xs[turn])
        graph.replay()
        found.append(ended())
    return {"same": same(found, in_eager(name)), "rebuilt": saved.rebuilt_bytes, "reasons": saved.reasons}


@contextmanager
def torch_cuda_on_the_standin():
    """`torch.cuda`'s graphs, streams and their names, as far as `make_graphed_callables` uses them."""

    class Stream:
        pass

    def graph(into, pool):
        return standin.capture(LIBRARY, into, pool)

    names = {
        "synchronize": lambda: None,
        "Stream": Stream,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": standin.Graph,
        "graph": graph,
    }
    with (
        mock.patch.multiple(torch.cuda, **names),
        mock.patch("torch.cuda.graphs.graph_pool_handle", return_value=2),
    ):
        yield


def graphed(name, which):
    """`torch.cuda.make_graphed_callables` of a model whose forward pass is within `lean()`."""
    NODES.forget_trials()
    found, told = [], []
    for setting in (None, SETTINGS[which]):
        xs = inputs(name)
        torch.manual_seed(0)
        model = MODELS[name][0]().to(DEVICE)
        forward = model.forward

        def run(x, forward=forward, setting=setting):
            with nullcontext() if setting is None else opened(**setting) as saved:
                y = forward(x)
            told.append(saved)
            return y

        model.forward = run
        state = [t.clone() for t in model.state_dict().values()]
        called = model
        if setting is not None:
            with torch_cuda_on_the_standin():
                called = torch.cuda.make_graphed_callables(model, (xs[0].to(DEVICE),))
            for t, value in zip(model.state_dict().values(), state, strict=True):
                t.copy_(value)  # warm-up passes move a batch norm's statistics
        steps = []
        for turn, values in enumerate(xs[:REPLAYS]):
            torch.manual_seed(turn)
            model.zero_grad()
            called(values.to(DEVICE)).float().square().mean().backward()
            steps.append([p.grad.cpu() for p in model.parameters()] + [b.cpu() for b in model.buffers()])
        found.append(steps)
    saved = told[-1]
    with opened("norm") as around:
        called(xs[0].to(DEVICE))
    return {"same": same(*found), "rebuilt": saved.rebuilt_bytes, "around": around.reasons}


def first_of_all(name):
    """A capture before any pass: what was not tried is kept, and replays are right."""
    NODES.forget_trials()
    xs = inputs(name)
    x = xs[0].to(DEVICE)
    model, step, ended = prepared(name, x)
    before = [t.clone() for t in model.state_dict().values()]
    graph = standin.Graph()
    with standin.capture(LIBRARY, graph):
        saved = step(SETTINGS["norm"])
    plain, plain_step, plain_ended = prepared(name, x)
    found = []
    for part, of, run in ((model, ended, graph.replay), (plain, plain_ended, lambda: plain_step(None))):
        for t, value in zip(part.state_dict().values(), before, strict=True):
            t.copy_(value)
        steps = []
        for values in xs[:REPLAYS]:
            x.copy_(values)
            plain.zero_grad()
            run()
            steps.append(of())
        found.append(steps)
    return {"same": same(*found), "kept": saved.kept_bytes, "reasons": saved.reasons}


def main():
    """All cases, by name; of one that raised, the error."""
    modes.capturing = lambda tensor: LIBRARY.is_capturing()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = {f"{name}, {which}": (replayed, name, which) for name in MODELS for which in REPLAYED}
    cases |= {f"{name}, {which}, graphed": (graphed, name, which) for name in MODELS for which in GRAPHED}
    cases["first of all"] = (first_of_all, "cnn")
    named = sys.argv[1:]
    standin.print_found(cases, lambda case: not named or case in named)


if __name__ == "__main__":
    main()
