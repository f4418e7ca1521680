"""A residual on the fast path: `batch_norm_act` takes it there if kernels take the residual as it is."""

import pytest
import torch
from cases import is_fast
from test_fast import IMAGE, nodes_in, whole_way  # noqa: F401  (a fixture)

import leannorm
from leannorm import functional
from leannorm.ops.backends import CPU

pytestmark = pytest.mark.skipif(bool(CPU.why_not()), reason="; ".join(CPU.why_not()))


@pytest.mark.parametrize("training", [True, False])
def test_a_functions_call_with_a_residual_is_fast(training):
    x, residual = (torch.randn(IMAGE, requires_grad=True) for _ in range(2))
    mean, var = torch.zeros(8), torch.ones(8)
    y = functional.batch_norm_act(x, mean, var, training=training, act="silu", residual=residual)
    assert is_fast(y.grad_fn)


RESIDUALS = {
    "of another dtype": lambda: torch.randn(IMAGE, dtype=torch.float64),
    "of another layout": lambda: torch.randn(IMAGE).to(memory_format=torch.channels_last),
    "of another size": lambda: torch.randn(6, 8, 5, 1),
    "of integers": lambda: torch.ones(IMAGE, dtype=torch.int64),
    "on another device": lambda: torch.randn(IMAGE, device="meta"),
    "sparse": lambda: torch.randn(IMAGE).to_sparse(),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", RESIDUALS)
def test_any_other_residual_is_left_to_the_whole_way(name, training, monkeypatch):
    def told():
        torch.manual_seed(0)
        x, mean, var = torch.randn(IMAGE), torch.zeros(8), torch.ones(8)
        residual = RESIDUALS[name]()
        try:
            made = functional.batch_norm_act(x, mean, var, training=training, act="silu", residual=residual)
        except leannorm.LeannormError as error:
            made = str(error)
        return made, mean, var

    ours = told()
    whole_way(monkeypatch)
    for a, b in zip(ours, told(), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
