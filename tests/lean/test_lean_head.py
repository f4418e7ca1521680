"""`lean(head=True)`: what reads logits without making them gives what plain torch gives."""

import contextlib
import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leannorm.head import columns
from leannorm.head.logits import Logits
from leannorm.saving import lean

B, T, H, V = 3, 7, 12, 300


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Several blocks of columns, and parts of rows, of so few logits."""
    for size, instead in (("_ELEMENTS", 1), ("_FEWEST", 64), ("_PART", 64 * 5)):
        monkeypatch.setattr(columns, size, instead)


class Head(nn.Module):
    def __init__(self, bias=True, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(H, H, dtype=dtype), nn.Linear(H, V, bias=bias, dtype=dtype)
        with torch.no_grad():
            self.head.weight.mul_(4)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def tokens(ignored=True):
    made = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))
    if ignored:
        made[0, :3] = -100
    return made


def trained(model, read, context):
    """What `read(model, x)` gives, and the gradients of a weighted sum of it."""
    x = torch.randn(B, T, H, dtype=next(model.parameters()).dtype, generator=torch.Generator().manual_seed(2))
    x.requires_grad_()
    model.zero_grad()
    with context as saved:
        out = read(model, x)
    made = [out.detach().clone()]
    if out.requires_grad:
        scale = torch.linspace(0.5, 2.0, out.numel(), dtype=out.dtype).reshape(out.shape)
        (out * scale).sum().backward()
        made += [x.grad, *(p.grad for p in model.parameters())]
    return made, saved


def told(saved):
    return [reason for reason in saved.reasons if reason.startswith("head=True")]


def selective(logits, index):
    """TRL's log-probabilities, in float32 and in half precision."""
    if logits.dtype in (torch.float32, torch.float64):
        picked = torch.gather(logits, -1, index.unsqueeze(-1)).squeeze(-1)
        return picked - torch.stack([torch.logsumexp(each, dim=-1) for each in logits])
    rows = []
    for each, at in zip(logits, index, strict=True):
        rows.append(F.log_softmax(each, dim=-1).gather(dim=-1, index=at.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)


def entropy(logits):
    """TRL's."""
    made = []
    for chunk in logits.reshape(-1, logits.shape[-1]).split(8, dim=0):
        logps = F.log_softmax(chunk, dim=-1)
        made.append(-(torch.exp(logps) * logps).sum(-1))
    return torch.cat(made).reshape(logits.shape[:-1])


def entropy_of_products(logits):
    """verl's."""
    return torch.logsumexp(logits, -1) - torch.sum(F.softmax(logits, -1) * logits, -1)


def dpo(logits):
    labels = tokens()[:, 1:].clone()
    mask = labels != -100
    labels[~mask] = 0
    logits = logits[:, :-1, :]
    logps = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return (logps * mask).sum(-1) + logits[mask].mean().detach()


def capped(logits):
    return torch.tanh(logits / 30.0) * 30.0


def shifted(logits, **settings):
    """As models of transformers lost it for years."""
    at = tokens()
    kept = logits[..., :-1, :].contiguous().view(-1, V)
    return F.cross_entropy(kept, at[..., 1:].contiguous().view(-1), **settings)


def classes(**settings):
    return lambda y: F.cross_entropy(y.view(-1, V), tokens().view(-1), **settings)


def grpo(logits):
    """TRL's, with a temperature; its entropies are read without gradients."""
    logits = logits[:, :-1, :][:, -4:, :] / 0.9
    with torch.no_grad():
        scale, old = entropy(logits), -6.0 * torch.ones((), dtype=logits.dtype)
    logps = selective(logits, tokens(False)[:, -4:])
    ratio, kl = torch.exp(logps - logps.detach() + 0.1), torch.exp(old - logps) - (old - logps) - 1
    losses = torch.min(ratio * scale, ratio.clamp(0.8, 1.2) * scale) - 0.04 * kl
    mask = tokens()[:, -4:] != tokens(False)[0, -1]
    return (losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)


CLASS_WEIGHTS = torch.rand(V, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
READERS = {
    "cross_entropy": classes(),
    "sum": classes(reduction="sum"),
    "none": classes(reduction="none"),
    "another index ignored": lambda y: F.cross_entropy(
        y.flatten(0, 1), tokens(False).flatten(), ignore_index=int(tokens(False)[1, 1])
    ),
    "nothing ignored": lambda y: F.cross_entropy(y.flatten(0, 1), tokens(False).flatten()),
    "smoothing": classes(label_smoothing=0.1),
    "smoothing, none": classes(label_smoothing=0.1, reduction="none"),
    "class weights": classes(weight=CLASS_WEIGHTS),
    "class weights, none": classes(weight=CLASS_WEIGHTS, reduction="none"),
    "class weights and smoothing": classes(weight=CLASS_WEIGHTS, label_smoothing=0.2),
    "a criterion": lambda y: nn.CrossEntropyLoss()(y.reshape(B * T, -1), tokens().reshape(-1)),
    "classes in the middle": lambda y: F.cross_entropy(y.transpose(1, 2), tokens()),
    "classes in the middle, none": lambda y: F.cross_entropy(y.permute(0, 2, 1), tokens(), reduction="none"),
    "nll_loss": lambda y: F.nll_loss(F.log_softmax(y, -1).view(-1, V), tokens().view(-1)),
    "a criterion of log-softmax": lambda y: nn.NLLLoss(CLASS_WEIGHTS)(y[0].log_softmax(1), tokens()[0]),
    "classes in the middle, nll_loss": lambda y: F.nll_loss(y.log_softmax(-1).transpose(1, 2), tokens()),
    "shifted": shifted,
    "logsumexp": lambda y: torch.logsumexp(y, -1),
    "logsumexp, kept": lambda y: y.logsumexp(dim=2, keepdim=True),
    "z-loss": lambda y: shifted(y) + 1e-2 * y[:, :-1].logsumexp(-1).square().mean(),
    "selected": lambda y: selective(y, tokens(False)),
    "gather": lambda y: y.gather(-1, torch.stack([tokens(False), tokens(False) // 2], -1)),
    "entropy": entropy,
    "entropy of products": entropy_of_products,
    "entropy and a loss": lambda y: entropy(y).mean() + classes()(y),
    "dpo": dpo,
    "grpo": grpo,
    "soft cap": lambda y: classes()(capped(y)),
    "soft cap, entropy": lambda y: entropy_of_products(capped(y)),
    "scaled": lambda y: classes()(y * 0.3),
    "of a number": lambda y: classes()(0.3 * y - 1),
    "mean": lambda y: y[tokens() != -100].mean(),
    "mean of rows": lambda y: y.mean(-1) + y.detach().mean(2, keepdim=True).squeeze(-1),
    "no rows": lambda y: y[tokens() == V].logsumexp(-1).sum() + entropy(y[:0]).sum() + y[0].logsumexp(-1),
    "by a temperature": lambda y: selective(y / torch.tensor(0.7), tokens(False)),
    "one sequence": lambda y: F.cross_entropy(y[1], tokens()[1]),
    "rows by a mask": lambda y: F.cross_entropy(y[tokens() != -100], tokens()[tokens() != -100]),
    "the last tokens": lambda y: F.cross_entropy(y[:, -2:].flatten(0, 1), tokens(False)[:, -2:].flatten()),
    "one row": lambda y: F.cross_entropy(y[0, -1], tokens(False)[0, -1]),
    "cast down": lambda y: classes()(y.to(torch.float32)),
    "halves": lambda y: sum(map(classes_of, y.split(2), tokens().split(2))),
}  # fmt: skip


def classes_of(y, at):
    return F.cross_entropy(y.reshape(-1, V), at.reshape(-1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", READERS)
def test_readers_give_what_torch_gives(name, bias):
    model, seen = Head(bias), []

    def read(model, x):
        logits = model(x)
        seen.append(logits)
        return READERS[name](logits)

    plain, _ = trained(model, read, contextlib.nullcontext())
    ours, saved = trained(model, read, lean(head=True))
    close = {"rtol": 2e-5, "atol": 1e-6} if name == "cast down" else {"rtol": 1e-9, "atol": 1e-12}
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, **close)
    assert isinstance(seen[1], Logits)
    assert not seen[1].computed
    assert told(saved) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", READERS)
def test_errors_are_those_of_torch_at_most(name, dtype):
    """Against float64, over all gradients, twice torch's and one rounding."""
    exact = Head()
    model = Head(dtype=dtype)
    model.load_state_dict(exact.state_dict())
    exact.load_state_dict(model.state_dict())

    def read(model, x):
        return READERS[name](model(x.to(dtype).to(x.dtype)))

    truth, _ = trained(exact, read, contextlib.nullcontext())
    try:
        plain, _ = trained(model, read, contextlib.nullcontext())
    except RuntimeError:
        pytest.skip("torch takes no class weights of another dtype")
    ours, saved = trained(model, read, lean(head=True))
    assert told(saved) == []
    eps = torch.finfo(dtype).eps
    for a, b, c in zip(ours, plain, truth, strict=True):
        assert a.dtype == b.dtype
        of_ours, of_torch = ((t.double() - c).norm() for t in (a, b))
        assert of_ours <= 2 * of_torch + eps * c.norm()


OTHERS = {
    "a number": lambda y: y[0, 0, 0] * 2,
    "item": lambda y: y.sum() * y[0, 0, 0].item(),
    "print": lambda y: (repr(y), y.sum())[1],
    "topk": lambda y: y.topk(3, -1).values,
    "columns": lambda y: y[..., :10].sum(-1),
    "columns by an index": lambda y: y[:, :, torch.arange(V - 1, -1, -1)].logsumexp(-1),
    "flat": lambda y: y.view(-1),
    "activation": lambda y: F.silu(y),
    "split": lambda y: y.chunk(2, -1)[1],
    "relu in place": lambda y: F.relu(y, inplace=True),
    "squares": lambda y: y.square().mean(),
    "numpy": lambda y: y.sum() * float(y.detach().numpy().max()),
    "in place": lambda y: y.mul_(2).sum(),
    "in place, a view": lambda y: (y.view(-1, V).mul_(2), y.sum())[1],
    "in place, a cast before": lambda y: (c := y.float(), y.mul_(2), c.sum().double() + y.sum())[2],
    "written": lambda y: (y.__setitem__((..., 0), 0.0), y.logsumexp(-1))[1],
    "scaled in place": lambda y: classes()(y.div_(0.7)),
    "other targets": lambda y: F.cross_entropy(y.view(-1, V), torch.full((B * T, V), 1 / V, dtype=y.dtype)),
    "kl_div": lambda y: F.kl_div(
        F.log_softmax(y, -1), torch.full((B, T, V), 1 / V, dtype=y.dtype), reduction="batchmean"
    ),
    "softmax": lambda y: y.softmax(-1),
    "softmax over tokens": lambda y: y.softmax(1),
    "a learned scale": lambda y: classes()(y * nn.Parameter(torch.tensor(0.3))),
    "max": lambda y: y.max(-1).values,
    "saved": lambda y: (torch.save(y.detach(), io.BytesIO()), y.sum())[1],
    "copied": lambda y: copy.deepcopy(y.detach()).sum() + y.sum(),
    "two losses": lambda y: classes()(y) + y.square().mean(),
    "concatenated": lambda y: torch.cat([y, y]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_gets_the_tensor(name):
    """Bits are torch's, and the reason is told."""
    model = Head()
    plain, _ = trained(model, lambda m, x: OTHERS[name](m(x)), contextlib.nullcontext())
    ours, saved = trained(model, lambda m, x: OTHERS[name](m(x)), lean(head=True))
    if name == "two losses":
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a, b)
    else:
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert len(told(saved)) == (2 if name == "softmax" else 1)  # which is read twice below


def test_logits_are_computed_once():
    model, calls = Head(), []
    with lean(head=True) as saved:
        logits = model(torch.randn(B, T, H, dtype=torch.float64))
        with torch.profiler.profile() as profile:
            logits.sum(), logits.square(), logits[0, 0, 0].item(), logits.view(-1, V).exp()
    calls = [e for e in profile.events() if e.name == "aten::linear"]
    assert len(calls) == 1
    assert told(saved)[0].startswith(f"head=True: logits of {V} columns were computed, once, since sum needs")


def test_what_is_known_of_a_shape_computes_nothing():
    model = Head()
    x = torch.randn(B, T, H, dtype=torch.float64)
    plain = model(x)
    with lean(head=True):
        logits = model(x)
    for ask in (
        lambda y: (y.shape, y.dtype, y.device, y.ndim, y.size(-1), y.dim(), y.numel(), len(y)),
        lambda y: (y.requires_grad, y.is_leaf, y.stride(), y.is_contiguous(), y.element_size()),
        lambda y: (torch.is_floating_point(y), y.is_floating_point(), y.layout, y.is_cuda),
    ):
        assert ask(logits) == ask(plain)
    assert isinstance(hash(logits), int)
    assert not logits.computed


def test_the_largest_of_a_row():
    model = Head()
    x = torch.randn(B, T, H, dtype=torch.float64)
    want = model(x)
    with lean(head=True) as saved:
        logits = model(x)
        with torch.no_grad():
            found = logits.argmax(-1), logits.detach().argmax(dim=2, keepdim=True)
    assert torch.equal(found[0], want.argmax(-1))
    assert torch.equal(found[1], want.argmax(2, keepdim=True))
    assert told(saved) == []


@pytest.mark.parametrize("target", [V, -3, 10**6])
def test_targets_out_of_range_raise_torchs_error(target):
    model, at = Head(), tokens()
    at[1, 1] = target
    errors = []
    for context in (contextlib.nullcontext(), lean(head=True)):
        with pytest.raises(IndexError) as raised, context:
            F.cross_entropy(model(torch.randn(B, T, H, dtype=torch.float64)).view(-1, V), at.view(-1))
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_labels_ignored(reduction):
    def read(model, x):
        at = torch.full((B * T,), -100)
        return F.cross_entropy(model(x).view(-1, V), at, reduction=reduction)

    plain, _ = trained(Head(), read, contextlib.nullcontext())
    ours, _ = trained(Head(), read, lean(head=True))
    for a, b in zip(ours, plain, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_an_empty_batch_is_torchs():
    model = Head()
    with lean(head=True):
        loss = F.cross_entropy(
            model(torch.zeros(0, H, dtype=torch.float64)), torch.zeros(0, dtype=torch.int64)
        )
    assert loss.isnan()


class Square(torch.autograd.Function):
    """Past torch's functions: what it is given, its gradient belongs to."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@pytest.mark.filterwarnings("ignore:leannorm. tensors of a subclass")
@pytest.mark.parametrize("of", [lambda y: y, lambda y: y.view(-1, V).float(), lambda y: y.transpose(1, 2)])
def test_a_function_of_the_program(of):
    plain, _ = trained(Head(), lambda m, x: Square.apply(of(m(x))), contextlib.nullcontext())
    ours, saved = trained(Head(), lambda m, x: Square.apply(of(m(x))), lean(head=True))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)
    assert told(saved)


def test_outside_of_the_pass_and_without_gradients_a_layer_is_torchs():
    model, x = Head(), torch.randn(B, T, H, dtype=torch.float64)
    with lean(head=True):
        with torch.no_grad():
            assert type(model(x)) is Tensor
        later = model(x)
    assert type(model(x)) is Tensor
    torch.testing.assert_close(classes()(later), classes()(model(x)))  # which may be read there
    assert not later.computed
    with lean("norm"):
        assert type(model(x)) is Tensor


def test_gradients_of_gradients():
    found = []
    for context in (contextlib.nullcontext(), lean(head=True)):
        model, x = (
            Head(),
            torch.randn(B, T, H, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
        )
        with context:
            y = model(x)
            loss = classes()(capped(y)) + entropy_of_products(y).mean() + classes(label_smoothing=0.1)(y)
        first = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
        sum(g.square().sum() for g in first).backward()
        found.append([*first, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
