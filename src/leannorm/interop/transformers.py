"""Hugging Face transformers: an unmodified `Trainer` trains in less memory, and checks the norms."""

from __future__ import annotations

from typing import Any, Literal

from torch.autograd.graph import saved_tensors_hooks

from leannorm._errors import MissingDependencyError
from leannorm._untouched import themselves, untouched
from leannorm.saving import lean, make_lean, unmake_lean
from leannorm.saving.models import last_pass

__all__ = ["doctor_callback", "lean_callback"]
__dir__ = __all__.copy


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
    """A `TrainerCallback` under which the model's forward pass runs in `lean` while it is trained.

    `Trainer(..., callbacks=[lean_callback()])`, or one of TRL's trainers; the arguments are those of `lean`.
    `callback.saved` reports what the last step kept and rebuilt. Checkpoints do not change, nor does the
    model once training has ended.

    Raises: `MissingDependencyError` without `transformers`, `InputError` as `lean` does.
    Source: `transformers.TrainerCallback`, transformers 5.23.
    """
    base: Any = _trainer_callback("lean_callback", "leannorm.make_lean")
    settings: dict[str, Any] = {"recompute": recompute, "budget": budget, "overhead": overhead, "peak": peak}
    settings |= {"limit": limit, "held": held, "verify": verify, "head": head}
    lean(**settings)  # raises for invalid settings

    class LeanCallback(base):  # type: ignore[misc]
        """Makes the model lean when training begins, and undoes that when it ends."""

        def __init__(self) -> None:
            self.saved: lean | None = None

        def __repr__(self) -> str:
            return f"LeanCallback({self.saved or 'before its first step'})"

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            make_lean(kwargs["model"], **settings)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.saved = last_pass(kwargs["model"])

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            unmake_lean(kwargs["model"])

    return LeanCallback()


def doctor_callback(batches: Any = None, *, forward: Any = None) -> Any:
    """A `TrainerCallback` that runs `leannorm.doctor` once, before training begins, and prints what it found.

    `Trainer(..., callbacks=[doctor_callback()])`; its arguments are those of `doctor`, which also gets the
    trainer's optimizer. `callback.report` is the report; rank 0 prints it if there are findings. Training
    itself does not change.

    Raises: `MissingDependencyError` without `transformers`.
    Source: `transformers.TrainerCallback`, transformers 5.23.
    """
    base: Any = _trainer_callback("doctor_callback", "leannorm.doctor")

    class DoctorCallback(base):  # type: ignore[misc]
        """Examines the model in training mode, which the trainer only sets later, before each step."""

        def __init__(self) -> None:
            self.report: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            from leannorm.report.doctor.examine import doctor

            model, optimizer = kwargs["model"], kwargs.get("optimizer")
            with untouched(model, themselves):
                model.train()
                self.report = doctor(model, batches, optimizer=optimizer, forward=forward)
            if state.is_world_process_zero and not self.report:
                self.report.print()

    return DoctorCallback()


def _trainer_callback(needs: str, instead: str) -> Any:
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise MissingDependencyError(
            f"{needs} needs transformers ({error}); pip install transformers, or use {instead}"
        ) from error
    return TrainerCallback
