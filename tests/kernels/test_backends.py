"""What a backend is: its verbs, who is served, and that there is one of each."""

import copy
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from leannorm import nn, use_backend
from leannorm.ops import schema, select
from leannorm.ops.backends import BACKENDS, CPU, REFERENCE, Backend, cpu
from leannorm.ops.backends.compiled_gated import CompiledGated
from leannorm.ops.select import pick

EACH = pytest.mark.parametrize("backend", BACKENDS.values(), ids=list(BACKENDS))


@EACH
def test_a_copy_is_the_backend_itself(backend):
    assert pickle.loads(pickle.dumps(backend)) is copy.deepcopy(backend) is BACKENDS[backend.name] is backend
    assert backend.name in repr(backend)
    assert len({backend, copy.copy(backend)}) == 1


@EACH
def test_reasons_are_a_list_of_sentences(backend):
    strange = torch.ones(2, device="meta"), torch.ones(2, dtype=torch.int8)
    for tensors in ((), (torch.ones(2), None), strange):
        reasons = backend.why_not(*tensors)
        assert isinstance(reasons, list)
        assert all(isinstance(reason, str) for reason in reasons)
        assert len(set(reasons)) == len(reasons)


@pytest.mark.parametrize("operator", [*schema.OPERATORS, *schema.BETWEEN])
def test_a_verb_that_has_an_operator_is_not_the_references(operator):
    """What a compiled backend does not replace it inherits, and a backend named never falls back."""
    verb = operator.removesuffix("_").removesuffix("_tracked")
    assert getattr(CompiledGated, verb) is not getattr(Backend, verb)
    assert getattr(type(REFERENCE), verb) is getattr(Backend, verb)


def test_each_verb_says_what_it_computes_in_one_place():
    for verb in (*schema.OPERATORS, *schema.BETWEEN):
        meaning = getattr(Backend, verb.removesuffix("_").removesuffix("_tracked"))
        assert meaning.__doc__, verb


@EACH
def test_a_backend_serves_by_its_name(backend):
    x = torch.ones(2, 3, device="cuda" if torch.cuda.is_available() else "cpu")
    if backend.why_not(x, named=True):
        pytest.skip("; ".join(backend.why_not(x, named=True)))
    with use_backend(backend.name):
        assert pick(x) is backend


@pytest.mark.skipif(bool(CPU.why_not()), reason="; ".join(CPU.why_not()))
def test_who_serves_is_found_while_a_compiler_traces():
    @torch.compile(fullgraph=True, backend="eager")
    def moments(x):
        return pick(x).channel_moments(x).mean

    x = torch.randn(4, 3, 5)
    torch.testing.assert_close(moments(x), REFERENCE.channel_moments(x).mean)


@pytest.fixture
def no_kernels(monkeypatch):
    monkeypatch.setattr(cpu, "_UNAVAILABLE", "the C++ kernels are not built: no-such-compiler")
    monkeypatch.setattr(select, "_PICKED", {})
    monkeypatch.setattr(select, "_cpu_serves", None)
    monkeypatch.setattr(select, "_warned", False)
    monkeypatch.setattr(select, "_chosen", select.AUTO)


def test_missing_kernels_are_reported_once_with_the_remedy(no_kernels):
    layer = nn.BatchNorm2d(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.randn(2, 4, 5, 5))
    with pytest.warns(UserWarning, match=r"no-such-compiler.*pip install --no-build-isolation"):
        layer(torch.randn(8, 4, 64, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.LayerNorm(64)(torch.randn(8, 4, 64, 64))


def test_on_windows_no_compiler_is_recommended(no_kernels, monkeypatch):
    monkeypatch.setattr(select, "sys", SimpleNamespace(platform="win32"))
    with pytest.warns(UserWarning, match="There are none for Windows") as caught:
        nn.BatchNorm2d(4)(torch.randn(8, 4, 64, 64))
    assert "pip install" not in str(caught[0].message)


class Called(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.__name__.split(".")[0])
        return function(*args, **(kwargs or {}))


BY_TORCH = {
    "batch": (lambda: nn.BatchNormAct2d(4), (8, 4, 32, 32), {"native_batch_norm", "threshold_backward"}),
    "group": (lambda: nn.GroupNorm(2, 4), (8, 4, 64, 64), {"native_group_norm"}),
    "layer": (lambda: nn.LayerNorm(64), (256, 64), {"native_layer_norm", "native_layer_norm_backward"}),
}


@pytest.mark.filterwarnings("ignore:leannorm normalizes on the CPU")
@pytest.mark.parametrize(("make", "shape", "names"), BY_TORCH.values(), ids=BY_TORCH)
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_large_tensors_go_by_torchs_kernels_without_ours(no_kernels, make, shape, names, scale):
    layer, x = make(), (torch.randn(shape) * scale).requires_grad_()
    dy, exact = torch.randn(shape), copy.deepcopy(layer).double()
    with Called() as called:
        y = layer(x)
        y.backward(dy)
    if scale == 1:
        assert names <= called.names
    wide = x.detach().double().requires_grad_()
    want = exact(wide)
    want.backward(dy.double())
    assert y.abs().max() > 1
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double() * scale, wide.grad * scale, rtol=1e-4, atol=1e-4)
