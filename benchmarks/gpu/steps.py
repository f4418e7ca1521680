"""Time and memory of training steps in bfloat16, channels_last: plain PyTorch, convert, lean and others."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.architectures import in_layout
from benchmarks.gpu.blocks import BLOCKS, with_liger
from benchmarks.gpu.networks import builder
from benchmarks.gpu.report import Report
from benchmarks.record import shown
from leannorm import compile_options, convert, lean
from leannorm.ops.backends import BACKENDS
from leannorm.ops.select import use_backend
from leannorm.report.memory import measure_step
from leannorm.report.settings import settings_for
from leannorm.report.timing import device_seconds

SETTINGS = ("stock", "convert", "norm", "conv", "convert + norm", "convert + conv", "checkpoint", "compile")
OF_BLOCKS = (
    *("stock", "convert", "norm", "conv", "convert + norm", "liger", "checkpoint"),
    *("compile", "compile + norm", "compile + conv"),
)
SMOKE_BLOCKS = ("stock", "norm", "convert + norm", "checkpoint")
REACH = {("resnet50", "convert + norm"): (0.92, 0.75)}  # time and peak, relative to the baseline
SMOKE = ("stock", "convert", "norm", "convert + conv")
WARM_UP, STEPS = 3, 10


class Batch(NamedTuple):
    images: Tensor
    labels: Tensor


class Case(NamedTuple):
    """A network whose settings are timed; `found` has the rows of those timed so far."""

    name: str
    source: str
    model: nn.Module
    batch: Batch
    found: dict[str, dict[str, Any]]


class Side:
    """One setting: its network, optimizer and training step."""

    def __init__(self, setting: str, model: nn.Module, smoke: bool) -> None:
        self.model = convert(model) if "convert" in setting else model
        if setting == "liger":
            self.model = with_liger(model) or model
        self.run: Callable[[Tensor], Any] = self.model
        recompute: Any = setting.split()[-1]
        is_lean = recompute in ("norm", "conv")
        compiled = setting.startswith("compile")
        if compiled:
            torch._dynamo.reset()
            how: dict[str, Any] = {"options": compile_options(recompute)} if is_lean else {}
            self.run = torch.compile(self.model, backend="aot_eager" if smoke else "inductor", **how)
        self.around: Callable[[], AbstractContextManager[Any]] = (
            partial(lean, recompute) if is_lean and not compiled else nullcontext
        )
        if setting == "checkpoint":
            self.around = settings_for(self.model, (), (), ("checkpoint",))[1].around
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)

    def forward(self, batch: Batch) -> Tensor:
        kind = batch.images.device.type
        with self.around(), torch.autocast(kind, torch.bfloat16):
            return F.cross_entropy(self.run(batch.images), batch.labels)

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.forward(batch).backward()
        self.optimizer.step()


class SixteenBits(Side):
    """A training step of blocks with 16-bit parameters, without autocast."""

    def forward(self, batch: Batch) -> Tensor:
        with self.around():
            return self.run(batch.images).float().square().mean()


def batch_of(count: int, size: int, classes: int, device: torch.device) -> Batch:
    images = torch.randn(count, 3, size, size, device=device, dtype=torch.bfloat16)
    images = images.contiguous(memory_format=torch.channels_last)
    return Batch(images, torch.randint(classes, (count,), device=device))


@contextmanager
def interpreted(report: Report) -> Iterator[None]:
    """Use the interpreted Triton kernels on the CPU."""
    x = torch.zeros(2, 8, 2, 2, dtype=torch.bfloat16)
    there = report.device.type == "cpu" and not BACKENDS["triton"].why_not(x, named=True)
    with use_backend("triton") if there else nullcontext():
        yield


def run_network(name: str, report: Report, settings: tuple[str, ...], smoke: bool) -> None:
    """Check gradients at a small batch, then time every setting at the full one."""
    source, make = builder(name, smoke)
    count, size, classes = (8, 16, 10) if smoke else (256, 224, 1000)
    torch.manual_seed(0)
    model = in_layout(make().to(report.device), torch.channels_last).train()
    print(f"{name}: {source}, batch {count}, {size} pixels")
    with interpreted(report):
        if settings != ("compile",):
            small = batch_of(4 if smoke else 8, size, classes, report.device)
            check_gradients(name, model, small, report, ("conv",) if smoke else ("norm", "conv"))
        batch = batch_of(count, size, classes, report.device)
        found: dict[str, dict[str, Any]] = {}
        for row in report.data["steps"]:
            if row["network"] == name:
                found.setdefault(row["setting"], row)
        case = Case(name, source, model, batch, found)
        if settings == ("compile",):
            settings = settings if "stock" in found else ("stock", *settings)
        else:  # the baseline again: the difference of its two times is the noise
            settings = (*settings, "stock, again")
        for setting in settings:
            if not report.has(150 if setting == "compile" and not smoke else 10, f"{name}, {setting}"):
                continue
            what = partial(time_setting, case, setting, report, smoke)
            report.attempt(f"{name}, {setting}", what)


def run_blocks(name: str, report: Report, settings: tuple[str, ...], smoke: bool) -> None:
    """Check that `lean()` changes no gradient of blocks with 16-bit parameters, then time every setting."""
    torch.manual_seed(0)
    model, shape = BLOCKS[name][smoke]()
    model.to(report.device, torch.bfloat16).train()
    x = torch.randn(shape, device=report.device, dtype=torch.bfloat16)
    batch = Batch(x, x)
    print(f"{name}, blocks in bfloat16, input {'x'.join(map(str, shape))}")
    settings = tuple(s for s in settings if s != "liger" or with_liger(model) is not None)
    with interpreted(report):
        if "stock" in settings:
            check_equal(name, model, batch, report)
            settings = (*settings, "stock, again")
        found = {row["setting"]: row for row in reversed(report.data["steps"]) if row["network"] == name}
        case = Case(name, "plain", model, batch, found)
        for setting in settings:
            if report.has(40 if setting.startswith("compile") and not smoke else 5, f"{name}, {setting}"):
                what = partial(time_setting, case, setting, report, smoke, SixteenBits)
                report.attempt(f"{name}, {setting}", what)


@contextmanager
def repeatable() -> Iterator[None]:
    """Use kernels whose results repeat bit for bit, where torch and the vendor have them."""
    before = torch.backends.cudnn.deterministic, torch.are_deterministic_algorithms_enabled()
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about operators without one
            yield
    finally:
        torch.backends.cudnn.deterministic = before[0]
        torch.use_deterministic_algorithms(before[1])


@sdpa_kernel(SDPBackend.MATH)
@repeatable()
def check_equal(name: str, model: nn.Module, batch: Batch, report: Report) -> None:
    """Check that `lean()` changes no bit of a gradient that is the same in five steps of the baseline.

    Fused attention kernels add up gradients in a varying order, and a gradient of 16 bits may then be the
    same five times by chance. So attention is computed by matrix products here.
    """
    for plain in ("stock", "convert"):
        # a gradient of 16 bits may be the same twice by chance
        first, *others, lean_ones = (
            gradients(SixteenBits(setting, copy.deepcopy(model), True), batch)
            for setting in (*[plain] * 5, "norm" if plain == "stock" else "convert + norm")
        )
        repeat = [k for k, v in first.items() if all(torch.equal(v, other[k]) for other in others)]
        differ = [k for k in repeat if not torch.equal(first[k], lean_ones[k])]
        print(f"  {shown(plain)}: {len(repeat)} of {len(first)} gradients repeat, {len(differ)} differ")
        if differ:
            report.wrong(f"{name}, lean() on {shown(plain)}: {len(differ)} gradients differ: {differ[:4]}")


def time_setting(case: Case, setting: str, report: Report, smoke: bool, kind: type[Side] = Side) -> None:
    device, batch, found = report.device, case.batch, case.found
    side = kind(setting.removesuffix(", again"), copy.deepcopy(case.model), smoke)
    warm_up, steps = (1, 1) if smoke else (WARM_UP, STEPS)
    for _ in range(warm_up):
        side.step(batch)
    seconds = median(device_seconds([partial(side.step, batch)], device, steps, head_start=False))
    side.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    there = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    memory = measure_step(partial(side.forward, batch), device=device)
    row: dict[str, Any] = {"network": case.name, "source": case.source, "setting": setting}
    row |= {
        "batch": len(batch.images),
        "milliseconds": seconds * 1e3,
        "held_bytes": memory.held,
        "peak_bytes": memory.peak,
    }
    row["max_memory_allocated"] = there + memory.peak
    found[setting] = row
    stock = found.get("stock")
    for key in ("milliseconds", "held_bytes", "peak_bytes", "max_memory_allocated"):
        row[f"{key}_of_stock"] = None if stock is None else row[key] / max(stock[key], 1e-9)
    row["reach"] = REACH.get((case.name, setting))
    report.add("steps", row)
    of = [row[f"{key}_of_stock"] for key in ("milliseconds", "max_memory_allocated", "held_bytes")]
    ratios = "" if stock is None else "  of the baseline: time {:.3f}, peak {:.3f}, kept {:.3f}".format(*of)
    most = row["max_memory_allocated"] / 1e9
    print(f"  {shown(setting):16} {row['milliseconds']:9.2f} ms, {most:7.3f} GB at most;{ratios}", flush=True)
    del side
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # so that each setting begins with an empty allocator


# ---------------------------------------------------------------- answers


def gradients(side: Side, batch: Batch, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Gradients and buffers after one step, by name; in one dtype, or under autocast."""
    side.optimizer.zero_grad(set_to_none=True)
    if dtype is not None:
        F.cross_entropy(side.run(batch.images.to(dtype)), batch.labels).backward()
    else:
        side.forward(batch).backward()
    found = {k: p.grad.detach().clone() for k, p in side.model.named_parameters() if p.grad is not None}
    return found | {k: b.detach().clone() for k, b in side.model.named_buffers()}


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 in float32 products and convolutions."""
    flags: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [of.allow_tf32 for of in flags]
    try:
        for of in flags:
            of.allow_tf32 = False
        yield
    finally:
        for of, allowed in zip(flags, before, strict=True):
            of.allow_tf32 = allowed


@repeatable()
def check_gradients(
    name: str, model: nn.Module, batch: Batch, report: Report, settings: tuple[str, ...]
) -> None:
    """Check that `convert` has at most twice the baseline's error, and that `lean` is equal bit for bit.

    Errors are against float64, in float32: with 16 bits the gradients of a new deep network are as far from
    float64's as they are long. Equality is checked only for gradients that are equal in two runs of the same
    step, since some vendor kernels add up in a varying order.
    """

    def of(setting: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        own = copy.deepcopy(model).to(dtype) if dtype else copy.deepcopy(model)
        return gradients(Side(setting, own, True), batch, dtype)

    exact, errors = of("stock", torch.float64), {}
    for plain in ("stock", "convert"):
        with full_precision():
            errors[plain] = distance(of(plain, torch.float32), exact)
        first, second = of(plain), of(plain)
        repeats = {k for k, v in first.items() if torch.equal(v, second[k])}
        count = f"{len(repeats)} of {len(first)}"
        print(f"  {shown(plain)}: {errors[plain]:.2e} from float64's gradients, and {count} repeat")
        for recompute in settings:
            setting = recompute if plain == "stock" else f"convert + {recompute}"
            lean_ones = of(setting)
            differ = sorted(k for k in repeats if not torch.equal(lean_ones[k], first[k]))
            if differ:
                where = f"{name}, lean({recompute!r}) on {shown(plain)}"
                off = distance({k: lean_ones[k] for k in differ}, {k: first[k].double() for k in differ})
                report.wrong(f"{where}: {len(differ)} gradients differ, by {off:.1e}: {differ[:4]}")
    allowed = 2 * errors["stock"] + torch.finfo(torch.float32).eps / 2
    if not errors["convert"] <= allowed:
        report.wrong(f"{name}, convert: gradients {errors['convert']:.3e} off, allowed {allowed:.3e}")


def distance(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The relative L2 distance of all tensors, as one vector."""
    pairs = [(v.double(), exact[k].double()) for k, v in ours.items() if v.is_floating_point()]
    off = sum(float((a - b).square().sum()) for a, b in pairs)
    return (off / max(sum(float(b.square().sum()) for _, b in pairs), 1e-300)) ** 0.5
