"""`convert` on the norms of transformers' families: a sample on every run, all with `make conformance`.

Each hand-written class is compared with its original in float32 and bfloat16, output and gradients, and the
swap is undone. What is left must be in the list of what leannorm does not have.
"""

from importlib.util import find_spec

import pytest

needs = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")

LANGUAGE = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "t5", "mt5", "phi3"]
LANGUAGE += ["olmo", "olmo2", "gpt_oss", "granite", "cohere", "cohere2", "deberta", "imagegpt", "starcoder2"]
LANGUAGE += ["stablelm", "glm", "glm4", "nanochat", "smollm3", "helium", "deepseek_v3", "squeezebert"]
STATES = ["qwen3_next", "mamba", "mamba2", "bamba", "falcon_mamba", "jamba", "zamba2"]
IMAGES = ["detr", "convnext", "convnextv2", "vitdet", "poolformer"]
SAMPLE = [*LANGUAGE, *STATES, *IMAGES]
# classes that compute what no function of leannorm does
LEFT = {
    "Gemma3nAudioCumulativeGroupNorm",
    "HYV4UnweightedRMSNorm",
    "MuseSparkTextInputScaledRMSNorm",
    "ZayaQKNorm",
    "xLSTMMultiHeadLayerNorm",
}
SWAPPED: set[str] = set()
SEEN: set[str] = set()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        whole = metafunc.config.getoption("markexpr") == "conformance"
        if whole and find_spec("transformers") is not None:
            import families

            marked = [pytest.param(n, marks=[pytest.mark.conformance]) for n in families.names()]
            metafunc.parametrize("family", marked)
        else:
            metafunc.parametrize("family", SAMPLE)


@pytest.mark.sampled(of=4)
@needs
@pytest.mark.filterwarnings("ignore")
def test_norms_are_swapped_for_the_same_and_back(family):
    import families

    try:
        model = families.build(family)
    except Exception as error:  # a default configuration that its own network does not take
        if family in SAMPLE:
            raise
        pytest.skip(f"does not build: {str(error).splitlines()[0][:80] if str(error) else type(error)}")
    swapped, left = families.converted(model)
    assert set(left) <= LEFT, left
    SWAPPED.update(swapped)
    SEEN.update(left)


@needs
@pytest.mark.conformance
def test_most_classes_are_swapped():
    assert len(SWAPPED) >= 200
    assert len(SWAPPED) / len(SWAPPED | SEEN) >= 0.95


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
NETWORKS = {
    "Llama": {},
    "Qwen3": {},
    "Gemma2": {},
    "Olmo2": {},
    "Cohere": {},
    "Phi3": {},
}


def whole(family, dtype):
    """A random network with random norms, and its tokens."""
    import families  # noqa: F401 (it makes transformers importable)
    import torch
    import transformers

    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**SIZES, **HEADS, **special, **NETWORKS[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 0.3, 0.3)
    return model.to(dtype), torch.randint(3, 100, (2, 24))


def step(model, tokens):
    model.zero_grad()
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    return [out.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@needs
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("network", NETWORKS)
def test_a_whole_network_computes_the_same_and_back_to_the_bit(network):
    import torch

    from leannorm import convert

    model, tokens = whole(network, torch.float32)
    want, exact = step(model, tokens), step(whole(network, torch.float64)[0], tokens)
    kinds = [type(m) for m in model.modules()]
    got = step(convert(model), tokens)
    assert [type(m) for m in model.modules()] != kinds
    total = [sum((r - e).square().sum() for r, e in zip(run, exact, strict=True)) for run in (got, want)]
    assert total[0] <= 4 * total[1]
    convert(model, to="torch")
    assert [type(m) for m in model.modules()] == kinds
    assert all(torch.equal(a, b) for a, b in zip(step(model, tokens), want, strict=True))


@needs
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("recompute", "share"), [("norm", 1.0), ("conv", 1.0)])
def test_a_converted_llama_saves_less(recompute, share):
    """Under `lean()` both keep as much: each norm's input and one statistic a row."""
    import torch

    from leannorm import convert, lean

    saved, kept = {}, {}
    tokens = torch.randint(3, 100, (8, 96), generator=torch.Generator().manual_seed(0))  # no small pass
    for converted in (False, True):
        model, _ = whole("Llama", torch.bfloat16)
        if converted:
            convert(model)
        sizes = []

        def pack(tensor, sizes=sizes):
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(input_ids=tokens, labels=tokens)
        with lean(recompute) as record:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        saved[converted], kept[converted] = sum(sizes), record.kept_bytes
    assert saved[True] < 0.92 * saved[False]
    assert kept[True] <= share * kept[False]


TIMMS = ["LayerNormFp32", "LayerNorm2dFp32", "RmsNormFp32", "RmsNorm2dFp32"]
TIMMS_LEFT = ["SimpleNorm", "EvoNorm2dB0", "EvoNorm2dS0", "FilterResponseNormTlu2d", "FrozenBatchNormAct2d"]


@pytest.mark.skipif(find_spec("timm") is None, reason="needs timm")
@pytest.mark.parametrize("name", [*TIMMS, *TIMMS_LEFT])
def test_timms_own(name):
    import families
    import timm.layers
    import torch

    from leannorm import convert

    layer = getattr(timm.layers, name)(16)
    if name in TIMMS:
        for dtype in (torch.float32, torch.bfloat16):
            assert families.check(layer, dtype)
        assert type(convert(layer)).__module__.startswith("leannorm.")
    else:
        with pytest.warns(UserWarning, match=f"{name} is not known, it"):
            convert(layer)
