"""Does torchvision fit the installed torch? Its own error, deep inside timm or transformers, does not say."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

_INDEX = "https://download.pytorch.org/whl/"
_DECLARED = torch.library.Library("torchvision", "FRAGMENT")


def why_torchvision_fails() -> str | None:
    """Why torchvision cannot be imported, with the line that fixes it; None if it can be, or is not
    installed.

    One built for another torch, such as one with CUDA next to a torch without, does not find the library of
    its operators.
    """
    if find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        installed = version_of("torchvision", "(of unknown version)")
        return f"torchvision {installed} does not fit torch {torch.__version__} ({reason}): {mended_by()}"
    return None


def mended_by(installed: str = str(torch.__version__)) -> str:
    """The command that installs a torchvision for this build of torch.

    >>> mended_by("2.13.0")
    'pip uninstall -y torchvision && pip install torch==2.13.0 torchvision'
    >>> mended_by("2.13.0+cpu").removeprefix(mended_by("2.13.0"))
    ' --index-url https://download.pytorch.org/whl/cpu'
    """
    release, _, build = installed.partition("+")
    index = f" --index-url {_INDEX}{build}" if re.fullmatch(r"cpu|xpu|cu\d+|rocm[\d.]+", build) else ""
    return f"pip uninstall -y torchvision && pip install torch=={release} torchvision{index}"


def import_torchvision() -> str | None:
    """Import torchvision, for a library that imports it; says why if it does not fit.

    In that case two of its operators are declared without kernels: detection models that call them raise
    torch's error.
    """
    why = why_torchvision_fails()
    if why is not None:
        for name in (n for n in ("nms", "qnms") if not hasattr(torch.ops.torchvision, n)):
            _DECLARED.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        importlib.import_module("torchvision")
    return why


def version_of(package: str, otherwise: str) -> str:
    """The installed version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return otherwise
