"""Compiled networks with `compile_options`, relative to the same networks compiled without options.

    python -m benchmarks.lean_compiled [MODEL ...] [--convert] [--settings norm ...] [--json FILE]

Reports kept activations, peak memory, step time and gradient errors. Each setting has a process of its own,
and the processes alternate, one step each; ratios are medians over the turns. `kept` and `peak` are bytes in
torch's allocator above the start of a step, including the gradients of weights. Gradients are compared with
eager code in float64: the error of a parameter's gradient is relative to its largest value, and the largest
error is reported. Next to it are the error of the network compiled without options ("baseline") and that of
eager code in the model's own dtype ("eager"). The setting `stock` is the baseline, the settings `torch .5`
and so on are torch's `activation_memory_budget`, and "checkpoint" puts one around every block. `--convert`
converts the norms first, also in the baseline. Results go to a file of `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import record
from benchmarks.architectures import import_torchvision, in_layout

RESULTS = record.FOLDER / "lean_compiled_cpu.json"
SETTINGS: dict[str, dict[str, Any] | float | None] = {
    "stock": None,
    "checkpoint": None,
    "norm": {"recompute": "norm"},
    "conv": {"recompute": "conv"},
    "overhead .2": {"overhead": 0.2},
    "budget .5": {"budget": 0.5},
    "budget .3": {"budget": 0.3},
    "peak .8": {"peak": 0.8},
    "peak .6": {"peak": 0.6},
    "torch .7": 0.7,
    "torch .5": 0.5,
    "torch .3": 0.3,
    "torch .2": 0.2,
}


class Block(nn.Module):
    """Two convolutions of a 3-D U-Net, each with instance norm and a leaky ReLU, as in nnU-Net."""

    def __init__(self, a: int, b: int, stride: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(a, b, 3, stride, 1), nn.InstanceNorm3d(b, affine=True), nn.LeakyReLU(inplace=True),
            nn.Conv3d(b, b, 3, 1, 1), nn.InstanceNorm3d(b, affine=True), nn.LeakyReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class UNet3d(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            [Block(1, sizes[0]), Block(sizes[0], sizes[1], 2), Block(sizes[1], sizes[2], 2)]
        )
        self.lift = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, 2) for a, b in pairwise(sizes))
        self.up = nn.ModuleList(Block(2 * a, a) for a in sizes[:-1])
        self.last = nn.Conv3d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
        for lift, block, skip in zip(
            reversed(self.lift), reversed(self.up), reversed(kept[:-1]), strict=True
        ):
            x = block(torch.cat([lift(x), skip], 1))
        out: Tensor = self.last(x)
        return out


class Subject(NamedTuple):
    model: nn.Module
    inputs: Any
    loss: Callable[[Any], Tensor]


def _mean_square(out: Tensor) -> Tensor:
    return out.float().square().mean()


def _images(model: nn.Module, *shape: int) -> Subject:
    x = torch.randn(shape).to(memory_format=torch.channels_last)
    return Subject(in_layout(model, torch.channels_last), x, _mean_square)


def subject(name: str) -> Subject:
    import_torchvision()
    torch.manual_seed(0)
    if name == "unet3d":
        return Subject(UNet3d(), torch.randn(2, 1, 32, 48, 48), _mean_square)
    if name.startswith("llama"):
        from benchmarks.lean_transformers import LARGE, MODELS, SMALL

        sizes = LARGE if name.startswith("llama_large") else SMALL._replace(tokens=(4, 256))
        model, inputs, _ = MODELS["llama"](sizes)
        return Subject(model, inputs, lambda out: out.loss)
    import timm

    made: dict[str, Callable[[], Subject]] = {
        "resnet18": lambda: _images(timm.create_model(name, num_classes=10), 8, 3, 160, 160),
        "resnet50": lambda: _images(timm.create_model(name, num_classes=10), 8, 3, 160, 160),
        "mobilenetv3_small_100": lambda: _images(timm.create_model(name, num_classes=10), 16, 3, 160, 160),
        "convnext_tiny": lambda: _images(timm.create_model(name, num_classes=10), 4, 3, 160, 160),
        "vit_tiny": lambda: _images(timm.create_model("vit_tiny_patch16_224", depth=6), 4, 3, 224, 224),
        "vit_small_patch16_224": lambda: _images(timm.create_model(name, num_classes=10), 4, 3, 224, 224),
    }
    return made[name]()


MODELS = (
    "resnet18", "resnet50", "mobilenetv3_small_100", "convnext_tiny", "vit_tiny", "unet3d", "llama bfloat16",
    "llama float32",
)  # fmt: skip
# Models of the README's first table, in its sizes; they are measured only by name
BY_NAME = ("vit_small_patch16_224", "llama_large bfloat16")


def checkpoint_blocks(model: nn.Module) -> None:
    """Put a checkpoint around every block, by the model's own switch if it has one."""
    if isinstance(model, UNet3d):
        for block in model.modules():
            if isinstance(block, Block):
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
        return
    switched: Any = model
    if hasattr(model, "set_grad_checkpointing"):
        switched.set_grad_checkpointing()
    else:
        switched.gradient_checkpointing_enable({"use_reentrant": False})


class Side:
    """One setting: a compiled model and its training step."""

    def __init__(self, name: str, setting: str, convert: bool) -> None:
        import leannorm

        model, self.inputs, self.loss = subject(name)
        self.model = model.to(getattr(torch, name.partition(" ")[2] or "float32")).train()
        if convert:
            leannorm.convert(self.model)
        if setting == "checkpoint":
            checkpoint_blocks(self.model)
        how = SETTINGS[setting]
        self.options = leannorm.compile_options(**how) if isinstance(how, dict) else None
        if isinstance(how, float):
            torch._functorch.config.activation_memory_budget = how
        torch._functorch.config.enable_autograd_cache = False  # a cached plan has no report
        self.compiled = torch.compile(self.model, options=self.options)

    def forward(self, model: Any = None) -> Tensor:
        run, inputs = model or self.compiled, self.inputs
        return self.loss(run(**inputs) if isinstance(inputs, dict) else run(inputs))

    def step(self, model: Any = None) -> None:
        self.model.zero_grad()
        self.forward(model).backward()

    def first(self) -> dict[str, Any]:
        """Compile, measure memory and compare gradients; steps are timed later."""
        from leannorm.report.memory import measure_step

        start = time.perf_counter()
        self.step()
        seconds = time.perf_counter() - start
        gradients = {"compiled": self._gradients()}
        state = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.step()
        self.model.zero_grad()
        memory = measure_step(self.forward)
        plans = [graph.plan for graph in self.options.report().graphs if graph.plan] if self.options else []
        self.step(self.model)
        gradients["eager"] = self._gradients()
        self.model.double()
        if isinstance(self.inputs, Tensor):
            self.inputs = self.inputs.double()
        self.step(self.model)
        exact = self._gradients()
        errors = {key: _error(found, exact) for key, found in gradients.items()}
        del gradients, exact
        self.model.load_state_dict(state)
        return {
            "held": memory.held,
            "peak": memory.peak,
            "first": seconds,
            "planned": [sum(p.point.held for p in plans), max((p.point.peak for p in plans), default=0)],
            "planned_stock": [
                sum(p.stock.held for p in plans),
                max((p.stock.peak for p in plans), default=0),
            ],
            "planned_overhead": sum(p.overhead for p in plans),
            "reasons": self.options.report().reasons if self.options else [],
            **errors,
        }

    def back(self, name: str) -> None:
        """Return to the dtype of the measurement."""
        self.model.to(getattr(torch, name.partition(" ")[2] or "float32"))
        if isinstance(self.inputs, Tensor):
            self.inputs = self.inputs.float()

    def _gradients(self) -> list[Tensor]:
        return [p.grad.detach().double() for p in self.model.parameters() if p.grad is not None]


def _error(found: list[Tensor], exact: list[Tensor]) -> float:
    largest = max(float(b.abs().max()) for b in exact)  # for gradients that are 0 up to rounding
    pairs = zip(found, exact, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-6 * largest)) for a, b in pairs)


def serve(pipe: Any, name: str, setting: str, convert: bool, threads: int) -> None:
    """Run in a process of its own: measure memory, then time one step per request."""
    from leannorm._freed_memory import keep_freed_memory

    torch.set_num_threads(threads)
    side = Side(name, setting, convert)
    found = side.first()
    keep_freed_memory()  # only now, since all processes exist at once: float64's memory is returned first
    side.back(name)
    side.step()
    pipe.send(found)
    while pipe.recv():
        start = time.perf_counter(), time.process_time()
        side.step()
        pipe.send((time.perf_counter() - start[0], time.process_time() - start[1]))


def measure(name: str, settings: list[str], convert: bool, steps: int, threads: int) -> list[dict[str, Any]]:
    context, sides, rows = multiprocessing.get_context("spawn"), {}, []
    for setting in settings:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, name, setting, convert, threads), daemon=True)
        process.start()
        theirs.close()
        found = ours.recv()
        sides[setting] = (ours, process)
        rows.append({"model": name, "convert": convert, "setting": setting, **found, "wall": [], "cpu": []})
    for _ in range(steps):
        for row, (ours, _) in zip(rows, sides.values(), strict=True):
            ours.send(True)
            wall, cpu = ours.recv()
            row["wall"].append(wall)
            row["cpu"].append(cpu)
    for ours, process in sides.values():
        ours.send(False)
        process.join()
    stock = rows[0]
    for row in rows:
        row["held_ratio"], row["peak_ratio"] = row["held"] / stock["held"], row["peak"] / stock["peak"]
        row["time"] = median(a / b for a, b in zip(row["wall"], stock["wall"], strict=True))
        row["cpu_time"] = median(a / b for a, b in zip(row["cpu"], stock["cpu"], strict=True))
    return rows


def line(row: dict[str, Any], stock: dict[str, Any]) -> str:
    planned = [a / b if b else 1 for a, b in zip(row["planned"], row["planned_stock"], strict=True)]
    return (
        f"{row['model']:22}{' converted' if row['convert'] else '':11}{record.shown(row['setting']):12}"
        f" {row['held_ratio']:5.2f} {row['peak_ratio']:5.2f} {row['time']:6.3f} {row['cpu_time']:6.3f}"
        f"   {planned[0]:5.2f} {planned[1]:5.2f} {1 + row['planned_overhead']:6.3f}"
        f"   {row['compiled']:.0e} baseline {stock['compiled']:.0e} eager {row['eager']:.0e}"
        f"   {row['first']:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models",
        nargs="*",
        choices=[*MODELS, *BY_NAME, []],
        metavar="MODEL",
        help="default: all except those of the README's first table",
    )
    parser.add_argument(
        "--settings", nargs="*", choices=list(SETTINGS), metavar="SETTING", default=list(SETTINGS)
    )
    parser.add_argument("--convert", action="store_true")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    settings = ["stock", *(s for s in options.settings if s != "stock")]
    print(f"torch {torch.__version__}, {options.threads} threads")
    print(f"{'':46}  kept  peak   time    cpu   planned: kept peak time   gradient errors   first step")
    for name in options.models or MODELS:
        rows = measure(name, settings, options.convert, options.steps, options.threads)
        for row in rows:
            print(line(row, rows[0]), flush=True)
        short = [{k: v for k, v in row.items() if k not in ("wall", "cpu")} for row in rows]
        record.write(options.json, short, "model", "convert", "setting")


if __name__ == "__main__":
    main()
