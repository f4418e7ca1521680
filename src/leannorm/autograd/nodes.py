"""The library of autograd nodes in C++ (csrc/nodes/): is it there, and does it fit this torch and this
Python?

It needs torch's C++ interface, which changes from release to release, so only a build from source has it.
Without it, the functions in Python compute the same.
"""

from __future__ import annotations

import sysconfig
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from leannorm.ops.backends import CPU
from leannorm.ops.backends.library import schema_digest, why_unfit

PATH = Path(__file__).parents[1] / "_nodes.so"
INTERFACE = 69  # raised when functions of csrc/nodes change their arguments


def built_for() -> str:
    """What setup.py writes into the library: the interface, releases and schemas that it was built for."""
    python = sysconfig.get_config_var("SOABI")
    releases = f"torch {torch.__version__} {torch.version.git_version} {python}"
    return f"{INTERFACE} {releases} {schema_digest().decode()}"


def load(path: Path = PATH) -> tuple[Any, str | None]:
    """The module and None, or None and the reason why there is none."""
    kernels, note = CPU.why_not(), path.with_suffix(".reason")
    if kernels:
        return None, kernels[0]
    if not path.exists():
        why = note.read_text().strip() if note.exists() else "the package was installed without building them"
        return None, f"the C++ autograd nodes are not built: {why}"
    try:
        stamp = f"leannorm nodes {built_for()}\0".encode()
        unfit = why_unfit(path, stamp, "another torch, Python or source of leannorm than those here")
        if unfit is None:
            loader = ExtensionFileLoader("leannorm._nodes", str(path))
            spec = spec_from_file_location("leannorm._nodes", path, loader=loader)
            assert spec is not None
            module = module_from_spec(spec)
            loader.exec_module(module)
            return module, None
    except (OSError, RuntimeError, ImportError) as error:
        unfit = " ".join(str(error).split())
    return None, f"the C++ autograd nodes cannot be loaded: {unfit}"


NODES, WHY_NOT = load()
