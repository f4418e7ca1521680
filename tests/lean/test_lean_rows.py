"""The gradient of a log-softmax is computed some rows at a time, over the incoming one if it is free."""

from contextlib import nullcontext
from tempfile import NamedTemporaryFile

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.dlpack import from_dlpack, to_dlpack

from leannorm import lean
from leannorm.report.memory import measure_step
from leannorm.saving import rows
from leannorm.saving.evidence import same_bits

TOKENS, WORDS, WIDTH = 1100, 1000, 16
WHOLE = TOKENS * WORDS * 4  # bytes of the logits in float32


def leaves(dtype=torch.bfloat16):
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    return x, torch.randn(WORDS, WIDTH, dtype=dtype, requires_grad=True)


TARGET = torch.arange(TOKENS) * 7 % WORDS
TARGET[3] = -100


def log_softmax(x, weight):
    return F.log_softmax((x @ weight.T).float(), -1)


def cross_entropy(x, weight, **settings):
    return F.cross_entropy((x @ weight.T).float(), TARGET, **settings)


def in_stock_and_lean(run, dtype=torch.bfloat16, setting="conv"):
    """What `run(context, x, weight)` returns, twice."""
    found = []
    for context in (torch.enable_grad(), lean(setting)):
        found.append(run(context, *leaves(dtype)))
    return found


def assert_same(found):
    stock, ours = found
    assert len(stock) == len(ours) > 0
    assert all(same_bits(a, b) for a, b in zip(stock, ours, strict=True))


def gradients(context, loss, x, weight, **settings):
    with context:
        made = loss(x, weight)
    made.backward(**settings)
    return made.detach(), x.grad, weight.grad


def kl(x, weight):
    return F.kl_div(log_softmax(x, weight), torch.full((TOKENS, WORDS), 1 / WORDS), reduction="sum")


def of_three_dims(x, weight):
    return log_softmax(x.view(2, TOKENS // 2, WIDTH), weight).exp().square().sum()


def with_z_loss(x, weight):
    wide = (x @ weight.T).float()
    return F.cross_entropy(wide, TARGET) + wide.square().mean() + wide.logsumexp(-1).square().mean()


def twice(x, weight):
    made = log_softmax(x, weight)
    return F.nll_loss(made, TARGET) + F.nll_loss(made, TARGET.roll(5)) + made.square().mean()


LOSSES = {
    "cross entropy": cross_entropy,
    "sum": lambda x, w: cross_entropy(x, w, reduction="sum"),
    "each": lambda x, w: cross_entropy(x, w, reduction="none").square().sum(),
    "weighted": lambda x, w: F.nll_loss(log_softmax(x, w), TARGET, torch.linspace(0, 1, WORDS)),
    "smoothed": lambda x, w: cross_entropy(x, w, label_smoothing=0.1),
    "kl": kl,
    "three dims": of_three_dims,
    "z": with_z_loss,
    "twice": twice,
}


@pytest.mark.parametrize("setting", ["norm", "conv"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.sampled(of=2)
def test_gradients_are_those_of_stock(loss, setting):
    assert_same(in_stock_and_lean(lambda c, x, w: gradients(c, LOSSES[loss], x, w), setting=setting))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_three_tensors_one_is_left(dtype):
    x, weight = leaves(dtype)

    def forward(context):
        with context:
            return cross_entropy(x, weight)

    for _ in range(2):  # tries each kind of call
        forward(lean("conv")).backward()
    stock, ours = (measure_step(lambda c=c: forward(c)) for c in (torch.enable_grad(), lean("conv")))
    assert stock.peak >= 3 * WHOLE
    assert ours.peak < stock.peak - 0.4 * WHOLE  # what is left is the forward pass's


class _Kept:
    def __init__(self):
        self.values = []

    def whole(self, gradient):
        self.values.append(gradient)

    def view(self, gradient):
        self.values.append(gradient[5:])

    def numpy(self, gradient):
        self.values.append(torch.from_numpy(gradient.numpy()))

    def dlpack(self, gradient):
        self.values.append(torch.from_dlpack(gradient))

    def detached(self, gradient):
        self.values.append(gradient.detach())


@pytest.mark.parametrize("way", ["whole", "view", "detached", "numpy", "dlpack"])
def test_who_holds_the_incoming_gradient_keeps_it(way):
    def run(context, x, weight):
        kept = _Kept()
        with context:
            made = log_softmax(x, weight)
            made.register_hook(getattr(kept, way))
            loss = F.nll_loss(made, TARGET)
        loss.backward()
        return [*kept.values, x.grad, weight.grad]

    assert_same(in_stock_and_lean(run))


def test_a_retained_gradient_stays():
    def run(context, x, weight):
        with context:
            made = log_softmax(x, weight)
            made.retain_grad()
            loss = F.nll_loss(made, TARGET)
        loss.backward()
        return made.grad, x.grad

    assert_same(in_stock_and_lean(run))


def test_a_gradient_that_was_asked_for_stays():
    def run(context, x, weight):
        with context:
            made = log_softmax(x, weight)
            loss = F.nll_loss(made, TARGET)
        return torch.autograd.grad(loss, [made, x])

    assert_same(in_stock_and_lean(run))


def test_a_gradient_that_the_caller_gave_stays():
    def run(context, x, weight):
        with context:
            made = log_softmax(x, weight)
        given = torch.ones_like(made)
        made.backward(given)
        return given, x.grad, weight.grad

    assert_same(in_stock_and_lean(run))


class _Gradient(torch.autograd.Function):
    """Gives a gradient that it computed in the forward pass, as fused losses do."""

    @staticmethod
    def forward(ctx, x, gradient):
        ctx.save_for_backward(gradient)
        ctx.kept = gradient
        return x.sum()

    @staticmethod
    def backward(ctx, _):
        return ctx.kept if ctx.needs_input_grad[1] else ctx.saved_tensors[0], None


@pytest.mark.parametrize("saved", [True, False])
def test_a_gradient_that_a_function_has_kept_stays(saved):
    def run(context, x, weight):
        given = torch.linspace(-1, 1, TOKENS * WORDS).view(TOKENS, WORDS).requires_grad_(not saved)
        with context:
            loss = _Gradient.apply(log_softmax(x, weight), given)
        loss.backward(retain_graph=True)
        loss.backward()
        return given.detach(), x.grad, weight.grad

    assert_same(in_stock_and_lean(run))


class _Computed(torch.autograd.Function):
    """Gives the gradient that `compute()` returns, which nobody holds then."""

    @staticmethod
    def forward(ctx, x, compute):
        ctx.compute = compute
        return x.sum()

    @staticmethod
    def backward(ctx, _):
        return ctx.compute(), None


def _of_array(values):
    array = values.numpy().copy()
    return array, lambda: torch.from_numpy(array)


def _of_buffer(values):
    buffer = bytearray(values.numpy().tobytes())
    return buffer, lambda: torch.frombuffer(buffer, dtype=torch.float32).resize_(TOKENS, WORDS)


def _of_another_tensor(values):
    values = values.clone()
    return values, lambda: from_dlpack(to_dlpack(values))


def _of_a_file(values):
    """As other processes see it: mapped twice."""
    with NamedTemporaryFile() as file:
        values.numpy().tofile(file)
        file.flush()
        mapped = [torch.from_file(file.name, shared=True, size=values.numel()) for _ in range(2)]
    return mapped[0], lambda: mapped.pop().resize_(values.shape)


@pytest.mark.parametrize("owner", [_of_array, _of_buffer, _of_another_tensor, _of_a_file])
def test_memory_that_others_see_stays(owner):
    """No count of torch's tells that an array, a buffer or a process is behind a gradient's memory."""

    def run(context, x, weight):
        values = torch.linspace(-1, 1, TOKENS * WORDS).view(TOKENS, WORDS)
        seen, compute = owner(values)
        with context:
            loss = _Computed.apply(log_softmax(x, weight), compute)
        loss.backward()
        if isinstance(seen, bytearray):
            seen = torch.frombuffer(seen, dtype=torch.float32)
        return torch.as_tensor(seen), x.grad, weight.grad

    assert_same(in_stock_and_lean(run))


def test_a_node_that_is_called_by_hand():
    def run(context, x, weight):
        with context:
            made = log_softmax(x, weight)
        given = torch.linspace(-1, 1, made.numel()).view_as(made)
        return made.grad_fn(given), given

    assert_same(in_stock_and_lean(run))


def test_twice_through_one_graph_and_twice_differentiated():
    def run(context, x, weight):
        with context:
            loss = cross_entropy(x, weight)
        loss.backward(retain_graph=True)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.float().square().sum(), weight, retain_graph=True)
        loss.backward()
        return first.detach(), second, x.grad, weight.grad

    assert_same(in_stock_and_lean(run, torch.float32))


def test_batched_gradients():
    def run(context, x, weight):
        with context:
            loss = cross_entropy(x, weight)
        return torch.autograd.grad(loss, x, torch.tensor([1.0, 2.0]), is_grads_batched=True)

    assert_same(in_stock_and_lean(run, torch.float32))


def test_what_a_hook_reads_of_the_node_is_a_tensor_like_any():
    def run(context, x, weight):
        found = []
        with context:
            made = log_softmax(x, weight)
            node = made.grad_fn
            node.register_prehook(lambda _: found.append(node._saved_result * 2))
            loss = F.nll_loss(made, TARGET)
        loss.backward()
        return [*found, x.grad]

    assert_same(in_stock_and_lean(run))


class _Passes(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert not types or all(kind in (torch.Tensor, torch.nn.Parameter) for kind in types)
        return function(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_plain_tensors():
    def run(context, x, weight):
        with context:
            loss = cross_entropy(x, weight)
        with _Passes():
            loss.backward()
        return x.grad, weight.grad

    assert_same(in_stock_and_lean(run))


def test_under_verify_and_in_anomaly_mode():
    def run(context, x, weight):
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            return gradients(context, cross_entropy, x, weight)

    assert_same(in_stock_and_lean(run))
    x, weight = leaves()
    with lean("conv", verify=True):
        loss = cross_entropy(x, weight)
    loss.backward()


def test_an_edit_raises_as_in_stock():
    x, weight = leaves()
    with lean("conv"):
        made = log_softmax(x, weight)
        loss = F.nll_loss(made, TARGET)
    with torch.no_grad():
        made.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


def test_only_what_has_the_same_bits_in_parts_is_read_in_parts():
    wide = torch.randn(TOKENS, WORDS)
    assert rows._in_parts(wide, lambda x: x.exp())
    assert not rows._in_parts(wide, lambda x: x.cumsum(0))
    assert rows._reads_no_value(wide)


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_a_softmax_that_widens_its_input_is_held_by_that(function):
    def run(context, x, weight):
        with context as saved:
            made = function(x @ weight.T + 1.0, -1, dtype=torch.float32)
            loss = made.to(x.dtype).square().sum()
        if saved is not None and isinstance(saved, lean):
            narrow = [r.bytes for r in saved.records if not r.rebuilt and r.shape[-1:] == (WORDS,)]
            assert narrow == [WHOLE // 2] * len(narrow) != []
        loss.backward()
        return x.grad, weight.grad

    assert_same(in_stock_and_lean(run, setting="norm"))


@pytest.mark.filterwarnings("ignore:leannorm")
def test_a_plan_knows_what_is_read_in_rows():
    """The least peak that is planned is the peak of a step that makes everything again, and is measured."""
    peaks = []
    for setting in (None, {"recompute": "conv"}, {"peak": 0.2}):
        x, weight = leaves()
        for _ in range(5):
            x.grad, weight.grad = torch.zeros_like(x), torch.zeros_like(weight)
            saved = nullcontext() if setting is None else lean(**setting)

            def forward(saved=saved, x=x, weight=weight):
                with saved:
                    return cross_entropy(x.tanh(), weight)

            peak = measure_step(forward).peak
        peaks.append(peak)
    stock, conv, planned = peaks
    assert planned <= 1.03 * conv
    assert saved.plan.peak_ratio == pytest.approx(planned / stock, abs=0.05)
