"""The demo on real digits: equal starts, equal data, equal gradients, and what its verdict may say."""

import json
import sys
from contextlib import contextmanager

import pytest
import torch

from leannorm._errors import InputError, MissingDependencyError
from leannorm.demo import digits, headline, page, train
from leannorm.demo.network import DigitNetwork, lean_pair, loss_of, stock_pair
from leannorm.demo.networks import Bottleneck, VisionTransformer, resnet50
from leannorm.demo.train import Settings, Way, compare, prepared


class Silent:
    def __init__(self):
        self.steps, self.epochs = [], []

    def step(self, done, of):
        self.steps.append((done, of))

    def epoch(self, epoch, sides):
        self.epochs.append((epoch, [len(side.loss) for side in sides]))


@pytest.fixture(scope="module")
def a_part():
    """Real digits, fewer of them."""
    data = digits.load()
    return data._replace(images=data.images[:320], labels=data.labels[:320])


@pytest.fixture(scope="module")
def ran(a_part):
    progress = Silent()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "load", lambda data, root: a_part)
        settings = Settings(epochs=2, batch_size=64)
        return compare(settings, prepared(settings), progress), progress


@pytest.fixture
def one_batch(a_part, monkeypatch):
    data = a_part._replace(
        images=a_part.images[:32],
        labels=a_part.labels[:32],
        test_images=a_part.test_images[:10],
        test_labels=a_part.test_labels[:10],
    )
    monkeypatch.setattr(train, "load", lambda data_name, root: data)


def test_the_digits_are_real_and_split_once_and_for_all():
    data = digits.load()
    assert data.images.shape == (1437, 1, 28, 28)
    assert data.test_images.shape == (360, 1, 28, 28)
    assert data.labels.bincount().min() >= 0.9 * data.labels.bincount().max()  # stratified
    assert abs(data.images.mean()) < 1e-5
    assert abs(data.images.std() - 1) < 1e-5
    assert torch.equal(data.images, digits.load().images)


def test_training_learns_and_both_sides_alike(ran):
    result, _ = ran
    stock, *others = result.sides
    assert stock.loss[-1] < 0.7 * stock.loss[0]
    assert stock.accuracy[-1] > 0.5
    for side in others:
        assert abs(stock.loss[-1] - side.loss[-1]) < 0.01 * stock.loss[-1]


def test_lean_is_exact(ran):
    stock, _, lean = ran[0].sides
    assert lean.gradient_difference == 0
    assert lean.loss == stock.loss


def test_less_is_held_and_the_gradients_are_the_same(ran):
    stock, fused, lean = ran[0].sides
    for side in (fused, lean):
        assert side.held <= 0.60 * stock.held
        assert side.peak < stock.peak
        assert side.double_difference <= 1e-11
    assert ran[0].passed
    assert "same gradients" in ran[0].verdict


def test_progress_hears_of_every_step_and_epoch(ran):
    assert ran[1].steps == [(i, 10) for i in range(1, 11)]
    assert ran[1].epochs == [(1, [1] * 3), (2, [2] * 3)]


def test_numbers_survive_json_and_the_page_is_self_contained(ran):
    result, _ = ran
    data = json.loads(json.dumps(result.as_dict()))
    assert data["sides"][1]["name"] == "ConvBatchNorm2d"
    assert data["settings"]["epochs"] == 2
    html = page.html(result)
    assert html.startswith("<!doctype html>")
    body = html[html.index("<body>") :]
    assert "ConvBatchNorm2d" in body
    assert body.count("data-figure=") == 2
    assert " src=" not in body
    assert "<link" not in html[: html.index("<script>")]


def test_what_lean_saves_on_a_network_is_measured_and_shown_first(ran):
    """A block of each of the demo's networks, on images that a test can afford."""
    networks = [
        headline.Network(
            "residual", lambda: torch.nn.Sequential(Bottleneck(64, 64, 1)), (4, 64, 32, 32), (64, 32, 32)
        ),
        headline.Network("transformer", lambda: VisionTransformer(64, 1, 2), (4, 3, 64, 64), (3, 64, 64)),
    ]
    saved = list(headline.measured("cpu", 1, networks, "100MB"))
    for one in saved:
        stock, norm, conv = one.steps.settings
        assert conv.kept < norm.kept < stock.kept
        assert conv.gradient_difference == 0
        assert one.leanest is conv
        assert one.larger_batch > 1
        assert "equal bit for bit" in one.in_words()
    assert json.loads(json.dumps(saved[0].as_dict()))["settings"][0]["name"] == "stock"
    html = page.html(ran[0], saved)
    assert html.count("data-figure=") == 4
    assert html.index("transformer, 4x3x64x64: memory over one step") < html.index(
        "digit network: training loss"
    )


def test_the_resnet_is_the_known_one():
    model = resnet50()
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 1000)


@pytest.mark.usefixtures("one_batch")
def test_wrong_gradients_are_told():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy

    class WrongPair(torch.nn.Module):
        def __init__(self, *sizes):
            super().__init__()
            pair = stock_pair(*sizes)
            self.conv, self.bn = pair.conv, pair.bn

        def forward(self, x):
            return Doubled.apply(self.bn(self.conv(x)))

    ways = {"stock": Way(stock_pair), "wrong": Way(WrongPair)}
    settings = Settings(epochs=1, batch_size=32)
    result = compare(settings, prepared(settings), Silent(), ways)
    assert not result.passed
    assert "differ by more than rounding" in result.verdict


@pytest.mark.usefixtures("one_batch")
def test_a_way_may_stand_around_the_forward_pass():
    entered = []

    @contextmanager
    def around():
        entered.append(torch.is_grad_enabled())
        yield

    settings = Settings(epochs=1, batch_size=32)
    ways = {"stock": Way(stock_pair), "same": Way(stock_pair, around)}
    compare(settings, prepared(settings), Silent(), ways)
    assert entered == [True] * 4  # a first pass, measured, in float64, trained


def test_dropout_is_that_of_the_seed():
    torch.manual_seed(1)
    network, images = DigitNetwork(stock_pair), torch.randn(4, 1, 28, 28)
    labels = torch.arange(4)
    assert loss_of(network, images, labels, 7) == loss_of(network, images, labels, 7)
    assert loss_of(network, images, labels, 7) != loss_of(network, images, labels, 8)


def test_state_dicts_of_both_networks_are_interchangeable():
    stock, lean = DigitNetwork(stock_pair), DigitNetwork(lean_pair)
    assert list(stock.state_dict()) == list(lean.state_dict())
    lean.load_state_dict(stock.state_dict())


BAD = {
    "epochs": (Settings(epochs=0), "--epochs must be at least 1; got 0"),
    "batch size": (Settings(batch_size=1), "--batch-size must be at least 2; got 1"),
    "large batch": (Settings(batch_size=2000), "--batch-size must be at most 1437"),
    "device": (Settings(device="warp"), "cannot use device 'warp'"),
    "data": (Settings(data="letters"), "unknown data 'letters': choose digits or mnist"),
    "root": (Settings(data="mnist"), "add --root DIR"),
}


@pytest.mark.parametrize(("settings", "message"), BAD.values(), ids=BAD)
def test_bad_settings_say_what_to_change(settings, message):
    with pytest.raises(InputError, match=message):
        prepared(settings)


@pytest.mark.parametrize(
    ("module", "data", "remedy"),
    [("sklearn", "digits", r"leannorm\[demo\]"), ("torchvision", "mnist", "install")],
)
def test_a_missing_library_is_named(monkeypatch, module, data, remedy):
    for name in [m for m in sys.modules if m.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=remedy):
        digits.load(data, "somewhere")


class _StoredMnist:
    """Stands in for torchvision's class: that library's operators need another build of torch here."""

    def __init__(self, root, train, download):
        if "missing" in root:
            raise RuntimeError("Error downloading train-images-idx3-ubyte.gz:\nmore")
        self.data = torch.randint(0, 255, (64 if train else 32, 28, 28), dtype=torch.uint8)
        self.targets = torch.arange(len(self.data)) % 10


@pytest.fixture
def torchvision(monkeypatch):
    datasets = type(sys)("torchvision.datasets")
    datasets.MNIST = _StoredMnist
    monkeypatch.setitem(sys.modules, "torchvision", type(sys)("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)


@pytest.mark.usefixtures("torchvision")
def test_mnist_is_read_and_a_failed_download_is_one_sentence(tmp_path):
    data = digits.load("mnist", str(tmp_path))
    assert data.images.shape == (64, 1, 28, 28)
    assert data.images.dtype == torch.float32
    with pytest.raises(InputError, match=r"neither read from .* nor downloaded") as caught:
        digits.load("mnist", str(tmp_path / "missing"))
    assert "\n" not in str(caught.value)


def test_the_table_of_ways_starts_with_stock():
    assert next(iter(train.WAYS)) == "stock"
