"""Rates of a device: measured once and kept, the table where that cannot be; and what the hooks cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from lean_cases import in_a_group
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from leannorm import compile_options
from leannorm.planning.goal import Goal
from leannorm.saving import lean, rates
from leannorm.saving.plan import plan

CPU = torch.device("cpu")
FOUND = rates._CPU_TILES._replace(memory=7e9, hold=1e-9, rebuild=1e-9)  # on every processor


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Where rates are kept; measuring itself takes seconds, and gives FOUND, or what a test has it give."""
    path = tmp_path / "cache" / "rates.json"
    monkeypatch.setenv("LEANNORM_RATES", str(path))
    monkeypatch.setattr(rates, "measure", lambda device: measured.append(device) or measuring[-1](device))
    measured.clear()
    measuring[1:] = []
    rates._measured.cache_clear()
    yield path
    rates._measured.cache_clear()


measured: list[torch.device] = []
measuring = [lambda device: FOUND]


def again():
    rates._measured.cache_clear()
    return rates.measured(CPU)


def test_a_device_is_measured_once_and_kept(file):
    assert again() == again() == (FOUND, None)
    assert measured == [CPU]
    assert list(json.loads(file.read_text())) == [rates._name(CPU)]


def entry(file, **changes):
    made = json.loads(file.read_text())[rates._name(CPU)]
    return {rates._name(CPU): made | changes}


@pytest.mark.parametrize(
    "text",
    [
        lambda file: json.dumps(entry(file))[:-40],
        lambda file: json.dumps(entry(file, made_by=["0.0.1", "2.0.0", 1, True])),
        lambda file: json.dumps({"another processor": entry(file)[rates._name(CPU)]}),
        lambda file: json.dumps(entry(file, memory=-1.0)),
        lambda file: json.dumps(entry(file, memory="fast")),
        lambda file: json.dumps(entry(file, products={"4": 1e9})),
        lambda file: "[]",
        lambda file: "[" * 100_000,
        lambda file: "",
    ],
    ids=[
        "cut off",
        "older",
        "another device",
        "negative",
        "a word",
        "two dtypes missing",
        "a list",
        "too deep",
        "empty",
    ],
)
def test_what_another_device_or_version_left_or_half_of_it_is_measured_again(file, text):
    again()
    file.write_text(text(file))
    assert again() == (FOUND, None)
    assert measured == [CPU, CPU]
    assert again() == (FOUND, None)
    assert len(measured) == 2


def test_where_nothing_can_be_written_the_table_serves_and_says_so(file, monkeypatch):
    file.parent.parent.joinpath("cache").write_text("a file in place of the folder")
    found, why = again()
    assert found == rates.table(CPU)
    assert why is not None
    assert why.startswith("prices come from the table")
    assert measured == []
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    with pytest.warns(UserWarning, match="prices come from the table"), lean(overhead=1e3) as saved:
        loss = model(torch.randn(64, 64)).sum()
    loss.backward()
    assert why in saved.reasons


def test_what_was_measured_beside_other_work_is_not_kept(monkeypatch, tmp_path):
    path = tmp_path / "rates.json"
    monkeypatch.setenv("LEANNORM_RATES", str(path))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * os.cpu_count())]
    try:
        found, why = again()
    finally:
        rates._measured.cache_clear()
        for process in busy:
            process.kill()
            process.wait()
    assert found == rates.table(CPU)
    assert "others took its cores meanwhile" in why
    assert json.loads(path.read_text()) == {}


def test_ranks_keep_the_table(file):
    with in_a_group():
        assert rates.measured(CPU) == (rates.table(CPU), rates.RANKS)
    assert measured == []


def test_without_a_file_nothing_is_measured(monkeypatch):
    monkeypatch.setenv("LEANNORM_RATES", "")
    assert again() == (rates.table(CPU), None)


def test_a_user_without_a_home_has_the_table(monkeypatch):
    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "LEANNORM_RATES"):
        monkeypatch.delenv(name, raising=False)
    assert again() == (rates.table(CPU), None)
    assert compile_options()["custom_partitioner_fn"].uuid()  # torch asks for it at each compilation


def test_what_others_keep_meanwhile_stays(file):
    def measure(device):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"another device": {}}))
        return FOUND

    measuring.append(measure)
    assert again() == (FOUND, None)
    assert json.loads(file.read_text()).keys() == {"another device", rates._name(CPU)}


def test_what_a_compilation_measures_has_its_hooks(file):
    """A backend asks for rates, as `compile_options()` does."""
    tensors = []

    def measure(device):
        with torch.enable_grad(), lean("conv") as saved:
            loss = nn.Sequential(nn.Linear(16, 64), nn.SiLU())(torch.ones(64, 16)).sum()
        tensors.append(len(saved.records))
        loss.backward()
        return FOUND

    def backend(module, inputs):
        assert again() == (FOUND, None)
        return module.forward

    measuring.append(measure)
    torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(3))
    again()  # kept
    measure(CPU)
    assert tensors[0] == tensors[1] > 0
    assert len(tensors) == 2


class Dtypes(TorchDispatchMode):
    """Of all products, convolutions and sums."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in ("addmm", "mm", "convolution", "add", "native_layer_norm"):
            self.seen |= {one.dtype for one in (found if isinstance(found, tuple) else (found,))}
        return found


def test_what_is_measured_is_of_float32_whatever_the_default_is():
    torch.set_default_dtype(torch.float64)
    try:
        for measure in (
            lambda: rates._of_convolutions(torch.contiguous_format, CPU),
            lambda: rates._of_sums(1024, CPU),
            lambda: rates.of_hooks(1),
            rates._is_busy,
        ):
            with Dtypes() as dtypes:
                measure()
            assert dtypes.seen == {torch.float32}
    finally:
        torch.set_default_dtype(torch.float32)


def test_measuring_finds_what_can_be_and_touches_no_generator():
    before = torch.get_rng_state()
    hold, rebuild = rates.of_hooks(4)
    assert 0 < hold < 1e-2
    assert 0 < rebuild < 1e-1
    assert torch.equal(torch.get_rng_state(), before)


class Run:
    def __init__(self):
        torch.manual_seed(0)
        layers = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
        self.model, self.x = nn.Sequential(*layers), torch.randn(256, 64)

    def step(self, saved):
        self.model.zero_grad()
        with saved:
            loss = self.model(self.x).square().mean()
        loss.backward()
        return [p.grad for p in self.model.parameters()]


def test_more_time_never_keeps_more_and_the_hooks_are_counted(file):
    measuring.append(lambda device: FOUND._replace(hold=2e-6, rebuild=5e-6))
    run, saved = Run(), lean(overhead=10.0)
    run.step(saved)
    passed = saved.plan.made_for
    made = [plan(Goal(overhead=i / 50), passed) for i in range(200)]
    kept = [one.kept_bytes for one in made]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] == passed.lines.stock.held > kept[-1]
    assert all(one.overhead <= i / 50 + 1e-9 for i, one in enumerate(made) if not one.is_dear)
    assert made[0].is_dear
    assert made[-1].hooks == pytest.approx(2e-6 * len(kept) / passed.lines.step.seconds, rel=10)


def test_a_named_file_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv("LEANNORM_RATES", str(tmp_path / "mine.json"))
    assert rates.path() == tmp_path / "mine.json"
    monkeypatch.delenv("LEANNORM_RATES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert rates.path() == tmp_path / "leannorm" / "rates.json"
    assert os.environ.get("LEANNORM_RATES") is None


class Widening(nn.Module):
    """Residual blocks of bfloat16, each behind an RMS norm in float32, and a loss of float32 logits."""

    def __init__(self, width=128):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(6)).bfloat16()

    def forward(self, x):
        for linear in self.linears:
            wide = x.float()
            x = x + linear((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype))
        return nn.functional.cross_entropy(x.float(), torch.arange(len(x)) % x.shape[1])


def test_where_all_is_too_dear_the_hooks_alone_are_named(file):
    model = Widening()
    for _ in range(2):
        with lean(overhead=1e-6, verify=True) as saved:
            loss = model(torch.randn(256, 128, dtype=torch.bfloat16))
        loss.backward()
    assert saved.plan.is_dear
    assert saved.kept_bytes == saved.plan.kept_bytes
