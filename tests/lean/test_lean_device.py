"""`lean()` on what CUDA's operators give, on tensors without data; norms that no layer calls."""

from __future__ import annotations

import lean_cases
import pytest
import torch
import torch.nn.functional as F
from test_lean import Stock, assert_same, step
from torch._subclasses.fake_tensor import FakeTensorMode

from leannorm.saving import lean

aten = torch.ops.aten


def test_a_norm_called_past_torchs_function():
    model = lean_cases.on_tokens(lean_cases.Apply(lambda x: torch.layer_norm(x, (32,), eps=0.5)))
    x = torch.randn(lean_cases.TOKENS)
    for _ in range(2):
        model.zero_grad()
        stock, _ = step(model, x, Stock())
        model.zero_grad()
        assert_same(step(model, x, lean("norm"))[0], stock)


# ---------------------------------------------------------------- CUDA's nodes, on tensors without data

needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="torch is built without CUDA; its nodes need the build, not a GPU"
)


def rebuilt(make, *shape, dtype=torch.float32, recompute="norm"):
    """What `lean()` makes of a function's saved tensors, by operator; on fake CUDA tensors, forward only."""
    with FakeTensorMode():
        x = torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)
        with lean(recompute) as saved:
            kept = make(x)
        assert kept.device.type == "cuda"
    nodes = {record.node: record.rebuilt for record in saved.records}
    return nodes, saved


def weights(n, dtype=torch.float32):
    return [torch.ones(n, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2)]


def linear(x, n=64):
    return F.linear(x, torch.ones(8, n, device="cuda", dtype=x.dtype, requires_grad=True))


@needs_cuda_build
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("statistics", [True, False])
def test_cudnn_batch_norm(training, statistics):
    def run(x):
        running = [torch.zeros(64, device="cuda") for _ in range(2)] if statistics else [None, None]
        y = F.batch_norm(x.tan(), *running, *weights(64), training or not statistics)
        assert y.grad_fn.name() == "CudnnBatchNormBackward0"
        return F.conv2d(y, torch.ones(8, 64, 1, 1, device="cuda", requires_grad=True))

    nodes, saved = rebuilt(run, 4, 64, 16, 16)
    assert nodes["aten::cudnn_batch_norm"]
    assert saved.rebuilt_bytes == 4 * 64 * 256 * 4


@needs_cuda_build
def test_native_batch_norm_on_cuda():
    def run(x):
        y = F.batch_norm(x.tan(), None, None, *weights(64), True)  # cuDNN's is for other dtypes
        assert y.grad_fn.name() == "NativeBatchNormBackward0"
        return F.conv2d(y, torch.ones(8, 64, 1, 1, device="cuda", dtype=torch.bfloat16, requires_grad=True))

    nodes, _ = rebuilt(run, 4, 64, 16, 16, dtype=torch.bfloat16)
    assert nodes["aten::native_batch_norm"]


@needs_cuda_build
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("rows", [32, 4096])
def test_rows_on_cuda(norm, rows):
    def run(x):
        w, b = weights(64)
        y = F.layer_norm(x.tan(), (64,), w, b) if norm == "layer" else F.rms_norm(x.tan(), (64,), w)
        assert y.grad_fn.name() == {"layer": "NativeLayerNormBackward0", "rms": "FusedRmsNormBackward0"}[norm]
        return linear(y)

    nodes, _ = rebuilt(run, rows, 64)
    assert nodes[{"layer": "aten::native_layer_norm", "rms": "aten::_fused_rms_norm"}[norm]]


_ATTENTIONS = {
    "flash": lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v)[0],
    "efficient": lambda q, k, v: aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[0],
    "cudnn": lambda q, k, v: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[0],
}


@needs_cuda_build
@pytest.mark.parametrize("kind", _ATTENTIONS)
def test_attention_on_cuda_keeps_its_output_once(kind):
    """The node keeps it, and the next linear layer keeps it seen from another side, which costs nothing."""
    batch, tokens, heads, width = 2, 128, 4, 16

    def run(x):
        qkv = (x.tan()).view(batch, tokens, 3, heads, width).permute(2, 0, 3, 1, 4).unbind(0)
        y = _ATTENTIONS[kind](*qkv)
        assert y.grad_fn.name().startswith("ScaledDotProduct")
        return linear(y.transpose(1, 2).reshape(batch * tokens, heads * width))

    _, saved = rebuilt(run, batch * tokens, 3 * heads * width, dtype=torch.bfloat16, recompute="conv")
    one = batch * tokens * heads * width * 2  # bytes of q, of k, of v and of the output
    statistics = batch * heads * tokens * 4
    assert 3 * one <= saved.kept_bytes <= 3 * one + 2 * statistics + 4096  # the output is computed from them
