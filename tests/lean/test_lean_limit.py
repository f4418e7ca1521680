"""`lean(limit=)`: what the process may have, kept to while the forward pass goes on."""

import gc
import itertools
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import nn

import leannorm
from leannorm import InputError, lean
from leannorm.autograd.nodes import NODES
from leannorm.saving import limit as limits

ROOT = Path(__file__).parents[2]
MEGABYTE = 10**6

pytestmark = pytest.mark.skipif(
    NODES is None or not NODES.bytes_in_use(), reason="needs the C++ nodes, and a system that counts memory"
)


TIGHT = pytest.mark.filterwarnings("ignore:leannorm. limit is out of reach")


def with_room(megabytes):
    """The limit that leaves so many to what comes."""
    gc.collect()
    NODES.trim_heap()  # a pass could use what the C library has kept of freed memory
    return NODES.bytes_in_use() + int(megabytes * MEGABYTE)


def perceptron(depth=10):
    torch.manual_seed(0)
    layers = [(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)]
    return nn.Sequential(*[one for layer in layers for one in layer]), torch.randn(2048, 256)


def convolutional():
    torch.manual_seed(0)
    stages = [
        (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.SiLU()) for _ in range(6)
    ]
    return nn.Sequential(*[one for stage in stages for one in stage]), torch.randn(4, 8, 64, 64)


def attention():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(4, 128, 64)


NETWORKS = [perceptron, convolutional, attention]


def step(network, x, context):
    """Gradients, running statistics and what `lean` says."""
    torch.manual_seed(1)
    network.zero_grad(set_to_none=True)
    with context as saved:
        loss = network(x).square().mean()
    loss.backward()
    return [p.grad.clone() for p in network.parameters()], [b.clone() for b in network.buffers()], saved


def equal(ours, stock):
    return all(
        torch.equal(a, b)
        for pair in zip(ours[:2], stock[:2], strict=True)
        for a, b in zip(*pair, strict=True)
    )


@TIGHT
@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("share", [2.0, 0.7, 0.4, 0.2, 0.05])
def test_gradients_are_those_of_plain_torch_at_every_limit(make, share):
    network, x = make()
    state = [b.clone() for b in network.buffers()]
    stock = step(network, x, nullcontext())
    activations = step(network, x, lean("norm", verify=True))[2]
    beyond = activations.kept_bytes + activations.rebuilt_bytes
    for _ in range(4):
        for b, before in zip(network.buffers(), state, strict=True):
            b.copy_(before)
        ours = step(network, x, lean(limit=with_room(share * beyond / MEGABYTE)))
        assert equal(ours, stock)
        assert ours[2].kept_bytes + ours[2].rebuilt_bytes <= 1.3 * beyond
        assert not any("autograd alone has it" in reason for reason in ours[2].reasons)
    if share < 0.5:
        assert ours[2].rebuilt_bytes > 0.3 * beyond


def test_far_from_the_limit_nothing_is_computed_twice():
    network, x = perceptron()
    for _ in range(3):
        saved = step(network, x, lean(limit=with_room(2000)))[2]
        assert saved.rebuilt_bytes == 0
        assert saved.kept_bytes > 50 * MEGABYTE
        assert saved.reasons == []


@TIGHT
def test_a_smaller_limit_keeps_less():
    network, x = perceptron()
    step(network, x, nullcontext())
    kept = []
    for room in (400, 90, 60, 40, 20):
        for _ in range(2):
            saved = step(network, x, lean(limit=with_room(room)))[2]
        kept.append(saved.kept_bytes)
    assert all(less <= more + 10_000 for more, less in itertools.pairwise(kept))
    assert kept[-1] < 0.4 * kept[0]


def test_what_cannot_fit_is_said_with_the_least():
    network, x = perceptron()
    with pytest.warns(UserWarning, match="limit is out of reach"):
        saved = step(network, x, lean(limit=with_room(2)))[2]
    assert "takes about" in saved.reasons[0]
    assert "at least" in saved.reasons[0]
    kept = max((one for one in saved.records if not one.rebuilt), key=lambda one: one.bytes)
    assert str(tuple(kept.shape)) in saved.reasons[0]


@pytest.mark.parametrize(
    "limit", ["8 apples", 8, 0.5, -1, True, float("nan"), "0GiB", 8.5 * 2**30 + 0.5, [8]]
)
def test_a_limit_is_bytes_or_the_device(limit):
    with pytest.raises(InputError) as error:
        lean(limit=limit)
    assert repr(limit) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("other", [{"budget": 0.5}, {"overhead": 0.1}, {"peak": 0.5}])
def test_it_is_the_only_goal(other):
    with pytest.raises(InputError, match="one of budget, overhead, peak and limit"):
        lean(limit="8GiB", **other)
    with pytest.raises(InputError, match="chooses itself what to rebuild"):
        lean("conv", limit="8GiB")


def test_a_limit_below_what_is_there_is_an_error_before_anything_ran():
    network, x = perceptron()
    context = lean(limit=4 * MEGABYTE)
    with pytest.raises(InputError, match=r"before the forward pass; got limit=4\.0 MB"), context:
        network(x)
    loss = network(x).sum()  # no hooks are left behind
    assert type(loss.grad_fn).__name__ == "SumBackward0"
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_memory_of_others_that_passes_the_limit_later_is_said_and_no_error():
    network, x = perceptron()
    limit = with_room(150)
    stock, others = step(network, x, nullcontext()), []

    def train():
        for i in range(3):
            ours = step(network, x, lean(limit=limit))
            assert equal(ours, stock)
            assert bool(ours[2].reasons) == (i > 0)
            others.append(torch.ones(80 * MEGABYTE))
        return ours[2]

    with pytest.warns(UserWarning, match="was passed before the pass began"):
        saved = train()
    assert "the process had" in saved.reasons[0]


@TIGHT
def test_edits_while_values_are_dropped():
    """What is edited in the pass is made again from a copy, though it was kept when it was edited."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))
    x = torch.randn(2048, 256)

    def run(context):
        layers.zero_grad(set_to_none=True)
        counts = torch.zeros(2048, 256)
        with context as saved:
            y = x
            for i, layer in enumerate(layers):
                counts += i
                y = layer(y + counts)
                y = y.relu_() if i % 2 else torch.tanh(y).mul(1.5).add_(1.0)
            loss = y.mean()
        loss.backward()
        return [p.grad for p in layers.parameters()], [counts], saved

    stock = run(nullcontext())
    for room in (200, 40, 20, 5):
        for _ in range(3):
            assert equal(run(lean(limit=with_room(room))), stock)


@TIGHT
def test_in_two_threads():
    results, stock = {}, {}
    networks = [perceptron(6), perceptron(8)]
    for i, (network, x) in enumerate(networks):
        network.eval()  # both threads draw from one generator of random numbers
        stock[i] = step(network, x, nullcontext())
    limit = with_room(30)

    def train(i):
        for _ in range(4):
            results.setdefault(i, []).append(step(*networks[i], lean(limit=limit)))

    threads = [Thread(target=train, args=(i,)) for i in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for i in range(2):
        assert len(results[i]) == 4
        assert all(equal(one, stock[i]) for one in results[i])


@TIGHT
def test_a_pass_within_another_has_the_smaller_limit():
    network, x = perceptron()
    stock = step(network, x, nullcontext())
    limit = with_room(30)
    torch.manual_seed(1)
    network.zero_grad(set_to_none=True)
    with lean(limit=limit) as outer, lean(limit="900GiB"):
        loss = network(x).square().mean()
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(network.parameters(), stock[0], strict=True))
    assert outer.rebuilt_bytes > 20 * MEGABYTE


@TIGHT
def test_a_model_whose_loop_cannot_be_edited():
    network, x = perceptron()
    stock = step(network, x, nullcontext())
    leannorm.make_lean(network, limit=with_room(40))
    for _ in range(3):
        assert equal(step(network, x, nullcontext()), stock)
    assert network.forward.saved.rebuilt_bytes > 0


@pytest.fixture
def files_say(monkeypatch):
    """What the system's files say; all others are as they are, unless a test is without any."""
    read = Path.read_text

    def say(found, others=True):
        def text(path):
            if str(path) in found:
                return found[str(path)]
            if not others:
                raise FileNotFoundError(path)
            return read(path)

        monkeypatch.setattr(Path, "read_text", text)

    return say


def test_the_device_has_what_its_control_group_allows(files_say):
    groups = "/sys/fs/cgroup"
    found = {f"{groups}/a/b/memory.max": "max\n", f"{groups}/a/memory.max": "3000000000\n"}
    files_say(found | {f"{groups}/memory.max": "max\n", "/proc/self/cgroup": "0::/a/b\n"})
    assert list(limits._of_groups()) == [3_000_000_000]
    assert limits.device_bytes(10**6) <= 3_000_000_000


def test_ranks_of_one_launcher_share_the_machine(monkeypatch):
    alone = limits.device_bytes(0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert limits.device_bytes(0) < alone / 8


def test_a_system_without_figures_is_an_error(files_say):
    network, x = perceptron(2)
    files_say({}, others=False)
    with pytest.raises(InputError, match='limit="device" needs a system'), lean(limit="device"):
        network(x)


def in_a_process(code, depth=16):
    """What the code prints, in a process that has not had a limit."""
    head = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
import torch
from contextlib import nullcontext
from test_lean_limit import perceptron, step
from leannorm import lean
from leannorm.autograd.nodes import NODES
def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024
network, x = perceptron({depth})
"""
    ran = subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, check=True)
    return ran.stdout


PEAK = """
step(network, x[:64], lean(limit="900GiB"))
before, resident = NODES.bytes_in_use(), status("VmRSS")
for _ in range(4):
    step(network, x, lean(limit=before + {room}) if {room} else nullcontext())
print(status("VmHWM") - resident)
"""


def test_the_process_does_not_take_more():
    """By the system's own count of what the process had at most."""

    def peak(room):
        return int(in_a_process(PEAK.format(room=room), depth=24))

    plain = peak(0)
    assert plain > 180 * MEGABYTE
    for share in (0.9, 0.7, 0.5):
        assert peak(int(share * plain)) <= share * plain
