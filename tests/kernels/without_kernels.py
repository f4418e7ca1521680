"""An install without the C++ kernels: what it says, and that torch's kernels compute large tensors.

`test_backends.py` runs this file in a process that has a package without them.
"""

import copy
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from leannorm import nn
from leannorm.ops.backends import CPU


def test_missing_kernels_are_reported_once_with_the_remedy():
    assert "no-such-compiler" in CPU.why_not()[0]
    layer = nn.BatchNorm2d(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.randn(2, 4, 5, 5))
    with pytest.warns(UserWarning, match=r"no-such-compiler.*pip install --no-build-isolation"):
        layer(torch.randn(8, 4, 64, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.LayerNorm(64)(torch.randn(8, 4, 64, 64))


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
def test_large_tensors_go_by_torchs_kernels_without_ours(make, shape, names, scale):
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
