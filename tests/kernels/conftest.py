"""Whose kernels a test of this folder tries, and what stands for torch's operators."""

from contextlib import nullcontext

import pytest
import torch
from kernel_cases import SEVERAL
from stand_ins import on_device

from leannorm.ops import schema
from leannorm.ops.backends import BACKENDS, aten, triton
from leannorm.ops.select import use_backend


@pytest.fixture(params=["cpu", "triton"])
def kernels(request, monkeypatch):
    """A backend that serves by its name, and makes tensors where its kernels run.

    A small input takes Triton one launch, but where several are asked for.
    """
    name = request.param.split(",")[0]
    device = "cuda" if name == "triton" and torch.cuda.is_available() else "cpu"
    reasons = BACKENDS[name].why_not(torch.empty(1, device=device), named=True)
    if reasons:
        pytest.skip(" ".join(reasons))
    if name == "aten":  # small inputs too, and in slices, as large ones
        for size, instead in (("_SMALL", 1), ("_SLICE", 200)):
            monkeypatch.setattr(aten, size, instead)
    if request.param == SEVERAL:
        from leannorm.ops.backends.triton import tape, tiling

        tiling.planned.cache_clear()
        tape.forget()
        small_tiles = tiling.Choice(in_flight=16, warps=1, rounds=0)  # as large inputs have, for their size
        on_device(monkeypatch, choice=small_tiles)
    with use_backend(name), torch.device("cuda") if device == "cuda" else nullcontext():
        yield BACKENDS[name]
    if request.param == SEVERAL:
        tiling.planned.cache_clear()
        tape.forget()


@pytest.fixture(scope="module")
def interpreted_operators():
    """The operators once more, in a namespace where tensors of the CPU reach the interpreted kernels."""
    library = torch.library.Library("leannorm_interpreted", "DEF")
    for definition in schema.SCHEMAS:
        name = library.define(definition)
        library.impl(name, getattr(triton._kernels, name), "CPU")
        fake = torch._library.simple_registry.singleton.find(f"leannorm::{name}").fake_impl.kernel.func
        torch.library.register_fake(f"leannorm_interpreted::{name}", fake, lib=library)
    yield torch.ops.leannorm_interpreted
    library._destroy()


@pytest.fixture
def operators(kernels, request):
    """torch's operators that these kernels implement."""
    if kernels.name == "triton" and triton.INTERPRETED:
        return request.getfixturevalue("interpreted_operators")
    return torch.ops.leannorm
