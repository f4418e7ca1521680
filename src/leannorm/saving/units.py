"""FSDP2's units: the weights of a unit exist while it runs, forward or backward, and are freed in between."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from leannorm.head.formula import Gathered
from leannorm.saving.shards import local_of

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard._fsdp_state"
_STATES = "torch.distributed._composable_state"


class Units:
    """Finds the unit that owns a weight, and whether it runs now, in torch's own records of this process."""

    def __init__(self) -> None:
        self._owners: dict[int, Any] = {}  # by the weight's memory
        self._seen = 0  # how many groups of weights had been gathered when `_owners` was made
        self.freed_first: Any = None  # the first unit that owned a weight asked for, and did not run

    @property
    def exist(self) -> bool:
        """Whether this process has sharded a module."""
        return _FULLY_SHARD in sys.modules and bool(_modules())

    def owner_runs(self, tensor: Tensor) -> int:
        """0: the tensor is not a unit's weight; 1: its unit runs now; 2: its unit does not run now.

        A node that saves a tensor now reads it in its own backward pass, when the same units run again.
        """
        unit = self._owner_of(tensor)
        if unit is None or unit._training_state.name == "FORWARD":
            return 0 if unit is None else 1
        self.freed_first = unit if self.freed_first is None else self.freed_first
        return 2

    def rests(self, tensor: Tensor) -> bool:
        """Whether the tensor is a weight of a unit that does not run now."""
        return self.exist and self.owner_runs(tensor) == 2

    def gathered(self, tensor: Tensor) -> Gathered | None:
        """How long a unit's weight exists; None for any other tensor."""
        unit: Any = self._owner_of(tensor) if self.exist else None
        memory = tensor.untyped_storage()._cdata
        for group in () if unit is None else _groups_of(unit):
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param") and _memory_of(parameter) == memory:
                    edits = partial(_edits, parameter.sharded_param)
                    return Gathered(edits, group._reshard_after_forward, tuple(unit._modules))
        return None

    def _owner_of(self, tensor: Tensor) -> Any:
        memory = tensor.untyped_storage()._cdata
        if memory not in self._owners:
            gathered = [group for group in _groups() if hasattr(group[1].fsdp_params[0], "_unsharded_param")]
            if len(gathered) != self._seen:
                self._seen = len(gathered)
                self._owners = {_memory_of(p): unit for unit, group in gathered for p in group.fsdp_params}
        return self._owners.get(memory)


def is_of_flat(tensor: Tensor) -> bool:
    """Whether the tensor is a view of one of FSDP1's flat parameters, which may be freed at any time."""
    return bool(getattr(tensor._base, "_is_flat_param", False))


@cache
def _steps() -> Counter[int]:
    """How many steps of optimizers each parameter, by its id, has had since this was first called."""
    steps = Counter[int]()

    def count(optimizer: Optimizer, *_: Any) -> None:
        steps.update(id(p) for group in optimizer.param_groups for p in group["params"])

    register_optimizer_step_post_hook(count)
    return steps


def _edits(shard: Tensor) -> tuple[int, ...]:
    """What an edit of the shard changes: fused and foreach optimizers do not change a DTensor's version."""
    local = local_of(shard)
    return shard._version, 0 if local is None else local._version, _steps()[id(shard)]


def _modules() -> Any:
    return getattr(sys.modules.get(_STATES), "_module_state_mapping", {})


def _groups() -> Iterator[tuple[Any, Any]]:
    """Each unit's groups of weights, with the unit."""
    for unit in {id(unit): unit for unit in (state() for state in list(_modules().values()))}.values():
        for group in _groups_of(unit):
            if group.fsdp_params:
                yield unit, group


def _groups_of(unit: Any) -> Any:
    """The unit's groups of weights; in older releases of torch a unit has one, or none."""
    if hasattr(unit, "_fsdp_param_groups"):
        return unit._fsdp_param_groups
    group = getattr(unit, "_fsdp_param_group", None)
    return () if group is None else (group,)


def _memory_of(parameter: Any) -> int:
    weight = parameter._unsharded_param
    local = local_of(weight)
    memory: int = (weight if local is None else local).untyped_storage()._cdata
    return memory


def wrap_of(unit: Any) -> tuple[str, str]:
    """The classes of the unit's module, and of the module around it ("" for the model itself)."""
    name, path = _class_of(unit._modules[0]), _groups_of(unit)[0]._module_fqn or ""
    root = next((state for state in unit._state_ctx.all_states if state._is_root), None)
    if root is None or not path:
        return name, ""
    return name, _class_of(root._modules[0].get_submodule(path.rpartition(".")[0]))


def _class_of(module: Any) -> str:
    """The name of the class that the module had before it was sharded."""
    return type(module).__name__.removeprefix("FSDP")
