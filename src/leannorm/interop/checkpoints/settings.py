"""Settings that a checkpoint may lack and the caller gives: eps, momentum, the number of values behind a
variance."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch

from leannorm import _checks
from leannorm._errors import InputError
from leannorm.interop.checkpoints.arrays import Checkpoint
from leannorm.interop.checkpoints.conventions import Convention
from leannorm.interop.checkpoints.matching import Slot, foreign_names, kind_of

Names = Mapping[str, str | Sequence[str]]
PerLayer = float | Mapping[str, float] | None
DEFAULT_EPS: dict[str | None, Callable[[Convention], float | None]] = {
    "batch_norm": lambda convention: convention.eps,
    "norm": lambda convention: convention.layer_eps,
    "rms_norm": lambda convention: convention.rms_eps,
}


class ConventionWarning(UserWarning):
    """The checkpoint leaves open what the two frameworks do differently; the message names the argument.

    >>> from leannorm import interop
    >>> issubclass(interop.ConventionWarning, UserWarning)
    True
    """


def per_layer(argument: str, setting: PerLayer, layers: Sequence[str]) -> Mapping[str, float]:
    """The argument by layer, given as one number for all `layers` or as a mapping from their names."""
    if setting is None or not isinstance(setting, Mapping):
        return {} if setting is None else dict.fromkeys(layers, setting)
    unknown = sorted(set(setting) - set(layers))
    if unknown:
        raise InputError(f"{argument} must name layers that have one, {sorted(layers)}; got {unknown}")
    return setting


def factors_of(count: PerLayer, slots: Sequence[Slot], theirs: Convention) -> dict[str, float]:
    """The factor n/(n-1) of each layer whose count is given."""
    counts = per_layer("count", count, [s.module_name for s in slots if s.role == "running_var"])
    if counts and not theirs.biased_running_var:
        raise InputError(
            f"count is for frameworks that keep the biased variance; {theirs.framework}'s is unbiased"
        )
    for layer, n in counts.items():
        if not n > 1:
            raise InputError(f"count must be above 1, the values behind each variance; got {n} for {layer!r}")
    return {layer: 1.0 if math.isinf(n) else n / (n - 1) for layer, n in counts.items()}


def variance_note(
    slots: Sequence[Slot], factors: Mapping[str, float], theirs: Convention, verb: str
) -> list[str]:
    kept = sorted({s.module_name for s in slots if s.role == "running_var" and s.module_name not in factors})
    if not kept or not theirs.biased_running_var:
        return []
    return [
        f"the running variance is biased in {theirs.framework}, unbiased in torch, and was {verb} as it is "
        f"for {listed(kept)}: pass count=N*H*W of a training batch to convert it by n/(n-1), or "
        "count=math.inf to keep it, which is right for inference"
    ]


def listed(names: Sequence[str]) -> str:
    shown = [repr(name) for name in names[:4]]
    return ", ".join(shown) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def warn_of(notes: Sequence[str]) -> None:
    if notes:
        warnings.warn("; ".join(notes), ConventionWarning, stacklevel=3)


def settings_of(
    model: torch.nn.Module, theirs: Convention, checkpoint: Checkpoint, names: Names, **settings: PerLayer
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """The eps and momentum to set by layer, and notes on those that neither the file nor the caller
    states."""
    norms = {name: module for name, module in model.named_modules() if kind_of(module) in DEFAULT_EPS}
    changes: dict[str, dict[str, float]] = {}
    notes = []
    for argument, values in settings.items():
        layers = {name: module for name, module in norms.items() if hasattr(module, argument)}
        requested = per_layer(argument, values, list(layers))
        unknown: dict[str, float] = {}
        for name, module in layers.items():
            stated = [checkpoint.settings[f] for f in foreign_names(name, names) if f in checkpoint.settings]
            ours = getattr(module, argument)
            default = theirs.momentum if argument == "momentum" else DEFAULT_EPS[kind_of(module)](theirs)
            value = requested.get(name, stated[0].get(argument, default) if stated else default)
            if value is None:
                continue
            if argument == "momentum":
                _checks.momentum(value)
                value = theirs.torch_momentum(value)
            else:
                check = _checks.positive_eps if kind_of(module) == "batch_norm" else _checks.non_negative_eps
                check(value)
                value = theirs.attribute(value)
            # equal up to the rounding of a file that stores float32
            same = ours is not None and math.isclose(ours, value, rel_tol=1e-6)
            if name in requested or (stated and argument in stated[0] and not same):
                changes.setdefault(name, {})[argument] = value
            elif default is not None and not (stated or same or theirs.framework == "torch"):
                unknown[name] = default
        if unknown:
            name, default = next(iter(unknown.items()))
            notes.append(
                f"the checkpoint does not say its {argument}: {theirs.framework}'s default is {default:g}"
                + (f" (torch writes it {theirs.torch_momentum(default):g})" if argument == "momentum" else "")
                + f", here {listed(list(unknown))} has {getattr(norms[name], argument)}; "
                f"pass {argument}= as the {theirs.framework} layers had it"
            )
    return changes, notes
