"""Matching: which tensor of a model is which entry of a checkpoint, with the axes converted."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from leannorm._catalog import torchs_kind
from leannorm._errors import InputError
from leannorm.interop.checkpoints.conventions import TORCH_AXES, Convention, permuted

# the names of norms in the frameworks' tables, by kind; and of the other layers, by class
OF_NORMS = {
    "batch": "batch_norm",
    "instance": "batch_norm",
    "group": "norm",
    "layer": "norm",
    "rms": "rms_norm",
}
OTHERS: tuple[tuple[type[torch.nn.Module], str], ...] = (
    (torch.nn.Linear, "linear"),
    (_ConvTransposeNd, "conv_transpose"),
    (_ConvNd, "conv"),
    (torch.nn.Embedding, "embedding"),
)

# the attribute of torch's norms that has the shape of their tensors
_SIZES = ("num_features", "num_channels", "normalized_shape")

# classes of torch that are not layers: their parameters are the model's own
HOLDERS = (torch.nn.ParameterList, torch.nn.ParameterDict)
STATISTICS = ("running_mean", "running_var")
# the values of a norm's tensors that have no effect
IDENTITY = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}


@dataclass(frozen=True)
class Slot:
    """One tensor of the model; `candidates` are the keys that may hold it in a checkpoint, best first.

    `prefixes`: the layer's names there. `absent`: the model's norm lacks this tensor, and `tensor` is the
    identity.
    """

    module_name: str
    module: torch.nn.Module
    role: str
    tensor: Tensor
    kind: str | None
    candidates: tuple[str, ...]
    prefixes: tuple[str, ...] = ("",)
    absent: bool = False

    @property
    def key(self) -> str:
        return joined(self.module_name, self.role)

    def key_in(self, keys: Collection[str]) -> str | None:
        return next((candidate for candidate in self.candidates if candidate in keys), None)

    @property
    def optional(self) -> bool:
        """Whether it is a counter or an index table, which other frameworks do not save."""
        return not self.tensor.is_floating_point()

    @property
    def of_norm(self) -> bool:
        """Whether it is one of the four tensors that a norm may have, in a layer that the framework also
        has."""
        return self.kind in OF_NORMS.values() and self.role in IDENTITY and bool(self.candidates)

    @property
    def identity(self) -> float:
        """The values without effect of a tensor that a norm may have."""
        return IDENTITY[self.role] - (
            getattr(self.module, "weight_offset", 0.0) if self.role == "weight" else 0
        )


def joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def kind_of(module: torch.nn.Module) -> str | None:
    norm = torchs_kind(module)
    return OF_NORMS[norm] if norm else next((kind for cls, kind in OTHERS if isinstance(module, cls)), None)


def foreign_names(name: str, names: Mapping[str, str | Sequence[str]]) -> tuple[str, ...]:
    """The module's names in the checkpoint: from its entry in `names`, or that of its nearest ancestor."""
    ancestor = name
    while ancestor not in names and ancestor:
        ancestor = ancestor.rpartition(".")[0]
    if ancestor not in names:
        return (name,)
    theirs = names[ancestor]
    rest = name[len(ancestor) :].lstrip(".")
    prefixes = (theirs,) if isinstance(theirs, str) else tuple(theirs)
    return tuple(joined(prefix.replace("/", "."), rest) for prefix in prefixes)


def own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for role, parameter in module._parameters.items():
        if parameter is not None:
            yield role, parameter
    for role, buffer in module._buffers.items():
        if buffer is not None and role not in module._non_persistent_buffers_set:
            yield role, buffer


def _leaves(
    module: torch.nn.Module, role: str, learned: Sequence[str], theirs: Convention
) -> tuple[str, ...]:
    """The names that the framework may give to this tensor of this layer."""
    kind = kind_of(module)
    if theirs.framework == "torch":
        return (role,)
    if kind is not None:
        leaves = theirs.names.get(kind, {}).get(role, ())
    elif type(module).__module__.startswith("torch.") and not isinstance(module, HOLDERS):
        return ()  # a layer that is not in the table of conventions
    else:
        leaves = (role,)  # a model's own parameter: there is no convention for it
    if theirs.framework == "keras" and role in learned:
        leaves += (str(learned.index(role)),)  # .weights.h5 and lists number their arrays
    return leaves


def slots_of(
    model: torch.nn.Module, convention: Convention, names: Mapping[str, str | Sequence[str]]
) -> list[Slot]:
    """Every parameter and saved buffer of the model, in the model's order."""
    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = sorted(set(names) - set(modules))
    if unknown:
        raise InputError(
            f"names must map modules of the model, got {unknown}; it has {sorted(filter(None, modules))}"
        )
    slots = []
    for name, module in modules.items():
        own = dict(own_tensors(module))
        for role, tensor in own.items():
            if tensor.is_meta or isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):
                raise InputError(
                    f"{joined(name, role)} has no memory yet (meta device or a lazy layer); "
                    "materialize it with to_empty() or one forward pass"
                )
        learned = [role for role, tensor in own.items() if tensor.is_floating_point()]
        prefixes = foreign_names(name, names)
        named = {role: (tensor, _leaves(module, role, learned, convention)) for role, tensor in own.items()}
        for role, (tensor, leaves) in (named | _absent(module, own, convention)).items():
            candidates = tuple(joined(p, leaf.replace("/", ".")) for p in prefixes for leaf in leaves)
            absent = role not in own
            slots.append(Slot(name, module, role, tensor, kind_of(module), candidates, prefixes, absent))
    return slots


def _absent(
    module: torch.nn.Module, own: Mapping[str, Tensor], theirs: Convention
) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
    """The tensors that this norm lacks, as identities, and their names in the framework."""
    kind = kind_of(module)
    if kind is None or kind not in OF_NORMS.values() or kind not in theirs.names:
        return {}
    size = next(getattr(module, name) for name in _SIZES if hasattr(module, name))
    shape = (size,) if isinstance(size, int) else tuple(size)
    table = {**theirs.names["batch_norm"], **theirs.names[kind]}
    return {role: (torch.full(shape, IDENTITY[role]), table[role]) for role in IDENTITY if role not in own}


@dataclass(frozen=True)
class Pairing:
    """`pairs` of a slot and its key in the checkpoint; `problems` are errors even with strict=False.

    `lacked`: pairs for tensors that the model's norm lacks, which must be the identity. `identity`: tensors
    that the norms of the checkpoint lack; they are also `missing`, unless the checkpoint says that the norms
    were made without them.
    """

    pairs: list[tuple[Slot, str]]
    lacked: list[tuple[Slot, str]]
    identity: list[Slot]
    missing: list[str]
    surplus: list[str]
    problems: list[str]


def number_of(key: str) -> str | None:
    """The layer, if the key ends in the number of one of its arrays."""
    layer, _, leaf = key.rpartition(".")
    return layer if leaf.isdigit() else None


def match(slots: Sequence[Slot], keys: Sequence[str], absent: frozenset[str] = frozenset()) -> Pairing:
    """Pair slots and keys by name; a tensor that the model uses twice needs only one key.

    `absent` are keys that the checkpoint lacks because its layers were made without them.
    """
    present = set(keys)
    own = [slot for slot in slots if not slot.absent]
    pairs = [(slot, key) for slot in own if (key := slot.key_in(present)) is not None]
    used = {key for _, key in pairs}
    others = [slot for slot in slots if slot.absent]
    lacked = [(slot, key) for slot in others if (key := slot.key_in(present - used)) is not None]
    used |= {key for _, key in lacked}
    surplus = [key for key in keys if key not in used]
    problems = [
        f"{slot.key} has two arrays there, {key} and {more[0]}; pass names= of one"
        for slot, key in (*pairs, *lacked)
        if slot.of_norm and (more := [c for c in slot.candidates if c in present and c != key])
    ]

    norms = {slot.module_name for slot, _ in (*pairs, *lacked) if slot.of_norm}
    paired = {id(slot.tensor) for slot, _ in pairs}
    identity, missing = [], []
    for slot in own:
        if id(slot.tensor) in paired or slot.optional:
            continue
        without = slot.of_norm and not absent.isdisjoint(slot.candidates)
        if without or (slot.of_norm and slot.module_name in norms):
            identity.append(slot)
        if not without:
            tried = f"looked for {' or '.join(slot.candidates)}"
            missing.append(
                f"{slot.key} ({tried if slot.candidates else f'no rule for {type(slot.module).__name__}'})"
            )
    # numbers do not identify the arrays: if the count differs, each of them may be another array
    numbered = {number_of(key) for slot, key in pairs if key != slot.candidates[0]}
    for prefix in sorted(layer for layer in numbered if layer is not None):
        there = [key for key in keys if number_of(key) == prefix]
        ours = [slot.candidates[0] for slot in own if prefix in map(number_of, slot.candidates)]
        if len(there) != len(ours):
            problems.append(
                f"{prefix} holds {len(there)} numbered arrays, the model {len(ours)}: {', '.join(ours)}"
            )
    return Pairing(pairs, lacked, identity, missing, surplus, problems)


def _is_depthwise(slot: Slot, convention: Convention) -> bool:
    module = slot.module
    return (
        convention.framework == "keras"
        and slot.kind == "conv"
        and slot.role == "weight"
        and isinstance(module, _ConvNd)
        and module.groups == module.in_channels > 1
    )


def _axes(slot: Slot, convention: Convention) -> str | None:
    return convention.axes.get(slot.kind or "") if slot.role == "weight" else None


def to_ours(value: Tensor, slot: Slot, convention: Convention) -> Tensor:
    """The checkpoint's array with the model's order of axes; unchanged if the number of axes differs."""
    axes = _axes(slot, convention)
    if value.dim() != slot.tensor.dim() or axes is None:
        return value
    if _is_depthwise(slot, convention) and value.shape[-2] != 1:
        value = value.flatten(-2).unsqueeze(-2)  # DepthwiseConv2D: (*, input channels, multiplier)
    return permuted(value, axes, TORCH_AXES[slot.kind or ""])


def to_theirs(slot: Slot, convention: Convention) -> Tensor:
    """A copy of the model's tensor with the framework's order of axes, on the CPU."""
    value, axes = slot.tensor.detach().cpu(), _axes(slot, convention)
    if axes is not None:
        value = permuted(value, TORCH_AXES[slot.kind or ""], axes)
        if _is_depthwise(slot, convention):
            value = value.squeeze(-2).unflatten(-1, (slot.module.groups, -1))
    return value.clone(memory_format=torch.contiguous_format)
