"""`lean(head=True)` among adapters, autocast, hooks, checkpoints, threads and compilers."""

from __future__ import annotations

import contextlib
import copy
from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import leannorm
from leannorm.head.logits import Logits
from leannorm.saving import lean

B, T, H, V = 2, 9, 16, 320


class Model(nn.Module):
    def __init__(self, head=None, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body = nn.Embedding(V, H, dtype=dtype), nn.Linear(H, H, dtype=dtype)
        self.head = nn.Linear(H, V, bias=False, dtype=dtype) if head is None else head

    def logits(self, x):
        return self.head(torch.tanh(self.body(self.embed(x))))

    def forward(self, x, labels=None):
        y = self.logits(x)
        return y if labels is None else F.cross_entropy(y[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))


class Adapter(nn.Module):
    """PEFT's LoRA on a head."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(H, V, bias=False, dtype=torch.float64).requires_grad_(False)
        self.first, self.second = (
            nn.Linear(a, b, bias=False, dtype=torch.float64) for a, b in ((H, 4), (4, V))
        )

    def forward(self, x):
        result = self.base(x)
        dtype = result.dtype
        result = result + self.second(self.first(F.dropout(x, 0.0))) * 2.0
        return result.to(dtype)


TOKENS = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))


def told(saved):
    return [reason for reason in saved.reasons if reason.startswith("head=True")]


def stepped(model, context, steps=1):
    model.zero_grad()
    for _ in range(steps):
        with context() as saved:
            loss = model(TOKENS, labels=TOKENS)
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], saved


def agree(model, *, reasons=0, steps=1, **close):
    plain, _ = stepped(copy.deepcopy(model), contextlib.nullcontext, steps)
    ours, saved = stepped(model, lambda: lean("conv", head=True), steps)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, **close)
    assert len(told(saved)) == reasons, saved.reasons
    return saved


def test_an_adapter_on_the_head():
    agree(Model(Adapter()))


def test_a_tied_weight():
    model = Model()
    model.head.weight = model.embed.weight
    agree(model, steps=2)


def test_gradients_are_added_up():
    agree(Model(), steps=3)


def test_a_frozen_head():
    model = Model()
    model.head.requires_grad_(False)
    agree(model)


def test_a_product_with_the_embedding():
    class Tied(Model):
        def logits(self, x):
            return torch.tanh(self.body(self.embed(x))) @ self.embed.weight.T

    agree(Tied())
    agree(Tied(), steps=2)


def test_autocast():
    model = Model(nn.Linear(H, V), torch.float32)

    @contextlib.contextmanager
    def context(inner):
        with inner as saved, torch.autocast("cpu", torch.bfloat16):
            yield saved

    exact = copy.deepcopy(model).double()
    truth, _ = stepped(exact, contextlib.nullcontext)
    plain, _ = stepped(copy.deepcopy(model), lambda: context(contextlib.nullcontext()))
    ours, saved = stepped(model, lambda: context(lean(head=True)))
    assert told(saved) == []
    for a, b, c in zip(ours, plain, truth, strict=True):
        assert a.dtype == b.dtype
        assert (a - c).norm() <= 2 * (b - c).norm() + 1e-3 * c.norm()


def test_logits_of_autocast_are_computed_as_there():
    model = Model(nn.Linear(H, V), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(TOKENS)
        with lean(head=True):
            logits = model(TOKENS)
    assert isinstance(logits, Logits)
    assert logits.dtype is torch.bfloat16
    assert torch.equal(logits, plain)


def test_a_model_that_is_lean():
    model = leannorm.make_lean(Model(), head=True)
    loss = F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())  # outside of its forward pass
    loss.backward()
    plain = Model()
    F.cross_entropy(plain(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
    assert told(model.forward.saved) == []
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    repr(model(TOKENS))
    assert "since __repr__ needs them" in told(model.forward.saved)[0]


def test_the_optimizer_steps_as_without_it():
    found = []
    for context in (contextlib.nullcontext, lambda: lean("conv", head=True)):
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(4):
            stepped(model, context)
            optimizer.step()
        found.append([*model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_a_hook_on_the_layer():
    model, seen = Model(), []
    model.head.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    agree(model)
    model.head.register_forward_hook(lambda module, args, y: seen.append(y.abs().max().item()))
    saved = agree(model, reasons=1)
    assert seen[-1] > 0
    assert "since abs needs them" in told(saved)[0]


def test_a_hook_that_changes_the_logits():
    model = Model()
    model.head.register_forward_hook(lambda module, args, y: y * 0.5)
    agree(model)
    model.head.register_forward_hook(lambda module, args, y: y.abs())
    agree(model, reasons=1)


def test_a_hook_on_the_gradient_of_the_logits():
    found = []
    for context in (contextlib.nullcontext(), lean(head=True)):
        model = Model()
        with context:
            y = model(TOKENS)
            y.retain_grad()
            y.register_hook(lambda g: g * 2)
            loss = F.cross_entropy(y.view(-1, V), TOKENS.view(-1))
        loss.backward()
        found.append([y.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_backward_hook_on_the_layer():
    model, seen = Model(), []
    model.head.register_full_backward_hook(
        lambda module, of_inputs, of_outputs: seen.append(of_outputs[0].norm())
    )
    agree(model, reasons=1)
    assert len(seen) == 2
    torch.testing.assert_close(seen[0], seen[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_head(reentrant):
    class Checkpointed(Model):
        def forward(self, x, labels):
            hidden = torch.tanh(self.body(self.embed(x)))
            y = checkpoint(self.head, hidden, use_reentrant=reentrant)
            return F.cross_entropy(y.view(-1, V), labels.view(-1))

    agree(Checkpointed(), reasons=not reentrant)  # a reentrant one runs it without gradients first


def test_a_checkpoint_around_head_and_loss():
    class Checkpointed(Model):
        def forward(self, x, labels):
            return checkpoint(super().forward, x, labels, use_reentrant=False)

    agree(Checkpointed(), reasons=1)


def test_two_backward_passes():
    model = Model()
    with lean("conv", head=True):
        loss = model(TOKENS, labels=TOKENS)
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for p, g in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * g)


def test_other_threads_are_left_alone():
    model, seen = Model(), []
    with lean("norm", head=True):
        thread = Thread(target=lambda: seen.append(type(model(TOKENS))))
        thread.start()
        thread.join()
        assert isinstance(model(TOKENS), Logits)
    assert seen == [torch.Tensor]


@pytest.mark.filterwarnings(
    "ignore:leannorm. lean.. saw no tensor", "ignore:leannorm. most of what this pass saved was freed"
)
def test_passes_that_take_turns():
    """The first to open is the first to close."""
    model, first, second = Model(), lean(head=True), lean(head=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert isinstance(model(TOKENS), Logits)
    second.__exit__(None, None, None)
    assert type(model(TOKENS)) is torch.Tensor
    assert torch._C._len_torch_function_stack() == 0


def test_an_error_within_closes_the_pass():
    with pytest.raises(KeyError), lean(head=True):
        raise KeyError
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.filterwarnings("ignore:leannorm")
def test_transforms_get_tensors():
    model = Model()
    parameters = dict(model.named_parameters())

    def loss(p):
        return torch.func.functional_call(model, p, (TOKENS, TOKENS))

    want = torch.func.grad(loss)(parameters)
    with lean(head=True):
        found = torch.func.grad(loss)(parameters)
    assert all(torch.equal(found[k], want[k]) for k in want)


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_within():
    model = Model()
    want, _ = stepped(copy.deepcopy(model), contextlib.nullcontext)
    model.compile(backend="aot_eager", fullgraph=True)
    found, _ = stepped(model, lambda: lean(head=True))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_loss():
    class Compiled(Model):
        def forward(self, x, labels):
            criterion = torch.compile(F.cross_entropy, backend="aot_eager")
            return criterion(self.logits(x).flatten(0, 1) * 0.5, labels.flatten())

    agree(Compiled())


@pytest.mark.filterwarnings("ignore:leannorm. tensors of a subclass")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_loss(reentrant):
    class Checkpointed(Model):
        def forward(self, x, labels):
            y = self.logits(x).flatten(0, 1)
            return checkpoint(F.cross_entropy, y, labels.flatten(), use_reentrant=reentrant)

    agree(Checkpointed(), reasons=int(reentrant))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_body():
    model = Model()
    want, _ = stepped(copy.deepcopy(model), contextlib.nullcontext)
    model.body.compile(backend="aot_eager")
    found, saved = stepped(model, lambda: lean(head=True))
    assert told(saved) == []
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)


def test_the_first_layer_of_an_mlp_is_no_head():
    class Wide(Model):
        def __init__(self):
            super().__init__()
            self.up, self.down = (nn.Linear(a, b, dtype=torch.float64) for a, b in ((H, 300), (300, H)))

        def logits(self, x):
            y = self.embed(x)
            return self.head(y + self.down(F.gelu(self.up(y))))

    model, seen = Wide(), []
    model.up.register_forward_hook(lambda module, args, y: seen.append(type(y)))

    def context():
        return lean(head=True)

    for _ in range(2):
        _, saved = stepped(model, context)
        assert told(saved) == []
    assert seen == [Logits, torch.Tensor]


@pytest.mark.filterwarnings("ignore:leannorm. budget=")
@pytest.mark.parametrize(
    "settings", [{}, {"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.3}, {"verify": True}]
)
def test_with_every_setting(settings):
    model = Model()
    want, _ = stepped(copy.deepcopy(model), contextlib.nullcontext)
    for _ in range(3):
        found, saved = stepped(model, lambda: lean(**settings, head=True))
        assert told(saved) == []
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:leannorm. most of what this pass saved was freed")
def test_a_weight_of_a_subclass_is_told():
    class Kind(torch.Tensor):
        pass

    model = Model()
    model.head.weight = nn.Parameter(model.head.weight.detach().as_subclass(Kind))
    with lean(head=True) as saved:
        model(TOKENS)
    assert "is a Kind, sharded or of another subclass of tensors" in saved.reasons[-1]


def test_a_part_of_a_flat_parameter_is_told():
    """As FSDP1 sets a layer's weight while it runs, which it does on accelerators only."""
    flat, x = nn.Parameter(torch.randn(V * H)), torch.randn(B, T, H)
    flat._is_flat_param = True
    with lean(head=True) as saved:
        y = F.linear(x, flat.split([V * H])[0].view(V, H))
    assert type(y) is torch.Tensor
    assert "a part of a flat parameter" in told(saved)[0]


@pytest.mark.filterwarnings("ignore:leannorm. most of what this pass saved was freed")
def test_what_was_asked_is_part_of_a_copy():
    copied = copy.deepcopy(lean(head=True))
    with copied:
        assert isinstance(Model()(TOKENS), Logits)
