"""What Triton's launcher in C is called with, where there is no device: run by `test_launch_cache.py`.

`python stand_in_driver.py NAME` runs one of the functions below, in a process that does not interpret.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
sys.path[:0] = [str(Path(__file__).parents[i]) for i in (2, 1, 0)]

import torch  # noqa: E402
from more_inputs import Gated, Modulated, Summed  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import leannorm  # noqa: E402
from benchmarks import host_time  # noqa: E402
from leannorm import nn  # noqa: E402
from leannorm._types import Channels, ChannelTensors, KeptByRowNorm, Rows  # noqa: E402
from leannorm.autograd import fast  # noqa: E402
from leannorm.ops import schema  # noqa: E402
from leannorm.ops.backends import TRITON, triton  # noqa: E402
from leannorm.ops.backends.triton import (  # noqa: E402
    channel,
    channel_gradients,
    gated,
    launch,
    rows,
    statistics,
    tape,
)
from leannorm.saving import small  # noqa: E402

LAUNCHED: list[tuple] = []
PUBLIC: list[str] = []
STREAM = [7]


def prepare() -> None:
    """Note the arguments of every launch, and the kernels that Triton's public call launched."""
    host_time.without_a_device(lambda *given: LAUNCHED.append(given), lambda device: STREAM[0])
    public = launch.Launch._public

    def noted(self, *given):
        PUBLIC.append(self.kernel.__name__)
        return public(self, *given)

    launch.Launch._public = noted


def numbered(given: tuple, tensors: list[torch.Tensor]) -> tuple:
    """A launch's arguments: numbers in place of given tensors, 'new' for made ones, no empty hooks."""
    known = {t.data_ptr(): i for i, t in enumerate(tensors)}

    def say(value):
        if isinstance(value, torch.Tensor):
            value = value.data_ptr()
        if type(value).__name__ in ("HookChain", "LazyDict"):  # empty ones, of the public call
            return None
        if isinstance(value, (tuple, list)):
            return tuple(say(v) for v in value)
        return (
            ("given", known[value])
            if value in known
            else "new"
            if type(value) is int and value > 2**40
            else value
        )

    return tuple(say(v) for v in given)


def calls(offset: int = 0, dtype: torch.dtype = torch.bfloat16):
    """Operators and what they are called with; tensors begin `offset` values behind a multiple of 16."""

    def new(*shape, dtype=dtype):
        count = int(torch.Size(shape).numel())
        return torch.randn(count + offset).to(dtype)[offset:].view(shape)

    f32, f64 = torch.float32, torch.float64
    sizes = (4, 8, 6, 6)
    for shape, groups in ((sizes, 0), ((64, 8, 64, 64), 0), (sizes, 2), ((2, 8, 256, 256), 2), (sizes, -2)):
        x, dy, r, y = (new(*shape) for _ in range(4))
        w, b = new(8, dtype=f32), new(8, dtype=f32)
        stats = (2, 8) if groups < 0 else (shape[0], groups) if groups else (8,)
        mean, rstd, p, q = (new(*stats, dtype=f64) for _ in range(4))
        yield channel.channel_forward, (x, w, b, None, 1e-5, "relu", groups, None)
        yield channel.channel_forward, (x, w, None, r, 1e-5, "silu", groups, None)
        yield channel.channel_normalize, (x, mean, rstd, w, b, r, "relu", None)
        yield channel.channel_moments, (x, groups, None)
        yield channel_gradients.channel_backward, (dy, x, mean, rstd, w, b, None, None, "relu", groups, False)
        yield channel_gradients.channel_backward, (dy, x, mean, rstd, w, b, r, y, "relu", groups, True, True)
        yield channel_gradients.channel_backward_, (dy, x, mean, rstd, w, b, r, y, "relu", groups, True)
        yield channel_gradients.channel_grad_sums, (dy, x, mean, rstd, w, b, None, None, "gelu")
        yield channel_gradients.channel_input_grad, (dy, x, mean, rstd, w, b, r, y, p, q, "relu", True)
    x, w, b = new(4, 8, 6, 6), new(8, dtype=f32), new(8, dtype=f32)
    mean, m2, running, var = new(8, dtype=f64), new(8, dtype=f64), new(8, dtype=f32), new(8, dtype=f32)
    batches, count = torch.tensor(3), new(dtype=f64)
    yield channel.channel_forward_tracked_, (x, w, b, None, 1e-5, "relu", running, var, batches, 0.1)
    yield channel.channel_forward_tracked_, (x, w, b, None, 1e-5, "relu", running, var, None, 0.2)
    yield statistics.move_running_, (running, var, batches, None, mean, m2, 0, count)
    yield channel.channel_evaluate, (x, running, var, 1e-5, w, b, None, "relu")
    yield statistics.constants_of, (running, var, 1e-5)
    yield statistics.sums_of, (mean, m2, 100)
    yield statistics.moments_of, (new(33, dtype=f64), 1e-5)
    yield statistics.means_of, (new(17, dtype=f64), w, count)
    for shape in ((40, 64), (40, 4096), (3, 70000)):
        x, dy, r = (new(*shape) for _ in range(3))
        w, b = new(shape[1]), new(shape[1])
        mean, rstd = new(shape[0], 1, dtype=f32), new(shape[0], 1, dtype=f32)
        for rms in (False, True):
            yield rows.row_forward, (x, r if rms else None, w, None if rms else b, 1, 2, 1e-5, rms)
            yield rows.row_backward, (dy, r if rms else None, x, mean, rstd, w, 1, 2, rms, True, not rms)
            yield rows.row_backward, (dy, None, x, mean, rstd, None, 1, 2, rms, False, False)
    for kept in (64, 20000):
        x, dy, gate = new(40, kept), new(40, kept), new(40, 2 * kept)[:, kept:]
        rstd, w = new(40, dtype=f32), new(kept, dtype=f32)
        for before in (False, True):
            yield gated.row_gated_forward, (x, gate, w, 1e-5, "silu", before, False)
            yield gated.row_gated_backward, (dy, x, gate, rstd, w, "silu", before, True)
        for groups in (5, 40):
            gate, scale, shift = (new(groups, kept, dtype=dtype if groups == 40 else f32) for _ in range(3))
            mean = new(40, dtype=f32)
            yield rows.row_forward, (x, dy, scale, shift, 1, 2, 1e-5, False, 1.0, False, None, gate)
            of_scale = scale, 1, 2, False, True, True, 1.0, None
            yield rows.row_backward, (dy, None, x, mean, rstd, *of_scale)
            yield rows.row_backward, (dy, None, x, mean, rstd, *of_scale, gate, dy.clone())
    heads, w = new(2, 10, 3, 4, 64)[:, :, 1], new(64)
    mean, rstd = new(2, 10, 4, 1, dtype=f32), new(2, 10, 4, 1, dtype=f32)
    yield rows.row_forward, (heads, None, w, None, 3, 4, 1e-5, True)
    yield rows.row_backward, (heads, None, heads.clone(), mean, rstd, w, 3, 4, True, True, False)


def launched_by(operator, arguments) -> list[tuple]:
    LAUNCHED.clear()
    result = operator(*arguments)
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    kinds = [None if t is None else (t.shape, t.stride(), t.dtype) for t in results]
    return [kinds, *(numbered(given, tensors) for given in LAUNCHED)]


def same_launches() -> None:
    """A repeated call launches what the first one did by Triton's public call; and what no tape said."""
    for dtype in (torch.bfloat16, torch.float32):
        for offset in (0, 1):
            for operator, arguments in calls(offset, dtype):
                plain = launched_by(operator.operator, arguments)
                first = launched_by(operator, arguments)
                del PUBLIC[:]
                again = launched_by(operator, arguments)
                assert not PUBLIC, (operator.__name__, PUBLIC)
                assert plain == first == again, (operator.__name__, dtype, offset, plain, first, again)
                assert len(again) > 1


def integers() -> None:
    """A kept launch serves all integers; a kernel compiled for 1, or for multiples of 16, would not."""
    seen = set()
    public = launch.Launch._public

    def looked_at(self, *given):
        count = len(self.values) - len(self.constants)
        for parameter, value in zip(self.kernel.params[:count], self.values[:count], strict=True):
            if type(value) is int:
                assert parameter.do_not_specialize, (self.kernel.__name__, parameter.name)
                seen.add((self.kernel.__name__, parameter.name))
        return public(self, *given)

    launch.Launch._public = looked_at
    for operator, arguments in calls():
        operator(*arguments)
    assert len(seen) > 50


def numbers() -> None:
    """A setting that is a tensor is read by every call."""
    x, w = torch.randn(40, 64), torch.randn(64)
    images, mean, var = torch.randn(2, 4, 3, 3), torch.zeros(4), torch.ones(4)
    for eps in (0.25, 0.5, 0.25):
        given = torch.tensor(eps)
        LAUNCHED.clear()
        TRITON.row_forward((x, None, None, None, None, w, None), Rows(1, 2, given, True))
        TRITON.channel_forward(ChannelTensors(images), Channels(0, given))
        TRITON.channel_evaluate(ChannelTensors(images, mean=mean, var=var), Channels(0, given))
        assert len(LAUNCHED) == 3
        for launched in LAUNCHED:  # Triton 3.9 puts a kernel's arguments in a tuple of their own
            assert any(type(v) is float and v == eps for v in tree_leaves(launched))


def alignment() -> None:
    """Other pointers of the same kind of tensors find their own kernel, in any order."""
    functions = {}
    for order in ((0, 1, 0, 1), (1, 0)):
        for offset in order:
            for number, (operator, arguments) in enumerate(calls(offset)):
                launched = [given[4] for given in (launched_by(operator, arguments) and LAUNCHED)]
                assert functions.setdefault((number, offset), launched) == launched
        tape.forget()
    count = max(number for number, _ in functions) + 1
    assert all(functions[n, 0] != functions[n, 1] for n in range(count))


def negated() -> None:
    """A view that torch negates when it is read is written out by the dispatcher, in every call."""
    x, dy, w = torch.randn(40, 64), torch.randn(40, 64), torch.randn(64)
    mean, rstd = torch.zeros(40, 1), torch.ones(40, 1)

    def given(call, *arguments) -> set:
        LAUNCHED.clear()
        call(*arguments)
        return {v.data_ptr() if isinstance(v, torch.Tensor) else v for v in tree_leaves(LAUNCHED)}

    for _ in range(3):
        span = Rows(1, 2, 1e-5, True)
        forward = given(TRITON.row_forward, torch._neg_view(x), None, w, None, span)
        kept = KeptByRowNorm(x, mean, rstd, w)
        backward = given(TRITON.row_backward, torch._neg_view(dy), None, kept, span)
        assert w.data_ptr() in forward & backward
        assert x.data_ptr() not in forward
        assert x.data_ptr() in backward
        assert dy.data_ptr() not in backward


def devices_and_streams() -> None:
    """Every launch is on the stream that is current by then, and on the device of its tensors."""
    x, w = torch.randn(40, 64), torch.randn(64)
    call = (x, None, w, None, 1, 2, 1e-5, True)
    entered = []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)

        def __exit__(self, *_):
            entered.append(None)

    for _ in range(3):
        rows.row_forward(*call)
    for STREAM[0] in (7, 8, 7):
        LAUNCHED.clear()
        rows.row_forward(*call)
        assert LAUNCHED[0][3] == STREAM[0]
    launch._current_device, torch.cuda.device = lambda: 1, Device
    rows.row_forward(*call)
    assert entered == [0, None]


def hooks() -> None:
    """A profiler that listens to launches hears each of them; when it has left, they are quick again."""
    from triton import knobs

    heard = []
    call = (torch.randn(40, 64), None, torch.randn(64), None, 1, 2, 1e-5, True)
    rows.row_forward(*call)
    knobs.runtime.launch_enter_hook.add(heard.append)
    del PUBLIC[:]
    rows.row_forward(*call)
    assert PUBLIC == ["forward_tile"]
    knobs.runtime.launch_enter_hook.remove(heard.append)
    del PUBLIC[:]
    rows.row_forward(*call)
    assert not PUBLIC


IN_CPP = Summed, Modulated, Gated  # which the functions in Python pass to no tape
_IMAGES, _TOKENS, _SAMPLES = (4, 8, 6, 6), (40, 64), (5, 8, 64)
USUAL = [  # layers, and the shape of what they are called with
    (lambda: nn.BatchNorm2d(8), _IMAGES),
    (lambda: nn.BatchNormAct2d(8, act="silu"), (64, 8, 64, 64)),
    (lambda: nn.BatchNorm2d(8).eval(), _IMAGES),
    (lambda: nn.GroupNorm(2, 8), _IMAGES),
    (lambda: nn.InstanceNorm2d(8), _IMAGES),
    (lambda: nn.LayerNorm(64), _TOKENS),
    (lambda: nn.RMSNorm(64), _TOKENS),
    (lambda: nn.RMSNorm(64, weight_offset=1.0, cast="before"), _TOKENS),
    (lambda: nn.LayerNorm(8, dim=1), _IMAGES),
    (lambda: Modulated(64, 5), _SAMPLES),
    (lambda: Modulated(64, 5, 8), _SAMPLES),
    (lambda: Modulated(64, 5, affine=True), _SAMPLES),
    (lambda: Modulated(64, 5, of="gated sum"), _SAMPLES),
    (lambda: Gated(*_SAMPLES), _SAMPLES),
    (lambda: Gated(*_SAMPLES, elementwise_affine=False), _SAMPLES),
    (lambda: Summed("relu", 8), _IMAGES),
]


def layers() -> None:
    """A layer's call in one step launches what its first call did, whichever nodes repeat it."""
    from triton import knobs

    class Device:
        def __init__(self, index):
            entered.append(index)

        def __enter__(self):
            pass

        __exit__ = lambda *_: None  # noqa: E731

    entered, quick = [], launch._current_device
    made = [
        *USUAL,
        (lambda: Summed("silu", 8), (64, 8, 64, 64)),
    ]
    for nodes in dict.fromkeys((fast.NODES, None)):
        fast.NODES = nodes
        for (make, shape), offset in itertools.product(made, (0, 1)):
            tape.forget()
            layer = make()
            if nodes is None and isinstance(layer, IN_CPP):
                continue
            x, dy = (torch.randn(torch.Size(shape).numel() + offset)[offset:].view(shape) for _ in range(2))
            given = [x.requires_grad_(), dy, *layer.parameters(), *layer.buffers()]

            def call():
                LAUNCHED.clear()
                del PUBLIC[:]
                y = layer(x)  # noqa: B023
                node = y.grad_fn
                in_cpp = not isinstance(node, torch.autograd.function.BackwardCFunction)
                is_fast = in_cpp or node.call.backend.as_given
                y.backward(dy)  # noqa: B023
                with torch.no_grad():
                    layer(x)  # noqa: B023
                return is_fast, [numbered(g, given) for g in LAUNCHED]  # noqa: B023

            was_fast, first = call()
            repeats, again = call()
            assert (was_fast, repeats) == (False, True), shape
            assert first == again, (shape, first, again)
            assert len(again) > 2
            assert not PUBLIC, (shape, offset, PUBLIC)
            STREAM[0] = 8
            call()
            assert {launched[3] for launched in LAUNCHED} == {8}
            STREAM[0] = 7
            heard: list = []
            knobs.runtime.launch_exit_hook.add(heard.append)
            assert call()[1] == first
            knobs.runtime.launch_exit_hook.remove(heard.append)
            assert len(PUBLIC) == len(first)
            launch._current_device, torch.cuda.device, device = lambda: 1, Device, torch.cuda.device
            assert call()[1] == first
            launch._current_device, torch.cuda.device = quick, device
            assert entered == [0] * len(first)
            entered.clear()


def passes() -> None:
    """Under `lean()` each call is one of the dispatcher's, which the pass writes down; later ones are not."""
    heard, kernel = [], triton.imported_by_call("row_forward")
    schema.LIBRARY.impl(
        "row_forward", lambda *given: heard.append(1) or kernel(*given), "CPU", allow_override=True
    )
    layer, x = nn.LayerNorm(64), torch.randn(40, 64, requires_grad=True)
    for turn in range(4):
        heard.clear()
        layer(x)
        assert not heard, turn
        around = leannorm.lean("norm")
        around.place = small.NEVER_SMALL  # it is looked at however little it saves
        with around:
            y = layer(x)
        assert heard, turn
        in_cpp = not isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction)
        assert in_cpp == (fast.NODES is not None)


def another_triton() -> None:
    """Its launches may differ inside: they are Triton's own, and it is said once."""
    import triton

    triton.__version__ = "4.2.0"
    call = (torch.randn(40, 64), None, torch.randn(64), None, 1, 2, 1e-5, True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            rows.row_forward(*call)
    assert PUBLIC == ["forward_tile"] * 3
    assert [str(w.message).split(";")[0] for w in caught] == [
        "each launch takes some 10 µs longer: leannorm knows how Triton 3.6 to 3.9 launch a compiled kernel, "
        "found Triton 4.2.0"
    ]


if __name__ == "__main__":
    prepare()
    globals()[sys.argv[1]]()
