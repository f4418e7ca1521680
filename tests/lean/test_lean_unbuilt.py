"""Large dropped tensors are rebuilt when an operator reads them; a product writes over rebuilt factors."""

from tempfile import NamedTemporaryFile

import pytest
import torch
import torch.nn.functional as F
from test_lean_limit import TIGHT, with_room
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from leannorm import lean
from leannorm.autograd.nodes import NODES
from leannorm.report.memory import measure_step
from leannorm.saving import unbuilt
from leannorm.saving.evidence import same_bits

pytestmark = pytest.mark.skipif(NODES is None, reason="only the log in C++ gives nodes stand-ins")
TOKENS, WIDTH, MIDDLE = 1024, 32, 1024
MIDDLE_BYTES = TOKENS * MIDDLE * 4


@pytest.fixture(autouse=True)
def smaller_ones_wait_too():
    NODES.set_waits_from(1 << 21)
    yield
    NODES.set_waits_from(1 << 23)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, MIDDLE, bias=False) for _ in range(2))
        self.down = nn.Linear(MIDDLE, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Gelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, MIDDLE), nn.Linear(MIDDLE, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class WithoutBias(Gelu):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, MIDDLE, bias=False), nn.Linear(MIDDLE, WIDTH, bias=False)


class Fused(Gated):
    """Gate and value are halves of one product, as in Phi-3."""

    def __init__(self):
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * MIDDLE, bias=False)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Transposed(Gated):
    """One factor, and so the gradient of the other, is in another layout."""

    def forward(self, x):
        return self.down(
            F.silu(self.gate(x)) * torch.tanh(self.up.weight @ x.transpose(-1, -2)).transpose(-1, -2)
        )


class Squared(Gated):
    def forward(self, x):
        u = torch.tanh(self.up(x))
        return self.down(u * u)


class ReadTwice(Gated):
    """A later node reads a factor, too."""

    def forward(self, x):
        a, u = F.silu(self.gate(x)), torch.tanh(self.up(x))
        return self.down(a * u) + self.down(u.exp()) + self.down(a * a.exp())


class Broadcast(Gated):
    def forward(self, x):
        u = torch.tanh(self.up(x))
        return self.down(F.silu(self.gate(x)) * u * u.mean(-1, keepdim=True) * torch.tanh(self.up(x[:1])))


class Widened(Gated):
    """The factors have different dtypes."""

    def forward(self, x):
        wide = torch.tanh(self.up(x).double())
        return self.down((F.silu(self.gate(x)) * wide).to(x.dtype))


class Activated(Gated):
    """Each activation's node reads what it has saved over once, at the end."""

    def forward(self, x):
        h = torch.tanh(self.gate(x)) * torch.sigmoid(self.up(x))
        return self.down(F.gelu(h, approximate="tanh") + F.silu(self.up(x)))


class Attention(nn.Module):
    """As models write it where no kernel does: with a soft cap, and a softmax in float32."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = torch.tanh(q @ k.transpose(-1, -2) / 3) * 5
        weights = F.softmax(scores, -1, dtype=torch.float32).to(x.dtype)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class OverColumns(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.softmax(q @ k.transpose(-1, -2), 1).transpose(-1, -2) @ v)


class Complex(Gated):
    def forward(self, x):
        a, u = (torch.polar(torch.ones_like(z), z) for z in (self.gate(x), self.up(x)))
        return self.down((a * u).real)


MODELS = [Gated, Gelu, WithoutBias, Fused, Transposed, Squared, ReadTwice, Broadcast, Widened, Complex]
MODELS += [Activated, Attention, OverColumns]
SETTINGS = {"conv": lambda: lean("conv"), "lean": lean, "budget": lambda: lean(budget=0.2)}


def made(kind, dtype=torch.float32):
    torch.manual_seed(0)
    model = kind().to(dtype)
    return model, torch.randn(2, TOKENS // 2, WIDTH, dtype=dtype, requires_grad=True)


def gradients(model, x, context, backward=torch.Tensor.backward):
    for leaf in (x, *model.parameters()):
        leaf.grad = None
    with context:
        loss = model(x).float().square().mean()
    backward(loss)
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def same(stock, ours):
    return len(stock) == len(ours) > 1 and all(same_bits(a, b) for a, b in zip(stock, ours, strict=True))


@pytest.fixture
def stood(monkeypatch):
    """For each rebuild that an operator asked for, whether nobody else had the tensor's memory."""
    found = []
    before = unbuilt.Source.read

    def read(self):
        tensor, alone = before(self)
        found.append(alone)
        return tensor, alone

    monkeypatch.setattr(unbuilt.Source, "read", read)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_gradients_are_those_of_stock(kind, setting, dtype):
    if dtype is torch.bfloat16 and kind is Complex:
        pytest.skip("torch has no such complex numbers")
    model, x = made(kind, dtype)
    stock = gradients(model, x, torch.enable_grad())
    for _ in range(3):
        assert same(stock, gradients(model, x, SETTINGS[setting]()))


@pytest.mark.parametrize(
    ("kind", "most", "written"), [(Gated, 4, 4), (WithoutBias, 2, 2)], ids=["gated", "gelu"]
)
def test_an_mlp_has_few_tensors_at_once(kind, most, written, stood):
    """Gate, its SiLU, up, and their product or its gradient; before, six and three."""
    model, x = made(kind)
    for _ in range(3):
        gradients(model, x, lean("conv"))
    stood.clear()

    def forward():
        with lean("conv"):
            return model(x).square().mean()

    for leaf in (x, *model.parameters()):
        leaf.grad = None
    ours = measure_step(forward).peak
    assert most <= ours / MIDDLE_BYTES < most + 0.5
    assert stood.count(True) == written  # that nobody else had


def backward_twice(loss):
    loss.backward(retain_graph=True)
    loss.backward()


def differentiated_again(loss):
    leaves = [leaf for leaf in _leaves(loss.grad_fn) if leaf.requires_grad]
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    sum(one.square().sum() for one in first).backward()


def _leaves(node, seen=None):
    seen = {} if seen is None else seen
    if node is not None and node not in seen:
        seen[node] = getattr(node, "variable", None)
        for one, _ in node.next_functions:
            _leaves(one, seen)
    return [leaf for leaf in seen.values() if leaf is not None]


class _Plain(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert all(kind in (torch.Tensor, nn.Parameter) for kind in types)
        return function(*args, **(kwargs or {}))


def within_a_mode(loss):
    with _Plain():
        loss.backward()


def in_anomaly_mode(loss):
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        loss.backward()


def under_autocast(loss):
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()


WAYS = [backward_twice, differentiated_again, within_a_mode, in_anomaly_mode, under_autocast]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Gated, ReadTwice, Gelu, Attention], ids=lambda kind: kind.__name__)
def test_every_way_to_run_the_backward_pass(kind, way):
    model, x = made(kind)
    stock = gradients(model, x, torch.enable_grad(), way)
    for _ in range(2):
        assert same(stock, gradients(model, x, lean("conv"), way))


def test_batched_gradients():
    model, x = made(Gated)

    def run(context):
        with context:
            loss = model(x).square().mean()
        return torch.autograd.grad(
            loss, [x, model.up.weight], torch.tensor([1.0, 2.0]), is_grads_batched=True
        )

    assert same(run(torch.enable_grad()), run(lean("conv")))


@TIGHT
def test_under_verify_and_a_limit():
    model, x = made(Gated)
    stock = gradients(model, x, torch.enable_grad())
    for context in (lean("conv", verify=True), lean(limit=with_room(40))):
        assert same(stock, gradients(model, x, context))


class _Reads:
    """Reads what a product's node has saved, before the node does."""

    def __init__(self):
        self.found = []

    def __call__(self, module, args, output):
        if output.grad_fn is None:
            return
        node = output.grad_fn.next_functions[0][0]
        while type(node).__name__ != "MulBackward0":
            node = next(one for one, _ in node.next_functions if one is not None)
        node.register_prehook(lambda _: self.found.extend((node._saved_self, node._saved_other)))
        node.register_hook(lambda made, _: self.found.extend(made))


def test_what_hooks_have_seen_stays():
    found = []
    for context in (torch.enable_grad(), lean("conv")):
        model, x = made(Gated)
        hook = _Reads()
        with context:
            y = model(x)
            hook(model, (x,), y)
            loss = y.square().mean()
        loss.backward()
        found.append([*hook.found, x.grad])
    assert len(found[0]) == 5
    assert same(*found)


def test_memory_that_others_see_is_not_written():
    """An operator of the program may return memory that torch does not know to be shared."""
    with NamedTemporaryFile() as file:
        torch.linspace(-1, 1, TOKENS * MIDDLE).numpy().tofile(file)
        file.flush()
        seen = torch.from_file(file.name, shared=True, size=TOKENS * MIDDLE)
        before = seen.clone()

        @torch.library.custom_op("leannorm_tests::from_a_file", mutates_args=())
        def from_a_file(x: torch.Tensor) -> torch.Tensor:
            return torch.from_file(file.name, shared=True, size=TOKENS * MIDDLE).view(*x.shape[:-1], -1)

        from_a_file.register_autograd(lambda ctx, gradient: gradient[..., :WIDTH].clone())
        model, x = made(Gated)

        def loss():
            u = from_a_file(x)
            return model.down(F.silu(model.gate(x)) * u).square().mean()

        found = []
        for context in (torch.enable_grad(), lean("conv"), lean("conv")):
            x.grad = None
            with context:
                made_here = loss()
            made_here.backward()
            found.append([x.grad, model.gate.weight.grad])
            model.gate.weight.grad = None
        assert all(same(found[0], one) for one in found[1:])
        assert torch.equal(seen, before)


def test_an_edit_raises_as_in_stock():
    model, x = made(Gated)
    with lean("conv"):
        a = F.silu(model.gate(x))
        loss = model.down(a * model.up(x)).square().mean()
    with torch.no_grad():
        a.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()
