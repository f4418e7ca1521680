"""Models by name: `timm:NAME`, `torchvision:NAME`, `package.module:callable`."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from leannorm._errors import InputError, MissingDependencyError
from leannorm.report.fitting import import_torchvision

_RULE = "name a model as timm:NAME, torchvision:NAME or package.module:callable"


def model_named(spec: str) -> nn.Module:
    """A new model by its name, with random weights, in training mode.

    A callable is imported from installed packages or the working directory, and called without arguments.

    Raises InputError for an unknown name and for a callable that makes no module without arguments,
    MissingDependencyError if timm or torchvision is needed and cannot be imported.

    >>> type(model_named("torch.nn:Identity")).__name__
    'Identity'
    """
    source, found, name = spec.partition(":")
    if not (source and found and name):
        raise InputError(f"{_RULE}; got {spec!r}")
    model = _made(_maker(source, name), spec, "the model")
    if not isinstance(model, nn.Module):
        raise InputError(f"{spec!r} made a {type(model).__name__}, not a torch.nn.Module; {_RULE}")
    return model.train()


def made_by(spec: str) -> object:
    """What `package.module:callable` returns, called without arguments.

    Raises InputError for another name, and where the callable raises.

    >>> made_by("collections:OrderedDict")
    OrderedDict()
    """
    source, found, name = spec.partition(":")
    if not (source and found and name):
        raise InputError(f"name a function as package.module:callable; got {spec!r}")
    return _made(_callable(source, name), spec, "the batches")


def _made(maker: Callable[[], object], spec: str, what: str) -> object:
    try:
        return maker()
    except Exception as error:
        raise InputError(
            f"{spec!r} was called without arguments and raised {in_one_line(error)}: "
            f"name a function without arguments that makes {what}"
        ) from error


def _maker(source: str, name: str) -> Callable[[], object]:
    if source == "timm":
        timm = _library("timm")
        if not timm.is_model(name):
            raise InputError(f"timm has no model {name!r}; timm.list_models() names them all")
        return lambda: timm.create_model(name)
    if source == "torchvision":
        models = _library("torchvision.models")
        if name not in models.list_models():
            raise InputError(
                f"torchvision has no model {name!r}; torchvision.models.list_models() names them all"
            )
        return lambda: models.get_model(name)
    return _callable(source, name)


def tried(model: nn.Module, sizes: tuple[int, ...], spec: str, device: str = "cpu") -> Tensor:
    """A random input of these sizes, which a copy of the model has taken once.

    Raises InputError with the model's own words if it does not take one.
    """
    images = torch.randn(sizes, device=device)
    try:
        with torch.random.fork_rng(), torch.no_grad():
            copy.deepcopy(model)(images)
    except Exception as error:
        shape = "x".join(map(str, sizes))
        raise InputError(f"{spec} does not take --input {shape}: {in_one_line(error)}") from error
    return images


def in_one_line(error: Exception) -> str:
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__


def _library(name: str):  # type: ignore[no-untyped-def]  # a module without known types
    try:
        import_torchvision()
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # torchvision built for another torch fails on its operators
        package = name.split(".", 1)[0]
        raise MissingDependencyError(
            f"{package} cannot be imported ({str(error).splitlines()[0]}): install {package} for this torch, "
            "or name a model as package.module:callable"
        ) from None


def _callable(source: str, name: str) -> Callable[[], object]:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(source)
    except ImportError as error:
        raise InputError(f"cannot import {source!r} ({error}); {_RULE}") from None
    maker = getattr(module, name, None)
    if not callable(maker):
        raise InputError(f"{source!r} has no callable {name!r}; {_RULE}")
    return maker  # type: ignore[no-any-return]


def shape_of(text: str) -> tuple[int, ...]:
    """`8x3x224x224` as integers. Raises InputError for anything else."""
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"an input is written as its sizes, batch first, like 8x3x224x224; got {text!r}")
    return tuple(int(part) for part in parts)
