"""Layers swapped by their formula among compilers, exporters, autocast and sharded weights."""

import copy

import pytest
import torch
from formula_cases import GemmaNorm, LlamaNorm, made
from test_convert_formula import assert_close, computed_by_us, given, results
from torch import nn as stock
from torch.utils.checkpoint import checkpoint

from leannorm import convert, lean


def pair(name="Llama", dtype=torch.float32):
    layer = made(name, dtype)
    return convert(copy.deepcopy(layer)), layer


@pytest.mark.parametrize("name", ["Llama", "Gemma", "gate before", "gate behind"])
def test_compiles_as_one_graph(name):
    ours, own = pair(name)
    inputs = given(name, torch.float32)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_close(results(compiled, inputs), results(own, inputs), torch.float32)
    own.variance_epsilon = ours.variance_epsilon = 0.5
    assert_close([compiled(*inputs)], [own(*inputs)], torch.float32)


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_graphs_that_leave_are_the_originals():
    ours, own = pair()
    x = torch.randn(2, 16)
    exported = [torch.export.export(m, (x,)).graph_module.graph for m in (ours, own)]
    assert targets(exported[0]) == targets(exported[1])
    traced = [torch.jit.trace(m, (x,)).inlined_graph for m in (ours, own)]
    kinds = [[node.kind() for node in graph.nodes()] for graph in traced]
    assert kinds[0] == kinds[1]
    assert targets(torch.fx.symbolic_trace(ours).graph) == targets(torch.fx.symbolic_trace(own).graph)


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Llama", "Gemma", "T5", "permuted", "gate behind", "one group"])
def test_dtypes_under_autocast_and_with_other_weights(name, dtype, weight):
    ours, own = pair(name, weight)
    inputs = given(name, dtype)
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            try:
                want = own(*inputs)
            except RuntimeError as error:
                with pytest.raises(type(error)):
                    ours(*inputs)
                continue
            assert_close([ours(*inputs)], [want], want.dtype)


def test_under_checkpointing_and_lean_to_the_bit():
    ours, _ = pair()
    model = stock.Sequential(stock.Linear(16, 16), ours, stock.SiLU(), stock.Linear(16, 16))
    x = torch.randn(8, 16, requires_grad=True)
    up = torch.randn(8, 16)

    def gradients(y):
        return torch.autograd.grad(y, [x, *model.parameters()], up)

    want = gradients(model(x))
    again = [gradients(checkpoint(model, x, use_reentrant=False))]
    with lean("norm"):
        y = model(x)
    again.append(gradients(y))
    for found in again:
        assert all(torch.equal(g, w) for g, w in zip(found, want, strict=True))


def test_transforms_and_second_derivatives():
    ours, own = pair()
    x = torch.randn(3, 4, 16)
    assert_close([torch.vmap(ours)(x)], [own(x)], torch.float32)
    jacobians = [torch.func.jvp(m, (x,), (torch.ones_like(x),))[1] for m in (ours, own)]
    torch.testing.assert_close(*jacobians)
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        second = []
        for layer in (ours, own):
            (first,) = torch.autograd.grad(layer(leaf).square().sum(), leaf, create_graph=True)
            second.append(torch.autograd.grad(first.square().sum(), leaf)[0])
        torch.testing.assert_close(*second, rtol=1e-4, atol=1e-4)


def test_any_layout():
    ours, own = pair()
    for x in (torch.randn(16, 6).T, torch.randn(2, 5, 4, 16).transpose(1, 2), torch.randn(4, 32)[:, ::2]):
        assert_close(results(ours, [x]), results(own, [x]), torch.float32)


def test_weights_that_are_sharded(tmp_path):
    """A DTensor goes to the own code; the plain tensor that FSDP puts there for a forward, to ours."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        _, own = pair()
        model = stock.Sequential(stock.Linear(16, 16), made("Llama", torch.float32))
        plain = copy.deepcopy(model)
        fully_shard(model, mesh=mesh)
        convert(model)
        assert isinstance(model[1].weight, DTensor)
        x = torch.randn(4, 16)
        called = []
        before = LlamaNorm.forward
        model[1].register_forward_hook(lambda m, *_: called.append(type(m.weight)))
        torch.testing.assert_close(model(x), plain(x))
        assert called == [stock.Parameter] or not issubclass(called[0], DTensor)
        assert LlamaNorm.forward is before
        sharded = convert(copy.deepcopy(own))
        sharded.weight = stock.Parameter(distribute_tensor(own.weight.detach(), mesh))
        y = sharded(distribute_tensor(x, mesh))
        torch.testing.assert_close(y.full_tensor(), own(x))
        compiled = torch.compile(sharded, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(distribute_tensor(x, mesh)).full_tensor(), own(x))
    finally:
        dist.destroy_process_group()


def test_hooks_of_accelerate_are_left_and_named():
    hooks = pytest.importorskip("accelerate.hooks")
    model = stock.Sequential(made("Llama", torch.float32), made("Gemma", torch.float32))
    hooks.add_hook_to_module(model[0], hooks.AlignDevicesHook("cpu"))
    x = torch.randn(3, 16)
    want = model(x)
    with pytest.warns(UserWarning, match=r"0 \(its forward is replaced"):
        convert(model)
    torch.testing.assert_close(model(x), want)
    assert computed_by_us(model[1], [x])


def test_fake_tensors_take_our_path():
    from torch._subclasses.fake_tensor import FakeTensorMode

    ours, _ = pair()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = ours(mode.from_tensor(torch.randn(3, 16)))
    assert y.shape == (3, 16)


class Int8Linear(stock.Module):
    """As bitsandbytes' layers: a weight of integers, which no gradient reaches, and its scales."""

    def __init__(self, size=16):
        super().__init__()
        self.weight = stock.Parameter(torch.randint(-127, 128, (size, size)).to(torch.int8), False)
        self.register_buffer("scales", torch.full((size,), 0.01))

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scales.to(x.dtype)).T


class Adapted(stock.Module):
    """As peft's layers: the old one stands still, two thin ones beside it learn."""

    def __init__(self, layer, size=16):
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A, self.lora_B = stock.Linear(size, 2, bias=False), stock.Linear(2, size, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_beside_quantized_and_adapted_layers_the_norms_are_swapped_and_nothing_else(dtype):
    torch.manual_seed(0)
    layers = [Int8Linear(), made("Llama", dtype), Adapted(Int8Linear()), made("Gemma", dtype)]
    model = stock.Sequential(*layers)
    for layer in (layers[2].lora_A, layers[2].lora_B):
        layer.to(dtype)
    x = torch.randn(8, 16, dtype=dtype)
    kinds, state = [type(m) for m in model.modules()], copy.deepcopy(model.state_dict())

    def run():
        y = model(x)
        learning = [p for p in model.parameters() if p.requires_grad]
        return [y, *torch.autograd.grad(y.float().square().sum(), learning)]

    want = run()
    convert(model)
    swapped = [type(m) is not kind for m, kind in zip(model.modules(), kinds, strict=True)]
    assert [isinstance(m, (LlamaNorm, GemmaNorm)) for m in model.modules()] == swapped
    assert_close(run(), want, dtype)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    convert(model, to="torch")
    assert [type(m) for m in model.modules()] == kinds
    assert all(torch.equal(g, w) for g, w in zip(run(), want, strict=True))
