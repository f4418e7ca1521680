"""Without kernels a layer calls torch's own norm, once in each direction, and little else."""

import pytest
import torch
from torch.profiler import profile

from leannorm import nn, use_backend

F32 = torch.float32
SHAPE = 8, 32, 20, 20
LAYERS = {
    "batch": (lambda: nn.BatchNorm2d(32), "batch"),
    "batch, evaluated": (lambda: nn.BatchNorm2d(32).eval(), "batch"),
    "batch, its own statistics": (lambda: nn.BatchNorm2d(32, track_running_stats=False), "batch"),
    "relu": (lambda: nn.BatchNormAct2d(32, act="relu"), "batch"),
    "silu": (lambda: nn.GroupNormAct(4, 32, act="silu"), "group"),
    "group": (lambda: nn.GroupNorm(4, 32), "group"),
    "one group": (lambda: nn.GroupNorm(1, 32), "group"),
    "instance": (lambda: nn.InstanceNorm2d(32, affine=True), "group"),
    "layer": (lambda: nn.LayerNorm(SHAPE[1:]), "layer"),
}


def called(function):
    """The operators that run on a tensor of this size or a larger one, but for those that only allocate."""
    with profile(record_shapes=True) as profiled:
        function()
    large = torch.Size(SHAPE).numel()
    found = []
    for event in profiled.key_averages(group_by_input_shape=True):
        sizes = [torch.Size(shape).numel() for shape in event.input_shapes if shape]
        if max(sizes, default=0) >= large and event.key.startswith("aten::"):
            found += [event.key.removeprefix("aten::")] * event.count
    return [name for name in found if not name.startswith(("empty", "detach", "view", "contiguous", "clone"))]


# what runs beside the norm: what calls it, activations, what fills memory in tests, and a layout's change
BESIDE = {"batch_norm", "_batch_norm_impl_index", "relu_", "clamp_min_", "silu", "fill_"}
BESIDE_BACK = {"threshold_backward", "silu_backward", "fill_"}
MOVED = {"copy_", "new_empty_strided"}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_calls_torch_s_own_norm(name, dtype, layout):
    """So no layer takes more time than torch's, but for the calls on its statistics."""
    make, kind = LAYERS[name]
    if name == "layer" and layout is torch.channels_last:
        pytest.skip("rows are lines of memory")
    layer, last = make().to(dtype), layout is torch.channels_last
    # what autograd would have torch's operators keep, or torch add up in a row, is computed by the formulas
    by_formulas = name == "silu" or (last and (name == "instance" or (kind == "group" and dtype is F32)))
    x = torch.randn(SHAPE).to(dtype).contiguous(memory_format=layout).requires_grad_()
    dy = torch.randn_like(x)
    moved = MOVED if name == "instance" and last else set()
    with use_backend("aten"), torch.set_grad_enabled(not by_formulas):
        found = []
        ran = called(lambda: found.append(layer(x)))
        back = [] if by_formulas else called(lambda: found[0].backward(dy))
    assert [name for name in ran if name not in BESIDE | moved] == [f"native_{kind}_norm"]
    back = [name for name in back if name not in BESIDE_BACK | moved]
    assert back == [f"native_{kind}_norm_backward"] * (not by_formulas)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "values",
    [(1.0, 0.0), (1.0, 1e4), (1e-12, 0.0), (1e25, 0.0), (0.0, 0.0), (0.0, 3.0), (1e-3, 1e-4)],
    ids=str,
)
def test_what_torch_computes_inexactly_is_computed_otherwise(name, values, dtype):
    """Values whose squares vanish or overflow, constants, and a mean of many standard deviations."""
    make, _ = LAYERS[name]
    std, mean = values
    x = (torch.randn(SHAPE, dtype=torch.float64) * std + mean).to(dtype)
    layer, dy, found = make(), torch.randn(SHAPE).to(dtype), {}
    for backend in ("reference", "aten"):
        with use_backend(backend):
            for parameter in layer.parameters():
                parameter.grad = None
            given = x.clone().requires_grad_()
            y = layer(given)
            y.backward(dy)
        found[backend] = [y.detach(), given.grad, *(p.grad for p in layer.parameters())]
    roundings = 64 * torch.finfo(torch.float32 if dtype is torch.float64 else dtype).eps
    for ours, theirs in zip(found["aten"], found["reference"], strict=True):
        worst = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=roundings, atol=roundings * worst)
