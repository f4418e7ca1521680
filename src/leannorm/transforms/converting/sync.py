"""Classes of batch norms that share their statistics over a process group."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin

from leannorm import nn
from leannorm._catalog import OURS
from leannorm.nn.sync import Synchronized
from leannorm.transforms.derived import one_a_class, reduced


@one_a_class
def synchronized_class(cls: type[Module]) -> type[Module]:
    """A subclass of `cls` whose `super().forward` shares statistics; `unsynced` is `cls`."""
    if issubclass(cls, Synchronized):
        return cls
    ours = [OURS[base] for base in cls.__mro__ if base in OURS][:1]
    bases = (cls, nn.SyncBatchNorm, *(o for o in ours if not issubclass(cls, o)))
    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": lambda layer, protocol: reduced(synchronized_class, cls, layer),
        "unsynced": cls,
    }
    if issubclass(cls, LazyModuleMixin):
        then: Any = cls.cls_to_become
        body["cls_to_become"] = synchronized_class(OURS.get(then, then))
    return type(f"Sync{cls.__name__}", bases, body)


def why_not_sync(kind: type[Module]) -> str | None:
    """Why batch norms of this class cannot share their statistics as they are."""
    for cls in kind.__mro__:
        if cls.__module__.startswith(("leannorm.", "torch.nn.")):
            break
        code = getattr(vars(cls).get("forward"), "__code__", None)
        if "forward" in vars(cls) and (code is None or "super" not in code.co_names):
            return f"{kind.__name__} computes its norm by itself, not by super().forward"
    return None
