"""What a dropped tensor is made of is edited behind the pass, where plain PyTorch lets a program do so."""

import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from leannorm import lean
from leannorm.saving import recorded_pass

pytestmark = [
    pytest.mark.filterwarnings("ignore:leannorm. (budget|more is kept|lean.. saw no tensor)"),
    pytest.mark.usefixtures("with_and_without_nodes"),
]


def norm():
    return lean("norm")


def of_values(h, part):
    with torch.no_grad():
        h += part


def by_several(h, part):
    with torch.no_grad():
        torch._foreach_add_([part.clone(), h], [part, part])


def as_a_result(h, part):
    with torch.no_grad():
        torch.mul(h.detach(), 3, out=h.detach())


def of_data(h, part):
    h.data.mul_(2)


def of_a_view(h, part):
    h.detach()[3:5].zero_()


def by_copy(h, part):
    h.detach().view(-1)[7:].copy_(part.view(-1)[7:])


def by_a_pass(h, part):
    with lean("norm"):
        F.relu(part, inplace=True)
        h.detach().exp_()


def twice(h, part):
    h.detach().exp_()
    h.detach().log_().mul_(2)


EDITS = [of_values, by_several, as_a_result, of_data, of_a_view, by_copy, by_a_pass, twice]


@pytest.mark.parametrize(
    "settings", [{"recompute": "norm"}, {"recompute": "conv"}, {"recompute": "norm", "verify": True}], ids=str
)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("again", [False, True])
def test_what_no_node_reads_any_more(edit, again, settings):
    """The activation saves its result, and nobody its input."""

    def train(context):
        torch.manual_seed(0)
        first, second, seen = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), []
        for _ in range(3):
            with context() as saved:
                h = first(torch.randn(64, 64))
                log, y = h.norm(), F.relu(h)
                loss = second(y).square().mean()
            if saved is not None:
                assert any(record.rebuilt for record in saved.records)
            torch.autograd.grad(log, first.weight, retain_graph=True)
            if again:
                seen += torch.autograd.grad(loss, second.weight, retain_graph=True)
            edit(h, h.detach().clone())
            seen += torch.autograd.grad(loss, [*first.parameters(), *second.parameters()])
            seen.append(h.detach())
        return seen

    stock, ours = train(nullcontext), train(lambda: lean(**settings))
    assert all(map(torch.equal, stock, ours))


@pytest.mark.parametrize("of_data", [False, True])
def test_what_a_node_reads_is_as_plain_pytorch_has_it(of_data):
    """Past autograd it reads what was written; else it is an error."""

    def train(context):
        torch.manual_seed(0)
        weight = torch.randn(64, 64, requires_grad=True)
        with context():
            h = torch.randn(64, 64) @ weight
            square, y = h.square(), F.relu(h)
            loss = square.sum() + (y * y.exp()).sum()
        (h.data if of_data else h.detach()).mul_(2)
        return torch.autograd.grad(loss, weight)

    if of_data:
        assert all(map(torch.equal, train(nullcontext), train(norm)))
        return
    for context in (nullcontext, norm):
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            train(context)


def test_an_edit_of_another_thread_is_an_error():
    for _ in range(3):
        weight = torch.randn(64, 64, requires_grad=True)
        with lean("norm") as saved:
            h = torch.randn(64, 64) @ weight
            log, loss = h.norm(), (F.relu(h) * 2).exp().sum()
        thread = threading.Thread(target=h.detach().mul_, args=(2,))
        thread.start(), thread.join()
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            torch.autograd.grad(loss, weight)
        assert saved.rebuilt_bytes > 0
        del log


@pytest.mark.parametrize("end", ["backward", "dropped", "not needed"])
def test_nothing_is_watched_when_it_is_over(end):
    def run():
        weight, last = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
        with lean("norm"):
            h = torch.randn(64, 64) @ weight
            log, loss = h.norm(), (F.relu(h) @ last).sum()
        return h, log, loss

    for _ in range(3):
        h, log, loss = run()
        assert recorded_pass.LOG.exposed() == 1
        if end == "not needed":
            h.detach().zero_()
        elif end == "backward":
            loss.backward()
        else:
            del loss
        assert recorded_pass.LOG.exposed() == 0
        del h, log
    with lean("norm"):
        loss = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))(
            torch.randn(64, 64)
        ).sum()
    assert recorded_pass.LOG.exposed() == 0  # nobody has what it is made of
    loss.backward()


def normalized(x, weight):
    """A batch norm's output, and the statistics that it saves for the backward pass."""
    return torch.native_batch_norm(x * 1.5, weight, None, None, None, True, 0.1, 1e-5)


def test_statistics_that_nobody_else_has_are_not_watched():
    """A norm's output is rebuilt from them, and to watch writes costs every operator of a backward pass."""
    x, weight = torch.randn(64, 8, 8, 8), torch.ones(8, requires_grad=True)
    for _ in range(3):
        with lean("norm") as saved:
            loss = F.relu(normalized(x, weight)[0]).exp().sum()
        assert saved.rebuilt_bytes > 0
        assert recorded_pass.LOG.exposed() == 0
        loss.backward()


@pytest.mark.parametrize("which", [1, 2], ids=["mean", "invstd"])
def test_statistics_that_somebody_has_may_be_edited(which, with_and_without_nodes):
    """The log in Python does not watch them: then the edit is an error."""
    x = torch.randn(64, 8, 8, 8)

    def train(context):
        weight = torch.ones(8, requires_grad=True)
        with context():
            y = normalized(x, weight)
            statistics, loss = y[which], F.relu(y[0]).exp().sum()
        del y
        statistics.data.mul_(2)
        return torch.autograd.grad(loss, weight)[0]

    for _ in range(3):
        if with_and_without_nodes:
            assert torch.equal(train(nullcontext), train(norm))
        else:
            with pytest.raises(RuntimeError, match="edit a copy of it"):
                train(norm)


class Two(torch.autograd.Function):
    """Two results of one tensor, which it alone saves, and into which its backward pass writes."""

    @staticmethod
    def forward(ctx, x):
        y = x * 1.5
        ctx.save_for_backward(y)
        return y.sin(), y.cos()

    @staticmethod
    def backward(ctx, first, second):
        (y,) = ctx.saved_tensors
        gradient = 1.5 * first * y.cos()
        y.data.mul_(2)
        return gradient


def test_a_backward_pass_may_write_into_what_it_alone_has_saved():
    def train(context):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with context():
            first, second = Two.apply(x)
            a, b = first.sum(), second.square().sum()
        return (*torch.autograd.grad(a, x), *torch.autograd.grad(b, second))

    for _ in range(3):
        assert all(map(torch.equal, train(nullcontext), train(norm)))
    with norm() as saved:
        second = Two.apply(torch.randn(64, 64, requires_grad=True))[1]
        second.square().sum().backward()
    assert saved.rebuilt_bytes > 0


def test_a_number_that_a_call_writes_into_stays_what_it_is():
    """torch makes a tensor of each number, into which the call writes; the log shares those of equal ones."""

    def gradient(context, number, writes):
        x = torch.randn(64, 64, generator=torch.manual_seed(0)).requires_grad_()
        with context:
            if writes:
                torch.ops.aten.add_(number, 3.0)
            loss = (x.sin() * number).exp().cos().sum()
        loss.backward()
        return x.grad

    for _ in range(3):  # until a product with a number is trusted
        gradient(lean("norm"), 1.5, writes=False)
    expected = gradient(nullcontext(), 2.25, writes=True)
    assert torch.equal(gradient(lean("norm"), 2.25, writes=True), expected)
