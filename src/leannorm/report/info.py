"""The installed versions, devices and backends, as data."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from leannorm._torch import TESTED, is_tested
from leannorm.autograd.nodes import WHY_NOT
from leannorm.ops.backends.library import last_cache
from leannorm.ops.select import backends

_OPTIONAL = ("triton", "scikit-learn", "plotly", "jinja2", "torchvision", "timm")


class Installation(NamedTuple):
    """Facts by name; every backend, best first, with the reasons why it cannot serve (none: it can)."""

    facts: dict[str, str]
    backends: dict[str, list[str]]


def installation() -> Installation:
    """The facts about this machine that belong in a bug report.

    >>> installation().backends["reference"]
    []
    """
    from leannorm import __version__

    serving = backends()
    facts = {
        "leannorm": __version__,
        "torch": torch.__version__,
        "this torch is": "tested" if is_tested(torch.__version__) else "untested: leannorm check tries it",
        "torch tested": ", ".join(TESTED),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": str(torch.get_num_threads()),
        "CUDA devices": ", ".join(_cuda_devices()) or "none",
        "last cache": "no kernel asks" if serving["cpu"] else last_cache(),
        "autograd nodes of small calls": "in C++" if WHY_NOT is None else f"in Python: {WHY_NOT}",
    }
    return Installation(facts | {name: _version(name) for name in _OPTIONAL}, serving)


def _cuda_devices() -> list[str]:
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
