"""transformers' families as random networks without weights, and what `convert` makes of their norms."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.architectures import import_torchvision
from leannorm import convert
from leannorm._catalog import name_of, torchs_kind
from leannorm.transforms.converting.classes import KNOWN
from leannorm.transforms.recognizing.recognition import looks_like_norm

import_torchvision()  # transformers imports it

# names that stand for something else than the norm of an input: a weight's, a scale, fixed statistics
NO_NORMS = {"_WeightNorm", "NoNorm", "Phi4MultimodalAudioMeanVarianceNormLayer"}
_DEPTHS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "n_layer", "n_layers")


def names() -> list[str]:
    """The model types that have a model of their own."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    found = []
    for name in sorted(CONFIG_MAPPING):
        with contextlib.suppress(Exception):  # a package that is not installed
            if CONFIG_MAPPING[name] in MODEL_MAPPING:
                found.append(name)
    return found


def build(name: str) -> nn.Module:
    """The family's network of its default sizes on the meta device, with few layers where it can have few."""
    import transformers

    for few in (True, False):
        config = transformers.CONFIG_MAPPING[name]()
        parts = [config, *(v for v in vars(config).values() if isinstance(v, transformers.PretrainedConfig))]
        for part in parts if few else ():
            for depth in _DEPTHS:
                if isinstance(getattr(part, depth, None), int) and not getattr(part, "layer_types", None):
                    with contextlib.suppress(Exception):
                        setattr(part, depth, min(getattr(part, depth), 4))
        try:
            with torch.device("meta"):
                return transformers.AutoModel.from_config(config)
        except Exception:
            if not few:
                raise
    raise AssertionError


class Left(NamedTuple):
    """A hand-written norm that was left, and why."""

    layer: str
    reason: str


def hand_written(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The norms of classes that no table has."""
    for name, module in model.named_modules():
        if module._modules or type(module).__name__ in NO_NORMS or name_of(type(module)) in KNOWN:
            continue
        if looks_like_norm(module) or torchs_kind(module):
            yield name, module


def random_twin(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The layer with random parameters in memory."""
    twin = copy.copy(layer)
    vars(twin)["_parameters"], vars(twin)["_buffers"] = dict(layer._parameters), dict(layer._buffers)
    generator = torch.Generator().manual_seed(0)
    for tensors in (twin._parameters, twin._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                value = torch.rand(tensor.shape, generator=generator).add_(0.5).to(dtype)
                tensors[name] = nn.Parameter(value) if isinstance(tensor, nn.Parameter) else value
    return twin


def inputs(layer: nn.Module, dtype: torch.dtype) -> Iterator[list[torch.Tensor]]:
    """What a norm may take: rows, images, sequences of channels; with a gate."""
    tensors = [*layer.parameters(), *layer.buffers()]
    sizes = tuple(getattr(layer, "normalized_shape", ())) or (tuple(tensors[0].shape) if tensors else (48,))
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 3, *sizes), (2, *sizes, 3, 5), (2, *sizes, 5), (6, *sizes)]
    for shape in shapes:
        x, gate = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        yield [x]
        yield [x, gate]


def results(layer: nn.Module, given: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in given]
    y = layer(*leaves)
    up = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    wanted = [*leaves, *layer.parameters()]
    gradients = torch.autograd.grad(y, wanted, up, allow_unused=True)
    return [y.detach(), *(g for g in gradients if g is not None)]


def check(layer: nn.Module, dtype: torch.dtype) -> int:
    """Compare a layer's copy, converted, with the layer; how many kinds of input were compared."""
    own = random_twin(layer, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = convert(random_twin(layer, dtype))
    budget, compared = (16 if dtype == torch.bfloat16 else 64) * torch.finfo(dtype).eps, 0
    for given in inputs(own, dtype):
        try:
            want = results(own, given)
        except Exception:  # not an input of this norm
            continue
        for g, w in zip(results(ours, given), want, strict=True):
            assert (g.dtype, g.shape) == (w.dtype, w.shape)
            error = (g.double() - w.double()).abs().max()
            assert error <= budget * max(w.double().abs().max(), 1e-3), (type(layer), dtype, given[0].shape)
        compared += 1
    assert list(ours.state_dict()) == list(own.state_dict())
    assert repr(ours) in (repr(own), f"leannorm.{own!r}")
    convert(ours, to="torch")
    assert type(ours) is type(own)
    assert vars(ours).keys() == vars(own).keys()
    return compared


def converted(model: nn.Module) -> tuple[set[str], dict[str, Left]]:
    """The classes of a network's hand-written norms that are swapped, and those that are left.

    Every class is compared with its original in two dtypes.
    """
    before = {path: type(layer) for path, layer in hand_written(model)}
    layers = dict(model.named_modules())
    kinds = {cls: layers[path] for path, cls in before.items()}
    for layer in kinds.values():
        for dtype in (torch.float32, torch.bfloat16):
            assert check(layer, dtype) or _takes_more(layer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert(model)
    said = " ".join(str(w.message) for w in caught)
    swapped, left = set(), {}
    for path, cls in before.items():
        if type(layers[path]) is cls:
            assert path in said, f"{path} was left and not named"
            left[cls.__name__] = Left(path, said)
        else:
            swapped.add(cls.__name__)
    convert(model, to="torch")
    assert {path: type(layers[path]) for path in before} == before
    return swapped, left


def _takes_more(layer: nn.Module) -> bool:
    """Is it a norm that takes other inputs than those tried?"""
    return type(layer).__name__ in {
        "Gemma3nAudioCumulativeGroupNorm",
        "xLSTMMultiHeadLayerNorm",
        "ZayaQKNorm",
    }
