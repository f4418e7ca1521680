"""Single calls of the norms: the shapes, the functions of each library, the check and the timing.

Bytes are those that an implementation must move. `bytes_once` counts every tensor once. The other count adds
a second read where one is needed: a batch norm's second pass over an input that is larger than the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from math import log2, prod, sqrt
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import modern, tune
from benchmarks.gpu.report import Report
from leannorm import functional
from leannorm.ops.backends import BACKENDS
from leannorm.ops.select import backends, use_backend
from leannorm.report.answers import Error, error_of, largest_error, poisoned_memory
from leannorm.report.timing import device_seconds, sets_past_the_cache, time_step

EPS = 1e-5
TURNS = 24


class Case(NamedTuple):
    """A norm, its shape, and its goals: shares of a copy's speed, forward and backward."""

    name: str
    shape: tuple[int, ...]
    kind: str  # channel, layer, rms, or one of modern.KINDS
    reach: tuple[float, float] = (0.0, 0.0)
    residual: bool = False
    channels_last: bool = True

    def __str__(self) -> str:
        return f"{self.name} {'x'.join(map(str, self.shape))}"


Sizes = tuple[tuple[int, int], ...]
_RELU: Sizes = (64, 112), (64, 56), (128, 56), (128, 28), (256, 28), (256, 14), (512, 14), (512, 7)
_ADD: Sizes = (256, 56), (512, 28), (1024, 14), (2048, 7)
_PLANES: Sizes = (64, 56), (128, 28), (256, 14), (512, 14), (512, 7)


def cases(smoke: bool) -> dict[str, list[Case]]:
    """The cases by section: ResNet-50's batch norms, rows, and small tensors."""
    relu, add, planes, batch, lines = _RELU, _ADD, _PLANES, 128, 32768
    lengths: tuple[int, ...] = 1024, 4096, 8192, 16384
    if smoke:
        relu, add, planes, batch, lines, lengths = ((8, 5),), ((16, 3),), ((8, 5),), 2, 6, (40,)
    # a DiT, Mamba-2, Gemma, Llama's queries, a UNet
    tokens, inner, images, heads = (64, 512, 1152), (32768, 4096), (32, 256, 64, 64), (16, 2048, 32, 128)
    if smoke:
        tokens, inner, images, heads = (2, 3, 16), (6, 16), (2, 8, 4, 4), (2, 3, 2, 16)
    of_modern: tuple[tuple[str, tuple[int, ...]], ...]
    of_modern = ("AdaLN", tokens), ("AdaLN of a token", tokens), ("gated residual + AdaLN", tokens)
    of_modern += ("gated RMS norm", inner), ("RMS norm, 1 + w", inner), ("RMS norm of heads", heads)
    of_modern += (("group norm + silu", images),)
    image, line = ((2, 8, 4, 4), (4, 40)) if smoke else ((2, 64, 28, 28), (64, 768))
    near = (0.80, 0.80)
    return {
        "channels": [
            *(Case("batch norm + relu", (batch, c, n, n), "channel", near) for c, n in relu),
            *(Case("batch norm + add + relu", (batch, c, n, n), "channel", near, True) for c, n in add),
            *(
                Case("batch norm + relu, contiguous", (batch, c, n, n), "channel", near, channels_last=False)
                for c, n in planes
            ),
        ],
        "rows": [
            *(Case("layer norm", (lines, n), "layer", (0.85, 0.75)) for n in lengths),
            *(Case("RMS norm", (lines, n), "rms", (0.88, 0.75)) for n in lengths),
        ],
        "modern": [
            Case(name, shape, kind) for (name, shape), kind in zip(of_modern, modern.KINDS, strict=True)
        ],
        "small": [
            Case("batch norm + relu", image, "channel"),
            Case("batch norm + add + relu", image, "channel", residual=True),
            Case("batch norm + relu, contiguous", image, "channel", channels_last=False),
            Case("layer norm", line, "layer"),
            Case("RMS norm", line, "rms"),
        ],
    }


class Set(NamedTuple):
    """The tensors of one call, and the gradient of its output."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    residual: Tensor | None
    mean: Tensor
    var: Tensor
    dy: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [
            t
            for t in (self.x, self.weight, self.bias, self.residual, self.mean)
            if t is not None and t.requires_grad
        ]


Side = Callable[[Set], Tensor]


def make_set(case: Case, dtype: torch.dtype, device: torch.device) -> Set:
    """Random tensors; weight and bias are float32 for channel norms, `dtype` for row norms."""
    if case.kind in modern.KINDS:
        made = Set(*modern.tensors(case.kind, case.shape, dtype, device))
        unused = case.kind in ("gated", "offset", "heads")
        return made._replace(bias=made.bias.detach()) if unused else made

    def full() -> Tensor:
        t = torch.randn(case.shape, device=device, dtype=dtype)
        last = case.kind == "channel" and case.channels_last
        return t.contiguous(memory_format=torch.channels_last) if last else t

    features = case.shape[1]
    of = torch.float32 if case.kind == "channel" else dtype
    weight = (torch.rand(features, device=device) + 0.5).to(of).requires_grad_()
    bias = torch.randn(features, device=device).to(of).requires_grad_(case.kind != "rms")
    mean, var = torch.zeros(features, device=device), torch.ones(features, device=device)
    residual = full().requires_grad_() if case.residual else None
    return Set((full() * 2 + 0.5).requires_grad_(), weight, bias, residual, mean, var, full())


def ours(kind: str) -> Side:
    if kind in modern.KINDS:
        return modern.ours(kind)
    return {
        "channel": lambda s: functional.batch_norm_act(
            s.x, s.mean, s.var, s.weight, s.bias, True, 0.1, EPS, act="relu", residual=s.residual
        ),
        "layer": lambda s: functional.layer_norm(s.x, s.weight.shape, s.weight, s.bias, EPS),
        "rms": lambda s: functional.rms_norm(s.x, s.weight.shape, s.weight, EPS),
    }[kind]


def torchs(kind: str) -> Side:
    if kind in modern.KINDS:
        return modern.formula(kind)

    def channel(s: Set) -> Tensor:  # in place, as in torchvision's networks
        y = F.batch_norm(s.x, s.mean, s.var, s.weight, s.bias, True, 0.1, EPS)
        return F.relu_(y if s.residual is None else y.add_(s.residual))

    return {
        "channel": channel,
        "layer": lambda s: F.layer_norm(s.x, s.weight.shape, s.weight, s.bias, EPS),
        "rms": lambda s: F.rms_norm(s.x, s.weight.shape, s.weight, EPS),
    }[kind]


def compiled(kind: str, smoke: bool) -> Side:
    torch._dynamo.reset()  # compiled for one shape only
    norm = torchs(kind)

    def function(*tensors: Tensor | None) -> Tensor:
        return norm(Set(*tensors, tensors[0]))  # type: ignore[arg-type, call-arg]

    made = torch.compile(function, dynamic=False, backend="aot_eager" if smoke else "inductor")
    return lambda s: made(*s[:-1])


def others(kind: str) -> dict[str, Side]:
    """Row norms of other libraries that can be imported."""
    if kind in modern.KINDS:
        return modern.others(kind)
    found: dict[str, Side] = {}
    try:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        if kind == "layer":
            found["liger"] = lambda s: LigerLayerNormFunction.apply(s.x, s.weight, s.bias, EPS)
        if kind == "rms":
            found["liger"] = lambda s: LigerRMSNormFunction.apply(s.x, s.weight, EPS, 0.0, "llama", False)
    except Exception:  # not installed, or built for another torch
        pass
    try:
        from quack import rmsnorm

        if kind == "rms":
            found["quack"] = lambda s: rmsnorm(s.x, s.weight, eps=EPS)
    except Exception:
        pass
    return found


# ---------------------------------------------------------------- answers


def answers(side: Side, s: Set) -> list[Tensor]:
    y = side(s)
    return [y.detach(), *torch.autograd.grad(y, s.leaves, s.dy)]


def errors(case: Case, sides: dict[str, Side], s: Set) -> dict[str, list[Error]]:
    """The errors of every side's output and gradients against float64.

    Where an output is near 0, two correct results may differ in whether relu zeroes it. So the float64
    gradient uses each side's own sign pattern.
    """
    doubles = (None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in s)
    double = Set(*doubles)  # type: ignore[arg-type]
    kind, relu = case.kind, case.kind == "channel"
    if relu:
        z = F.batch_norm(double.x, None, None, double.weight, double.bias, True, 0.1, EPS)
        z = z if double.residual is None else z + double.residual
    else:
        z = torchs(kind)(double)
    # a sum of n values of about 1 may be near 0 and its partial sums not: for each of its log2(n) levels
    # one rounding of a partial sum, whose size is sqrt(n)
    n = prod(case.shape) // case.shape[1]
    partial_sums = torch.finfo(torch.float32).eps / 2 * log2(n) * sqrt(n) if n > 1 else 0.0
    found: dict[str, list[Error]] = {}
    torchs_errors: list[float] = []
    for name, side in sides.items():  # torch's first: its errors are the budget of the others
        # under poisoned_memory torch.compile would compile again
        with tune.launched_as(name, s.x.device), poisoned_memory() if name == "ours" else nullcontext():
            got = answers(side, s)
        dz = double.dy * (got[0] > 0) if relu else double.dy
        exact = [
            (z.relu() if relu else z).detach(),
            *torch.autograd.grad(z, double.leaves, dz, retain_graph=True),
        ]
        if not torchs_errors:
            torchs_errors = [largest_error(a, e) for a, e in zip(got, exact, strict=True)]
        found[name] = [
            error_of(a, e, t, partial_sums if a.dim() == 1 else 0.0)
            for a, e, t in zip(got, exact, torchs_errors, strict=True)
        ]
    return found


# ---------------------------------------------------------------- times


def moved(case: Case, itemsize: int, cache: int) -> dict[str, tuple[int, int]]:
    """For forward, backward and both: the bytes with repeated reads, and with each tensor counted once."""
    t, residual = prod(case.shape) * itemsize, case.residual
    forward = [t, t] + [t] * residual  # x, y, residual
    backward = [t, t, t] + [t, t] * residual  # x, dy, dx; output, dz
    again = case.kind == "channel"
    again_forward = t * (again and t > cache)
    reads = t * (3 if residual else 2)
    again_backward = reads * (again and reads > cache)
    once = sum(forward), sum(backward)
    if case.kind in modern.MOVED:
        once = tuple(t * sizes for sizes in modern.MOVED[case.kind])  # type: ignore[assignment]
    passes = once[0] + again_forward, once[1] + again_backward
    return {
        "forward": (passes[0], once[0]),
        "backward": (passes[1], once[1]),
        "both": (sum(passes), sum(once)),
    }


def timed(who: str, side: Side, sets: list[Set], device: torch.device) -> Iterator[tuple[str, float]]:
    """Median device seconds of forward, backward and both."""

    def back(y: Tensor, s: Set) -> Any:
        return torch.autograd.grad(y, s.leaves, s.dy, retain_graph=True)

    forward = [partial(side, s) for s in sets]
    both = [partial(answers, side, s) for s in sets]
    for direction, calls in (("forward", forward), ("backward", None), ("both", both)):
        if calls is None:
            calls = [partial(back, side(s), s) for s in sets]
        turns = TURNS if device.type == "cuda" else 1
        with tune.launched_as(who, device):
            device_seconds(calls, device, min(len(calls), 3), head_start=False)
            yield direction, median(device_seconds(calls, device, turns))


def serving(s: Set, smoke: bool) -> str:
    """The backend of the call. In a smoke run it is the interpreted kernels, which must be named."""
    tensors = (s.x, s.weight, s.bias, s.residual)
    if smoke and not BACKENDS["triton"].why_not(*tensors, named=True):
        return "triton"
    return next(name for name, why in backends(*tensors).items() if not why)


def run_case(case: Case, report: Report, compile_too: bool, smoke: bool) -> None:
    """Check, then time leannorm, torch and the other libraries, or only torch.compile."""
    device, dtype = report.device, torch.bfloat16
    s = make_set(case, dtype, device)
    name = serving(s, smoke)
    sides: dict[str, Side] = {"torch": torchs(case.kind)}
    if compile_too:
        sides["compile"] = compiled(case.kind, smoke)
    else:
        sides["ours"] = ours(case.kind)
        sides |= others(case.kind)
        if name == "triton" and tune.has_plain_launches(case.kind, s.x):
            sides["plain"] = sides["ours"]
    with use_backend(name) if smoke else nullcontext():
        right = keep_right(case, sides, s, report)
        nbytes = s.x.nbytes
        sets = [s, *(make_set(case, dtype, device) for _ in range(sets_past_the_cache(nbytes, device) - 1))]
        bytes_of = moved(case, s.x.element_size(), report.data.get("l2_bytes", 0))
        of_torch: dict[str, float] = {}
        for who, side in right.items():
            for direction, seconds in timed(who, side, sets, device):
                of_torch.setdefault(direction, seconds)
                passes, once = bytes_of[direction]
                rate = passes / seconds / 1e12
                row = {
                    "case": case.name,
                    "shape": list(case.shape),
                    "dtype": str(dtype).removeprefix("torch."),
                    "side": who,
                    "backend": name if who == "ours" else None,
                    "direction": direction,
                    "microseconds": seconds * 1e6,
                    "bytes": passes,
                    "bytes_once": once,
                    "tb_s": rate,
                    "share": rate / report.data["copy_tb_s"],
                    "share_once": once / seconds / 1e12 / report.data["copy_tb_s"],
                    "torch_over_this": of_torch[direction] / seconds,
                    "reach": {"forward": case.reach[0], "backward": case.reach[1]}.get(direction),
                }
                if who == "torch" and compile_too:
                    continue  # its row exists already
                report.add("rows", row)
                print(
                    f"{case!s:42} {who:8} {direction:8} {seconds * 1e6:10.1f} us {rate:7.3f} TB/s"
                    f"  share {row['share']:5.2f}  {row['torch_over_this']:5.2f}x torch",
                    flush=True,
                )


def keep_right(case: Case, sides: dict[str, Side], s: Set, report: Report) -> dict[str, Side]:
    """The sides whose errors are within the budget; the others are reported and not timed."""
    right = {}
    for who, found in errors(case, sides, s).items():
        outside = [f"{e.largest:.3e} > {e.allowed:.3e}" for e in found if not e.within]
        if not outside or who == "torch":  # torch's own error sets the budget
            right[who] = sides[who]
        else:
            add = report.wrong if who == "ours" else report.note
            add(f"{case}, {who}: errors of output and gradients exceed the budget: {', '.join(outside)}")
    return right


def run_small(case: Case, report: Report, smoke: bool) -> None:
    """Small tensors, where launches dominate: wall time and launches of a forward and backward pass."""
    device = report.device
    s = make_set(case, torch.bfloat16, device)
    name = serving(s, smoke)
    calls, turns = (1, 1) if smoke else (50, 9)
    with use_backend(name) if smoke else nullcontext():
        right = keep_right(case, {"torch": torchs(case.kind), "ours": ours(case.kind)}, s, report)
        runs = {who: partial(answers, side, s) for who, side in right.items()}
        seconds: dict[str, list[float]] = {who: [] for who in runs}
        for _ in range(turns + 1):
            for who, run in runs.items():
                taken = time_step(lambda run=run: [run() for _ in range(calls)], device)  # type: ignore[misc]
                seconds[who].append(taken / calls)
        for who, run in runs.items():
            took, count = median(seconds[who][1:]), launches(run, device)
            forward = launches(partial(right[who], s), device)
            row = {"case": case.name, "shape": list(case.shape), "side": who, "microseconds": took * 1e6}
            row |= {
                "launches": count,
                "launches_forward": forward,
                "backend": name if who == "ours" else None,
            }
            report.add("small", row)
            print(
                f"{case!s:42} {who:8} {took * 1e6:8.1f} us wall-clock, {count} launches ({forward} forward)"
            )


def launches(call: Callable[[], object], device: torch.device | str) -> int | None:
    """How many kernels, copies and fills a call launches on a GPU, by the profiler; None on the CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    call()
    for _ in range(2):  # the first profile of a process may miss kernels
        torch.cuda.synchronize(device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
            call()
            torch.cuda.synchronize(device)
    return sum(bool(event.device_type == DeviceType.CUDA) for event in recorded.events() or ())
