"""Twenty models of timm and transformers, as new and with statistics of the data that they are given.

One of them comes with a fault: in MobileNetV2 of transformers every norm has TensorFlow's momentum, 0.997.
"""

from __future__ import annotations

import copy
import warnings
from functools import cache

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.architectures import import_torchvision

IMAGES, TOKENS, SOUND = (3, 64, 64), "tokens", "sound"
TIMM = {
    "resnet18": {},
    "resnet26t": {},
    "mobilenetv3_small_050": {},
    "efficientnet_lite0": {},
    "regnetx_002": {},
    "repvgg_a0": {},
    "ghostnet_050": {},
    "edgenext_xx_small": {},
    "convnext_atto": {},
    "poolformer_s12": {},
    "levit_128s": {"img_size": 64},
    "vit_tiny_patch16_224": {"img_size": 64},
}
TRANSFORMERS = ("ResNet", "RegNet", "MobileNetV2", "Levit", "Bert", "Llama", "Bit", "Wav2Vec2")
NAMES = [*(f"timm:{name}" for name in TIMM), *(f"transformers:{name}" for name in TRANSFORMERS)]
SAMPLE = ["timm:mobilenetv3_small_050", "timm:convnext_atto", "transformers:ResNet", "transformers:Bert"]

_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
_SIZES = {
    "ResNet": {
        "embedding_size": 16,
        "hidden_sizes": [16, 32, 32],
        "depths": [2, 2, 2],
        "layer_type": "basic",
    },
    "RegNet": {
        "embedding_size": 16,
        "hidden_sizes": [16, 32, 32, 64],
        "depths": [2, 2, 2, 1],
        "groups_width": 8,
    },
    "MobileNetV2": {"depth_multiplier": 0.35},
    "Levit": {
        "image_size": 64,
        "hidden_sizes": [32, 48, 64],
        "num_attention_heads": [2, 3, 4],
        "depths": [2, 2, 2],
    },
    "Bert": _TEXT | {"vocab_size": 100},
    "Llama": _TEXT | {"vocab_size": 100},
    "Bit": {"num_groups": 8, "embedding_size": 32, "hidden_sizes": [32, 64, 64, 64], "depths": [1, 2, 1, 1]},
    "Wav2Vec2": _TEXT
    | {
        "conv_dim": [32, 32, 32],
        "conv_stride": [5, 2, 2],
        "conv_kernel": [10, 3, 3],
        "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
        "apply_spec_augment": False,
    },
}


def _transformers(name):
    import transformers

    config = getattr(transformers, f"{name}Config")(**_SIZES[name])
    return getattr(transformers, f"{name}Model")(config)


@cache
def _fresh(name):
    library, _, name = name.partition(":")
    import_torchvision()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if library == "transformers":
            return _transformers(name)
        import timm

        return timm.create_model(name, num_classes=10, **TIMM[name])


def fresh(name):
    """A new model, in training mode."""
    return copy.deepcopy(_fresh(name)).train()


def batch(name, seed, samples=8):
    """A batch of the data of a model: coloured noise, tokens, or sound."""
    random = torch.Generator().manual_seed(seed)
    if name in ("transformers:Bert", "transformers:Llama"):
        return {"input_ids": torch.randint(0, 100, (samples, 12), generator=random)}
    if name == "transformers:Wav2Vec2":
        return torch.randn(samples, 2000, generator=random)
    colours = torch.randn(samples, 3, 1, 1, generator=random)
    return torch.randn(samples, *IMAGES, generator=random) + colours


@cache
def _trained(name):
    """As after training: gamma and beta of several values, statistics of two batches."""
    model = fresh(name)
    random = torch.Generator().manual_seed(1)
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    momenta = [1 - norm.momentum if norm.momentum > 0.5 else norm.momentum for norm in norms]
    with torch.no_grad():
        for module in model.modules():
            if "norm" in type(module).__name__.lower():
                for parameter in module.parameters(recurse=False):
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=random) + 0.05)
        for norm in norms:
            norm.momentum = None
        for seed in (10, 11, 12):
            given = batch(name, seed, 16)
            model(**given) if isinstance(given, dict) else model(given)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model


def trained(name):
    return copy.deepcopy(_trained(name))
