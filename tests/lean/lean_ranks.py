"""What tests of `lean()` on several ranks share."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from leannorm.saving import lean
from leannorm.saving.small import NEVER_SMALL


def mesh_of_all() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def searching(setting: dict[str, Any]) -> lean:
    """`lean()` that searches small passes, too."""
    saved = lean(**setting)
    saved.place = NEVER_SMALL
    return saved


def kept(saved: Any) -> float:
    return saved.kept_bytes / max(saved.kept_bytes + saved.rebuilt_bytes, 1)
