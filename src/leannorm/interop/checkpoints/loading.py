"""`load`: read a checkpoint of any framework into a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leannorm._errors import InputError
from leannorm.interop.checkpoints.conventions import Convention, convention
from leannorm.interop.checkpoints.matching import STATISTICS, Slot, match, slots_of, to_ours
from leannorm.interop.checkpoints.settings import (
    Names,
    PerLayer,
    factors_of,
    settings_of,
    variance_note,
    warn_of,
)
from leannorm.interop.checkpoints.sources import read_any
from leannorm.interop.checkpoints.subsets import name_numbers


@dataclass(frozen=True)
class Loaded:
    """What `load` did: which keys matched, which did not, and what it set or left open.

    `loaded`: our key → the checkpoint's; `missing`, `surplus`: keys that matched nothing; `notes`: what the
    checkpoint left open; `settings`: layer → the eps and momentum that were set on it; `identity`: our keys
    of norm tensors that only one side has, which were set to the identity here, or are the identity there.

    >>> import torch
    >>> from leannorm import interop
    >>> layer = torch.nn.LayerNorm(2)
    >>> interop.load(layer, layer.state_dict(), source="torch").loaded
    {'weight': 'weight', 'bias': 'bias'}
    """

    loaded: dict[str, str]
    missing: tuple[str, ...]
    surplus: tuple[str, ...]
    notes: tuple[str, ...]
    settings: dict[str, dict[str, float]]
    identity: tuple[str, ...] = ()


def _value(
    slot: Slot, key: str, array: Tensor, theirs: Convention, factor: float, problems: list[str]
) -> Tensor:
    """The array converted for the model's tensor; problems with it are added to `problems`."""
    value = to_ours(array, slot, theirs)
    if value.shape != slot.tensor.shape:
        problems.append(
            f"{slot.key} has shape {tuple(slot.tensor.shape)}, {key} gives {tuple(value.shape)}"
            + (f" (from {tuple(array.shape)})" if value.shape != array.shape else "")
        )
        return slot.tensor
    if slot.role == "running_var" and factor != 1:
        value = value.double() * factor
    cast = value.to(slot.tensor.dtype)
    if slot.kind == "batch_norm" and slot.role in STATISTICS:
        if not value.isfinite().all():
            problems.append(
                f"{key} (for {slot.key}) holds NaN or infinity: the checkpoint's training diverged"
            )
        elif slot.role == "running_var" and (array < 0).any():
            problems.append(f"{key} (for {slot.key}) holds a negative variance, {array.min().item():.3g}")
    if value.isfinite().all() and not cast.isfinite().all():
        problems.append(f"{key} does not fit {slot.key}'s {cast.dtype}: load into a model in {value.dtype}")
    return cast


def load(
    model: torch.nn.Module,
    path_or_mapping: Any,
    source: str,
    *,
    names: Names | None = None,
    count: PerLayer = None,
    eps: PerLayer = None,
    momentum: PerLayer = None,
    strict: bool = True,
) -> Loaded:
    """Fill a model from a checkpoint written under another framework's conventions.

        running_var = var * n / (n - 1) if the source keeps the biased variance and `count` gives n.

    Args:
        model: any module; its norm, linear, convolution and embedding layers are read by the source's names
            and axes, its own parameters as they are. Memory, dtype and device of its tensors stay.
        path_or_mapping: a file (.pdparams, .h5, .weights.h5, .keras, .msgpack, .onnx, .safetensors, .pt),
            a mapping, nested or flat, of names to arrays of any library, or Keras' list of weights.
        source: a key of `CONVENTIONS`: "torch", "paddle", "keras" (or "tensorflow"), "flax", "onnx", "caffe".
        names: modules of the model → their names in the checkpoint, if these differ; applies to the modules
            inside, too. Several names, if one layer here is two there (Caffe: BatchNorm, Scale).
        count: values behind each variance of a training batch (N*H*W), one number or one per layer.
            `math.inf` keeps the variance as it is, which gives the source's own outputs in inference.
        eps: the source layers' eps, one number or one per layer, if the file does not state it.
        momentum: the same, by the source's own definition.
        strict: False leaves missing tensors alone and skips surplus ones. Missing tensors of a norm that the
            checkpoint has are set to the identity.

    A norm may have been made without scale or shift there. If the file says so (.keras, .h5 with its
    configuration, .onnx, numbers that allow only one reading), these are set to the identity. A tensor that
    the model's norm lacks must be the identity there.

    Raises: `InputError` for an unknown source, keys that match nothing, wrong shapes, NaN in statistics, a
    negative variance, a scale or a shift that the model's norm lacks, arrays without names that may be
    either of the two, a damaged file; `MissingDependencyError` for a format whose reader is not
    installed. The model is unchanged after any of them. Warns (`ConventionWarning`) of what stays open.

    Source: the framework files named in `leannorm.interop.checkpoints.conventions`.

    >>> import math
    >>> import torch
    >>> from leannorm import interop
    >>> bn = torch.nn.BatchNorm1d(2)
    >>> flax = {"scale": [1.0, 2.0], "bias": [0.0, 0.0], "mean": [3.0, 4.0], "var": [1.0, 1.0]}
    >>> _ = interop.load(bn, flax, source="flax", count=5, momentum=0.9)
    >>> bn.running_var, bn.momentum
    (tensor([1.2500, 1.2500]), 0.1)
    """
    theirs = convention(source, "source")
    names = names or {}
    slots = slots_of(model, theirs, names)
    factors = factors_of(count, slots, theirs)
    checkpoint, problems = name_numbers(read_any(path_or_mapping, theirs, slots), slots, theirs)
    pairing = match(slots, list(checkpoint.tensors), checkpoint.absent)
    problems += pairing.problems
    names_may_differ = bool(pairing.missing or pairing.surplus or problems)
    problems += [
        f"{key} is not {slot.identity:g} everywhere, and the model's norm has no {slot.key}: make it with one"
        for slot, key in pairing.lacked
        if not checkpoint.tensors[key].eq(slot.identity).all()
    ]
    values: dict[int, tuple[Slot, str, Tensor]] = {}
    for slot, key in pairing.pairs:
        factor = factors.get(slot.module_name, 1.0)
        value = _value(slot, key, checkpoint.tensors[key], theirs, factor, problems)
        first = values.setdefault(id(slot.tensor), (slot, key, value))
        if first[2] is not value and not torch.equal(first[2], value):
            problems.append(f"{first[0].key} and {slot.key} are one tensor here, {first[1]} and {key} differ")
    problems += [
        f"{slot.key} cannot be written: it is expanded or of inference mode; clone it"
        for slot in (*(slot for slot, _ in pairing.pairs), *pairing.identity)
        if slot.tensor.is_inference() or torch._debug_has_internal_overlap(slot.tensor) == 1
    ]
    if strict:
        problems += [f"missing: {line}" for line in pairing.missing]
        problems += [f"surplus: {line}" for line in pairing.surplus]
    if problems:
        remedy = (
            "; where the layers have other names, pass names={'layer here': 'layer there'}; strict=False "
            "passes over what is missing or surplus"
            + (", and sets what a norm there lacks to the identity" if pairing.identity else "")
        )
        raise InputError(
            "the checkpoint does not fit the model, which is unchanged"
            + (remedy if names_may_differ else "")
            + ":"
            + "".join(f"\n  {problem}" for problem in problems)
        )
    changes, notes = settings_of(model, theirs, checkpoint, names, eps=eps, momentum=momentum)
    notes = variance_note([slot for slot, _ in pairing.pairs], factors, theirs, "loaded") + notes
    with torch.no_grad():
        for slot, _, value in values.values():
            slot.tensor.copy_(value)
        for slot in pairing.identity:
            slot.tensor.fill_(slot.identity)
    for name, attributes in changes.items():
        for attribute, number in attributes.items():
            setattr(model.get_submodule(name), attribute, number)
    warn_of(notes)
    loaded = {slot.key: key for slot, key in pairing.pairs}
    identity = tuple(slot.key for slot in (*pairing.identity, *(slot for slot, _ in pairing.lacked)))
    return Loaded(loaded, tuple(pairing.missing), tuple(pairing.surplus), tuple(notes), changes, identity)
