"""`__torch_function__`: subclasses are told torch's function where ours stands in for one, modes ours."""

import inspect

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.overrides import TorchFunctionMode

from leannorm import functional, nn


class Told(torch.Tensor):
    """Notes what it is told, and computes it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        told.append((func, args, kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


told = []


class Heard(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        told.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def image(*shape):
    return torch.randn(shape or (4, 6, 5, 5))


def vectors():
    return torch.zeros(6), torch.ones(6), torch.rand(6), torch.randn(6)


STAND_INS = {
    "batch_norm": lambda: (image(), *vectors(), True, 0.2, 1e-3),
    "group_norm": lambda: (image(), 3, *vectors()[2:], 1e-3),
    "instance_norm": lambda: (image(), *vectors(), True, 0.2, 1e-3),
    "layer_norm": lambda: (image(4, 5, 6), (6,), *vectors()[2:], 1e-3),
    "rms_norm": lambda: (image(4, 5, 6), (6,), vectors()[2], 1e-3),
}
OWN = {
    "batch_norm_act": lambda: (image(), *vectors(), True, 0.2, 1e-3),
    "sync_batch_norm": lambda: (image(), *vectors(), True, 0.2, 1e-3),
    "conv_batch_norm": lambda: (image(), image(6, 6, 3, 3), None, *vectors()),
    "add_layer_norm": lambda: (image(4, 6), image(4, 6), (6,), *vectors()[2:]),
    "add_rms_norm": lambda: (image(4, 6), image(4, 6), (6,), vectors()[2]),
    "ada_layer_norm": lambda: (image(4, 6), (6,), image(4, 6), image(4, 6), 1e-5, vectors()[2]),
    "ada_rms_norm": lambda: (image(4, 6), (6,), image(4, 6), 1e-5, vectors()[2]),
    "add_ada_layer_norm": lambda: (
        image(4, 6),
        image(4, 6),
        vectors()[2],
        (6,),
        image(4, 6),
        image(4, 6),
        1e-5,
        vectors()[2],
    ),
    "add_ada_rms_norm": lambda: (
        image(4, 6),
        image(4, 6),
        vectors()[2],
        (6,),
        image(4, 6),
        1e-5,
        vectors()[2],
    ),
    "gated_rms_norm": lambda: (image(4, 6), image(4, 6), (6,), vectors()[2]),
    "group_norm_act": lambda: (image(), 3, *vectors()[2:], 1e-3),
}


def plain(y):
    return torch.stack([t.as_subclass(torch.Tensor) for t in ([y] if isinstance(y, torch.Tensor) else y)])


def as_told(given, which):
    """The arguments, the tensor at `which` of the subclass."""
    return [v.as_subclass(Told) if i == which else v for i, v in enumerate(given)]


@pytest.mark.parametrize("which", ["input", "weight"])
@pytest.mark.parametrize("name", [*STAND_INS, *OWN])
def test_a_subclass_is_told_torchs_function_or_else_ours(name, which):
    ours, make = getattr(functional, name), {**STAND_INS, **OWN}[name]
    given = make()
    names = [p for p in inspect.signature(ours).parameters if "weight" in p]
    place = 0 if which == "input" else list(inspect.signature(ours).parameters).index(names[0])
    want = plain(ours(*make_again(given)))
    told.clear()
    y = ours(*as_told(make_again(given), place))
    assert told[0][0] is (getattr(F, name) if name in STAND_INS else ours)
    torch.testing.assert_close(plain(y), want)


def make_again(given):
    return [v.clone() if isinstance(v, torch.Tensor) else v for v in given]


@pytest.mark.parametrize("name", STAND_INS)
def test_the_words_are_those_that_torchs_function_says_itself(name):
    given = as_told(STAND_INS[name](), 0)
    said = []
    for function in (getattr(functional, name), getattr(F, name)):
        told.clear()
        function(*given)
        said.append([(func, len(args), list(kwargs)) for func, args, kwargs in told][:1])
    assert said[0] == said[1]


def test_what_torchs_function_has_no_argument_for_is_told_of_ours():
    x = image().as_subclass(Told)
    for function in (functional.layer_norm, functional.rms_norm):
        told.clear()
        y = function(x, (6,), dim=1)
        assert told[0][0] is function
        torch.testing.assert_close(plain(y), plain(function(plain(x)[0], (6,), dim=1)))


@pytest.mark.parametrize("name", [*STAND_INS, *OWN])
def test_a_mode_is_told_ours_and_our_kernel_answers(name):
    function, given = getattr(functional, name), {**STAND_INS, **OWN}[name]()
    want = plain(function(*make_again(given)))
    told.clear()
    with Heard():
        y = function(*make_again(given))
    assert function in [func for func, _, _ in told]
    assert getattr(F, name, None) not in [func for func, _, _ in told]
    assert torch.equal(plain(y), want)


PER_SAMPLE = {
    "GroupNorm": (lambda m: m.GroupNorm(3, 6), (5, 6, 4, 4)),
    "LayerNorm": (lambda m: m.LayerNorm(6), (5, 4, 6)),
    "LayerNorm of two axes": (lambda m: m.LayerNorm((4, 6)), (5, 4, 6)),
    "InstanceNorm1d": (lambda m: m.InstanceNorm1d(6, affine=True), (5, 6, 7)),
    "InstanceNorm2d": (lambda m: m.InstanceNorm2d(6, affine=True), (5, 6, 4, 4)),
    "InstanceNorm3d": (lambda m: m.InstanceNorm3d(6, affine=True), (5, 6, 2, 3, 3)),
}


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_per_sample_gradients(name):
    """torch's ExpandedWeight knows torch's functions; each sample's gradient is what it is by itself."""
    make, shape = PER_SAMPLE[name]
    layer, x = make(nn), torch.randn(shape)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape))
    call_for_per_sample_grads(layer)(x).square().sum().backward()
    for i in range(len(x)):
        alone = torch.autograd.grad(layer(x[i : i + 1]).square().sum(), list(layer.parameters()))
        for p, gradient in zip(layer.parameters(), alone, strict=True):
            torch.testing.assert_close(p.grad_sample[i], gradient, rtol=1e-4, atol=1e-5)


def test_masked_tensors():
    """Their own answer, whatever it is, is that to torch's function."""
    from torch.masked import masked_tensor

    with pytest.warns(UserWarning, match="prototype"):
        x = masked_tensor(torch.randn(3, 4), torch.rand(3, 4) > 0.5)
    answers = []
    for function in (F.layer_norm, functional.layer_norm):
        try:
            answers.append(str(function(x, (4,))))
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}")
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", STAND_INS)
def test_compiles_in_one_piece(name):
    function, given = getattr(functional, name), STAND_INS[name]()
    compiled = torch.compile(lambda *v: function(*v), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*make_again(given)), function(*make_again(given)))
