"""MODEL on the command line: timm:NAME, torchvision:NAME, or package.module:callable."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from leannorm._errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    import torch

FORMS = "timm:NAME, torchvision:NAME or package.module:callable"
Model = Annotated[str, typer.Option("--model", help=FORMS, metavar="MODEL")]


def build(model: str) -> torch.nn.Module:
    """The model, with random weights; a module of the current folder counts as installed."""
    import torch

    library, _, name = model.partition(":")
    if not library or not name:
        raise InputError(f"MODEL must be {FORMS}; got {model!r}")
    try:
        if library == "timm":
            made = importlib.import_module("timm").create_model(name)
        elif library == "torchvision":
            made = importlib.import_module("torchvision.models").get_model(name)
        else:
            sys.path.insert(0, "")
            try:
                made = getattr(importlib.import_module(library), name)()
            finally:
                sys.path.remove("")
    except ImportError as error:
        raise MissingDependencyError(f"MODEL {model!r} needs {error.name or library}: {error}") from error
    except Exception as error:  # the model's own code may raise anything
        raise InputError(f"MODEL {model!r} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(made, torch.nn.Module):
        raise InputError(f"MODEL must make a torch.nn.Module, {model!r} makes a {type(made).__name__}")
    return made
