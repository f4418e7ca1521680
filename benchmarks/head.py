"""Language models without logits in memory: `lean(head=True)` compared with plain PyTorch.

    python -m benchmarks.head alone [--tokens 2048] [--dtype bfloat16] [--json FILE]
    python -m benchmarks.head models [--tokens 256] [--json FILE]
    python -m benchmarks.head families [FAMILY ...] [--json FILE]

`alone` trains a head of Qwen3's size (2,048 to 151,936) with its cross entropy, also with `lean("conv")` and
torch's `F.linear_cross_entropy`. `models` trains small language models with their own loss. Both report the
peak memory of a step and its time, relative to plain PyTorch. Time is the CPU time of one thread, the median
over turns, so other work on the machine matters less. `families` takes three steps with small float32 models
of transformers. It reports how far losses and gradients are from those of float64 at the same weights, for
`lean(head=True)` and for plain PyTorch, and which operators made the logits be computed.
"""

from __future__ import annotations

import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from statistics import median
from time import process_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks import held
from benchmarks.architectures import import_torchvision
from benchmarks.head_families import FAMILIES, build
from benchmarks.lean_transformers import LARGE, MODELS, checkpointed
from leannorm import keep_freed_memory
from leannorm.report.memory import measure_step
from leannorm.saving import lean

Row = dict[str, Any]
HIDDEN, VOCABULARY = 2048, 151936


def _measured(
    sides: dict[str, Callable[[], Tensor]], parameters: list[Tensor], turns: int, zeros: bool
) -> Iterator[Row]:
    """Peak and time of each side's step, relative to the first. `zeros`: steps add to existing gradients."""
    rows: list[Row] = []
    for name, loss in sides.items():
        for _ in range(2 if turns else name != "plain"):  # a rebuild is verified in two passes
            _clear(parameters, False)
            loss().backward()
        _clear(parameters, zeros)
        kept, peak, _, _ = measure_step(loss)
        rows.append({"setting": name, "held_mb": round(kept / 1e6), "peak_mb": round(peak / 1e6)})
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(turns):
        for side, loss in zip(seconds, sides.values(), strict=True):
            _clear(parameters, zeros)
            start = process_time()
            loss().backward()
            side.append(process_time() - start)
    for row, side in zip(rows, seconds, strict=True):
        row["peak"] = round(row["peak_mb"] / rows[0]["peak_mb"], 3)
        if not turns:
            yield row
            continue
        row["time"] = round(median(a / b for a, b in zip(side, seconds[0], strict=True)), 3)
        row["seconds"] = round(median(side), 2)
        yield row


def _clear(parameters: list[Tensor], zeros: bool) -> None:
    for p in parameters:
        if not zeros:
            p.grad = None
        elif p.grad is not None:
            p.grad.zero_()


def alone(names: list[str], tokens: int, dtype: str, turns: int, vocabulary: int) -> Iterator[Row]:
    """Measure the head and its loss, called as models of transformers call them."""
    torch.manual_seed(0)
    layer = nn.Linear(HIDDEN, vocabulary, bias=False).to(getattr(torch, dtype))
    x = torch.randn(tokens, HIDDEN).to(layer.weight.dtype).requires_grad_()
    target = torch.randint(vocabulary, (tokens,))

    def loss(context: Callable[[], Any]) -> Tensor:
        with context():
            return F.cross_entropy(layer(x).float(), target)

    sides: dict[str, Callable[[], Tensor]] = {
        "plain": partial(loss, nullcontext),
        'lean("conv")': partial(loss, partial(lean, "conv")),
        'lean("conv", head=True)': partial(loss, partial(lean, "conv", head=True)),
    }
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()
        sides["F.linear_cross_entropy"] = lambda: F.linear_cross_entropy(
            x, layer.weight, target, options=options
        )
    sides = {name: side for name, side in sides.items() if not names or name in names}
    for row in _measured(sides, [layer.weight, x], turns, zeros=False):
        yield {"what": "alone", "tokens": tokens, "vocabulary": vocabulary, "dtype": dtype, **row}


def models(names: Iterable[str], tokens: int, dtype: str, turns: int) -> Iterator[Row]:
    """Measure small models that compute their own loss, on two sequences of this many tokens."""
    for name in names:
        torch.manual_seed(0)
        model, inputs, blocks = MODELS[name](LARGE._replace(tokens=(2, tokens)))
        model.to(getattr(torch, dtype)).train()

        def loss(context: Callable[[], Any], model: nn.Module = model, inputs: Any = inputs) -> Tensor:
            with context():
                found: Tensor = model(**inputs).loss
                return found

        sides: dict[str, Callable[[], Tensor]] = {
            "plain": partial(loss, nullcontext),
            'lean("conv")': partial(loss, partial(lean, "conv")),
            'lean("conv", head=True)': partial(loss, partial(lean, "conv", head=True)),
            "checkpoint, every block": partial(loss, partial(checkpointed, blocks, 1)),
        }
        for row in _measured(sides, [*model.parameters()], turns, zeros=True):
            yield {"what": "models", "model": name, "tokens": 2 * tokens, "dtype": dtype, **row}


class _Wide(TorchFunctionMode):
    """Computes in float64, also where a model asks for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float and args[0].dtype is torch.float64:
            return args[0]
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs.update({k: torch.float64 for k, v in kwargs.items() if v is torch.float32})
        return func(*args, **kwargs)


def families(names: Iterable[str], steps: int = 3) -> Iterator[Row]:
    for name in names:
        try:
            yield _family(name, steps)
        except Exception as error:
            yield {"what": "families", "family": name, "failed": f"{type(error).__name__}: {error}"[:160]}


def _family(name: str, steps: int) -> Row:
    torch.manual_seed(0)
    model, inputs = build(name)
    exact = build(name)[0].double()
    model.eval(), exact.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distance = {"loss": [0.0, 0.0], "gradients": [0.0, 0.0]}
    reasons = dict[str, None]()

    def step(model: nn.Module, context: Any) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        with context as saved:
            loss = model(**inputs).loss
        loss.backward()
        if isinstance(saved, lean):
            reasons.update(dict.fromkeys(r for r in saved.reasons if r.startswith("head=True")))
        gradients = [torch.zeros(()) if p.grad is None else p.grad.double() for p in model.parameters()]
        return loss.detach().double(), gradients

    for _ in range(steps):
        exact.load_state_dict(
            {k: v.double() if v.is_floating_point() else v for k, v in model.state_dict().items()}
        )
        try:
            truth = step(exact, _Wide())
        except RuntimeError:  # a constant that does not fit float32
            truth = step(exact, nullcontext())
        for side, context in enumerate((lean("conv", head=True), nullcontext())):
            loss, gradients = step(model, context)
            distance["loss"][side] += float((loss - truth[0]).abs() / truth[0].abs())
            whole = sum(float(t.square().sum()) for t in truth[1])
            apart = sum(float((g - t).square().sum()) for g, t in zip(gradients, truth[1], strict=True))
            distance["gradients"][side] += (apart / whole) ** 0.5
        optimizer.step()
    row: Row = {"what": "families", "family": name}
    for key, (ours, plain) in distance.items():
        row[f"{key}, ours"], row[f"{key}, plain"] = ours / steps, plain / steps
    return row | {
        "computed": [r.split("since ")[1].split(" needs")[0] if "since" in r else r for r in reasons]
    }


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["alone", "models", "families"])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="settings, models or families; all of them by default"
    )
    parser.add_argument("--tokens", type=int, help="default: 2,048 for alone, 256 per sequence for models")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--turns", type=int, default=3)
    held.add_json(parser)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import_torchvision()
    if options.what == "alone":
        tokens = options.tokens or 2048
        found = alone(options.names, tokens, options.dtype, options.turns, options.vocabulary)
    elif options.what == "models":
        names = options.names or ["llama", "qwen3", "gemma2"]
        found = models(names, options.tokens or 256, options.dtype, options.turns)
    else:
        found = families(options.names or FAMILIES)
    held.tell(options, found, "what", "family", "model", "tokens", "vocabulary", "dtype", "setting")


if __name__ == "__main__":
    main()
