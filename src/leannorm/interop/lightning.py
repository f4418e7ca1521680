"""Lightning: training steps in less memory, `sync_batchnorm=True` on any device, and a check of the norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from typing import Any, Literal

import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from leannorm._errors import MissingDependencyError
from leannorm.saving import lean
from leannorm.transforms import convert

__all__ = ["doctor_callback", "layer_sync", "lean_callback"]
__dir__ = __all__.copy


def layer_sync(process_group: dist.ProcessGroup | str | None = None) -> Any:
    """A Lightning plug-in that shares batch norms' statistics for `fit`, and undoes that afterwards.

    `Trainer(sync_batchnorm=True, plugins=[layer_sync()])` does with `leannorm.convert(model, to="sync")` what
    Lightning does with torch's converter, which needs a GPU and drops subclasses' own forward; under
    launchers other than Lightning's too. `process_group` is `convert`'s.

    Raises: `MissingDependencyError` if neither `lightning` nor `pytorch_lightning` is installed.
    Source: `lightning.pytorch.plugins.layer_sync`, Lightning 2.6.
    """

    class LeannormLayerSync(_of_lightning("plugins.layer_sync", "TorchSyncBatchNorm")):  # type: ignore[misc]
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


def lean_callback(
    recompute: Literal["norm", "conv"] | None = None,
    *,
    budget: float | None = None,
    overhead: float | None = None,
    peak: float | int | str | None = None,
    limit: int | str | None = None,
    held: Literal["host"] | saved_tensors_hooks | tuple[Any, Any] | None = None,
    verify: bool = False,
    head: bool = False,
) -> Any:
    """A Lightning callback under which `training_step` runs in `lean` while `fit` runs.

    `Trainer(callbacks=[lean_callback()])`; the arguments are those of `lean`. The module and its checkpoints
    stay as they are. `callback.saved` reports what the last step kept and rebuilt.

    Raises: `MissingDependencyError` if neither `lightning` nor `pytorch_lightning` is installed,
    `InputError` as `lean` does.
    Source: `lightning.pytorch.callbacks.Callback`, Lightning 2.6.
    """
    settings: dict[str, Any] = {"recompute": recompute, "budget": budget, "overhead": overhead, "peak": peak}
    settings |= {"limit": limit, "held": held, "verify": verify, "head": head}
    saved = lean(**settings)

    class LeanCallback(_of_lightning("callbacks", "Callback")):  # type: ignore[misc]
        """Replaces `training_step` from `on_fit_start` on, until the trainer releases the module."""

        def __init__(self) -> None:
            self.saved = saved

        def __repr__(self) -> str:
            return f"LeanCallback({self.saved})"

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.training_step = _in_context(saved, pl_module.training_step)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.teardown(trainer, pl_module, "fit")

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            vars(pl_module).pop("training_step", None)

        def __reduce__(self) -> tuple[Any, ...]:
            return partial(lean_callback, **settings), ()

    return LeanCallback()


def doctor_callback(batches: Any = None, *, forward: Any = None) -> Any:
    """A Lightning callback that runs `leannorm.doctor` once, before the first training step, and prints it.

    `Trainer(callbacks=[doctor_callback()])`; the arguments are those of `doctor`, which also gets the
    trainer's optimizers. `callback.report` is the report; rank 0 prints it if there are findings. Training
    itself does not change.

    Raises: `MissingDependencyError` if neither `lightning` nor `pytorch_lightning` is installed.
    Source: `lightning.pytorch.callbacks.Callback`, Lightning 2.6.
    """

    class DoctorCallback(_of_lightning("callbacks", "Callback")):  # type: ignore[misc]
        """Runs just before the first step of `fit`, when modes, optimizers and ranks are set up."""

        def __init__(self) -> None:
            self.report: Any = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            from leannorm.report.doctor.examine import doctor

            model = pl_module if trainer.model is None or batches is not None else trainer.model
            self.report = doctor(model, batches, optimizer=trainer.optimizers, forward=forward)
            if trainer.is_global_zero and not self.report:
                self.report.print()

        def __reduce__(self) -> tuple[Any, ...]:
            return partial(doctor_callback, batches, forward=forward), ()

    return DoctorCallback()


def _in_context(context: lean, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context:
            return function(*args, **kwargs)

    return run


def _of_lightning(module: str, name: str) -> Any:
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return getattr(import_module(f"{package}.{module}"), name)
        except ModuleNotFoundError:
            continue
    raise MissingDependencyError("this needs Lightning; pip install lightning, or pytorch-lightning")
