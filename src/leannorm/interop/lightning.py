"""Lightning's `sync_batchnorm=True` with leannorm's layers, on any device."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from leannorm._errors import MissingDependencyError
from leannorm.transforms import convert


def layer_sync(process_group: Any = None) -> Any:
    """A Lightning plug-in that shares batch norms' statistics for `fit`, and takes that back after it.

    `Trainer(sync_batchnorm=True, plugins=[layer_sync()])` does with `leannorm.convert(model, to="sync")`
    what Lightning does with torch's converter, which needs a GPU and drops subclasses' own forward; also
    under other launchers than Lightning's. `process_group` is `convert`'s.

    Raises: `MissingDependencyError` where neither `lightning` nor `pytorch_lightning` is installed.
    Source: `lightning.pytorch.plugins.layer_sync`, Lightning 2.6.
    """

    class LeannormLayerSync(_lightnings_plugin()):  # type: ignore[misc]
        """Derived from Lightning's plug-in, since Lightning accepts only one of that type."""

        def apply(self, model: Any) -> Any:
            self._before = [(module, type(module), frozenset(vars(module))) for module in model.modules()]
            return convert(model, to="sync", process_group=process_group)

        def revert(self, model: Any) -> Any:
            for module, cls, names in self._before:
                if type(module) is not cls:
                    object.__setattr__(module, "__class__", cls)
                    for name in frozenset(vars(module)) - names:
                        del vars(module)[name]
            return model

        def __reduce__(self) -> tuple[Any, ...]:
            return layer_sync, (process_group,)

    return LeannormLayerSync()


def _lightnings_plugin() -> Any:
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return import_module(f"{package}.plugins.layer_sync").TorchSyncBatchNorm
        except ModuleNotFoundError:
            continue
    raise MissingDependencyError("layer_sync needs Lightning; pip install lightning, or pytorch-lightning")
