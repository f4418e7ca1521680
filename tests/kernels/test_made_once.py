"""What an autograd function returns is the result of one call, and not of one more that had nothing to do.

torch 2.11 compiles a function's forward pass to one that returns all tensors made on the way. One that is
there twice, say before and after a cast to the dtype that it has, gets the gradient of the second place, 0.
"""

import pytest
import torch
from kernel_cases import needs_kernels
from torch.overrides import TorchFunctionMode

from leannorm._types import Channels, ChannelTensors, KeptByChannelNorm, Rows
from leannorm.ops.backends import REFERENCE
from leannorm.ops.backends.shown import SHOWN


class Results(TorchFunctionMode):
    """Every tensor that a function of torch's returns, once for each time."""

    def __init__(self):
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        returned = function(*args, **(kwargs or {}))
        self.found += [returned] if isinstance(returned, torch.Tensor) else []
        return returned


X, R, V = torch.randn(4, 6, 5, 3), torch.randn(4, 6, 5, 3), torch.rand(6) + 0.5
W, S = torch.rand(3) + 0.5, torch.randn(4, 1, 1, 3)
MEAN, RSTD = torch.randn(6).double(), torch.rand(6).double() + 0.5
MASK = torch.rand(4, 15) > 0.3
PLAIN = ChannelTensors(X, V, V)
ROWS = Rows(3, 4, 1e-5, False)
LINES = Rows(3, 4, 1e-5, False, 1.0)
GATED = Rows(3, 4, 1e-5, True, act="silu")
CALLS = {
    "channel_forward": lambda b: b.channel_forward(PLAIN, Channels(0, 1e-5))[:1],
    "channel_forward, residual": lambda b: b.channel_forward(
        PLAIN._replace(residual=R), Channels(0, 1e-5, "silu")
    )[:1],
    "channel_forward, groups": lambda b: b.channel_forward(PLAIN, Channels(2, 1e-5, "relu"))[:1],
    "channel_normalize": lambda b: (b.channel_normalize(KeptByChannelNorm(X, MEAN, RSTD, V)),),
    "channel_forward, blocks": lambda b: b.channel_forward(PLAIN, Channels(-2, 1e-5))[:1],
    "channel_forward, mask": lambda b: b.channel_forward(PLAIN._replace(mask=MASK), Channels(0, 1e-5))[:1],
    "row_forward": lambda b: b.row_forward((X, None, None, None, None, W, W), ROWS)[:1],
    "row_forward, total": lambda b: b.row_forward((X, R, None, None, None, W, W), ROWS)[:2],
    "row_forward, rms": lambda b: b.row_forward(
        (X, R, None, None, None, W, None), Rows(3, 4, 1e-5, True, 1.0)
    )[:2],
    "row_forward, cast before": lambda b: b.row_forward(
        (X, R, None, None, None, W, None), Rows(3, 4, 1e-5, True, 0.0, True)
    )[:2],
    "row_forward, lines": lambda b: b.row_forward((X, R, S, None, None, S, S), LINES)[:2],
    "gated_forward": lambda b: b.row_gated_forward(X, R, W, GATED._replace(norm_before_gate=False))[:1],
    "gated_forward, before": lambda b: b.row_gated_forward(X, R, W, GATED._replace(cast_before=True))[:1],
}
OF_REFERENCE = [pytest.param(REFERENCE, call, id=f"reference: {name}") for name, call in CALLS.items()]
OF_SHOWN = [
    pytest.param(SHOWN, call, id=f"shown: {name}", marks=needs_kernels) for name, call in [*CALLS.items()][:4]
]


@pytest.mark.parametrize(("backend", "call"), [*OF_REFERENCE, *OF_SHOWN])
def test_an_output_is_the_result_of_one_call(backend, call):
    with Results() as results:
        outputs = call(backend)
    for output in outputs:
        assert sum(t is output for t in results.found) == 1
