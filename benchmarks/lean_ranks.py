"""`lean()` on two gloo ranks: kept activations under tensor parallelism and FSDP2, and the time of a step.

    python -m benchmarks.lean_ranks [MODEL ...] [--turns 8] [--json FILE]

Each row is a model, the way it is sharded, and a setting. It has the bytes that rank 0 keeps, relative to the
baseline's on that rank, and the median ratio of step times; the settings alternate. Gradients are compared
with the baseline's bit for bit. Rows of "one rank" are the same models without sharding.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from benchmarks import held
from benchmarks.architectures import import_torchvision
from leannorm.saving import lean
from leannorm.saving.small import NEVER_SMALL

WORDS, BATCH = 512, (8, 64)
SETTINGS: tuple[Literal["norm", "conv"] | None, ...] = None, "norm", "conv"


def _llama() -> nn.Module:
    import_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, use_cache=False, **sizes, **heads))
    return model


class _Across(nn.Module):
    """Mixes tokens with an MLP across them."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(tokens, 4 * tokens), nn.GELU(), nn.Linear(4 * tokens, tokens)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x.transpose(1, 2)))).transpose(1, 2)
        return y


class _Mixer(nn.Module):
    def __init__(self, width: int = 128, tokens: int = 64) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(6))
        inner = [_Across(tokens), nn.Sequential(nn.Linear(width, 512), nn.GELU(), nn.Linear(512, width))]
        self.mixers = nn.ModuleList(m for _ in range(3) for m in _copies(inner))

    def forward(self, x: Tensor) -> Tensor:
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return x


def _copies(modules: list[nn.Module]) -> list[nn.Module]:
    from copy import deepcopy

    return [deepcopy(m) for m in modules]


def _cut_mixer(model: nn.Module, mesh: Any, plan: str) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    by = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    by |= {f"{i}.0": ColwiseParallel() for i in (1, 3, 5)} | {f"{i}.2": RowwiseParallel() for i in (1, 3, 5)}
    parallelize_module(model.mixers, mesh, by)  # type: ignore[arg-type]


def _cut_llama(model: Any, mesh: Any, plan: str) -> None:
    """Shard weights by columns and rows; with "sequence" also norms, with "loss" also the loss."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    along, whole, part = plan != "columns", Replicate(), Shard(1)
    by: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    by |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    back: dict[str, Any] = {"output_layouts": part, "use_local_output": False} if along else {}
    by |= {name: RowwiseParallel(**back) for name in ("self_attn.o_proj", "mlp.down_proj")}
    top: dict[str, Any] = {"lm_head": ColwiseParallel(output_layouts=whole)}
    if along:
        named: dict[str, Any] = {"input_kwarg_layouts": {"hidden_states": part}}
        named["desired_input_kwarg_layouts"] = {"hidden_states": whole}
        by |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
        by["self_attn"] = PrepareModuleInput(**named)
        by["mlp"] = PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,))
        out = Shard(-1) if plan == "loss" else whole
        top = {
            "model.embed_tokens": RowwiseParallel(input_layouts=whole, **back),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(
                input_layouts=part, output_layouts=out, use_local_output=plan != "loss"
            ),
        }
    parallelize_module(model, mesh, top)
    for layer in model.model.layers:
        parallelize_module(layer, mesh, by)


def _units(model: Any, mesh: Any, plan: str) -> None:
    from torch.distributed.fsdp import fully_shard

    kinds = (nn.Linear, nn.LayerNorm)
    single = [m for m in model.modules() if isinstance(m, kinds) or type(m).__name__ == "LlamaRMSNorm"]
    for unit in model.model.layers if plan == "blocks" else single:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)


_Cut = Callable[[Any, Any, str], None]
ROWS: list[tuple[str, str, Callable[[], nn.Module], _Cut | None]] = [
    ("Llama", "one rank", _llama, None),
    ("Llama", "columns", _llama, _cut_llama),
    ("Llama", "sequence", _llama, _cut_llama),
    ("Llama", "loss", _llama, _cut_llama),
    ("Llama", "blocks", _llama, _units),
    ("Llama", "layers", _llama, _units),
    ("mixer", "one rank", _Mixer, None),
    ("mixer", "columns", _Mixer, _cut_mixer),
]


def _loss(model: nn.Module, plan: str, seed: int, mesh: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, _Mixer):
        out: Tensor = model(torch.randn(32, 64, 128, generator=generator))
        return out.square().mean()
    words = torch.randint(0, WORDS, BATCH, generator=generator)
    scores = model(input_ids=words, position_ids=torch.arange(BATCH[1])[None]).logits.flatten(0, 1)
    target = words.flatten()
    if plan == "loss":
        target = DTensor.from_local(target, mesh, [Replicate()])
    return F.cross_entropy(scores, target)


def _row(row: int, mesh: Any, turns: int) -> list[held.Row]:
    """The rows of a sharded model, one for each setting."""
    from torch.distributed.tensor.parallel import loss_parallel

    name, plan, make, cut = ROWS[row]
    torch.manual_seed(0)
    model = make()
    if cut is not None:
        cut(model, mesh, plan)
    gradients: dict[Any, list[Tensor]] = {}
    times: dict[Any, list[float]] = {}
    bytes_of = {}
    for _ in range(turns):
        for setting in SETTINGS:
            saved: Any = nullcontext() if setting is None else lean(setting)
            if setting is not None:
                saved.place = NEVER_SMALL
            model.zero_grad()
            start = perf_counter()
            with loss_parallel() if plan == "loss" else nullcontext():
                with saved:
                    loss = _loss(model, plan, 1, mesh)
                loss.backward()
            times.setdefault(setting, []).append(perf_counter() - start)
            found = [p.grad for p in model.parameters() if p.grad is not None]
            gradients[setting] = [getattr(g, "_local_tensor", g).clone() for g in found]
            if setting is not None:
                bytes_of[setting] = saved.kept_bytes, saved.kept_bytes + saved.rebuilt_bytes
    rows = []
    for setting, (kept, stock) in bytes_of.items():
        pairs = zip(times[setting][2:], times[None][2:], strict=True)
        same = all(map(torch.equal, gradients[setting], gradients[None]))
        ratio = round(median(ours / theirs for ours, theirs in pairs), 3)
        shares = {"held": round(kept / stock, 4), "stock_mb": round(stock / 1e6, 1), "time": ratio}
        rows.append({"model": name, "cut": plan, "setting": setting, **shares, "equal": same})
    return rows


def _work(rank: int, file: str, models: list[str], turns: int, end: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for row, (model, *_) in enumerate(ROWS):
        if model in models:
            found = _row(row, mesh, turns)
            if rank == 0:
                end.put(found)
    if rank == 0:
        end.put(None)
    dist.barrier()
    dist.destroy_process_group()


def _measured(models: list[str], turns: int) -> Iterator[held.Row]:
    with tempfile.TemporaryDirectory() as folder:
        end = mp.get_context("spawn").SimpleQueue()
        arguments = str(Path(folder) / "store"), models, turns, end
        started = spawn(_work, args=arguments, nprocs=2, join=False)
        while True:
            while end.empty():
                if started.join(0.1):  # raises the exception of a rank
                    break
            if end.empty() or (rows := end.get()) is None:
                break
            yield from rows
        while not started.join():
            pass


def main() -> None:
    names = list(dict.fromkeys(model for model, *_ in ROWS))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*names, []], metavar="MODEL")
    parser.add_argument("--turns", type=int, default=8, help="steps per setting; the first two do not count")
    held.add_json(parser)
    options = parser.parse_args()
    found = _measured(options.models or names, options.turns)
    held.tell(options, found, "model", "cut", "setting")


if __name__ == "__main__":
    main()
