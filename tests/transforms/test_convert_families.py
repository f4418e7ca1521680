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
IMAGES = ["detr", "conditional_detr", "convnext", "convnextv2", "vitdet", "poolformer"]
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
