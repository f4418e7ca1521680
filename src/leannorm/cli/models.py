"""Models by name: `timm:NAME`, `torchvision:NAME`, `hf:TYPE`, `package.module:callable`, `my.py:callable`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

from torch import nn

from leannorm._errors import InputError, MissingDependencyError
from leannorm.report.fitting import import_torchvision

_RULE = "name a model as timm:NAME, torchvision:NAME, hf:TYPE, package.module:callable or file.py:callable"
# settings for a transformers model that is made to be measured, if its configuration has them
_SMALL = {
    "hidden_size": 256, "n_embd": 256, "d_model": 256, "dim": 256, "intermediate_size": 688, "d_ff": 688,
    "num_hidden_layers": 4, "n_layer": 4, "num_layers": 4, "n_layers": 4, "num_decoder_layers": 4,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "n_heads": 4, "num_key_value_heads": 4,
    "head_dim": 64, "d_kv": 64, "use_cache": False,
}  # fmt: skip


def model_named(spec: str) -> nn.Module:
    """A new model by its name, with random weights, in training mode.

    A callable is imported from installed packages, the working directory or a file, and called without
    arguments.

    Raises InputError for an unknown name and for a callable that makes no module without arguments,
    MissingDependencyError if timm or torchvision is needed and cannot be imported.

    >>> type(model_named("torch.nn:Identity")).__name__
    'Identity'
    """
    source, name = _parted(spec)
    if not (source and name):
        raise InputError(f"{_RULE}; got {spec!r}")
    model = _made(_maker(source, name), spec, "the model")
    if not isinstance(model, nn.Module):
        raise InputError(f"{spec!r} made a {type(model).__name__}, not a torch.nn.Module; {_RULE}")
    return model.train()


def made_by(spec: str) -> object:
    """What `package.module:callable` or `file.py:callable` returns, called without arguments.

    Raises InputError for another name, and where the callable raises.

    >>> made_by("collections:OrderedDict")
    OrderedDict()
    """
    source, name = _parted(spec)
    if not (source and name):
        raise InputError(f"name a function as package.module:callable or file.py:callable; got {spec!r}")
    return _made(_callable(source, name), spec, "the batches")


def _parted(spec: str) -> tuple[str, str]:
    """The text before and after the colon; a file's path may contain colons too."""
    file, of_file, name = spec.rpartition(".py:")
    if of_file:
        return f"{file}.py", name
    source, _, name = spec.partition(":")
    return source, name


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
            near = did_you_mean(name, timm.list_models())
            raise InputError(f"timm has no model {name!r}{near}; timm.list_models() names them all")
        return lambda: timm.create_model(name)
    if source == "torchvision":
        models = _library("torchvision.models")
        if name not in models.list_models():
            near = did_you_mean(name, models.list_models())
            raise InputError(
                f"torchvision has no model {name!r}{near}; torchvision.models.list_models() names them all"
            )
        return lambda: models.get_model(name)
    if source == "hf":
        return _of_transformers(name)
    return _callable(source, name)


def _of_transformers(text: str) -> Callable[[], object]:
    """`llama` or `llama,num_hidden_layers=8`: a small configuration of that type, with random weights."""
    transformers = _library("transformers")
    name, *changes = (part.strip() for part in text.split(","))
    known = list(transformers.CONFIG_MAPPING.keys())
    if name not in known:
        raise InputError(
            f"transformers has no configuration {name!r}{did_you_mean(name, known)}; "
            "hf: is followed by a model_type, as in hf:llama"
        )
    config = transformers.AutoConfig.for_model(name)
    for small, least in _SMALL.items():
        if isinstance(getattr(config, small, None), int):
            setattr(config, small, least)
    for change in changes:
        setting, equals, value = change.partition("=")
        if not equals or not hasattr(config, setting) or not re.fullmatch(r"-?\d+(\.\d+)?", value):
            near = did_you_mean(setting, config.to_dict())
            raise InputError(f"hf:{name} has no number {change!r} to set{near}; as hf:{name},hidden_size=512")
        setattr(config, setting, float(value) if "." in value else int(value))

    def make() -> object:
        for kind in ("MaskedLM", "CausalLM", "Seq2SeqLM", "ImageClassification", ""):
            auto = getattr(transformers, f"AutoModelFor{kind}" if kind else "AutoModel")
            if type(config) in auto._model_mapping:
                return auto.from_config(config)
        raise InputError(f"transformers makes no model of the configuration {name!r}; name another")

    return make


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest known names, as the end of a message; empty if none is near.

    >>> did_you_mean("resnet5", ["resnet50", "vit"])
    ' (did you mean resnet50?)'
    """
    near = difflib.get_close_matches(name, list(known), n=3)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def in_one_line(error: Exception) -> str:
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__


def _library(name: str):  # type: ignore[no-untyped-def]  # a module without known types
    try:
        import_torchvision()
        return importlib.import_module(name)
    # a torchvision built for another torch fails on its operators
    except (ImportError, RuntimeError) as error:
        package = name.split(".", 1)[0]
        raise MissingDependencyError(
            f"{package} cannot be imported ({str(error).splitlines()[0]}): install {package} for this torch, "
            "or name a model as package.module:callable or file.py:callable"
        ) from None


def _callable(source: str, name: str) -> Callable[[], object]:
    file = Path(source).resolve() if source.endswith(".py") else None
    if file is not None and not file.is_file():
        raise InputError(f"there is no file {source!r}; {_RULE}")
    folder = os.getcwd() if file is None else str(file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(source) if file is None else _module_of(file)
    except ImportError as error:
        raise InputError(f"cannot import {source!r} ({error}); {_RULE}") from None
    except Exception as error:
        raise InputError(
            f"{source!r} was imported and raised {in_one_line(error)}: fix it, or name another module"
        ) from error
    maker = getattr(module, name, None)
    if not callable(maker):
        raise InputError(f"{source!r} has no callable {name!r}; {_RULE}")
    return maker  # type: ignore[no-any-return]


def _module_of(file: Path) -> ModuleType:
    """Load a file as a module, once, under its name or, if another module has that name, under its path."""
    for name in (file.stem, str(file)):
        known = sys.modules.get(name)
        if known is not None and getattr(known, "__file__", None) == str(file):
            return known
    name = str(file) if file.stem in sys.modules.keys() | sys.stdlib_module_names else file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass looks for its module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
