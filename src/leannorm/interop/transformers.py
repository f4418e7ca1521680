"""Hugging Face transformers: training in less memory with an unmodified `Trainer`."""

from __future__ import annotations

from typing import Any

from leannorm._errors import MissingDependencyError
from leannorm.saving import lean, make_lean, unmake_lean


def lean_callback(recompute: Any = "norm", **settings: Any) -> Any:
    """A `TrainerCallback` under which the model's forward pass runs in `lean` while it is trained.

    `Trainer(..., callbacks=[lean_callback()])`, also of TRL's trainers; the arguments are those of `lean`.
    Checkpoints are as without it, and so is the model when training has ended.

    Raises: `MissingDependencyError` without `transformers`, `InputError` as `lean` does.
    Source: `transformers.TrainerCallback`, transformers 5.23.
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise MissingDependencyError(
            f"lean_callback needs transformers ({error}); pip install transformers, or use leannorm.make_lean"
        ) from error
    lean(recompute, **settings)  # raises where there are no such settings

    class LeanCallback(TrainerCallback):
        """Makes the model lean when training begins, and takes that back when it ends."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            make_lean(kwargs["model"], recompute, **settings)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            unmake_lean(kwargs["model"])

    return LeanCallback()
