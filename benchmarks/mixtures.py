"""`lean()` on small mixtures of experts of transformers: kept activations, peak memory and step time.

    python -m benchmarks.mixtures [FAMILY ...] [--experts grouped_mm|eager|batched_mm] [--dtype bfloat16]
                                  [--scale 4] [--json FILE]
    python -m benchmarks.mixtures --families

All numbers are relative to plain PyTorch. Each model is trained with the settings of `lean()` and with a
checkpoint around every block, alternating, and gradients are compared. `--families` lists the families of the
installed transformers that have experts, and which of them are not in this benchmark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import held
from benchmarks.architectures import import_torchvision

_RANKS = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32}
_LATENT = _RANKS | {"v_head_dim": 32, "head_dim": 16, "n_group": 2, "topk_group": 1, "num_hidden_layers": 3}
_GROUPS = {"n_group": 1, "topk_group": 1, "num_hidden_layers": 3, "first_k_dense_replace": 1}
_INDEXER = {"first_k_dense_replace": 1, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {},
    "Mixtral": {},
    "Olmoe": {},
    "FlexOlmo": {},
    "Qwen2Moe": {"shared_expert_intermediate_size": 64},
    "GraniteMoe": {},
    "GraniteMoeShared": {"shared_intermediate_size": 64},
    "GraniteMoeHybrid": {"layer_types": ["attention"] * 2, "shared_intermediate_size": 64},
    "Phimoe": {},
    "JetMoe": {},
    "MiniMaxM2": {},
    "SolarOpen": {},
    "ExaoneMoe": {},
    "Glm4Moe": _GROUPS,
    "Ernie4_5_Moe": {"moe_num_experts": 8, "moe_k": 4},
    "HunYuanMoEV1": {"moe_topk": 4},
    "Afmoe": {},
    "Lfm2Moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 0},
    "DeepseekV2": _LATENT | {"topk_method": "greedy"},
    "DeepseekV3": _LATENT | {"first_k_dense_replace": 1},
    "Glm4MoeLite": _LATENT,
    "GptOss": {},
    "Jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
    },
    "MiniMax": {"layer_types": ["full_attention", "linear_attention"]},
    "Qwen3Next": {
        "layer_types": ["full_attention", "linear_attention"],
        "shared_expert_intermediate_size": 64,
    },
    "AriaText": {},
    "AXK1": _LATENT | {"first_k_dense_replace": 1},
    "AXK2": {},
    "BailingHybrid": _GROUPS | {"layer_types": ["full_attention"] * 3},
    "Cohere2Moe": {},
    "DeepseekV32": _LATENT | _INDEXER,
    "DeepseekV4": {},
    "Dots1": _GROUPS | {"n_shared_experts": 1, "max_window_layers": 3},
    "Flint": {"num_hidden_layers": 3, "mlp_layer_types": ["sparse"] * 3},
    "Gemma4Text": {
        "enable_moe_block": True,
        "top_k_experts": 4,
        "vocab_size_per_layer_input": 160,
        "hidden_size_per_layer_input": 16,
        "layer_types": ["full_attention"] * 2,
    },
    "GlmMoeDsa": _LATENT | _INDEXER,
    "GraniteMoeSWA": {},
    "HYV3": {},
    "HYV4": {},
    "InklingText": {},
    "Inkling2Text": {},
    "KimiLinear": {},
    "Kolibri1": {},
    "Laguna": {},
    "Llama4Text": {},
    "LongcatFlash": _RANKS
    | {
        "v_head_dim": 32,
        "num_layers": 2,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 4,
        "zero_expert_num": 2,
    },
    "Mellum": {},
    "MiMoV2Flash": {
        "n_group": 1,
        "topk_group": 1,
        "v_head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "layer_types": ["full_attention"] * 2,
    },
    "MiniMaxM3VLText": {},
    "NemotronH": {},
    "Qwen3_5MoeText": {},
    "Qwen4ExpText": {},
}


def mixture(family: str, experts: str, scale: int = 1) -> nn.Module:
    """A small model of the family, of width 64 · scale; `experts` names the implementation to use."""
    import_torchvision()
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "vocab_size": 160}
    sizes = {name: size * scale for name, size in {**sizes, "head_dim": 16}.items()}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "use_cache": False}
    sizes |= {"num_experts_per_tok": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes | FAMILIES[family])
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    try:
        model.set_experts_implementation(experts)  # type: ignore[operator]
    except ValueError:
        if experts != "eager":  # the model has only one implementation
            raise
    return model.train()


def measure(family: str, experts: str, dtype: str, scale: int) -> Iterator[held.Row]:
    """Yield the rows of one family."""
    model = mixture(family, experts, scale).to(getattr(torch, dtype))
    tokens = torch.randint(3, 160, (2, 128 * scale))

    def loss() -> Tensor:
        torch.manual_seed(1)  # some routers add noise
        found: Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    of = {"family": family, "experts": experts, "dtype": dtype, "scale": scale}
    blocks: list[nn.Module] = list(model.model.layers)  # type: ignore[union-attr, arg-type]
    for row in held.rows(model, loss, blocks, turns=7):
        yield {**of, **row}


def measured(families: Iterable[str], *how: Any) -> Iterator[held.Row]:
    for family in families:
        try:
            yield from measure(family, *how)
        except Exception as error:
            print(f"{family:16} {type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}")


def tell_families() -> None:
    """Print how many families have experts, and which are not listed, with or without a language model."""
    import_torchvision()
    import transformers

    listed = {getattr(transformers, f"{family}Config").__module__.split(".")[2] for family in FAMILIES}
    rest: dict[bool, list[str]] = {True: [], False: []}
    count = 0
    for name in sorted(module.name for module in iter_modules(transformers.models.__path__)):
        try:
            module = import_module(f"transformers.models.{name}.modeling_{name}")
        except ImportError:
            continue
        own = [
            key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        ]
        if any(key.endswith("Experts") for key in own):
            count += 1
            if name not in listed:
                rest[any(key.endswith("ForCausalLM") for key in own)].append(name)
    print(
        f"{count} families of transformers {transformers.__version__} have experts, "
        f"and {len(listed)} are listed here"
    )
    print(len(rest[True]), "are not listed and have a causal language model:", *rest[True])
    print(len(rest[False]), "are not listed and have none:", *rest[False])


def main() -> None:
    parser = held.parser_of(__doc__, FAMILIES, "FAMILY")
    parser.add_argument("--experts", default="grouped_mm", choices=["grouped_mm", "eager", "batched_mm"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--scale", type=int, default=1, help="multiplies widths and tokens")
    parser.add_argument("--families", action="store_true", help="list the families that have experts")
    options = held.parsed(parser)
    if options.families:
        return tell_families()
    found = measured(options.names or FAMILIES, options.experts, options.dtype, options.scale)
    held.tell(options, found, "family", "experts", "dtype", "scale", "setting")


if __name__ == "__main__":
    main()
