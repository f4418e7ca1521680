"""`lean(head=True)` on two gloo ranks: FSDP2 and DDP give what they give without it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lean_ranks import local, mesh_of_all
from ranks import ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.head import _Wide as Wide
from benchmarks.head_families import SIZES
from leannorm import InputError
from leannorm.head.logits import Logits
from leannorm.saving import lean

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")
H, V, STEPS = 16, 320, 3


class Model(nn.Module):
    """Returns logits, to which an adapter adds, with the loss if it is given labels."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, H), nn.Linear(H, V, bias=not tied)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(H, H), nn.Tanh()) for _ in range(2))
        self.adapter = nn.Sequential(nn.Linear(H, 4, bias=False), nn.Linear(4, V, bias=False))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = self.embed(x)
        for block in self.blocks:
            y = block(y)
        logits = self.adapter(y) + self.head(y)
        return logits if labels is None else (of_classes(logits, labels), logits)


def of_classes(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def within(model: nn.Module, words: Tensor) -> Any:
    return model(words, labels=words)[0]


def outside(model: nn.Module, words: Tensor) -> Any:
    return of_classes(model(words), words)


def after(model: nn.Module, words: Tensor) -> Any:
    """Logits, whose loss is computed when the pass is closed."""
    return model(words)


def policy(model: nn.Module, words: Tensor) -> Any:
    """As GRPO reads them: the last tokens, with a temperature, and an entropy."""
    y = model(words)[:, -4:] / 0.9
    picked = y.gather(-1, words[:, -4:].unsqueeze(-1)).squeeze(-1) - y.logsumexp(-1)
    logps = F.log_softmax(y, -1)
    return (picked.exp() * -(logps.exp() * logps).sum(-1)).mean()


def squared(model: nn.Module, words: Tensor) -> Any:
    return model(words).square().mean()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


def by_a_function(model: nn.Module, words: Tensor) -> Any:
    return Square.apply(model(words)[:, 1:].to(torch.float32)).mean()


def printed_by_one(model: nn.Module, words: Tensor) -> Any:
    logits = model(words)
    if not dist.get_rank():
        repr(logits)
    return of_classes(logits, words)


def twice(model: nn.Module, words: Tensor) -> Any:
    return outside(model, words) + within(model, words.flip(0))


READS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (within, outside, after, policy, squared, by_a_function, printed_by_one, twice)
}


def sharded(model: Any, wrap: str) -> Any:
    from torch.distributed.fsdp import fully_shard

    settings: dict[str, Any] = {"mesh": mesh_of_all()}
    if "freed" in wrap:
        settings["reshard_after_forward"] = True
    if "head" in wrap:
        fully_shard(model.head, **settings)
    if "kept head" in wrap:
        model.head.set_reshard_after_forward(False)
    if "tail" in wrap:  # as accelerate cuts a model
        tied = [model.embed] if model.head.weight is model.embed.weight else []
        fully_shard([*tied, model.adapter, model.head], **settings | {"reshard_after_forward": False})
    if "blocks" in wrap:
        for block in model.blocks:
            fully_shard(block, **settings)
    return fully_shard(model, **settings)


def wrapped(model: nn.Module, wrap: str) -> Any:
    if wrap == "ddp":
        return DistributedDataParallel(model)
    if wrap.startswith("ddp"):
        return DistributedDataParallel(model, **{wrap.split(", ")[1]: True})
    return sharded(model, wrap)


def trained(wrap: str, read: str, head: bool, tied: bool) -> tuple[list[Tensor], list[str]]:
    """Losses and gradients of a few steps; the second one's gradients are added to those of the first."""
    torch.manual_seed(0)
    model = wrapped(Model(tied).double(), wrap)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator, found, reasons = torch.Generator().manual_seed(dist.get_rank()), list[Tensor](), list[str]()
    for step in range(STEPS):
        words = torch.randint(V, (3, 9), generator=generator)
        added_up = not step and "static" not in wrap
        if "ddp" not in wrap:
            model.set_requires_gradient_sync(not added_up)
        with model.no_sync() if added_up and "ddp" in wrap else nullcontext():
            with lean("conv", head=True) if head else nullcontext() as saved:
                made = READS[read](model, words)
            loss = of_classes(made, words) if made.dim() else made
            loss.backward()
        reasons += [] if saved is None else [r for r in saved.reasons if r.startswith("head=True")]
        found.append(loss.detach())
        if step:
            found += [local(p.grad).clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return found, reasons


def of_wrap(rank: int, wrap: str) -> dict[str, set[str]]:
    found = {}
    for tied in (False, True) if "head" not in wrap else (False,):
        for read in READS:
            plain, _ = trained(wrap, read, False, tied)
            ours, reasons = trained(wrap, read, True, tied)
            for a, b in zip(ours, plain, strict=True):
                close = {"rtol": 1e-9, "atol": 1e-12} if read in ("policy", "squared") else {}
                torch.testing.assert_close(a, b, **close, msg=lambda m, c=(read, tied): f"{c}: {m}")
            found[f"{read}{', tied' * tied}"] = {r.split("since ")[1].split(" needs")[0] for r in reasons}
    return found


FREES = ", where FSDP2 frees their weight (reshard_after_forward),"
# what needs the logits as a tensor, if it is not what the loss asks for
WRAPS: dict[str, set[str]] = {
    "whole": set(),
    "blocks": set(),
    "blocks, kept head": set(),
    "blocks, tail": set(),
    "blocks, freed": {"the end of FSDPModel" + FREES},
    "blocks, head": {"the end of FSDPLinear" + FREES, "add"},
    "ddp": set(),
    "ddp, find_unused_parameters": {"grad_fn"},
    "ddp, static_graph": {"grad_fn"},
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_losses_and_gradients_are_those_without_it(wrap: str) -> None:
    """Of what the loss asks for, `squared` and a function of the program need the tensor."""
    needs, asks = WRAPS[wrap], {"squared": "square", "by_a_function": "mul", "printed_by_one": "__repr__"}
    for rank, found in enumerate(ranks(2, of_wrap, wrap)):
        for read, reasons in found.items():
            ask = asks.get(read.split(",")[0])
            if (rank and ask == "__repr__") or (needs and "static" not in wrap):
                assert reasons == needs, (read, reasons)
            else:  # a static graph is looked at in the first step alone
                assert reasons == needs | ({ask} - {None}), (read, reasons)


def llama(tied: bool, wrap: str, narrow: bool) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    settings: dict[str, Any] = {"mesh": mesh_of_all()}
    if narrow:
        settings["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return model, partial(fully_shard, **settings), model.model.layers if wrap == "blocks" else []


def llamas(rank: int, wrap: str) -> None:
    """Three steps, each from the same weights in float64, in float32 and in bfloat16's products."""
    for tied, narrow in product((False, True), (False, True)):
        far = [0.0, 0.0]
        exact, (model, shard, layers) = llama(tied, wrap, False)[0].double(), llama(tied, wrap, narrow)
        for part in (*layers, model):
            shard(part)
        optimizer, generator = torch.optim.AdamW(model.parameters(), 1e-2), torch.Generator().manual_seed(3)
        for _ in range(3):
            words = torch.randint(3, SIZES["vocab_size"], (2, 2, 24), generator=generator)
            whole = {k: v.full_tensor().double() for k, v in model.state_dict().items()}
            exact.load_state_dict(whole, strict=False)
            exact.zero_grad()
            with Wide():
                for batch in words:
                    (exact(input_ids=batch, labels=batch).loss / len(words)).backward()
            for side, context in enumerate((lean("conv", head=True), nullcontext())):
                optimizer.zero_grad()
                with context as saved:
                    out = model(input_ids=words[rank], labels=words[rank])
                if saved is not None:
                    assert isinstance(out.logits, Logits)
                    assert not [r for r in saved.reasons if r.startswith("head=True")]
                    assert not out.logits.computed
                out.loss.backward()
                pairs = zip(model.parameters(), exact.parameters(), strict=True)
                apart = sum((p.grad.full_tensor() - q.grad).square().sum() for p, q in pairs)
                far[side] += float(apart / sum(q.grad.square().sum() for q in exact.parameters())) ** 0.5
            optimizer.step()
        assert far[0] <= 1.25 * far[1], (tied, narrow, far)
        assert 0 < far[1] < (0.3 if narrow else 1e-4)


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("wrap", ["whole", "blocks"])
def test_a_llama_that_fsdp_shards_is_as_near_to_float64(wrap: str) -> None:
    ranks(2, llamas, wrap)


def words_of(seed: int) -> Tensor:
    return torch.randint(V, (3, 9), generator=torch.Generator().manual_seed(seed))


def freed_by_a_backward_pass(model: Any) -> Any:
    logits = model(words_of(0))
    outside(model, words_of(1)).backward()
    return logits


def freed_by_hand(model: Any) -> Any:
    logits = model(words_of(0))
    model.reshard()
    return logits


def stepped(model: Any, **settings: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    logits = freed_by_a_backward_pass(model)
    optimizer.step()
    model(words_of(2))  # gathers the weight that was stepped
    return logits


def edited(model: Any, whole: bool) -> Any:
    logits = freed_by_a_backward_pass(model)
    with torch.no_grad():
        (model.head.weight if whole else local(model.head.weight)).mul_(2)
    model(words_of(2))
    return logits


def called_from_outside(model: Any) -> Any:
    model(words_of(0))
    return model.head(torch.ones(2, 3, H))


def another_hook(model: Any) -> Any:
    logits = model(words_of(0))
    logits.register_hook(lambda g: 2 * g)
    return logits


# what logits that wait trust, and a program that breaks it
BROKEN: dict[str, tuple[Callable[..., Any], str]] = {
    "the weight exists, backward": (freed_by_a_backward_pass, "was freed by then"),
    "the weight exists, by hand": (freed_by_hand, "was freed by then"),
    "the weight stays, foreach": (partial(stepped, foreach=True), "was edited in place since"),
    "the weight stays, one by one": (partial(stepped, foreach=False), "was edited in place since"),
    "the weight stays, fused": (partial(stepped, fused=True), "was edited in place since"),
    "the weight stays, edited": (partial(edited, whole=True), "was edited in place since"),
    "the weight stays, a shard edited": (partial(edited, whole=False), "was edited in place since"),
    "the unit runs": (called_from_outside, "called from outside of the module"),
    "hooks leave gradients alone": (another_hook, "since register_hook needs them"),
}


def broken(rank: int, name: str) -> str:
    torch.manual_seed(0)
    model = sharded(Model(), "whole")
    with lean("conv", head=True) as saved:
        logits = BROKEN[name][0](model)
        try:
            logits.logsumexp(-1)
        except InputError as error:
            return str(error)
    return " ".join(saved.reasons)


@pytest.mark.filterwarnings("ignore:leannorm")
def test_what_is_trusted_is_checked() -> None:
    for name, (_, told) in BROKEN.items():
        for found in ranks(2, broken, name):
            assert told in found, (name, found)
