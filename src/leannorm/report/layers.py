"""The bytes that each layer of a model keeps for the backward pass, and what is rebuilt, by operation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from leannorm._report import grouped
from leannorm.saving.ledger import Record
from leannorm.saving.shards import storage_of

Counts = Callable[[], tuple[int, int]]


class LayerBytes(NamedTuple):
    """The bytes that a module's own operations keep, and those that will be rebuilt; without its children."""

    name: str
    kind: str
    kept: int
    rebuilt: int


class Operation(NamedTuple):
    """The rebuilt outputs of one operator: their number and their bytes."""

    node: str
    tensors: int
    nbytes: int


class StockCount(saved_tensors_hooks):
    """Counts the bytes that plain autograd keeps: every storage once, parameters not counted."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, int]] = {}  # references to them, so that no address is reused
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        if not (base.is_leaf and base.requires_grad):
            place, nbytes = storage_of(tensor)
            self._kept[place or id(tensor)] = (tensor.detach(), nbytes)
        return tensor

    kept_bytes = property(lambda self: sum(nbytes for _, nbytes in self._kept.values()))
    rebuilt_bytes = 0


@contextmanager
def by_layer(model: nn.Module, counts: Counts) -> Iterator[list[LayerBytes]]:
    """Within it, every change of `counts()` (kept, rebuilt) is credited to the innermost running module.

    The list is filled when the context closes, in the order of `named_modules`, with what runs outside of the
    model (the loss) at the end. Modules that keep nothing themselves are left out.
    """
    names = {module: name for name, module in model.named_modules()}
    sums: dict[nn.Module | None, list[int]] = defaultdict(lambda: [0, 0])
    at_work: list[nn.Module] = []
    last = [0, 0]

    def credit() -> None:
        now, module = counts(), at_work[-1] if at_work else None
        for i in (0, 1):
            sums[module][i] += now[i] - last[i]
        last[:] = now

    def enter(module: nn.Module, inputs: object) -> None:
        credit()
        at_work.append(module)

    def leave(module: nn.Module, inputs: object, output: object) -> None:
        credit()
        at_work.pop()

    enter.sees_nothing = leave.sees_nothing = True  # type: ignore[attr-defined]  # allows fused calls
    layers: list[LayerBytes] = []
    with ExitStack() as hooks:
        for module in names:
            hooks.enter_context(module.register_forward_pre_hook(enter))
            hooks.enter_context(module.register_forward_hook(leave))
        yield layers
        credit()
    layers += [
        LayerBytes(name or "(model)", type(module).__name__, *sums[module])
        for module, name in names.items()
        if any(sums[module])
    ]
    if any(sums[None]):
        layers.append(LayerBytes("(outside)", "the loss", *sums[None]))


def by_operation(records: Sequence[Record]) -> list[Operation]:
    """The rebuilt tensors among a forward pass's records, by operator, most bytes first."""
    operations = [
        Operation(node, len(group), sum(r.bytes for r in group))
        for node, group in grouped((r.node, r) for r in records if r.rebuilt).items()
    ]
    return sorted(operations, key=lambda operation: -operation.nbytes)
