"""`lean()` where the host does not wait for the device: on a stand-in for a GPU, and CUDA's own operators.

The stand-in (standin.cpp) is a device whose memory the host cannot read: what does ends the process. It
counts where the host waits, what is launched, and what streams do; `on_standin.py` trains networks on it.
"""

from functools import lru_cache

import pytest
import standin
import torch
import torch.nn.functional as F
from standin_cases import CASTS, MODELS, SETTINGS
from torch._subclasses.fake_tensor import FakeTensorMode

from leannorm.autograd.nodes import NODES
from leannorm.saving import lean
from leannorm.saving.operators import VARYING

aten = torch.ops.aten

needs_standin = pytest.mark.skipif(
    NODES is None or standin.why_not() is not None, reason=f"no stand-in for a GPU: {standin.why_not()}"
)


@lru_cache
def found(*options):
    """All that on_standin.py finds."""
    return standin.found_by("on_standin.py", *options)


CASES = [(name, setting, "") for name in MODELS for setting in SETTINGS]
CASES += [(name, setting, ", autocast") for name in CASTS for setting in SETTINGS]
OTHER_ATTENTION = {"vit", "vit with dropout", "converted vit", "llama"}
"""Whose attention is made of other operators on the stand-in than on a CPU."""
PLANNED = {"plain", "budget"}
A_PLANS_OWN = {"PlannedPass", "Following", "_Entry", "_Known", "_Made", "structure", "size"}
"""Python that a plan asks at its first tensors."""


@needs_standin
@pytest.mark.parametrize(("name", "setting", "cast"), CASES)
def test_a_step_has_its_bits_and_the_host_waits_for_none(name, setting, cast):
    one = found()[f"{name}, {setting}{cast}"]
    assert "error" not in one, one
    assert one["same"], "gradients are those of the device without lean()"
    assert one["rebuilt"]
    first = 5 if setting in PLANNED else 3  # the plan that the second pass follows makes other calls again
    waits = {what for what in one["waits"] if int(what.rpartition(" ")[2]) >= first}
    assert not waits, "later passes look at no value"
    frames = {frame.split(".")[0] for frame in one["frames"]}
    assert frames <= (A_PLANS_OWN if setting in PLANNED else set()), "and call no Python of saving/"
    if name not in OTHER_ATTENTION and setting in ("norm", "conv"):
        # small weights that a node saves are copied on a CPU alone
        assert one["kept_on_cpu"] - one["small_weights"] <= one["kept"] <= one["kept_on_cpu"]
    if setting == "limit":
        assert any("limit was not watched" in reason for reason in one["reasons"])


IN_PYTHON = "--python", *MODELS, "any order", "convolutions", "timed", "an optimizer"


@needs_standin
@pytest.mark.parametrize(("name", "setting", "cast"), [case for case in CASES if case[1] != "limit"])
def test_the_log_in_python_has_the_bits_too(name, setting, cast):
    """Those that torch computes under any mode, which may choose other operators on a device."""
    one = found(*IN_PYTHON)[f"{name}, {setting}{cast}"]
    assert "error" not in one, one
    assert one["same"]
    if setting in ("norm", "conv"):
        assert one["rebuilt"]


@needs_standin
def test_the_log_in_python_calls_nothing_again_that_varies_on_a_device():
    one = found(*IN_PYTHON)
    (free, _), (asked, _) = one["any order"]["False"], one["any order"]["True"]
    assert "aten::exp" not in free
    assert "aten::exp" in asked
    assert one["convolutions"] == [True, False]
    assert "aten::convolution" not in one["timed"][0]
    assert one["an optimizer"]


@needs_standin
def test_a_trial_is_a_look():
    """So the counter counts."""
    assert found()["a look"]["aten::equal"] > 0


@needs_standin
def test_in_a_capture_what_was_not_tried_before_is_held():
    (untried, reasons), (tried, none) = found()["a capture"]
    assert untried < tried / 4
    assert any("not tried before a CUDA graph's capture" in reason for reason in reasons)
    assert not none


@needs_standin
def test_values_that_tell_nothing_end_the_trials():
    waits, reasons = found()["zeros"]
    assert not waits
    assert any("on values that tell nothing" in reason for reason in reasons)


@needs_standin
def test_a_rebuilt_tensor_waits_for_its_stream_and_its_memory_is_told():
    two = found()["two streams"]
    assert [1, 2] in two["waits"]
    assert {1, 2} <= set(two["used"])
    assert found()["one stream"] == {"waits": [], "used": []}


@needs_standin
def test_convolutions_whose_algorithm_is_timed_are_held():
    rebuilt, reasons = found()["timed"]
    assert "aten::convolution" not in rebuilt
    assert "aten::native_batch_norm" in rebuilt
    assert any("cudnn.benchmark is on" in reason for reason in reasons)


@needs_standin
def test_what_is_added_in_any_order_is_not_called_again():
    """Unless torch is asked for determinism."""
    (free, reasons), (asked, _) = found()["any order"]["False"], found()["any order"]["True"]
    assert "aten::exp" not in free
    assert any("aten::index_add" in reason for reason in reasons)
    assert "aten::exp" in asked


@needs_standin
def test_a_transposed_convolution_is_not_called_again():
    assert found()["convolutions"] == [True, False]


def test_what_varies_is_an_operator_of_torchs():
    assert [name for name in VARYING if not torch._C._jit_get_schemas_for_operator(name)] == []


@needs_standin
def test_weights_are_copied_at_once_or_not_at_all():
    """A layer norm's node saves what it reads, a batch norm's not its bias."""
    assert found()["copies of layer norms"] == {}
    assert found()["copies of batch norms"] == {"copies at once": 1}


@needs_standin
def test_a_bias_may_change_before_the_backward_pass():
    assert found()["an optimizer"] is True


# ---------------------------------------------------------------- CUDA's operators, on tensors without data

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
    return {record.node for record in saved.records if record.rebuilt}, saved


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
    assert "aten::cudnn_batch_norm" in nodes
    assert saved.rebuilt_bytes >= 4 * 64 * 256 * 4


@needs_cuda_build
def test_native_batch_norm_on_cuda():
    def run(x):
        y = F.batch_norm(x.tan(), None, None, *weights(64), True)  # cuDNN's is for other dtypes
        assert y.grad_fn.name() == "NativeBatchNormBackward0"
        return F.conv2d(y, torch.ones(8, 64, 1, 1, device="cuda", dtype=torch.bfloat16, requires_grad=True))

    nodes, _ = rebuilt(run, 4, 64, 16, 16, dtype=torch.bfloat16)
    assert "aten::native_batch_norm" in nodes


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
    assert {"layer": "aten::native_layer_norm", "rms": "aten::_fused_rms_norm"}[norm] in nodes


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
    assert one <= saved.kept_bytes <= 3 * one + 2 * statistics + 4096  # the output is computed from them
