"""What only a GPU can show: lean() bit for bit on CUDA's kernels, in captured graphs, NCCL, and no stall."""

from __future__ import annotations

import copy

import lean_cases
import pytest
import torch
import torch.distributed as dist
from cases import is_fast
from test_lean import Stock, assert_same
from torch import nn

import leannorm
from leannorm import convert
from leannorm.autograd.nodes import NODES
from leannorm.distributed.call import Call
from leannorm.distributed.collective import add_up
from leannorm.distributed.group import statistics_group
from leannorm.distributed.headers import Arriving
from leannorm.report.bench import CASES, bench
from leannorm.saving import lean

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore"),  # torch's, of kernels that do not repeat to the bit
]

# torch's own batch norm looks at the number of batches where momentum is None
IMAGES = [name for name in lean_cases.IMAGES if "momentum" not in name]


@pytest.fixture(autouse=True)
def repeatable():
    """Whatever torch has no repeatable kernel for only warns; the vendor's choose repeatable ones."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.backends.cudnn.deterministic = before


def step(model, x, context, autocast):
    model.zero_grad()
    torch.manual_seed(1)
    with context, torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def same_twice(model, x, autocast):
    """What of a step repeats bit for bit without lean(): of the rest, equality cannot be asked."""
    once, again = step(model, x, Stock(), autocast), step(model, x, Stock(), autocast)
    return {name: v for name, v in once.items() if torch.equal(v, again[name])}


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", [*IMAGES, *lean_cases.SEQUENCES])
def test_gradients(name, autocast, converted):
    images = name in IMAGES
    model = (lean_cases.IMAGES if images else lean_cases.SEQUENCES)[name]().cuda()
    x = torch.randn(lean_cases.IMAGE if images else lean_cases.TOKENS, device="cuda")
    if images:
        model = model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    if converted:
        model = convert(model)
    stock = same_twice(copy.deepcopy(model), x, autocast)
    for setting in ("norm", "conv"):
        own = copy.deepcopy(model)
        for _ in range(2):
            ours = step(own, x, lean(setting), autocast)
        assert_same({key: ours[key] for key in stock}, stock)


@pytest.mark.parametrize("make", [lambda m: m, convert], ids=["stock", "converted"])
def test_a_captured_step(make):
    model = make(lean_cases.around(nn.ReLU(), nn.MaxPool2d(2), nn.SiLU())).cuda()
    plain = copy.deepcopy(model)
    x = torch.randn(lean_cases.IMAGE, device="cuda")

    def run(m, context):
        m.zero_grad(set_to_none=False)
        with context:
            loss = m(x).square().mean()
        loss.backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(model, lean("norm"))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(model, lean("norm"))
    x.normal_()
    graph.replay()
    run(plain, Stock())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_later_passes_do_not_wait_for_the_device():
    model = lean_cases.around(nn.ReLU(), nn.MaxPool2d(2), nn.SiLU()).cuda()
    tokens = lean_cases.on_tokens(nn.LayerNorm(32), nn.GELU()).cuda()
    x, t = torch.randn(lean_cases.IMAGE, device="cuda"), torch.randn(lean_cases.TOKENS, device="cuda")
    for mode in ("default", "default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for m, v in ((model, x), (tokens, t)):
                with lean("norm"):
                    loss = m(v).square().mean()
                loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_two_streams_read_what_one_rebuilds():
    """Under lean() the blocks of both branches are read across streams, and given back to the allocator."""
    width, side = 1024, torch.cuda.Stream()
    first, second = nn.Linear(width, width).cuda(), nn.Linear(width, width).cuda()
    x = torch.randn(4096, width, device="cuda", requires_grad=True)

    def run(context):
        for leaf in (x, *first.parameters(), *second.parameters()):
            leaf.grad = None
        with context:
            y = nn.functional.silu(x * 2)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y.record_stream(side)
                b = nn.functional.gelu(second(y))
            a = nn.functional.gelu(first(y))
            torch.cuda.current_stream().wait_stream(side)
            b.record_stream(torch.cuda.current_stream())
            loss = (a * b).sum()
        del y, a, b
        loss.backward()
        torch.empty(8, 4096, width, device="cuda").fill_(torch.nan)  # writes over what was given back
        return {"x": x.grad, "first": first.weight.grad, "second": second.weight.grad}

    stock = run(Stock())
    for _ in range(20):
        assert_same(run(lean("conv")), stock)


def test_convolutions_are_held_where_threads_time_their_algorithms():
    model = lean_cases.around(nn.ReLU(), nn.SiLU()).cuda()
    x = torch.randn(lean_cases.IMAGE, device="cuda")
    torch.backends.cudnn.benchmark = True
    try:
        with lean("conv") as saved:
            model(x).square().mean().backward()
    finally:
        torch.backends.cudnn.benchmark = False
    assert any("cudnn.benchmark is on" in reason for reason in saved.reasons)


def test_attention():
    model = lean_cases.on_tokens(lean_cases.Attention(False)).cuda().bfloat16()
    x = torch.randn(lean_cases.TOKENS, device="cuda", dtype=torch.bfloat16)
    stock = same_twice(copy.deepcopy(model), x, False)
    for _ in range(2):
        ours = step(model, x, lean("norm"), False)
    assert_same({key: ours[key] for key in stock}, stock)


def test_bench():
    timings = bench("cuda", torch.bfloat16, turns=1, cases=[CASES[0]]).timings
    assert all(timing.correct for timing in timings)


SYNC = Call("bn1", "training forward", 4, 0.0, False)


@pytest.fixture
def alone_on_nccl():
    """The statistics' communicator of a group of one rank, whose sums run on the device all the same."""
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    group = statistics_group(dist.group.WORLD.group_name, SYNC)
    sums = [torch.ones(16, dtype=torch.float64, device=device)]
    group.all_reduce(sums, 4, SYNC)
    yield group, sums
    dist.destroy_process_group()


def test_statistics_of_a_new_batch_size_do_not_wait_for_the_device(alone_on_nccl):
    group, sums = alone_on_nccl
    totals = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for count in range(5, 50):
            totals.append(group.all_reduce(sums, count, SYNC))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [float(total[0]) for total in totals] == list(range(5, 50))
    assert all(torch.equal(total[1:], sums[0]) for total in totals)


def test_a_communicator_outlives_a_sum_that_comes_late(alone_on_nccl):
    group, sums = alone_on_nccl
    for _ in range(2):
        torch.cuda._sleep(int(2.5e9))  # the sum stands behind this: a second and more
        total = group.all_reduce(sums, 4, SYNC._replace(debug=True))
        assert float(total[0]) == 4
    assert group.communicator.bound_device_id is None


def test_statistics_in_a_captured_graph_and_after_it(alone_on_nccl):
    group, sums = alone_on_nccl
    name = dist.group.WORLD.group_name
    add = torch.compile(lambda x, n: add_up((x,), n, name, SYNC) * 1, mode="reduce-overhead", dynamic=False)
    for count in (6, 7):
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            total = add(sums[0], count).clone()
            torch.full((1 << 16,), torch.nan, device="cuda")  # what a pool gives back is written over
            assert float(total[0]) == count
            assert float(group.all_reduce(sums, count + 1, SYNC)[0]) == count + 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_a_header_is_awaited_on_its_own_device():
    """Without set_device: the current device is another one."""
    message = torch.zeros(512, dtype=torch.float64, device="cuda:1")
    with torch.cuda.device(1):
        torch.cuda._sleep(int(1e9))
        message.fill_(3.0)
    header = Arriving(message)
    assert not header.is_there()
    assert header.values() == [3.0] * 7


def both_ways(layer, x, dy):
    """An output and its gradients, forward and backward."""
    layer.zero_grad()
    leaf = x.detach().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    return [y.detach(), leaf.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("name", ["batch", "group", "layer", "rms"])
def test_repeated_calls_are_the_first_ones(name):
    """Launches are kept by alignment, device and stream: what they give is what Triton's own call gives."""
    from leannorm.ops.backends.triton import tape

    make = {
        "batch": lambda: leannorm.nn.BatchNorm2d(16),
        "group": lambda: leannorm.nn.GroupNorm(4, 16),
        "layer": lambda: leannorm.nn.LayerNorm(8),
        "rms": lambda: leannorm.nn.RMSNorm(8),
    }[name]
    layer = make().cuda()
    for offset in (0, 1, 0, 1):  # values behind a multiple of 16 bytes
        x, dy = (torch.randn(5 * 16 * 8 * 8 + offset, device="cuda")[offset:].view(5, 16, 8, 8) for _ in "xy")
        tape.forget()
        first = both_ways(layer, x, dy)
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                again = both_ways(layer, x, dy)
            torch.cuda.current_stream().wait_stream(stream)
            for a, b in zip(first, again, strict=True):
                assert torch.equal(a, b)


def test_a_kept_launch_is_captured_and_follows_its_tensors():
    layer = leannorm.nn.LayerNorm(64).cuda()
    x = torch.randn(32, 64, device="cuda")
    with torch.no_grad():
        for _ in range(2):
            layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.normal_()
        graph.replay()
        assert torch.equal(y, layer(x))


def test_a_tensor_of_the_host_among_those_of_the_device_is_refused():
    layer = leannorm.nn.BatchNorm2d(4).cuda()
    x = torch.randn(2, 4, 3, 3, device="cuda")
    for _ in range(2):
        layer(x)
    layer.num_batches_tracked = layer.num_batches_tracked.cpu()
    with pytest.raises((ValueError, RuntimeError)):
        layer(x)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    for index in (0, 1, 1, 0):
        layer, x = leannorm.nn.LayerNorm(64).cuda(index), torch.randn(32, 64, device=index)
        torch.testing.assert_close(layer(x), torch.nn.functional.layer_norm(x, (64,)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [lambda **k: leannorm.nn.GroupNorm(4, 16, **k), lambda **k: leannorm.nn.LayerNorm(8, **k)]
)
def test_gradients_of_parameters_are_stored_in_their_dtype(make, dtype):
    layer = make(device="cuda", dtype=dtype)
    x, dy = (torch.randn(5, 16, 8, 8, device="cuda", dtype=dtype) for _ in "xy")
    got = both_ways(layer, x, dy)
    want = both_ways(copy.deepcopy(layer).double(), x.double(), dy.double())
    for a, b in zip(got, want, strict=True):
        scale = b.abs().max().item() + 1
        assert a.dtype == dtype
        assert (a.double() - b).abs().max().item() <= 4 * torch.finfo(dtype).eps * scale


def test_rows_of_720_million_values():
    """Four rows of a tile lie further apart than 2^31 values."""
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 40 GB of memory")
    x = torch.randn(4, 720_000_000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(720_000_000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leannorm.functional.rms_norm(x, weight.shape, weight).backward(x.detach())
    with torch.no_grad():
        want = sum(x[i, -1000:].float() ** 2 * x[i].float().square().mean().rsqrt() for i in range(4))
    torch.testing.assert_close(weight.grad[-1000:].float(), want, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: leannorm.nn.BatchNorm2d(16),
        lambda: leannorm.nn.BatchNorm2d(16).eval(),
        lambda: leannorm.nn.GroupNorm(4, 16),
        lambda: leannorm.nn.LayerNorm(8),
        lambda: leannorm.nn.RMSNorm(8),
    ],
)
def test_a_call_that_was_seen_goes_in_one_step(make):
    """By the nodes in C++ where they are built, which know a CUDA tensor by its dispatch keys; same bits."""
    from leannorm.ops.backends.triton import tape

    tape.forget()
    x, dy, found = torch.randn(5, 16, 8, 8, device="cuda", requires_grad=True), None, []
    for turn in range(3):
        layer = make().cuda()
        y = layer(x)
        dy = torch.randn_like(y) if dy is None else dy
        assert is_fast(y.grad_fn) == (turn > 0)
        in_python = isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction)
        assert in_python == (turn == 0 or NODES is None)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            again = layer(x) if not layer.training else None
        torch.cuda.current_stream().wait_stream(side)
        assert again is None or torch.equal(again, y)
        leaves = [x, *layer.parameters()]
        found.append([y.detach(), *torch.autograd.grad(y, leaves, dy), *layer.buffers()])
    for others in found[1:]:
        for a, b in zip(found[0], others, strict=True):
            assert torch.equal(a, b)
