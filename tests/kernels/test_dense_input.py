"""Sparse and mkldnn tensors are refused by our error, wherever they are handed in, and nothing is changed."""

import inspect
import warnings

import pytest
import torch
from layer_cases import LAYERS, Case

from leannorm import functional
from leannorm._errors import InputError

SHAPE = (4, 6, 5, 7)


def sparse(t):
    return t.to_sparse()


def compressed(t):
    """Matrices lie so by rows; a vector has no such layout."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the layout a beta
        return t.to_sparse_csr() if t.dim() == 2 else t.to_sparse()


def mkldnn(t):
    return t.to_mkldnn()


KINDS = [pytest.param(k, id=k.__name__) for k in (sparse, compressed, mkldnn)]
if not torch.backends.mkldnn.is_available():
    KINDS.pop()


def image(*shape):
    return torch.randn(shape or SHAPE)


def tensors(*names, size=6):
    return {name: torch.rand(size) for name in names}


STATE = ("running_mean", "running_var", "weight", "bias")
FUNCTIONS = {
    "batch_norm": lambda: {"input": image(), **tensors(*STATE), "training": True},
    "batch_norm in evaluation": lambda: {"input": image(4, 6), **tensors(*STATE)},
    "batch_norm_act": lambda: {"input": image(), **tensors(*STATE), "residual": image(), "training": True},
    "sync_batch_norm": lambda: {"input": image(), **tensors(*STATE), "residual": image(), "training": True},
    "batch_norm_op": lambda: {
        "x": image(), **tensors("estimated_mean", "estimated_var", "scale", "bias"),
    },
    "conv_batch_norm": lambda: {
        "input": image(), "conv_weight": image(6, 6, 3, 3),
        **tensors("conv_bias", "running_mean", "running_var", "bn_weight", "bn_bias"), "training": True,
    },
    "group_norm": lambda: {"input": image(), "num_groups": 3, **tensors("weight", "bias")},
    "instance_norm": lambda: {"input": image(), **tensors(*STATE)},
    "layer_norm": lambda: {"input": image(), "normalized_shape": (7,), **tensors("weight", "bias", size=7)},
    "rms_norm": lambda: {"input": image(4, 7), "normalized_shape": (7,), **tensors("weight", size=7)},
    "add_layer_norm": lambda: {
        "input": image(4, 7), "residual": image(4, 7), "normalized_shape": (7,),
        **tensors("weight", "bias", size=7),
    },
    "add_rms_norm": lambda: {
        "input": image(), "residual": image(), "normalized_shape": (7,), **tensors("weight", size=7),
    },
    "ada_layer_norm": lambda: {
        "input": image(4, 5, 7), "normalized_shape": (7,), "scale": image(4, 7), "shift": image(4, 7),
        **tensors("weight", "bias", size=7),
    },
    "ada_rms_norm": lambda: {
        "input": image(4, 5, 7), "normalized_shape": (7,), "scale": image(4, 7), "shift": image(4, 7),
        **tensors("weight", size=7),
    },
    "add_ada_layer_norm": lambda: {
        "input": image(4, 5, 7), "branch": image(4, 5, 7), "gate": image(4, 7), "normalized_shape": (7,),
        "scale": image(4, 7), "shift": image(4, 7), **tensors("weight", "bias", size=7),
    },
    "add_ada_rms_norm": lambda: {
        "input": image(4, 5, 7), "branch": image(4, 5, 7), "gate": image(4, 7), "normalized_shape": (7,),
        "scale": image(4, 7), "shift": image(4, 7), **tensors("weight", size=7),
    },
    "gated_rms_norm": lambda: {
        "input": image(4, 7), "gate": image(4, 7), "normalized_shape": (7,), **tensors("weight", size=7),
    },
    "group_norm_act": lambda: {"input": image(), "num_groups": 3, **tensors("weight", "bias")},
}  # fmt: skip


# moved in place, by whoever keeps them: those are never but dense
BUFFERS = ("running_mean", "running_var", "estimated_mean", "estimated_var")


def test_every_function_is_tried():
    assert {name.split()[0] for name in FUNCTIONS} == set(functional.__all__)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, kind):
    function, given = getattr(functional, name.split()[0]), FUNCTIONS[name]()
    function(**given)
    for argument in [k for k, v in given.items() if isinstance(v, torch.Tensor) and k not in BUFFERS]:
        other = kind(given[argument])
        before = {k: v.clone() for k, v in given.items() if isinstance(v, torch.Tensor)}
        who = f"(a norm's tensors|{argument}) must be (a )?dense.*"
        said = f"{who}got .*layout {other.layout}.*to_dense"
        with pytest.raises(InputError, match=said):
            function(**{**given, argument: other})
        assert all(torch.equal(given[k], v) for k, v in before.items())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [Case(layer, layer.options[0]) for layer in LAYERS], ids=str)
def test_layers(case, kind, training):
    layer = case.make().train(training)
    x, *others = case.inputs()
    parameters = inspect.signature(layer.forward).parameters.values()
    of_padding = "mask", "lengths", "fill"  # their rules come first, and have tests of their own
    names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY and p.name not in of_padding]
    given = dict(zip(names, [x, *others], strict=False))
    layer(**given)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    for argument in names:
        with pytest.raises(InputError, match=f"{argument} must be a dense tensor.*got layout"):
            layer(**given | {argument: kind(given.get(argument, x))})
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
