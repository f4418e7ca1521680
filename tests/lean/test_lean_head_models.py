"""Language models of transformers under `lean(head=True)`: as near to float64 as without it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.architectures import import_torchvision
from benchmarks.head import _family
from benchmarks.head_families import FAMILIES
from leannorm.head.logits import Logits
from leannorm.saving import lean

import_torchvision()
pytest.importorskip("transformers", reason="the models come from transformers, which is not installed")
SAMPLE = ["Llama", "Qwen3", "Gemma2", "GPT2", "Cohere", "Bert", "MT5"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        whole = metafunc.config.getoption("markexpr") == "conformance"
        marks = [pytest.mark.conformance] if whole else []
        metafunc.parametrize(
            "family", [pytest.param(name, marks=marks) for name in (FAMILIES if whole else SAMPLE)]
        )


@pytest.mark.filterwarnings("ignore")  # the models' own
def test_three_steps_are_as_near_to_float64_as_torchs(family: str) -> None:
    row = _family(family, 3)
    assert row["gradients, ours"] <= 1.25 * row["gradients, plain"]
    assert row["loss, ours"] <= 2 * row["loss, plain"] + 1e-7
    assert row["computed"] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_holds_and_makes_no_logits(dtype):
    from transformers import LlamaConfig, LlamaForCausalLM

    from leannorm.report.memory import measure_step

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 20_000}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False, tie_word_embeddings=True)).to(
        dtype
    )
    tokens = torch.randint(20_000, (4, 256))
    found = []

    def step(**settings):
        with lean("conv", **settings):
            out = model(input_ids=tokens, labels=tokens)
        found.append(out)
        return out.loss

    for _ in range(2):
        step(head=True).backward()
    peak = measure_step(lambda: step(head=True)).peak
    logits = tokens.numel() * 20_000 * dtype.itemsize
    assert peak < 0.9 * logits
    assert measure_step(step).peak > 2 * logits
    assert isinstance(found[0].logits, Logits)
    assert not found[0].logits.computed
