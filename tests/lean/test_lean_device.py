"""`lean()` where the host does not wait for the device: later passes look at no value; CUDA's own nodes."""

from __future__ import annotations

import lean_cases
import pytest
import torch
import torch.nn.functional as F
from test_lean import Stock, assert_same, step
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from leannorm import convert
from leannorm import nn as lnn
from leannorm.saving import (
    device,
    lean,
    leaves,
    masks,
    memo,
    narrowed,
    provenance,
    reasons,
    search,
    trial,
)
from leannorm.saving import values as saved_values

aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("searched")  # as on a device
_LOOKS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.item, aten.nonzero, aten.masked_select}


class Looks(TorchDispatchMode):
    """Notes where the host would wait for values: what stalls a step on a device, and ends a capture."""

    def __init__(self):
        super().__init__()
        self.looks = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in _LOOKS:
            self.looks.append(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_device(monkeypatch):
    """The CPU's tensors are treated as a device's, where that is not to ask for its clock."""
    for module in (narrowed, leaves, trial):
        monkeypatch.setattr(module, "asynchronous", lambda tensor: True)
    monkeypatch.setattr(masks, "_on_host", lambda tensor: False)
    monkeypatch.setattr(trial, "WATCHING", {*trial.WATCHING, f"{Looks.__module__}.{Looks.__qualname__}"})


# torch's own batch norm looks at the number of batches where momentum is None
CASES = {
    **{name: (make, lean_cases.IMAGE) for name, make in lean_cases.IMAGES.items() if "momentum" not in name},
    **{name: (make, lean_cases.TOKENS) for name, make in lean_cases.SEQUENCES.items()},
    "converted": (lambda: convert(lean_cases.around(nn.ReLU())), lean_cases.IMAGE),
    "leannorm rms norm": (lambda: lean_cases.on_tokens(lnn.RMSNorm(32)), lean_cases.TOKENS),
}


# The repeated bias of the keys comes from a node that saves nothing and reads a parameter alone. Only where
# nodes tell when they were made is it known that it is of this pass; elsewhere it is compared in every pass.
# So are casts and transposed weights that a function of torch's has made, whose leaf may have had other data.
UNTOLD = {
    "attention with a table of biases",
    "torch's attention, with weights",
    "torch's encoder",
    "transformer",
}


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("name", CASES)
def test_only_the_first_two_passes_look_at_values(name, as_on_a_device, with_and_without_nodes):
    make, shape = CASES[name]
    model = make()
    for _ in range(3):
        with Looks() as noted:  # torch makes views of another kind of node where a mode is on
            step(model, torch.randn(shape), lean("conv"))
        model.zero_grad()
    assert bool(noted.looks) == (name in UNTOLD and provenance.NODES is None)


def test_a_look_is_noticed(as_on_a_device):
    model, x = lean_cases.around(nn.SiLU()), torch.randn(3, *lean_cases.IMAGE[1:])
    trial._SEEN.clear()
    with Looks() as noted:
        step(model, x, lean("norm"))
    assert noted.looks


@pytest.mark.parametrize("make", [lambda: nn.MaxPool2d(2), lambda: nn.MaxPool2d(3, 2, 1)])
def test_positions_of_maxima_are_narrowed_without_a_look(make, as_on_a_device):
    model, x = lean_cases.around(nn.ReLU(), make(), nn.SiLU()), torch.randn(4, 3, 28, 28)
    stock, counted = step(model, x, Stock())
    model.zero_grad()
    ours, saved = step(model, x, lean("norm"))
    assert_same({k: v for k, v in ours.items() if "running" not in k and "num" not in k}, {
        k: v for k, v in stock.items() if "running" not in k and "num" not in k
    })  # fmt: skip
    positions = 8 * 4 * 16 * 14 * 14
    assert saved.kept_bytes <= counted.kept_bytes - 0.75 * positions


def test_in_a_capture_what_was_not_tried_before_is_held(monkeypatch):
    model, x = lean_cases.around(nn.SiLU()), torch.randn(lean_cases.IMAGE)
    for x in torch.randn(2, *lean_cases.IMAGE):
        step(model, x, lean("norm"))
    monkeypatch.setattr(trial, "capturing", lambda tensor: True)
    assert not step(model, x, lean("norm"))[1].reasons  # met before
    trial._SEEN.clear()
    memo.forget()
    with pytest.warns(UserWarning, match="not tried before this CUDA graph's capture"):
        _, saved = step(model, x, lean("norm"))
    assert saved.rebuilt_bytes == 0
    assert any("before it" in reason for reason in saved.reasons)


def test_a_norm_called_past_torchs_function_is_held():
    """The node does not say eps, the frame of F.layer_norm does; where there is none it is held."""
    model = lean_cases.on_tokens(lean_cases.Apply(lambda x: torch.layer_norm(x, (32,), eps=0.5)))
    x = torch.randn(lean_cases.TOKENS)
    for _ in range(2):
        model.zero_grad()
        stock, _ = step(model, x, Stock())
        model.zero_grad()
        assert_same(step(model, x, lean("norm"))[0], stock)


# ---------------------------------------------------------------- several streams, which only take notes


class FakeStream:
    """Knows how far every stream was when this one last waited for it, as events would tell."""

    def __init__(self, name):
        self.name, self.queued, self.seen = name, 0, {}

    def wait_stream(self, other):
        self.seen[other] = other.queued

    def __repr__(self):
        return self.name


class Streams:
    """The current stream of a CPU that is taken for a device, and the streams that tensors were told of."""

    def __init__(self, monkeypatch):
        self.first, self.second = FakeStream("first"), FakeStream("second")
        self.now, self.told = self.first, []
        monkeypatch.setattr(device, "asynchronous", lambda tensor: True)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: self.now)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
        monkeypatch.setattr(device, "streams_used", {})
        told = lambda tensor, stream: self.told.append((tensor.data_ptr(), stream))  # noqa: E731
        monkeypatch.setattr(torch.Tensor, "record_stream", told)

    def runs_on(self, stream, node):
        """The engine sets the stream of a node's forward pass before it reads what the node saved."""
        node.register_prehook(lambda _: setattr(self, "now", stream))


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setattr(memo, "on", False)  # it serves tensors of the CPU, which has no streams
    return Streams(monkeypatch)


def two_readers(streams, second):
    """x on the first stream; silu(x), rebuilt, is read by two products, the other of which is on `second`."""
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    with lean("norm") as saved:
        y = F.silu(x.sin())
        streams.now = second
        b = y @ w
        streams.now = streams.first
        a = y @ w
    streams.runs_on(streams.first, a.grad_fn)
    streams.runs_on(second, b.grad_fn)
    rebuilt, run = [], saved_values.run

    def noted(step, inputs, flags):
        result = run(step, inputs, flags)
        streams.now.queued += 1
        rebuilt.append(
            (streams.now, streams.now.queued, result[0].data_ptr(), [t.data_ptr() for t, _ in inputs])
        )
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_values, "run", noted)
        (a + 2 * b).sum().backward()
    assert saved.rebuilt_bytes == 64 * 64 * 4
    assert len(rebuilt) == 1, "one rebuild serves both readers"
    return rebuilt[0]


def test_a_rebuilt_tensor_waits_for_its_stream_and_keeps_its_memory(streams):
    on, at, memory, (source,) = two_readers(streams, streams.second)
    other = streams.second if on is streams.first else streams.first
    assert other.seen[on] >= at, "the other reader waits until the rebuild is queued"
    assert (memory, other) in streams.told
    assert (source, on) in streams.told


def test_what_is_held_waits_for_the_stream_that_packed_it(streams):
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    with lean("norm"):
        y = F.silu(x.exp())
        streams.now = streams.second
        b = y @ w
    streams.runs_on(streams.second, b.grad_fn)
    streams.first.queued = 7
    b.sum().backward()
    assert streams.second.seen[streams.first] == 7
    assert any(stream is streams.second for _, stream in streams.told)


def test_a_norms_statistics_are_shared_too(streams):
    norm, w = nn.LayerNorm(64), torch.randn(64, 64, requires_grad=True)
    x = torch.randn(64, 64, requires_grad=True)
    with lean("norm"):
        y = norm(x * 2)
        streams.now = streams.second
        z = y @ w
    weight = next(v for v in z.grad_fn._raw_saved_self.data.step.captured if v is not None)
    streams.runs_on(streams.second, z.grad_fn)
    z.sum().backward()
    assert (weight.data_ptr(), streams.second) in streams.told


def test_one_stream_has_nothing_to_wait_for(streams):
    two_readers(streams, streams.first)
    assert not streams.first.seen
    assert not streams.told


# ---------------------------------------------------------------- algorithms that each thread times by itself


@pytest.fixture
def timed_algorithms(monkeypatch):
    """`torch.backends.cudnn.benchmark`, on tensors that are taken for a device's."""
    monkeypatch.setattr(search, "asynchronous", lambda tensor: True)
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    yield
    torch.backends.cudnn.benchmark = before


@pytest.mark.parametrize("name", ["silu", "leannorm convolution and norm"])
def test_convolutions_whose_algorithm_is_timed_are_held(name, timed_algorithms, monkeypatch):
    model, x = lean_cases.IMAGES[name](), torch.randn(lean_cases.IMAGE)
    convolutions = {"ConvolutionBackward0", "ConvNormBackward"}
    monkeypatch.setattr(reasons, "_WARNED", set())
    with pytest.warns(UserWarning, match="cudnn.benchmark"):
        _, saved = step(model, x, lean("conv"))
    assert not [r for r in saved.records if r.node in convolutions and r.rebuilt]
    assert any("cudnn.benchmark is on" in reason for reason in saved.reasons)
    torch.backends.cudnn.benchmark = False
    _, saved = step(model, x, lean("conv"))
    assert not saved.reasons
    assert [r for r in saved.records if "Conv" in r.node and r.rebuilt]


def test_matrix_products_and_norms_are_rebuilt_beside_timed_algorithms(timed_algorithms):
    model, x = lean_cases.on_tokens(nn.Linear(32, 64), nn.SiLU(), width=64), torch.randn(lean_cases.TOKENS)
    _, saved = step(model, x, lean("conv"))
    assert not saved.reasons
    assert any(r.rebuilt for r in saved.records if r.node == "ViewBackward0")
    _, saved = step(lean_cases.around(nn.SiLU()), torch.randn(lean_cases.IMAGE), lean("norm"))
    assert not saved.reasons
    assert saved.rebuilt_bytes


# ---------------------------------------------------------------- CUDA's nodes, on tensors without data

needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="torch is built without CUDA; its nodes need the build, not a GPU"
)


def rebuilt(make, *shape, dtype=torch.float32, recompute="norm"):
    """What `lean()` makes of a function's saved tensors, by node; on fake CUDA tensors, forward only.

    The functions begin with a tangent: its node keeps what it puts out, and has no recipe.
    """
    with FakeTensorMode():
        x = torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)
        with lean(recompute) as saved:
            kept = make(x)
        assert kept.device.type == "cuda"
    nodes = {record.node: record.rebuilt for record in saved.records}
    assert not nodes.get("TanBackward0")
    return nodes, saved


def weights(n, dtype=torch.float32):
    return [torch.ones(n, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2)]


def linear(x, n=64):
    return F.linear(x, torch.ones(8, n, device="cuda", dtype=x.dtype, requires_grad=True))


@needs_cuda_build
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("statistics", [True, False])
def test_cudnn_batch_norm(training, statistics):
    def run(x):
        running = [torch.zeros(64, device="cuda") for _ in range(2)] if statistics else [None, None]
        y = F.batch_norm(x.tan(), *running, *weights(64), training or not statistics)
        assert y.grad_fn.name() == "CudnnBatchNormBackward0"
        return F.conv2d(y, torch.ones(8, 64, 1, 1, device="cuda", requires_grad=True))

    nodes, saved = rebuilt(run, 4, 64, 16, 16)
    assert nodes["CudnnBatchNormBackward0"]
    assert saved.rebuilt_bytes == 4 * 64 * 256 * 4


@needs_cuda_build
def test_native_batch_norm_on_cuda():
    def run(x):
        y = F.batch_norm(x.tan(), None, None, *weights(64), True)  # cuDNN's is for other dtypes
        assert y.grad_fn.name() == "NativeBatchNormBackward0"
        return F.conv2d(y, torch.ones(8, 64, 1, 1, device="cuda", dtype=torch.bfloat16, requires_grad=True))

    nodes, _ = rebuilt(run, 4, 64, 16, 16, dtype=torch.bfloat16)
    assert nodes["NativeBatchNormBackward0"]


@needs_cuda_build
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("rows", [32, 4096])
def test_rows_on_cuda(norm, rows):
    def run(x):
        w, b = weights(64)
        y = F.layer_norm(x.tan(), (64,), w, b) if norm == "layer" else F.rms_norm(x.tan(), (64,), w)
        assert y.grad_fn.name() == {"layer": "NativeLayerNormBackward0", "rms": "FusedRmsNormBackward0"}[norm]
        return linear(y)

    nodes, _ = rebuilt(run, rows, 64)
    assert nodes[{"layer": "NativeLayerNormBackward0", "rms": "FusedRmsNormBackward0"}[norm]]


_ATTENTIONS = {
    "flash": lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v)[0],
    "efficient": lambda q, k, v: aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[0],
    "cudnn": lambda q, k, v: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[0],
}


@needs_cuda_build
@pytest.mark.parametrize("kind", _ATTENTIONS)
def test_attention_on_cuda_keeps_its_output_once(kind):
    """The node keeps it, and the next linear layer keeps it seen from another side, which costs nothing."""
    batch, tokens, heads, width = 2, 128, 4, 16

    def run(x):
        qkv = (x.tan()).view(batch, tokens, 3, heads, width).permute(2, 0, 3, 1, 4).unbind(0)
        y = _ATTENTIONS[kind](*qkv)
        assert y.grad_fn.name().startswith("ScaledDotProduct")
        return linear(y.transpose(1, 2).reshape(batch * tokens, heads * width))

    _, saved = rebuilt(run, batch * tokens, 3 * heads * width, dtype=torch.bfloat16, recompute="conv")
    one = batch * tokens * heads * width * 2  # bytes of q, of k, of v and of the output
    statistics = batch * heads * tokens * 4
    assert 3 * one <= saved.kept_bytes <= 3 * one + 2 * statistics + 4096  # the output is computed from them
