"""`lean()` as a decorator, what `make_lean` leaves to look at, and what both say to what they are not for."""

from __future__ import annotations

import inspect
import pickle

import lean_cases
import pytest
import torch
from torch import nn

from leannorm import InputError, lean, make_lean

IMAGE = torch.randn(lean_cases.IMAGE, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(0)
    return lean_cases.IMAGES["silu"]()


def gradients(model, step):
    model.zero_grad()
    step(IMAGE).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    "setting", [{}, {"recompute": "norm"}, {"recompute": "conv"}, {"budget": 0.6}], ids=str
)
def test_each_call_of_a_decorated_function_is_a_pass(setting):
    model = network()

    def loss_of(x):
        """The mean of squares."""
        return model(x).square().mean()

    stock, step = gradients(model, loss_of), lean(**setting)(loss_of)
    for _ in range(3):
        assert all(map(torch.equal, gradients(model, step), stock))
        assert 9 <= len(step.saved.records) < 2 * 9  # of one call, not of all
        assert step.saved.rebuilt_bytes > 0 or not setting
    assert (step.__name__, step.__doc__) == (loss_of.__name__, loss_of.__doc__)
    assert inspect.signature(step) == inspect.signature(loss_of)


def test_a_decorated_method_and_two_functions_of_one_object():
    decorate = lean("conv")

    class Decorated(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        @decorate
        def forward(self, x):
            return self.inner(x)

    other, model = decorate(lambda x: x.exp()), Decorated()
    stock = gradients(model, lambda x: model.inner(x).sum())
    assert all(map(torch.equal, gradients(model, lambda x: model(x).sum()), stock))
    assert model.forward.saved.rebuilt_bytes > 0
    assert not other.saved.records  # each function has its own


def test_of_two_decorated_functions_one_may_be_small(monkeypatch):
    """Whether a pass is small is remembered by the line that opens it, which is one line of ours here."""
    monkeypatch.setenv("LEANNORM_SMALL_BYTES", str(2**16))
    model = network()
    little, much = (lean("norm")(lambda x, of=of: model(x[:of]).square().mean()) for of in (1, 4))
    for _ in range(3):
        little(IMAGE)
        much(IMAGE)
    assert "less than 4 MiB" in little.saved.reasons[0]
    assert not little.saved.rebuilt_bytes
    assert much.saved.rebuilt_bytes > 0


def test_an_error_in_a_decorated_function_closes_the_pass():
    @lean("norm")
    def fails(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails(IMAGE)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_decorated_function_compiles_as_without_it():
    model = network()
    step = lean("norm")(lambda x: model(x).square().mean())
    stock = gradients(model, lambda x: model(x).square().mean())
    with pytest.warns(UserWarning, match="entered inside compiled code"):
        ours = gradients(model, torch.compile(step, backend="aot_eager", fullgraph=True))
    assert all(map(torch.allclose, ours, stock))


def generator(x):
    yield x


async def coroutine(x):
    return x


WRONG = {
    "a class": (lambda: lean("norm")(nn.Linear), "the class Linear: decorate the function"),
    "a generator": (lambda: lean("norm")(generator), "return when their forward pass is done"),
    "a coroutine": (lambda: lean("norm")(coroutine), "return when their forward pass is done"),
    "a decorated model": (lambda: lean("norm")(nn.ReLU()), r"of a ReLU write make_lean\(model\)"),
    "a number": (lambda: lean("norm")(3), "got 3"),
    "lean(model)": (lambda: lean(nn.ReLU()), r"got a ReLU: write leannorm.make_lean\(model\), or with"),
    "no parentheses": (lambda: lean(coroutine), r"write @leannorm.lean\(\) with its parentheses"),
    "two settings": (lambda: lean("conv", budget=0.5), "budget=0.5 chooses itself.*got 'conv' too"),
    "eight": (lambda: lean(peak=8), r'peak=8 is a number of bytes.*write "8GiB", or a share'),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_it_is_not_for_is_said_with_what_to_write(case):
    call, said = WRONG[case]
    with pytest.raises(InputError, match=said):
        call()


@pytest.mark.parametrize("settings", [{"recompute": "conv", "budget": 0.5}, {"peak": 8}], ids=str)
def test_make_lean_refuses_them_at_the_call(settings):
    model = network()
    with pytest.raises(InputError):
        make_lean(model, **settings)
    assert "forward" not in vars(model)


def test_a_lean_model_shows_its_last_pass():
    model = make_lean(network(), "norm")
    assert model.forward.saved is None
    assert "before its first pass" in repr(model.forward)
    loss = model(IMAGE).square().mean()
    saved = model.forward.saved
    assert saved.rebuilt_bytes > 0
    assert repr(saved) in repr(model.forward)
    loss.backward()
    assert model.forward.saved is saved
    assert saved.kept_bytes > 0  # still told
    assert pickle.loads(pickle.dumps(model)).forward.saved is None
