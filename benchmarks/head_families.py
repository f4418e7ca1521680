"""Small models of transformers with a language model's loss, each built with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "use_cache": False,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = [
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Gemma",
    "Gemma2",
    "Gemma3Text",
    "Phi",
    "Phi3",
    "GPTNeoX",
    "GPT2",
    "GPTBigCode",
    "Bloom",
    "OPT",
    "StableLm",
    "Starcoder2",
    "Olmo",
    "Olmo2",
    "Olmo3",
    "Cohere",
    "Cohere2",
    "Granite",
    "Glm",
    "Glm4",
    "Helium",
    "Persimmon",
    "Nemotron",
    "SmolLM3",
    "Mamba",
    "Mixtral",
    "Olmoe",
    "GraniteMoe",
    "XGLM",
    "BioGpt",
    "Exaone4",
    "Ernie4_5",
    "HunYuanDenseV1",
    "Arcee",
    "Apertus",
    "Bart",
    "MT5",
    "Pegasus",
    "MBart",
    "Marian",
    "Bert",
    "Roberta",
    "Electra",
    "DistilBert",
    "Albert",
    "SeedOss",
    "Lfm2",
    "Rwkv",
    "RecurrentGemma",
    "FalconH1",
    "FalconMamba",
    "Jamba",
    "Doge",
    "DiffLlama",
    "Ministral",
    "NanoChat",
    "VaultGemma",
    "Jais2",
    "CTRL",
    "OpenAIGPT",
]
_OTHERS = {"GPT2": "GPT2LMHeadModel", "Bert": "BertLMHeadModel", "MT5": "MT5ForConditionalGeneration"}
_OTHERS |= {"DistilBert": "DistilBertForMaskedLM", "Albert": "AlbertForMaskedLM", "CTRL": "CTRLLMHeadModel"}
_OTHERS |= {"OpenAIGPT": "OpenAIGPTLMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


def build(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and a batch for it; some of the labels are ignored."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES)
    config._experts_implementation = "eager"
    model = getattr(transformers, _OTHERS.get(family, f"{family}ForCausalLM"))(config)
    tokens = torch.randint(3, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :6] = -100
    return model, {"input_ids": tokens, "labels": labels}
