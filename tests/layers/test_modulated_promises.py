"""What all functions with a scale, a gate or an activation promise: graphs, transforms, modes, errors."""

import pytest
import torch
from torch.library import opcheck

from leannorm import functional, nn, use_backend
from leannorm._errors import DtypeError, InputError
from leannorm.functional.door import AsOperators

X = (2, 3, 6)
CALLS = {
    "ada_layer_norm": lambda t: functional.ada_layer_norm(t(*X), (6,), t(2, 6), t(2, 6), 1e-5, t(6), t(6)),
    "ada_rms_norm": lambda t: functional.ada_rms_norm(t(*X), (6,), t(2, 1, 6), None, t(6), t(2, 1, 6)),
    "add_ada_layer_norm": lambda t: functional.add_ada_layer_norm(
        t(*X), t(*X), t(6), (6,), t(2, 3, 6), t(2, 3, 6)
    ),
    "add_ada_rms_norm": lambda t: functional.add_ada_rms_norm(t(*X), t(*X), t(2, 6), (6,), t(2, 6)),
    "gated_rms_norm": lambda t: functional.gated_rms_norm(t(*X), t(*X), (6,), t(6), cast="before"),
    "gated_rms_norm behind": lambda t: functional.gated_rms_norm(
        t(*X), t(*X), (6,), t(6), 1e-5, "gelu", False
    ),
    "group_norm_act": lambda t: functional.group_norm_act(t(2, 6, 4), 3, t(6), t(6), act="gelu"),
}
CALL = pytest.mark.parametrize("name", CALLS)


def first(out):
    return out if isinstance(out, torch.Tensor) else out[0] + 2 * out[1]


class Given:
    """Hands out tensors, always the same ones; as leaves."""

    def __init__(self, seed=0, dtype=torch.float32, leaf=True):
        torch.manual_seed(seed)
        self.dtype, self.leaf, self.made = dtype, leaf, []

    def __call__(self, *shape):
        self.made.append(torch.randn(shape).to(self.dtype).requires_grad_(self.leaf))
        return self.made[-1]


class Module(torch.nn.Module):
    def __init__(self, name, tensors):
        super().__init__()
        self.name = name
        self.tensors = torch.nn.ParameterList(tensors)

    def forward(self, factor):
        given = iter(self.tensors)
        return first(CALLS[self.name](lambda *shape: next(given) * factor))


def made_for(name):
    given = Given()
    CALLS[name](given)
    return [t.detach() for t in given.made]


@pytest.mark.sampled(of=4)
@CALL
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_compiles_to_one_graph(name, backend):
    model, one = Module(name, made_for(name)), torch.ones(())
    found = []
    with use_backend(backend):
        for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            y = call(one)
            found.append([y.detach(), *torch.autograd.grad(y.pow(2).sum(), list(model.parameters()))])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.sampled(of=4)
@CALL
def test_transforms_compile(name):
    model, one = Module(name, made_for(name)), torch.ones(())
    slope = torch.func.grad(lambda factor: model(factor).pow(2).sum())
    found = torch.compile(slope, fullgraph=True, backend="aot_eager")(one)
    torch.testing.assert_close(found, slope(one))


@CALL
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean")  # torch's own group_norm
def test_a_graph_that_leaves_has_nothing_of_ours(name):
    model, one = Module(name, made_for(name)).requires_grad_(False), torch.ones(())
    exported = torch.export.export(model, (one,))
    assert not any("leannorm" in str(n.target) for n in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(one), model(one))
    torch.testing.assert_close(torch.jit.trace(model, one)(one), model(one))


@CALL
def test_is_an_operator_where_a_program_asks(name):
    model, one = Module(name, made_for(name)).requires_grad_(False), torch.ones(())
    with AsOperators():
        exported = torch.export.export(model, (one,))
    mine = [str(n.target) for n in exported.graph.nodes if "leannorm" in str(n.target)]
    assert mine == [f"leannorm.{name.split()[0]}.default"]
    torch.testing.assert_close(exported.module()(one), model(one))


OPERATORS = {
    "ada_layer_norm": lambda t: (t(*X), [6], t(2, 6), t(2, 6), 1e-5, t(6), t(6)),
    "ada_rms_norm": lambda t: (t(*X), [6], t(2, 1, 6), None, t(6), None),
    "add_ada_layer_norm": lambda t: (t(*X), t(*X), t(6), [6], t(*X), t(*X), 1e-5, None, None),
    "add_ada_rms_norm": lambda t: (t(*X), t(*X), t(2, 6), [6], t(2, 6), None, t(6), None),
    "gated_rms_norm": lambda t: (t(*X).bfloat16(), t(*X), [6], t(6), None, "silu", False, "before"),
    "group_norm_act": lambda t: (t(2, 6, 4), 3, t(6), t(6), 1e-5, "silu"),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = getattr(torch.ops.leannorm, name).default
    opcheck(operator, OPERATORS[name](Given(leaf=name != "gated_rms_norm")), test_utils=checks)


@CALL
def test_functional_transforms(name):
    """vmap, grad, jvp and a Hessian agree with plain autograd."""
    tensors = [t.double() for t in made_for(name)]

    def loss(*some):
        given = iter(some)
        return first(CALLS[name](lambda *shape: next(given))).pow(2).sum()

    leaves = [t.clone().requires_grad_() for t in tensors]
    want = torch.autograd.grad(loss(*leaves), leaves)
    places = tuple(range(len(tensors)))
    torch.testing.assert_close(torch.func.grad(loss, places)(*tensors), want)
    tangents = [torch.randn_like(t) for t in tensors]
    _, slope = torch.func.jvp(loss, tuple(tensors), tuple(tangents))
    torch.testing.assert_close(slope, sum((g * t).sum() for g, t in zip(want, tangents, strict=True)))
    batched = [torch.stack((t, 2 * t)) for t in tensors]
    both = torch.func.vmap(loss)(*batched)
    torch.testing.assert_close(both, torch.stack((loss(*tensors), loss(*(2 * t for t in tensors)))))


@CALL
def test_autocast_leaves_it_alone(name):
    tensors = made_for(name)
    results = []
    for enabled in (False, True):
        given = iter(tensors)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            results.append(first(CALLS[name](lambda *shape, g=given: next(g))))
    assert torch.equal(*results)


x = torch.randn(2, 3, 6)
BAD = [
    ("scale must end in", lambda: functional.ada_layer_norm(x, (6,), torch.ones(3, 6), torch.ones(3, 6))),
    ("scale must end in", lambda: functional.ada_rms_norm(x, (6,), torch.ones(2, 1))),
    ("scale must end in", lambda: functional.ada_rms_norm(x, (6,), torch.ones(()))),
    ("scale must end in", lambda: functional.ada_rms_norm(x, (6,), torch.ones(1, 2, 3, 6))),
    ("scale must end in", lambda: nn.AdaRMSNorm(6)(x, torch.ones(2, 5))),
    ("shift must have the scale's", lambda: functional.ada_layer_norm(x, (6,), x, torch.ones(2, 6))),
    ("gate must end in", lambda: functional.add_ada_rms_norm(x, x, torch.ones(5), (6,), x)),
    ("branch must have the input's", lambda: functional.add_ada_rms_norm(x, x[:1], None, (6,), x)),
    ("gate must have the input's", lambda: functional.gated_rms_norm(x, x[..., :3], (6,))),
    ("gate must have the input's", lambda: nn.RMSNormGated(6)(x, torch.ones(6))),
    ("act must be one of", lambda: functional.gated_rms_norm(x, x, (6,), act="swish")),
    ("act must be one of", lambda: nn.RMSNormGated(6, act="swish")),
    ("cast must be", lambda: functional.gated_rms_norm(x, x, (6,), cast="first")),
    ("act must be one of", lambda: functional.group_norm_act(x, 3, act="swish")),
    ("act must be one of", lambda: nn.GroupNormAct(3, 3, act="swish")),
    ("divisible by num_groups", lambda: functional.group_norm_act(x, 2)),
    ("eps must not be negative", lambda: functional.ada_rms_norm(x, (6,), x, -1.0)),
    ("eps must not be negative", lambda: functional.gated_rms_norm(x, x, (6,), None, -1.0)),
    ("normalized_shape", lambda: functional.ada_rms_norm(x, (5,), x)),
    ("weight must have", lambda: functional.ada_rms_norm(x, (6,), x, None, torch.ones(5))),
]


@pytest.mark.parametrize(("rule", "call"), BAD, ids=range(len(BAD)))
def test_bad_input_is_named(rule, call):
    with pytest.raises(InputError, match=rule) as raised:
        call()
    assert "got" in str(raised.value)


@pytest.mark.parametrize("name", ["scale", "shift", "gate"])
def test_numbers_that_are_not_floating_are_named(name):
    given = {"scale": x, "shift": x, "gate": x} | {name: x.long()}
    with pytest.raises(DtypeError, match=f"{name} must be floating"):
        functional.add_ada_layer_norm(x, x, given["gate"], (6,), given["scale"], given["shift"])
    with pytest.raises(DtypeError, match="gate must be floating"):
        functional.gated_rms_norm(x, x.long(), (6,))
