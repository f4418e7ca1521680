"""`convert` on diffusers' transformers and UNets, which `make conformance` installs and runs.

Each hand-written norm is compared with its original in float32 and bfloat16, output and gradients, and the
swap is undone. Then whole networks are.
"""

import copy
import importlib
import inspect
import pkgutil
import warnings

import pytest
import torch

from leannorm import convert

DEPTHS = ("num_layers", "num_single_layers", "num_refiner_layers", "depth", "n_layers", "num_blocks")
NEEDED = {  # by classes that have no default configuration
    "Transformer2DModel": {"in_channels": 32},
    "DreamLiteTransformer2DModel": {"in_channels": 32},
    "TransformerTemporalModel": {"in_channels": 32},
    "LuminaNextDiT2DModel": {"in_channels": 4, "num_kv_heads": 8},
    "LatteTransformer3DModel": {
        "in_channels": 4, "out_channels": 4, "sample_size": 16, "patch_size": 2, "caption_channels": 24,
    },
    "HunyuanDiT2DModel": {"in_channels": 4, "sample_size": 16, "patch_size": 2},
    "EasyAnimateTransformer3DModel": {"in_channels": 16, "out_channels": 16, "patch_size": 2},
    "HiDreamImageTransformer2DModel": {
        "patch_size": 2, "caption_channels": (24, 24), "llama_layers": (0, 1), "num_single_layers": 2,
    },
    "OmniGenTransformer2DModel": {"rope_scaling": {"short_factor": [1.0] * 48, "long_factor": [1.0] * 48}},
}  # fmt: skip
LEFT = {"GlobalResponseNorm"}  # ConvNeXt V2's, by the norm of whole channels: leannorm has no such form
SWAPPED: set[str] = set()
SEEN: set[str] = set()
BUILT: list[str] = []

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("ignore")]


def models():
    """diffusers' model classes among its transformers and UNets, by name."""
    import families  # noqa: F401 (it makes transformers importable, which diffusers imports)
    from diffusers.models.modeling_utils import ModelMixin

    found = {}
    for package in ("transformers", "unets"):
        within = importlib.import_module(f"diffusers.models.{package}")
        for info in pkgutil.iter_modules(within.__path__, f"{within.__name__}."):
            if "flax" in info.name:
                continue
            for name, cls in vars(importlib.import_module(info.name)).items():
                if inspect.isclass(cls) and issubclass(cls, ModelMixin) and cls.__module__ == info.name:
                    found[name] = cls
    return found


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("markexpr") == "conformance"
        metafunc.parametrize("name", sorted(models()) if wanted else ["all"])


def build(cls):
    """The network of its default sizes on the meta device, with few layers where it can have few."""
    given = inspect.signature(cls.__init__).parameters
    few = {k: 2 for k in DEPTHS if k in given and type(given[k].default) is int and given[k].default > 2}
    needed = NEEDED.get(cls.__name__, {})
    with torch.device("meta"):
        try:
            return cls(**{**few, **needed})
        except Exception:  # as many layers as another of its options says
            return cls(**needed)


def test_norms_are_swapped_for_the_same_and_back(name):
    import families

    model = build(models()[name])
    BUILT.append(name)
    swapped, left = families.converted(model)
    SWAPPED.update(swapped)
    SEEN.update(left)
    assert set(left) <= LEFT, left
    kinds = [type(m) for m in model.modules()]
    convert(model)
    convert(model, to="torch")
    assert [type(m) for m in model.modules()] == kinds


def test_most_classes_are_swapped():
    print(f"{len(BUILT)} networks, swapped {sorted(SWAPPED)}, left {sorted(SEEN)}")
    assert len(BUILT) == len(models()) >= 87
    assert len(SWAPPED) >= 8


def image(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
STEP = {"timestep": torch.tensor([7, 400])}
NETWORKS = {
    "DiTTransformer2DModel": (
        {**HEADS, "num_layers": 2, "in_channels": 4, "sample_size": 8, "norm_num_groups": 4},
        {"hidden_states": image(2, 4, 8, 8), **STEP, "class_labels": torch.tensor([1, 2])},
    ),
    "SD3Transformer2DModel": (
        {**HEADS, "num_layers": 2, "in_channels": 4, "sample_size": 8, "joint_attention_dim": 24,
         "caption_projection_dim": 32, "pooled_projection_dim": 12, "pos_embed_max_size": 16,
         "out_channels": 4, "qk_norm": "rms_norm", "dual_attention_layers": (0,)},
        {"hidden_states": image(2, 4, 8, 8), **STEP, "encoder_hidden_states": image(2, 5, 24),
         "pooled_projections": image(2, 12)},
    ),
    "FluxTransformer2DModel": (
        {**HEADS, "num_layers": 2, "num_single_layers": 2, "in_channels": 4, "joint_attention_dim": 24,
         "pooled_projection_dim": 12, "axes_dims_rope": (4, 4, 8)},
        {"hidden_states": image(2, 16, 4), "timestep": torch.tensor([0.7, 0.1]),
         "encoder_hidden_states": image(2, 5, 24), "pooled_projections": image(2, 12),
         "img_ids": image(16, 3), "txt_ids": image(5, 3)},
    ),
    "CogVideoXTransformer3DModel": (
        {**HEADS, "num_layers": 2, "in_channels": 4, "out_channels": 4, "text_embed_dim": 24,
         "time_embed_dim": 8, "sample_width": 8, "sample_height": 8, "sample_frames": 5,
         "max_text_seq_length": 5},
        {"hidden_states": image(2, 2, 4, 8, 8), **STEP, "encoder_hidden_states": image(2, 5, 24)},
    ),
    "WanTransformer3DModel": (
        {**HEADS, "num_layers": 2, "in_channels": 4, "out_channels": 4, "text_dim": 24, "freq_dim": 16,
         "ffn_dim": 48, "rope_max_seq_len": 32},
        {"hidden_states": image(2, 4, 2, 8, 8), **STEP, "encoder_hidden_states": image(2, 5, 24)},
    ),
    "SanaTransformer2DModel": (
        {**HEADS, "num_layers": 2, "in_channels": 4, "out_channels": 4, "sample_size": 8,
         "caption_channels": 24, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16,
         "cross_attention_dim": 32},
        {"hidden_states": image(2, 4, 8, 8), **STEP, "encoder_hidden_states": image(2, 5, 24)},
    ),
    "UNet2DConditionModel": (
        {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "cross_attention_dim": 24,
         "attention_head_dim": 4, "norm_num_groups": 4,
         "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        {"sample": image(2, 4, 8, 8), **STEP, "encoder_hidden_states": image(2, 5, 24)},
    ),
    "UNet2DModel, scale_shift": (
        {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4,
         "attention_head_dim": 4, "down_block_types": ("ResnetDownsampleBlock2D", "AttnDownBlock2D"),
         "up_block_types": ("AttnUpBlock2D", "ResnetUpsampleBlock2D"),
         "resnet_time_scale_shift": "scale_shift"},
        {"sample": image(2, 3, 8, 8), **STEP},
    ),
}  # fmt: skip


def step(model, given):
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in given.items()}
    y = model(**given, return_dict=False)[0]
    y.square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("network", NETWORKS)
def test_a_whole_network_computes_the_same_and_back_to_the_bit(network):
    torch.manual_seed(0)
    options, given = NETWORKS[network]
    model = models()[network.split(",")[0]](**options).eval()  # in training DiT drops labels at random
    with torch.no_grad():
        for p in model.parameters():  # nothing is zero: modulations are, at first
            p.add_(0.05 * torch.randn(p.shape))
    want, kinds = step(model, given), [type(m) for m in model.modules()]
    exact = step(copy.deepcopy(model).double(), given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(model)
    got = step(model, given)
    assert len(got) == len(want) == len(exact)
    total = [sum((r - e).square().sum() for r, e in zip(run, exact, strict=True)) for run in (got, want)]
    assert total[0] <= 4 * total[1]
    convert(model, to="torch")
    assert [type(m) for m in model.modules()] == kinds
    assert all(torch.equal(a, b) for a, b in zip(step(model, given), want, strict=True))
