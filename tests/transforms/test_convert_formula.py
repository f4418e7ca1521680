"""`convert` on norms of unknown classes: swapped by what they compute, and only those."""

import copy
import pickle

import pytest
import torch
from formula_cases import KNOWN, GateBefore, GemmaNorm, LlamaNorm, T5Norm, made
from torch import nn as stock
from unknown_norms import UNKNOWN, unknown

from leannorm import convert
from leannorm.transforms import preview

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# their own code runs in these dtypes, as they compute in another one than leannorm does
OWN = {
    **dict.fromkeys(("Llama", "Gemma", "T5", "power", "unweighted", "centered"), (torch.float64,)),
    **dict.fromkeys(("gate behind", "sigmoid behind", "gate before", "parts"), (torch.float64,)),
}


def given(name, dtype, shape=None):
    _, own, count = KNOWN[name]
    torch.manual_seed(1)
    return [torch.randn(shape or own).to(dtype) for _ in range(count)]


def results(layer, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = layer(*leaves)
    torch.manual_seed(2)
    up = torch.randn(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [*leaves, *layer.parameters()], up)]


def assert_close(got, want, dtype):
    eps = torch.finfo(dtype).eps
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        assert (g.double() - w.double()).abs().max() <= 8 * eps * w.double().abs().max()


def look(layer):
    return (id(layer), type(layer), sorted(vars(layer)), [id(p) for p in layer.parameters()], repr(layer))


def computed_by_us(layer, inputs):
    """Has the layer's own forward not been called?"""
    calls, cls = [], type(layer).original
    before = cls.forward

    def forward(self, *args):
        calls.append(self)
        return before(self, *args)

    formula = vars(layer)["_formula"]
    functions = tuple((n, forward if n == "forward" else f, c) for n, f, c in formula.functions)
    functions = tuple((n, f, f.__code__) for n, f, _ in functions)
    had = "forward" in vars(cls)
    cls.forward = forward
    vars(layer)["_formula"] = formula._replace(functions=functions)
    try:
        layer(*inputs)
    finally:
        if had:
            cls.forward = before
        else:
            del cls.forward
        vars(layer)["_formula"] = formula
    return not calls


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_same_numbers_and_a_way_back(name, dtype):
    low = dtype in (torch.bfloat16, torch.float16)
    if low and name in ("biased", "channels", "frozen"):  # they round at every step
        return
    layer, inputs = made(name, dtype), given(name, dtype)
    original, before = copy.deepcopy(layer), look(layer)
    assert convert(layer) is layer
    assert type(layer) is not type(original)
    assert isinstance(layer, type(original))
    assert type(layer).__module__.startswith("leannorm.")
    assert repr(layer) == f"leannorm.{original!r}"
    assert list(layer.state_dict()) == list(original.state_dict())
    want = results(original, inputs)
    assert computed_by_us(layer, inputs) is (dtype not in OWN.get(name, ()))
    assert_close(results(layer, inputs), want, dtype)
    if dtype in OWN.get(name, ()):
        assert all(torch.equal(g, w) for g, w in zip(results(layer, inputs), want, strict=True))
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.copy(layer)):
        assert type(again) is type(layer)
        assert torch.equal(again(*inputs), layer(*inputs))
        assert type(convert(again, to="torch")) is type(original)
    assert look(convert(layer, to="torch")) == before


@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_the_order_of_rounding_is_the_originals(name):
    """Equal bit for bit where sums are exact, so that only roundings could differ."""
    layer = made(name, torch.bfloat16)
    x = torch.tensor([1.0, -1.0]).repeat(32, 8).bfloat16() * 2.0 ** torch.arange(-8, 24).unsqueeze(1) / 64
    x = x.bfloat16()
    want = layer(x)
    assert torch.equal(convert(layer)(x), want)


@pytest.mark.parametrize("shape", [(4, 16), (2, 3, 4, 16), (0, 3, 16), (1, 16)])
@pytest.mark.parametrize("name", ["Llama", "Gemma", "T5", "biased", "gate behind", "gate before"])
def test_any_rank_and_empty(name, shape):
    layer, inputs = made(name, torch.float32), given(name, torch.float32, shape)
    want = None if 0 in shape else results(layer, inputs)  # torch's var warns of no values
    convert(layer)
    assert computed_by_us(layer, inputs)
    if want is not None:
        assert_close(results(layer, inputs), want, torch.float32)
    assert layer(*inputs).shape == shape


@pytest.mark.parametrize("forward", UNKNOWN, ids=lambda f: f.__name__)
def test_what_computes_something_else_is_left_and_named(forward):
    layer = unknown(forward)
    before, state = look(layer), {k: v for k, v in vars(layer).items() if k != "training"}
    model = stock.Sequential(stock.Linear(16, 16), layer)
    random = torch.get_rng_state()
    with pytest.warns(UserWarning, match="1 \\(unknown_norms.HandWrittenNorm is not known, it") as caught:
        convert(model)
    assert len(caught) == 1
    assert look(layer) == before
    assert {k: v for k, v in vars(layer).items() if k != "training"} == state
    assert layer.seen == []
    assert torch.equal(torch.get_rng_state(), random)


def test_norms_by_configuration():
    """One class, other attributes: each layer by its own."""

    class ConfiguredNorm(T5Norm):
        def __init__(self, eps, plus):
            super().__init__(16, eps)
            self.plus = plus

        def forward(self, x):
            y = super().forward(x)
            return y + 1 if self.plus else y

    model = stock.Sequential(*(ConfiguredNorm(*how) for how in ((1e-6, False), (1e-1, False), (1e-6, True))))
    original, x = copy.deepcopy(model), torch.randn(3, 16)
    with pytest.warns(UserWarning, match="2 \\(.*ConfiguredNorm is not known"):
        convert(model)
    for layer, own in zip(model, original, strict=True):
        torch.testing.assert_close(layer(x), own(x))
    assert not torch.allclose(model[0](x), model[1](x))


def changes():
    def eps(layer):
        layer.variance_epsilon = 0.5

    def state(layer):
        vars(layer)["variance_epsilon"] = 0.5

    def no_weight(layer):
        layer.weight = None

    def tensor(layer):
        layer.variance_epsilon = torch.tensor(0.5)

    def wider(layer):
        layer.weight = stock.Parameter(torch.ones(3, 1, 16))

    def double(layer):
        layer.double()

    def patched_layer(layer):
        layer.forward = lambda x: x + 1

    def half_weight(layer):
        layer.weight = stock.Parameter(layer.weight.detach().bfloat16())

    return [eps, state, tensor, wider, double, patched_layer, half_weight, no_weight]


@pytest.mark.parametrize("change", changes(), ids=lambda f: f.__name__)
def test_a_change_after_the_conversion_takes_effect(change):
    layer, x = made("Llama", torch.float32), torch.randn(3, 2, 16)
    original = copy.deepcopy(layer)
    convert(layer)
    change(layer)
    change(original)
    try:
        want = original(x)
    except TypeError as error:
        with pytest.raises(TypeError, match=str(error)[:20]):
            layer(x)
        return
    torch.testing.assert_close(layer(x), want)


def test_converted_again_it_is_read_again():
    layer, x = convert(made("Llama", torch.float32)), torch.randn(3, 16)
    layer.variance_epsilon = 0.5
    assert not computed_by_us(layer, [x])
    assert computed_by_us(convert(layer), [x])
    assert type(convert(layer, to="torch")) is LlamaNorm


EPS = 1e-6


class GlobalNorm(LlamaNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.weight


def test_a_global_number_takes_effect(monkeypatch):
    layer, x = convert(GlobalNorm(16)), torch.randn(3, 16)
    assert computed_by_us(layer, [x])
    monkeypatch.setitem(globals(), "EPS", 0.5)
    torch.testing.assert_close(layer(x), GlobalNorm.forward(layer, x))


@pytest.mark.parametrize(
    "state",
    [
        lambda: torch.device("meta"),
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
)
def test_wherever_it_is_called(state):
    class HereNorm(LlamaNorm):
        pass

    layer, x = HereNorm(16), torch.randn(3, 16)
    with state():
        convert(layer)
    assert computed_by_us(layer, [x])


def test_a_patched_class_is_called():
    class PatchedNorm(GemmaNorm):
        pass

    layer, x = convert(PatchedNorm(16)), torch.randn(3, 16)
    assert computed_by_us(layer, [x])
    PatchedNorm._norm = lambda self, x: x * 7
    assert torch.equal(layer(x), x * 7 * (1 + layer.weight))
    del PatchedNorm._norm
    assert computed_by_us(layer, [x])
    PatchedNorm.forward = lambda self, x: x * 3
    assert torch.equal(layer(x), x * 3)


def test_calls_by_name_and_with_other_arguments():
    layer, x, gate = made("gate before", torch.float32), *given("gate before", torch.float32)
    original = copy.deepcopy(layer)
    convert(layer)
    for args, named in (
        ((x,), {"gate": gate}),
        ((), {"hidden_states": x, "gate": gate}),
        ((), {"gate": gate, "hidden_states": x}),
        ((), {"hidden_states": x}),
        ((x, None), {}),
        ((x, gate[:1]), {}),
    ):
        torch.testing.assert_close(layer(*args, **named), original(*args, **named))
    for args, named in (((), {"gate": gate}), ((x, gate, gate), {}), ((x,), {"hidden_states": x})):
        with pytest.raises(TypeError, match="argument"):
            layer(*args, **named)


def test_hooks_run():
    layer, calls = made("Llama", torch.float32), []
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    results(convert(layer), [torch.randn(3, 16)])
    assert calls == ["forward", "backward"]


def test_replaced_forwards_and_scripts_are_left_and_named():
    patched, known = made("Llama", torch.float32), stock.LayerNorm(4)
    patched.forward = known.forward = lambda x: x
    script = torch.jit.script(stock.Sequential(stock.LayerNorm(4)))
    model = stock.ModuleList([patched, known, script])
    kinds = [type(m) for m in model.modules()]
    with pytest.warns(UserWarning, match="0, 1 \\(its forward is replaced .*; 2.0 \\(a ScriptModule"):
        convert(model)
    assert [type(m) for m in model.modules()] == kinds


def test_convert_says_that_it_found_nothing_but_not_a_second_time_where_it_did():
    with pytest.warns(UserWarning, match="convert found no norm layer in Linear"):
        convert(stock.Linear(3, 3))
    convert(convert(made("Llama", torch.float32)))


def test_preview_names_the_formula():
    layer = made("Llama", torch.float32)
    assert str(preview(layer)) == "the model itself: LlamaNorm -> LlamaNorm by rms_norm"
    assert type(layer) is LlamaNorm


def test_on_the_meta_device_and_shared():
    with torch.device("meta"):
        layer = LlamaNorm()
    model = convert(stock.ModuleDict({"a": layer, "b": stock.Sequential(layer)}))
    assert model["a"] is model["b"][0]
    model.to_empty(device="cpu")
    torch.nn.init.ones_(layer.weight)
    assert computed_by_us(layer, [torch.randn(2, 16)])


def test_split_by_attributes_of_the_class():
    class Other(GateBefore):
        groups = 4

    for cls in (GateBefore, Other):
        layer, x = cls(), torch.randn(3, 16)
        want = layer(x)
        torch.testing.assert_close(convert(layer)(x), want)
