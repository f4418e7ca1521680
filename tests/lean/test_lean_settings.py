"""Torch's settings are after a pass and its backward pass what they were, and a rebuild has the pass's."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from lean_cases import assert_as_stock, forget_trials
from torch import nn

from leannorm import lean
from leannorm.saving import flags


@pytest.fixture(autouse=True)
def nothing_tried():
    forget_trials()


PLACES = [("generic", "all"), *itertools.product(("mkldnn", "cuda"), ("all", "matmul", "conv", "rnn"))]


def own_precision(backend, operation):
    """What is set at this place itself: found by setting what it would inherit from."""
    return flags._own(backend, operation)


def of_backends(module, prefix, seen):
    """Every plain value in torch.backends and what lies below it."""
    for name in sorted(dir(module)):
        if name.startswith("_") or name in ("torch", "sys"):
            continue
        with contextlib.suppress(Exception):  # what this build of torch has not
            value = getattr(module, name)
            if isinstance(value, (bool, int, float, str)) or value is None:
                yield f"{prefix}.{name}", value
            elif "torch.backends" in f"{type(value).__module__}{getattr(value, '__name__', '')}":
                known, _ = id(value) in seen, seen.add(id(value))
                yield from () if known else of_backends(value, f"{prefix}.{name}", seen)


def settings():
    """All of torch's global settings that a kernel's choice or bits may depend on."""
    found = dict(of_backends(torch.backends, "backends", {id(torch.backends)}))
    for name in dir(torch._C):
        if name.startswith("_get_") and hasattr(torch._C, f"_set_{name[5:]}"):
            with contextlib.suppress(Exception):
                found[name] = getattr(torch._C, name)()
    for place in PLACES:
        found[f"precision of {place}"] = own_precision(*place)
    found |= {
        "deterministic": torch.get_deterministic_debug_mode(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "denormals": flags._flushes(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(d) for d in ("cpu", "cuda")],
        "autocast's dtype": torch.get_autocast_dtype("cpu"),
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "anomaly": torch.is_anomaly_enabled(),
    }
    return found


def model():
    return nn.Sequential(
        *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 1), nn.GELU(), nn.Flatten(2)),
        *(
            nn.Linear(196, 256),
            nn.GELU(),
            nn.Linear(256, 196),
            nn.LayerNorm(196),
            nn.Softmax(-1),
            nn.Linear(196, 4),
        ),
    )


def set_precision(backend, operation, value):
    torch._C._set_fp32_precision_setter(backend, operation, value)


@contextlib.contextmanager
def changed(setting):
    """One setting changed, and brought back."""
    change, back = setting
    change()
    try:
        yield
    finally:
        back()


def precision(*values):
    """Set (backend, operation, value) each."""
    return (
        lambda: [set_precision(*v) for v in values],
        lambda: [set_precision(backend, operation, "none") for backend, operation, _ in values],
    )


def deterministic(warn_only):
    return (
        lambda: torch.use_deterministic_algorithms(
            not torch.are_deterministic_algorithms_enabled(), warn_only=warn_only
        ),
        lambda: torch.use_deterministic_algorithms(True),
    )


CHANGES = {
    "nothing": (lambda: None, lambda: None),
    "precision of all": precision(("generic", "all", "bf16")),
    "precision of one backend": precision(("mkldnn", "all", "bf16")),
    "precision of one operation": precision(("mkldnn", "matmul", "bf16")),
    "precision of all and of one": precision(("generic", "all", "tf32"), ("mkldnn", "conv", "ieee")),
    "precision of all and of a backend": precision(("generic", "all", "bf16"), ("mkldnn", "all", "bf16")),
    "deterministic": deterministic(False),
    "deterministic, warns": deterministic(True),
    "denormals": (lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
    "threads": (lambda: torch.set_num_threads(2), lambda: torch.set_num_threads(1)),
    "mkldnn": (lambda: torch._C._set_mkldnn_enabled(False), lambda: torch._C._set_mkldnn_enabled(True)),
    "nnpack": (lambda: torch._C._set_nnpack_enabled(False), lambda: torch._C._set_nnpack_enabled(True)),
}


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("within", [True, False], ids=["in the forward pass", "before the backward pass"])
def test_settings_are_as_they_were(change, within):
    network, x = model(), torch.randn(4, 8, 16, 16)
    for _ in range(2):
        around, later = CHANGES[change], CHANGES["nothing"]
        if not within:
            around, later = later, around
        with changed(around):
            before = settings()
            with lean("conv") as saved:
                loss = network(x).square().mean()
            assert settings() == before
        assert saved.rebuilt_bytes > 0
        with changed(later):
            before = settings()
            loss.backward()
            assert settings() == before


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("change", CHANGES)
def test_a_rebuild_has_the_settings_of_its_forward_pass(change):
    def gradients(context):
        torch.manual_seed(0)
        network, x, seen = model(), torch.randn(4, 8, 16, 16) * 1e-3, []
        for forward, backward in itertools.product((False, True), repeat=2):
            network.zero_grad()
            with changed(CHANGES[change if forward else "nothing"]), context():
                loss = network(x).square().mean()
            with changed(CHANGES[change if backward else "nothing"]):
                loss.backward()
            seen += [p.grad.clone() for p in network.parameters()]
        return seen

    stock, ours = gradients(contextlib.nullcontext), gradients(lambda: lean("conv"))
    assert all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True))


DENORMAL = {
    "multiples": lambda h: F.silu(h) * 1e-39 * 1e30,
    "sums": lambda h: ((a := h.sigmoid() * 1e-37) - a * 0.999) * 1e30,
    "quotients": lambda h: F.silu(h) / 1e38 / 10 * 1e30,
    "held before a cast": lambda h: (h.sin() * 1e-39).double(),
    "norms": lambda h: F.layer_norm(F.silu(h) * 1e-39 * 1e30, (64,)),
}


@pytest.mark.parametrize("flushed", [(False, True), (True, False)], ids=["backward", "forward"])
@pytest.mark.parametrize("made", DENORMAL)
@pytest.mark.parametrize("settings", [{}, {"recompute": "norm"}, {"budget": 0.05}], ids=str)
@pytest.mark.filterwarnings("ignore:leannorm. (budget|more is kept than the plan says)")
def test_what_is_made_of_denormal_numbers(made, flushed, settings):
    """Of no number that is denormal itself: the backward pass would read that as 0 in stock, too."""

    def program(context):
        linear, w, seen = nn.Linear(64, 64), torch.ones(64, 64, requires_grad=True), []
        for forward, backward in ((False, False), (False, False), flushed):  # those before are remembered
            w.grad = None
            try:
                torch.set_flush_denormal(forward)
                with context() as saved:
                    loss = (DENORMAL[made](linear(torch.randn(64, 64))) * w * 1e30).sum()
                torch.set_flush_denormal(backward)
                loss.backward()
            finally:
                torch.set_flush_denormal(False)
            assert saved is None or saved.rebuilt_bytes > 0 or not settings
            seen.append(w.grad)
        assert seen[0].count_nonzero()
        return seen

    assert_as_stock(program, **settings)
