"""What a program may use beside torch and leannorm: user-written autograd functions, contexts, interrupts."""

from __future__ import annotations

import contextlib
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import nn
from torch.autograd import Function


def _saves(name, count):
    """x to 2 sin x, by a user's function that saves `count` tensors and may be called like one of ours."""

    def forward(ctx, x):
        ctx.save_for_backward(x, *(x.cos() if i == 0 else x.new_ones(2) for i in range(count - 1)))
        return x.sin() * 2

    def backward(ctx, grad):
        return grad * 2 * ctx.saved_tensors[1]

    return type(name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


ConvNorm, ChannelNorm, RowNorm = _saves("ConvNorm", 6), _saves("ChannelNorm", 9), _saves("RowNorm", 5)
ChannelAffine, GatedNorm, UserSin = _saves("ChannelAffine", 9), _saves("GatedNorm", 4), _saves("UserSin", 2)
# a class may call its node what it likes: these two are called as torch's own
UserSilu, UserRelu = _saves("UserSilu", 2), _saves("UserRelu", 3)
UserSilu._backward_cls.__name__, UserRelu._backward_cls.__name__ = "SiluBackward0", "ReluBackward0"


class Posing(Function):
    """Called as leannorm's norm of rows, with attributes of its names, and doing something else."""

    @staticmethod
    def forward(ctx, x):
        ctx.dtypes, ctx.span, ctx.eps, ctx.rms, ctx.backend = (
            (x.dtype, None, None),
            (1, 2),
            1e-5,
            False,
            torch,
        )
        y = x * 3
        ctx.save_for_backward(x, y, x, None)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y, *_ = ctx.saved_tensors
        return grad * 3 + (y - x * 3)


Posing._backward_cls.__name__ = "RowNormBackward"


class Exp(Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx, x):
        y = x.clamp(max=2).exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class Negate(Function):
    """Works in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.neg_()

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Halves(Function):
    """Two outputs, one of which is saved."""

    @staticmethod
    def forward(ctx, x):
        a, b = x * 0.5, x.tanh()
        ctx.save_for_backward(b)
        return a, b

    @staticmethod
    def backward(ctx, grad_a, grad_b):
        (b,) = ctx.saved_tensors
        return grad_a * 0.5 + grad_b * (1 - b * b)


@torch.library.custom_op("programs::doubled_sin", mutates_args=())
def doubled_sin(x: torch.Tensor) -> torch.Tensor:
    """Its backward function writes into what it has saved."""
    return x.sin() * 2


def _slope(ctx, grad):
    (x,) = ctx.saved_tensors
    slope = grad * 2 * x.cos()
    if torch.is_grad_enabled():
        return slope
    x.detach().copy_(slope)
    return slope


doubled_sin.register_fake(torch.empty_like)
doubled_sin.register_autograd(
    _slope, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])
)


@contextlib.contextmanager
def swapped(on, *leaves):
    """Leaves have other data in the meantime, as weights that are quantized for the time of a call."""
    kept = [leaf.data for leaf in leaves]
    for leaf in leaves if on else ():
        leaf.data = (leaf.data * 4).round() / 4
    try:
        yield
    finally:
        for leaf, data in zip(leaves, kept, strict=True):
            leaf.data = data


@contextlib.contextmanager
def taking_turns(first, second):
    """Two contexts, of which the first to open is the first to close: those of two tasks of one thread."""
    first.__enter__()
    second.__enter__()
    try:
        yield
    finally:
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)


def convolved(x, weight, bias):
    """By the method of torch's layer, whose frame tells the bias."""
    layer = nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[2:], device="meta")
    return layer._conv_forward(x, weight, bias)


def forked(x):
    """A part runs in a thread of torch's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = _script()(x)
    return parts[0] + parts[1]  # in the script, the last thread would number the node


@lru_cache
def _script():
    return torch.jit.script(_two_parts)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * x.sigmoid()


def _two_parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    future = torch.jit.fork(_silu, x)
    y = x.tanh()
    return torch.jit.wait(future), y


def exchanged(leaf):
    """Has another tensor behind the same Python object, as `module.to` may do."""
    if leaf.is_leaf and leaf.grad is None:
        torch.utils.swap_tensors(leaf, nn.Parameter(leaf.detach() * 0.5, leaf.requires_grad))


class Interrupt(KeyboardInterrupt):
    """The program's own, so that whoever runs the program can still interrupt it."""


def interrupt(now, x, error=Interrupt):
    """x, or the error if it is `now`."""
    if now:
        raise error
    return x


@contextlib.contextmanager
def deterministic(mode):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def matmul(precision):
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # a line has set it by torch's other setting, which does not mix with this one
        yield
        return
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def busy(count):
    """Makes nodes, so that this thread's numbers are ahead of another's."""
    y = torch.zeros(1, requires_grad=True)
    for _ in range(count):
        y = y + 1


def elsewhere(make, x, count=0):
    """`make(x)`, in a thread that has made `count` nodes before."""

    def work():
        busy(count)
        return make(x)

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


def at_first(i, x, value):
    """The leaf x, of one value in the first step."""
    if not i:
        x.data.fill_(value)
    return x


def tangent_of(f, x):
    """The derivative of f at x in the direction of x, by forward-mode AD; it keeps its graph."""
    return torch.func.jvp(f, (x,), (x,))[1]


def gradient_of(f, x):
    """By a transform, which admits no hooks."""
    return torch.func.grad(lambda a: f(a).float().sum())(x)


def precision(value):
    torch.backends.fp32_precision = value


def only_warns(on):
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=on)


def flush(on):
    torch.set_flush_denormal(on)


PRECISIONS = (
    ("generic", "all"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
    ("cuda", "all"),
    ("cuda", "matmul"),
)


@contextlib.contextmanager
def own_settings():
    """What lines set for good is taken back after the program."""
    mode = torch.get_deterministic_debug_mode()
    try:
        yield
    finally:
        flush(False)
        torch.set_float32_matmul_precision("highest")
        for place in PRECISIONS:  # torch's own context of oneDNN's flags sets what it found, for good
            torch._C._set_fp32_precision_setter(*place, "none")
        torch.set_deterministic_debug_mode(mode)


def settings():
    """What those lines set, and what a rebuild might."""
    places = ("generic", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv")
    names = [torch._C._get_fp32_precision_getter(*place) for place in places]
    numbers = [("none", "ieee", "tf32", "bf16").index(name) for name in names]
    numbers += [torch.get_deterministic_debug_mode(), torch.get_num_threads(), torch._C._get_mkldnn_enabled()]
    return torch.tensor([*numbers, 2.0**-1022 * 0.5 == 0.0], dtype=torch.float64)


def suppressed():
    return contextlib.suppress(Exception)


def mkldnn(enabled):
    return torch.backends.mkldnn.flags(enabled=enabled, deterministic=False)


def autocast(dtype=torch.bfloat16, enabled=True, **options):
    return torch.autocast("cpu", dtype=dtype, enabled=enabled, **options)


class Body(nn.Module):
    """A model whose forward pass is a block of the program: `with model:`."""

    def forward(self, block):
        return block()
