"""`lean()` and checkpoints on blocks of language, vision and diffusion models, in float32 and bfloat16.

    python -m benchmarks.lean_transformers [MODEL ...] [--dtype bfloat16] [--selective] [--compile]

For each setting it reports whether gradients equal the baseline's bit for bit; the bytes kept for backward
and the peak of a step, above the memory of weights and their gradients; and the time of a step. All are
relative to plain PyTorch. The settings alternate in one process that keeps freed memory, and the time is a
median of ratios. `--selective` adds checkpoints that save matrix products. `--compile` adds torch.compile
with half of its activation budget, which computes other bits. `--large` takes language models as wide as a
small published one. Results go to a file of `benchmarks/results/`, or to `--json`. Rows that were not
measured again stay in the file, and `make pages` fills the pages and draws the plots from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import leannorm
from benchmarks import record
from benchmarks.architectures import import_torchvision
from benchmarks.gpu.blocks import Attention, Residual
from benchmarks.lean import settle
from leannorm.report.memory import measure_step
from leannorm.saving import lean

import_torchvision()


class Sizes(NamedTuple):
    """The widths of a language model, and its batch."""

    hidden_size: int
    intermediate_size: int
    heads: int
    vocab_size: int
    tokens: tuple[int, int]


SMALL, LARGE = Sizes(384, 1056, 6, 4000, (2, 160)), Sizes(1024, 2816, 16, 32000, (2, 256))
RESULTS = record.FOLDER / "lean_transformers_cpu.json"
LARGE_RESULTS = RESULTS.with_name("lean_transformers_large_cpu.json")


def _language(
    sizes: Sizes, family: str, **settings: Any
) -> tuple[nn.Module, dict[str, Tensor], list[nn.Module]]:
    import transformers

    config = getattr(transformers, f"{family}Config")(
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=4,
        vocab_size=sizes.vocab_size,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        use_cache=False,
        **settings,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    tokens = torch.randint(0, sizes.vocab_size, sizes.tokens)
    return model, {"input_ids": tokens, "labels": tokens}, list(model.model.layers)


def _timm(name: str, shape: tuple[int, ...], **settings: Any) -> tuple[nn.Module, Any, list[nn.Module]]:
    import timm

    model = timm.create_model(name, **settings)
    return model, torch.randn(shape), list(model.blocks)


class UNet(nn.Module):
    """Two resolutions of a diffusion model: GroupNorm, SiLU, convolution, attention at the bottom."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.up = nn.Conv2d(2 * width, width, 1)
        fine, coarse = (Residual(width), Residual(width)), (Residual(2 * width), Residual(2 * width))
        self.parts = nn.ModuleList([fine[0], coarse[0], Attention(2 * width), coarse[1], fine[1]])

    def forward(self, x: Tensor) -> Tensor:
        a, b, attention, c, d = self.parts
        fine = a(self.first(x))
        coarse = c(attention(b(self.down(fine))))
        return self.last(d(fine + nn.functional.interpolate(self.up(coarse), scale_factor=2.0)))


def _unet() -> tuple[nn.Module, Any, list[nn.Module]]:
    model = UNet()
    return model, torch.randn(2, 4, 48, 48), list(model.parts)


class DiT(nn.Module):
    """Blocks of a diffusion transformer: norms without parameters, shifted and scaled by a condition."""

    def __init__(self, width: int = 384, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Modulated(width) for _ in range(blocks))
        self.first, self.condition = nn.Linear(16, width), nn.Parameter(torch.randn(1, width))
        self.last = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        y, condition = self.first(x), self.condition.expand(len(x), -1)
        for block in self.blocks:
            y = block(y, condition)
        out: Tensor = self.last(y)
        return out


class _Modulated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(condition).unsqueeze(1).chunk(6, -1)
        shift, scale, gate, shift2, scale2, gate2 = parts
        n, tokens, width = x.shape
        y = self.first(x) * (1 + scale) + shift
        q, k, v = self.qkv(y).view(n, tokens, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + gate * self.out(y.transpose(1, 2).reshape(n, tokens, width))
        return x + gate2 * self.mlp(self.second(x) * (1 + scale2) + shift2)


def _dit() -> tuple[nn.Module, Any, list[nn.Module]]:
    model = DiT()
    return model, torch.randn(2, 160, 16), list(model.blocks)


MODELS: dict[str, Callable[[Sizes], tuple[nn.Module, Any, list[nn.Module]]]] = {
    "llama": lambda sizes: _language(sizes, "Llama"),
    "qwen3": lambda sizes: _language(sizes, "Qwen3", head_dim=64),
    "gemma2": lambda sizes: _language(sizes, "Gemma2", head_dim=64, sliding_window=512),
    "olmo2": lambda sizes: _language(sizes, "Olmo2"),
    "vit_base": lambda _: _timm("vit_base_patch16_224", (2, 3, 224, 224), depth=2),
    "dit": lambda _: _dit(),
    "unet": lambda _: _unet(),
}


@contextmanager
def checkpointed(blocks: list[nn.Module], every: int, **settings: Any) -> Iterator[None]:
    """Each block (or every second one) recomputes its forward pass in the backward pass."""
    settings["use_reentrant"] = False
    for block in blocks[::every]:
        forward = block.forward
        block.forward = lambda *a, _f=forward, **k: checkpoint(_f, *a, **settings, **k)
    try:
        yield
    finally:
        for block in blocks[::every]:
            del block.forward


def _saves_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    aten = torch.ops.aten
    saved = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution}
    saved.add(aten._scaled_dot_product_flash_attention_for_cpu)
    must = operator.overloadpacket in saved
    return CheckpointPolicy.MUST_SAVE if must else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def compiled(model: nn.Module) -> Iterator[None]:
    """Compile the model with half of torch's activation memory budget."""
    import torch._functorch.config as functorch

    before, functorch.activation_memory_budget = functorch.activation_memory_budget, 0.5
    try:
        model.compile()
        yield
    finally:
        model._compiled_call_impl = None
        functorch.activation_memory_budget = before


Context = Callable[[], AbstractContextManager[Any]]


def settings_for(
    model: nn.Module, blocks: list[nn.Module], selective: bool = False, compiling: bool = False
) -> dict[str, Context]:
    """The settings to measure, the baseline first."""
    more: dict[str, Context] = {}
    if selective:
        contexts = partial(create_selective_checkpoint_contexts, _saves_products)
        more["checkpoint, selective"] = lambda: checkpointed(blocks, 1, context_fn=contexts)
    if compiling:
        more["torch.compile, budget .5"] = lambda: compiled(model)
    return {
        "stock": nullcontext,
        "lean()": lean,
        'lean("norm")': lambda: lean("norm"),
        'lean("conv")': lambda: lean("conv"),
        "lean(overhead=.05)": lambda: lean(overhead=0.05),
        "lean(overhead=.15)": lambda: lean(overhead=0.15),
        "lean(budget=.25)": lambda: lean(budget=0.25),
        "lean(budget=.15)": lambda: lean(budget=0.15),
        "checkpoint, every block": lambda: checkpointed(blocks, 1),
        "checkpoint, every second": lambda: checkpointed(blocks, 2),
        **more,
    }


def same_gradients(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> bool:
    """Whether the gradients are equal bit for bit, and the same ones are missing."""
    pairs = zip(ours, theirs, strict=True)
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def measure(
    name: str,
    dtype: torch.dtype,
    steps: int,
    sizes: Sizes = SMALL,
    selective: bool = False,
    compiling: bool = False,
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs, blocks = MODELS[name](sizes)
    model.to(dtype).train()
    if isinstance(inputs, Tensor):
        inputs = inputs.to(dtype)

    others = tree_map_only(Tensor, lambda t: t.flip(0), inputs)

    latest: list[Any] = [None]

    def forward(context: Context, given: Any = inputs) -> Tensor:
        with context() as latest[0]:
            if isinstance(given, Tensor):
                return model(given).float().square().mean()
            loss: Tensor = model(**given).loss
            return loss

    def step(context: Context, given: Any = inputs) -> list[Tensor | None]:
        model.zero_grad()
        forward(context, given).backward()
        return [p.grad for p in model.parameters()]

    rows: list[dict[str, Any]] = []
    stock, contexts = list[Tensor | None](), settings_for(model, blocks, selective, compiling)
    for setting, context in contexts.items():
        for given in (others, *[inputs] * 6):  # rebuilds are verified on two inputs, and plans corrected
            found = step(context, given)
        if "overhead" in setting:

            def followed(context: Context = context) -> Any:
                step(context)
                return latest[0]

            settle(followed)
        stock = stock or found
        equal = same_gradients(found, stock)
        del found
        model.zero_grad(set_to_none=False)  # gradients of weights are allocated before the step
        kept, peak, _, _ = measure_step(partial(forward, context))
        rows.append({"model": name, "dtype": str(dtype)[6:], "setting": setting, "equal": equal,
                     "kept": kept, "peak": peak, "seconds": [], "ratio": 1.0})  # fmt: skip
    for _ in range(steps):
        for row, context in zip(rows, contexts.values(), strict=True):
            start = perf_counter()
            step(context)
            row["seconds"].append(perf_counter() - start)
    for row in rows:
        row["ratio"] = median(a / b for a, b in zip(row["seconds"], rows[0]["seconds"], strict=True))
        row["kept_ratio"], row["peak_ratio"] = row["kept"] / rows[0]["kept"], row["peak"] / rows[0]["peak"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", choices=[*MODELS, []], metavar="MODEL", help="default: all of them"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: both")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="language models of width 1,024, 2×256 tokens")
    parser.add_argument("--selective", action="store_true", help="add checkpoints that save products")
    parser.add_argument("--compile", action="store_true", help="add torch.compile with half a budget")
    parser.add_argument("--json", type=Path, help="default: a file of benchmarks/results")
    options = parser.parse_args()
    sizes = LARGE if options.large else SMALL
    leannorm.keep_freed_memory()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    rows = []
    dtypes = [options.dtype] if options.dtype else ["bfloat16", "float32"]
    for name, dtype in product(options.models or MODELS, dtypes):
        for row in measure(
            name, getattr(torch, dtype), options.steps, sizes, options.selective, options.compile
        ):
            rows.append(row)
            print(
                f"{row['model']:9} {row['dtype']:8} {record.shown(row['setting']):25} "
                f"kept {row['kept_ratio']:.2f}  peak {row['peak_ratio']:.2f}  time {row['ratio']:.2f}"
                f"{'' if row['equal'] else '  GRADIENTS DIFFER'}",
                flush=True,
            )
    results = options.json or (LARGE_RESULTS if options.large else RESULTS)
    record.write(results, rows, "model", "dtype", "setting")


if __name__ == "__main__":
    main()
