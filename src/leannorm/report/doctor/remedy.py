"""What fixes a finding, in lines of Python that run as printed.

`model` is what `doctor` was called with, and so are `batches`, `optimizer`, `averaged`, `forward` and
`group`; any other name is explained in a comment after it. A line that begins with "# or" is another remedy,
instead of the lines before it; what code cannot do is a sentence in a comment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from leannorm import nn
from leannorm._catalog import OURS, TORCHS, Norm
from leannorm.report.doctor.observe import Seen
from leannorm.report.doctor.subject import Subject, layer
from leannorm.transforms.statistics.freezing import Frozen

ENOUGH = 16  # samples per batch
CHECKPOINT = "model.load_state_dict(checkpoint)  # the last one in which all values are finite"


WEIGHT = "weight", "scale"
MEAN = "running_mean", "estimated_mean"
EPS = "eps", "epsilon", "variance_epsilon"


def attribute(norm: Norm, names: tuple[str, ...]) -> str:
    """A norm's weight, mean or eps as an expression, since classes have their own names for them."""
    values = ((name, getattr(norm.module, name, None)) for name in names)
    return f"{layer(norm.name)}.{next(name for name, value in values if isinstance(value, (Tensor, float)))}"


def momentum_set(norm: Norm, value: float | str) -> str:
    """The line that gives the new batch this weight; with None all batches have the same weight."""
    if value == "None":
        return f"{layer(norm.name)}.momentum = None"
    own = 1 - float(value) if isinstance(norm.module, nn.BatchNormOp) else float(value)
    return f"{layer(norm.name)}.momentum = {round(own, 6):g}"


def frozen(norm: Norm) -> str:
    """The line that freezes it."""
    return f"leannorm.freeze({layer(norm.name)})"


def path_to(module: Module, model: Module, name: str) -> str:
    """A module inside of a wrapper as an expression."""
    path = next(path for path, one in model.named_modules() if one is module)
    return f"{name}.{path}" if path else name


def recalibrated(model: Module, name: str, passed: str) -> str:
    """The line that measures a model's running statistics and leaves its mode unchanged."""
    if model.training:
        return f"leannorm.recalibrate({name}, batches{passed})"
    return f"leannorm.recalibrate({name}.train(), batches{passed}); {name}.eval()"


def remeasured(subject: Subject, norm: Norm | None = None, why: str = "") -> str:
    """The lines that set running statistics to those of the batches.

    Afterwards all modes are as before. A norm that does not train is unfrozen for it.
    """
    if norm is not None and not (isinstance(norm.module, _BatchNorm) and norm.tracks):
        return "# train it for some hundred batches: leannorm.recalibrate is for batch norms"
    if norm is not None and hasattr(norm.mean, "placements"):
        return "# leannorm.recalibrate(model, batches), before distribute_module makes DTensors of statistics"
    run = recalibrated(subject.model, "model", subject.passed) + (f"  # {why}" if why else "")
    if norm is None:
        return run
    held = vars(norm.module).get("train")
    name = layer(norm.name)
    if isinstance(held, Frozen) and held.statistics:
        again = name if held.affine else f"{name}, affine=False"
        return f"leannorm.unfreeze({name})\n{run}\nleannorm.freeze({again})"
    if subject.training and not norm.module.training:
        return f"{name}.train()\n{run}\n{name}.eval()"
    return run


def added_to(subject: Subject, beside: Sequence[Module], new: str) -> str:
    """The line that adds a layer's parameters to the optimizer of those `beside` it; "" without one."""
    name = _optimizer_of(subject, [p for module in beside for p in module.parameters()])
    own = f"[*{new}.parameters(recurse=False)]"
    return f'{name}.add_param_group({{"params": {own}, "weight_decay": 0.0}})' if name else ""


def _optimizer_of(subject: Subject, parameters: Iterable[Tensor]) -> str:
    """The optimizer that has one of them, as an expression; "" without one."""
    ids = {id(p) for p in parameters}
    for name, optimizer in subject.optimizers.items():
        if any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            return name
    return ""


def undecayed(subject: Subject, norm: Norm) -> str:
    """The lines that put a norm, with others of its kind, into groups of the optimizer without weight
    decay."""
    optimizer = _optimizer_of(subject, [p for _, p in norm.affine])
    return f"""norms = set()
norms |= {{id(p) for p in {layer(norm.name)}.parameters(recurse=False)}}
for group in {optimizer}.param_groups[:]:
    own = [p for p in group["params"] if id(p) in norms]
    group["params"] = [p for p in group["params"] if id(p) not in norms]
    {optimizer}.add_param_group({{**group, "params": own, "weight_decay": 0.0}})"""


def more_values(subject: Subject, norm: Norm, seen: Seen, least: int) -> str:
    """The lines that give each statistic of a norm at least this many values, from enough samples."""
    each = seen.values // max(seen.together, 1) if norm.kind == "batch" else _in_a_row(norm, seen)
    groups = _groups(norm, each, least)
    if norm.kind == "batch":
        lines = [_larger_batches(norm, max(least, ENOUGH))]
        if len(subject.ranks) > 1 and not hasattr(norm.module, "process_group"):
            lines.append('# or leannorm.convert(model, to="sync")  # statistics of all ranks')
        if groups and _is_plain(norm):
            lines.append(f"# or {_as_group_norm(norm, groups)}")
        return "\n".join(lines)
    if norm.kind == "group" and groups:
        return f"{layer(norm.name)}.num_groups = {groups}  # another function: train on"
    if norm.kind == "instance" and groups and _is_plain(norm):
        return _as_group_norm(norm, groups)
    return _replaced(norm, "torch.nn.Identity()", "its rows are too short to normalize: train on")


def _larger_batches(norm: Norm, samples: int) -> str:
    if isinstance(vars(norm.module).get("group_size"), int):
        return f"{layer(norm.name)}.group_size = {samples}"
    loader = f"torch.utils.data.DataLoader(dataset, batch_size={samples}, shuffle=True, drop_last=True)"
    return f"batches = {loader}  # dataset: that of the training"


def _in_a_row(norm: Norm, seen: Seen) -> int:
    """The number of values of a channel in a sample."""
    groups = getattr(norm.module, "num_groups", 1)
    return seen.values * groups // _channels(norm) if norm.kind == "group" else seen.values


def _channels(norm: Norm) -> int:
    return int(getattr(norm.module, "num_channels", norm.channels or 1))


def _groups(norm: Norm, each: int, least: int) -> int | None:
    """The most groups, up to 32, of at least this many values if a channel has `each`."""
    channels = _channels(norm)
    some = (groups for groups in range(min(channels, 32), 0, -1) if channels % groups == 0)
    return next((groups for groups in some if channels // groups * each >= least), None)


def _is_plain(norm: Norm) -> bool:
    """Whether it does nothing but normalize."""
    return type(norm.module) in OURS or type(norm.module) in TORCHS


def _as_group_norm(norm: Norm, groups: int) -> str:
    affine = "" if norm.affine else ", affine=False"
    new = f"leannorm.nn.GroupNorm({groups}, {_channels(norm)}{affine})"
    return _replaced(norm, new, "needs no batch: make the optimizer anew, and train on")


def _replaced(norm: Norm, module: str, why: str) -> str:
    """The line that replaces a norm with another module."""
    places = [f'setattr({layer(path)}, "{child}", {module})' for _, path, child in norm.parents]
    return f"{'; '.join(places) or f'model = {module}'}  # {why}"
