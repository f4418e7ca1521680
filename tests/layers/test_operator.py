"""batch_norm_op against its written contract, in float64, and as an operator of torch's."""

import pytest
import torch
import torch.nn.functional as TF

from leannorm import functional as F
from leannorm import nn
from leannorm._errors import InputError


def arguments(shape=(6, 3, 4, 5), dtype=torch.float64):
    c = shape[1]
    x = torch.randn(shape, dtype=dtype) * 3 + 7
    scale, bias = torch.rand(c, dtype=dtype) + 0.5, torch.randn(c, dtype=dtype)
    mean, var = torch.randn(c, dtype=dtype), torch.rand(c, dtype=dtype) + 0.5
    return x, mean, var, scale, bias


def statistics(x):
    dims = (0, *range(2, x.dim()))
    return x.mean(dims), x.var(dims, unbiased=False)


SHAPES = [(6, 3), (6, 3, 5), (6, 3, 4, 5), (2, 3, 3, 4, 2)]
BATCH_IDS = [None, 0, 1, 7, torch.tensor(0), torch.tensor(3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch_id", BATCH_IDS, ids=repr)
def test_training_normalizes_by_the_batch_and_moves_the_estimates(shape, batch_id):
    x, mean, var, scale, bias = arguments(shape)
    batch_mean, batch_var = statistics(x)
    first = batch_id is not None and int(batch_id) == 0
    old = (mean.clone(), var.clone())
    out = F.batch_norm_op(x, mean, var, scale, bias, batch_id=batch_id)
    torch.testing.assert_close(out.y, TF.batch_norm(x, None, None, scale, bias, True, 0.0, 1e-6))
    torch.testing.assert_close(out.batch_mean, batch_mean)
    torch.testing.assert_close(out.batch_var, batch_var)
    for saved, estimate, before, batch in zip(out[3:], (mean, var), old, out[1:3], strict=True):
        assert saved.data_ptr() == estimate.data_ptr()
        if first:
            assert torch.equal(saved, batch)
        else:
            torch.testing.assert_close(saved, before * 0.99 + 0.01 * batch)


def test_the_first_batch_replaces_estimates_that_were_never_written():
    x, mean, var, scale, bias = arguments()
    for batch_id in (0, torch.tensor(0)):
        mean.fill_(float("nan")), var.fill_(float("inf"))
        F.batch_norm_op(x, mean, var, scale, bias, batch_id=batch_id)
        torch.testing.assert_close(mean, statistics(x)[0])
        torch.testing.assert_close(var, statistics(x)[1])


def test_inference_uses_the_estimates_and_leaves_them():
    x, mean, var, scale, bias = arguments()
    before = mean.clone(), var.clone()
    out = F.batch_norm_op(x, mean, var, scale, bias, is_infer=True, batch_id=0)
    torch.testing.assert_close(out.y, TF.batch_norm(x, mean, var, scale, bias, False, 0.0, 1e-6))
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])
    assert torch.equal(out.batch_mean, mean)


def test_global_estimates_are_moved_then_used_as_constants():
    x, mean, var, scale, bias = arguments()
    x.requires_grad_()
    out = F.batch_norm_op(x, mean, var, scale, bias, use_global_est=True, batch_id=2, momentum=0.9)
    other = x.detach().clone().requires_grad_()
    expected = TF.batch_norm(other, out.saved_mean, out.saved_var, scale, bias, False, 0.0, 1e-6)
    torch.testing.assert_close(out.y, expected)
    torch.testing.assert_close(out.batch_mean, statistics(x.detach())[0])
    g = torch.randn_like(out.y)
    out.y.backward(g), expected.backward(g)
    torch.testing.assert_close(x.grad, other.grad)


def test_channels_last_layout_is_the_same_operator():
    x, mean, var, scale, bias = arguments()
    m2, v2 = mean.clone(), var.clone()
    a = F.batch_norm_op(x, mean, var, scale, bias)
    b = F.batch_norm_op(x.permute(0, 2, 3, 1).contiguous(), m2, v2, scale, bias, data_layout="NHWC")
    torch.testing.assert_close(a.y.permute(0, 2, 3, 1), b.y)
    assert b.y.is_contiguous()
    torch.testing.assert_close(mean, m2)


@pytest.mark.parametrize("flags", [{}, {"is_infer": True}], ids=str)
def test_gradients_are_those_of_the_formula(flags):
    x, mean, var, scale, bias = arguments((3, 2, 4))
    leaves = [t.requires_grad_() for t in (x, scale, bias)]

    def function(x, scale, bias):
        return F.batch_norm_op(x, mean.clone(), var.clone(), scale, bias, **flags).y

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_estimates_keep_their_precision_under_half_input(dtype):
    x, mean, var, scale, bias = arguments(dtype=torch.float32)
    out = F.batch_norm_op(x.to(dtype), mean, var, scale, bias, batch_id=0)
    assert out.y.dtype == dtype
    assert out.batch_mean.dtype == torch.float32
    torch.testing.assert_close(mean, statistics(x.to(dtype).double())[0].float())


# torch's own: from 2.15 on opcheck copies the arguments of operators that write, and looks at a copy's .grad
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("batch_id", [None, torch.tensor(0)], ids=repr)
def test_opcheck(flags, batch_id):
    x, mean, var, scale, bias = arguments(dtype=torch.float32)
    leaves = [t.requires_grad_() for t in (x, scale, bias)]
    arguments_ = (leaves[0], mean, var, leaves[1], leaves[2], batch_id, *flags, 1e-6, 0.99)
    torch.library.opcheck(torch.ops.leannorm.batch_norm_op.default, arguments_)


def test_export_and_compile_run_it_as_it_is():
    x = torch.randn(6, 4, 3, 3)
    eager, other, third = (nn.BatchNormOp(4) for _ in range(3))
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(other, (x,), dynamic_shapes=({0: batch},))
    names = [str(n.target) for n in program.graph.nodes]
    assert "leannorm.batch_norm_op.default" in names
    compiled = torch.compile(third, fullgraph=True, backend="aot_eager")
    exported = program.module()
    for n in (6, 3):
        x = torch.randn(n, 4, 3, 3)
        y = eager(x)
        y.square().sum().backward()
        for model, module in ((exported, other), (compiled, third)):
            z = model(x)
            z.square().sum().backward()
            exact = {"rtol": 0, "atol": 0} if model is exported else {}  # a compiler sees the formula
            torch.testing.assert_close(z, y, **exact)
            torch.testing.assert_close(module.scale.grad, eager.scale.grad, **exact)
            torch.testing.assert_close(module.estimated_var, eager.estimated_var, **exact)
            assert torch.equal(eager.batch_id, module.batch_id)


BAD = [
    ({"momentum": 1.5}, "momentum must be in"),
    ({"epsilon": 0.0}, "eps must be positive"),
    ({"batch_id": -1}, "batch_id counts batches from 0"),
    ({"data_layout": "CHWN"}, "data_layout must be one of"),
    ({"x": torch.ones(1, 3)}, "more than 1 value"),
    ({"x": torch.ones(4)}, "at least 2D"),
    ({"x": torch.ones(4, 3, dtype=torch.int64)}, "floating"),
    ({"estimated_mean": torch.ones(4)}, "estimated_mean must have one entry per channel"),
    ({"scale": torch.ones(2)}, "scale must have one entry per channel"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_input_changes_nothing(change, message):
    x, mean, var, scale, bias = arguments(dtype=torch.float32)
    given = {"x": x, "estimated_mean": mean, "estimated_var": var, "scale": scale, "bias": bias} | change
    before = mean.clone(), var.clone()
    with pytest.raises(InputError, match=message):
        F.batch_norm_op(**given)
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])
