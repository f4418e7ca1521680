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
    before = NODES.set_waits_from(1 << 21)
    yield
    NODES.set_waits_from(before)


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
    """Each activation's node is the last reader of what it has saved."""

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


def once(loss, leaves):
    loss.backward()


def gradients(model, x, context, backward=once):
    leaves = [x, *model.parameters()]
    for leaf in leaves:
        leaf.grad = None
    with context:
        loss = model(x).float().square().mean()
    backward(loss, leaves)
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


CASES = [(kind, torch.float32) for kind in MODELS]
CASES += [
    (kind, torch.bfloat16) for kind in MODELS if kind is not Complex
]  # torch has no such complex numbers


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=lambda one: getattr(one, "__name__", str(one)))
def test_gradients_are_those_of_stock(kind, setting, dtype):
    model, x = made(kind, dtype)
    stock = gradients(model, x, torch.enable_grad())
    for _ in range(3):
        assert same(stock, gradients(model, x, SETTINGS[setting]()))


@pytest.mark.parametrize(
    ("kind", "most", "written"), [(Gated, 4, 4), (WithoutBias, 2, 2)], ids=["gated", "gelu"]
)
def test_an_mlp_has_few_tensors_at_once(kind, most, written, stood):
    """Gated: the gate, its SiLU, up, and their product or its gradient. Without stand-ins, six and three."""
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


def backward_twice(loss, leaves):
    loss.backward(retain_graph=True)
    loss.backward()


def differentiated_again(loss, leaves):
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    sum(one.square().sum() for one in first).backward()


class _Plain(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert all(kind in (torch.Tensor, nn.Parameter) for kind in types)
        return function(*args, **(kwargs or {}))


def within_a_mode(loss, leaves):
    with _Plain():
        loss.backward()


def in_anomaly_mode(loss, leaves):
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        loss.backward()


def under_autocast(loss, leaves):
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


def test_what_hooks_have_seen_stays():
    """A hook may read what a node has saved, before the node does."""
    found = []
    for context in (torch.enable_grad(), lean("conv")):
        model, x = made(Gated)
        seen = []
        with context:
            y = model(x)
            node = y.grad_fn
            while type(node).__name__ != "MulBackward0":
                node = next(one for one, _ in node.next_functions if one is not None)
            node.register_prehook(lambda _, of=node, to=seen: to.extend((of._saved_self, of._saved_other)))
            node.register_hook(lambda gradients, _, to=seen: to.extend(gradients))
            loss = y.square().mean()
        loss.backward()
        found.append([*seen, x.grad])
    assert len(found[0]) == 5
    assert same(*found)


def test_memory_that_others_see_is_not_written():
    """An operator of the program may return memory of a file."""
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
