"""How fast a device is, and what the hooks of `lean()` cost its host: from a table, or measured once.

Measurements are stored by the names of devices, in the JSON file that LEANNORM_RATES names. Without that
variable it is `leannorm/rates.json` in the user's cache folder; if it is empty, no file is read or made. An
entry of another version or another number of threads, or one that cannot be read, is measured again.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from leannorm._files import cached, write_json
from leannorm.autograd.nodes import INTERFACE, NODES
from leannorm.ops.modes import in_no_mode
from leannorm.planning.goal import Goal
from leannorm.saving.shards import has_ranks


class Rates(NamedTuple):
    """`memory`: bytes moved per second. `products`: operations per second, by element size. `call`: seconds
    per call. `convolutions`, `grouped`: their rates as shares of the products'; `.._last`: the same in
    channels_last. `hold`: seconds of the two hooks of a tensor that is kept. `rebuild`: seconds more, without
    the kernels, of one that is rebuilt. `link`: bytes per second that are copied to the host, or back."""

    memory: float
    products: dict[int, float]
    call: float
    convolutions: float = 1.0
    grouped: float = 0.25
    convolutions_last: float = 1.0
    grouped_last: float = 0.25
    hold: float = 30e-6
    rebuild: float = 100e-6
    link: float = 12e9

    def in_channels_last(self) -> Rates:
        """The rates if all convolutions are in channels_last."""
        return self._replace(convolutions=self.convolutions_last, grouped=self.grouped_last)

    def operations(self, itemsize: int, groups: int) -> float:
        """Operations per second of a convolution with `groups` groups, or of another product (0)."""
        share = self.grouped if groups > 1 else self.convolutions if groups else 1.0
        return share * self.products.get(itemsize, self.products[2])


_GB, _T = 1e9, 1e12
_IN_CPP = 10e-6  # seconds of `hold` and of `rebuild`, where the hooks are C++
# What torch reaches on large tensors: half to two thirds of what data sheets say.
_CPU = Rates(4 * _GB, {8: 0.018 * _T, 4: 0.036 * _T, 2: 0.036 * _T}, 4e-6)  # of one core
_CPU_BFLOAT16 = _CPU._replace(products={**_CPU.products, 2: 0.072 * _T})
_CPU_TILES = Rates(6.5 * _GB, {8: 0.085 * _T, 4: 0.17 * _T, 2: 0.59 * _T}, 1e-6)
_CUDA = {
    7: Rates(600 * _GB, {8: 5 * _T, 4: 10 * _T, 2: 60 * _T}, 5e-6),
    8: Rates(1300 * _GB, {8: 9 * _T, 4: 15 * _T, 2: 200 * _T}, 5e-6, link=24 * _GB),
    9: Rates(2500 * _GB, {8: 35 * _T, 4: 45 * _T, 2: 550 * _T}, 5e-6, link=48 * _GB),
    10: Rates(6000 * _GB, {8: 35 * _T, 4: 60 * _T, 2: 1300 * _T}, 5e-6, link=48 * _GB),
}


def table(device: torch.device) -> Rates:
    """The row of the table for this device: the same in every run and on every rank."""
    row = _row(device)
    return row if NODES is None else row._replace(hold=_IN_CPP, rebuild=_IN_CPP)


@lru_cache
def _row(device: torch.device) -> Rates:
    if device.type == "cuda" and torch.cuda.is_available():
        major = torch.cuda.get_device_capability(device)[0]
        return _CUDA[min(max(major, min(_CUDA)), max(_CUDA))]
    if device.type != "cpu":
        return _CUDA[8]
    if torch.cpu._is_amx_tile_supported():
        return _CPU_TILES
    return _CPU_BFLOAT16 if torch.cpu._is_avx512_bf16_supported() else _CPU


def rates_for(goal: Goal, device: torch.device) -> tuple[Rates, str | None]:
    """Measured rates if the goal promises a time; else those of the table, so that equal passes have equal
    plans."""
    return measured(device) if goal.promises_time else (table(device), None)


def of_table_alone() -> bool:
    """Whether no measured time decides a plan: in a process group, and if LEANNORM_RATES is empty."""
    return has_ranks() or path() is None


RANKS = (
    "prices come from the table, not from this device: with several ranks they must be the same on each; a"
    " step may take more than the overhead that was asked for"
)


def measured(device: torch.device) -> tuple[Rates, str | None]:
    """What was measured on this device, now or before; or the table's rates, and the reason."""
    if has_ranks():
        return table(device), RANKS
    return _measured(device, path())


def path() -> Path | None:
    """The path of the file, which may not exist yet; None if there should be none."""
    return cached("LEANNORM_RATES", "rates.json")


@lru_cache
def _measured(device: torch.device, file: Path | None) -> tuple[Rates, str | None]:
    if file is None or device.type not in ("cpu", "cuda"):
        return table(device), None
    name, made_by, entries = _name(device), _made_by(), _read(file)
    rates = _rates_of(entries.get(name), made_by)
    if rates is not None:
        return rates, None
    try:  # a file that cannot be written is found before the work, not after it
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, entries)
        rates = in_no_mode(lambda: measure(device))
        write_json(file, {**_read(file), name: {"made_by": made_by, **rates._asdict()}})
    except Exception as error:
        text = " ".join(str(error).split())
        return table(device), f"prices come from the table, since measuring this device failed: {text}"
    return rates, None


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _made_by() -> list[object]:
    from leannorm import __version__

    return [__version__, torch.__version__, torch.get_num_threads(), NODES is not None and INTERFACE]


def _read(file: Path) -> dict[str, Any]:
    try:
        entries = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _rates_of(entry: Any, made_by: list[object]) -> Rates | None:
    """The rates of an entry; None if it is not of this version or not complete."""
    if not isinstance(entry, dict) or entry.get("made_by") != made_by:
        return None
    try:
        numbers = {name: float(entry[name]) for name in Rates._fields if name != "products"}
        products = {int(size): float(rate) for size, rate in entry["products"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    positive = all(0 < number < float("inf") for number in (*numbers.values(), *products.values()))
    return Rates(products=products, **numbers) if positive and set(products) == {2, 4, 8} else None


def _is_busy() -> bool:
    """Whether other processes take cores from this one (Linux): its threads then do not run all the time."""
    if sys.platform != "linux":
        return False
    a = torch.ones(1024, 1024, dtype=_DTYPE)
    a @ a  # starts torch's threads
    start, used = perf_counter(), process_time()
    for _ in range(12):
        a @ a
    share = (process_time() - used) / (perf_counter() - start)
    return share < 0.8 * min(torch.get_num_threads(), _cores())


def _cores() -> float:
    """The cores that this process may use at once: its CPU affinity, or less by a container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores


_DTYPE = torch.float32  # of the tensors that are measured, whatever the default is
_COLD = 2.0
"""How many times as long the hooks take between large kernels, which fill the caches with their own data."""
_LONG = 0.2  # seconds after which a measurement ends, if it had two runs


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of several runs: other processes made the others slower."""
    taken = list[float]()
    while len(taken) < 2 or (len(taken) < 40 and sum(taken) < _LONG):
        _wait(device)
        start = perf_counter()
        run()
        _wait(device)
        taken.append(perf_counter() - start)
    return min(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def measure(device: torch.device) -> Rates:
    """Measure the device for some seconds. Raises RuntimeError if other processes use the CPU meanwhile."""
    large = 512 if device.type == "cpu" else 8192
    memory = _of_sums(large * large * (64 if device.type == "cpu" else 16), device)
    few = torch.ones(16, dtype=_DTYPE, device=device)
    call = _seconds(lambda: [few + few for _ in range(100)], device) / 100
    products = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        b = torch.ones(large, large, dtype=dtype, device=device)
        products[dtype.itemsize] = 2 * large**3 / _seconds(lambda b=b: b @ b, device)  # type: ignore[misc]
    hold, rebuild = of_hooks()
    link = _of_copies(large * large, device)
    first, last = (
        _of_convolutions(layout, device) for layout in (torch.contiguous_format, torch.channels_last)
    )
    if device.type == "cpu" and _is_busy():
        raise RuntimeError("others took its cores meanwhile; the next process measures it again")
    dense, single, dense_last, single_last = (rate / products[4] for rate in (*first, *last))
    return Rates(memory, products, call, dense, single, dense_last, single_last, hold, rebuild, link)


def _of_sums(count: int, device: torch.device) -> float:
    """Bytes moved per second by an addition of `count` numbers."""
    a = torch.ones(count, dtype=_DTYPE, device=device)
    result = torch.zeros_like(a)  # with a new one for each run, page faults would be measured
    return 3 * a.nbytes / _seconds(lambda: torch.add(a, a, out=result), device)


def _of_copies(count: int, device: torch.device) -> float:
    """Bytes per second that are copied from the device to pinned memory of the host."""
    a = torch.ones(count, dtype=_DTYPE, device=device)
    to = torch.zeros(count, dtype=_DTYPE, pin_memory=device.type == "cuda")
    return a.nbytes / _seconds(lambda: to.copy_(a, non_blocking=True), device)


def _of_convolutions(layout: torch.memory_format, device: torch.device) -> tuple[float, float]:
    """Operations per second of a convolution in one group, and of one with a group for each channel."""
    sizes = (4, 64, 56, 56), (64, 64, 3, 3), (64, 1, 3, 3)
    x, dense, single = (torch.ones(of, dtype=_DTYPE, device=device).to(memory_format=layout) for of in sizes)
    of_dense = 2 * 9 * 64 * x.numel() / _seconds(lambda: torch.conv2d(x, dense, padding=1), device)
    of_single = 2 * 9 * x.numel() / _seconds(lambda: torch.conv2d(x, single, padding=1, groups=64), device)
    return of_dense, of_single


@torch.enable_grad()
def of_hooks(layers: int = 12) -> tuple[float, float]:
    """Seconds that the host takes for a tensor that is kept, and how many more for one that is rebuilt.

    Compares steps with and without hooks, on tensors so small that their kernels take no time.
    """
    from leannorm.saving.context import lean
    from leannorm.saving.small import NEVER_SMALL

    with torch.random.fork_rng(devices=[]):
        units = [m for _ in range(layers) for m in (nn.Linear(16, 16), nn.LayerNorm(16), nn.SiLU())]
        model = nn.Sequential(*units).to(_DTYPE)
    x = torch.arange(64 * 16, dtype=_DTYPE).view(64, 16)
    xs = x.sin(), x.cos()  # after trials on two inputs, later steps make none

    def step(around: Any, x: Tensor = x) -> tuple[float, Any]:
        start = thread_time()
        with around as saved:
            loss = model(x).square().mean()
        loss.backward()
        return thread_time() - start, saved

    def contexts() -> list[Any]:
        made: list[Any] = [torch.enable_grad(), lean(budget=1.0), lean("conv")]
        for context in made[1:]:
            context.place = NEVER_SMALL
        return made

    best, rebuilt = [float("inf")] * 3, 1
    for turn in range(12):
        for i, context in enumerate(contexts()):
            seconds, saved = step(context, xs[turn % 2])
            best[i] = min(best[i], seconds) if turn > 3 else best[i]
            if i == 2:
                rebuilt = max(sum(record.rebuilt for record in saved.records), 1)
    packed: list[Tensor] = []

    def count(tensor: Tensor) -> Tensor:
        packed.append(tensor.detach())
        return tensor

    step(saved_tensors_hooks(count, lambda t: t))
    saves = len(packed)
    best = [_COLD * seconds for seconds in best]
    hold = max(best[1] - best[0], 0.0) / saves
    return max(hold, 1e-7), max(best[2] - best[1], 1e-7) / rebuilt
