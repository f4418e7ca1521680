"""Does torchvision fit the torch at hand? Its own error, far inside of timm or transformers, does not say."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

_INDEX = "https://download.pytorch.org/whl/"
_DECLARED = torch.library.Library("torchvision", "FRAGMENT")


def why_torchvision_fails() -> str | None:
    """Why torchvision cannot be imported, with the line that mends it; None where it can, or is not there.

    One that was built for another torch, as with CUDA beside one without, finds no library of its operators.
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
    """Import torchvision, for a library that imports it; says why it does not fit, where that is so.

    Two of its operators are declared there, without kernels: models that call them, for detection, raise an
    error of torch's when they do.
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
