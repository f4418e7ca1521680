"""The demo on real digits: the same training twice, and what is told of it."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from leannorm._errors import MissingDependencyError
from leannorm.report.demo import demo as module
from leannorm.report.demo import digits
from leannorm.report.demo.demo import demo
from leannorm.report.demo.networks import Bottleneck, VisionTransformer, resnet50
from leannorm.report.demo.saved import Network

# a block of each of the demo's networks, on images that a test can afford
NETWORKS = (
    Network("residual", lambda: torch.nn.Sequential(Bottleneck(64, 64, 1)), (4, 64, 32, 32), (64, 32, 32)),
    Network("transformer", lambda: VisionTransformer(64, 1, 2), (4, 3, 64, 64), (3, 64, 64)),
)


@pytest.fixture(scope="module")
def few():
    """Real digits, fewer of them."""
    data = digits.load()
    return data._replace(images=data.images[:320], labels=data.labels[:320])


@pytest.fixture(scope="module")
def ran(few):
    heard = []
    report = demo(NETWORKS, epochs=2, batch_size=64, digits=few, memory="100MB", progress=heard.append)
    return report, heard


def test_the_digits_are_real_and_split_once_and_for_all():
    data = digits.load()
    assert data.images.shape == (1437, 1, 28, 28)
    assert data.test_images.shape == (360, 1, 28, 28)
    assert data.labels.bincount().min() >= 0.9 * data.labels.bincount().max()  # stratified
    assert abs(data.images.mean()) < 1e-5
    assert abs(data.images.std() - 1) < 1e-5
    assert torch.equal(data.images, digits.load().images)


def test_training_learns_and_is_the_same_under_lean(ran):
    report, _ = ran
    stock, lean = report.trained
    assert stock.loss[-1] < 0.7 * stock.loss[0]
    assert stock.accuracy[-1] > 0.5
    assert lean == stock._replace(name="lean()")
    assert report
    assert "weights equal bit for bit" in report.summary()


def test_less_is_held(ran):
    stock, plain, norm, conv = ran[0].digits.settings
    assert plain.kept <= 0.5 * stock.kept
    assert conv.kept < norm.kept <= 0.60 * stock.kept
    assert norm.peak < stock.peak
    assert plain.gradient_difference == norm.gradient_difference == conv.gradient_difference == 0


def test_what_lean_saves_on_a_network_is_measured(ran):
    for one in ran[0].networks:
        stock, plain, norm, conv = one.steps.settings
        assert conv.kept < norm.kept < stock.kept
        assert plain.kept < stock.kept
        assert one.leanest is conv
        assert one.larger_batch > 1
        assert [row[-2] for row in one.table().rows] == ["equal"] * 4


def test_progress_hears_of_every_part(ran):
    heard = ran[1]
    assert [line for line in heard if line.startswith("training digits")] == [
        f"training digits, {name}, epoch {epoch} of 2" for name in ("stock", "lean()") for epoch in (1, 2)
    ]
    assert "transformer: the largest batch in 100MB" in heard


def test_numbers_survive_json_and_the_page_is_self_contained(ran):
    report, _ = ran
    data = json.loads(report.to_json())
    assert [one["network"] for one in data["networks"]] == ["residual", "transformer"]
    assert [one["name"] for one in data["trained"]] == ["stock", "lean()"]
    html = report.html()
    assert html.startswith("<!doctype html>")
    body = html[html.index("<body>") :]
    assert body.count("data-figure=") == 4
    assert body.index("transformer, 4x3x64x64: memory over one step") < body.index("Digits: training loss")
    assert " src=" not in body
    assert "<link" not in html[: html.index("<script>")]


NARROW = """
<iframe src="page.html" width="400" height="3000"></iframe>
<script>
window.addEventListener("load", () => setTimeout(() => {
  const tables = [...document.querySelector("iframe").contentDocument.querySelectorAll(".scroll")];
  const cut = tables.filter(table => table.scrollWidth > table.clientWidth);
  document.title = `${tables.length} tables, ${cut.length} cut`;
}, 300));
</script>
"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_on_a_telephone_no_table_is_cut(ran, tmp_path):
    report, _ = ran
    report.to_html(tmp_path / "page.html")
    (tmp_path / "narrow.html").write_text(NARROW)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    options += ["--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'browser'}"]
    done = subprocess.run(
        ["chromium", *options, (tmp_path / "narrow.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "<title>4 tables, 0 cut</title>" in done.stdout


def test_the_resnet_is_the_known_one():
    model = resnet50()
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 1000)


class Wrong(torch.autograd.graph.saved_tensors_hooks):
    """Hooks that rebuild something else."""

    def __init__(self):
        super().__init__(lambda t: t, lambda t: t * 1.001 if t.is_floating_point() else t)


@pytest.mark.conformance
def test_another_training_is_told(few, monkeypatch):
    monkeypatch.setitem(digits.WAYS, "lean()", Wrong)
    report = demo((), epochs=1, batch_size=160, digits=few)
    assert not report
    assert report.repeats
    assert "digits, 1 epoch, stock" in report.summary()
    assert "DIFFERENT" in report.summary()


@pytest.mark.conformance
def test_where_stock_does_not_repeat_nobody_is_blamed(few, monkeypatch):
    seeds = iter(range(3))
    train = module.train
    monkeypatch.setattr(module, "train", lambda d, e, b, seed, *rest: train(d, e, b, next(seeds), *rest))
    report = demo((), epochs=1, batch_size=160, digits=few)
    assert report
    assert "other bits at each run here, plain PyTorch's too" in report.summary()


def test_a_missing_library_is_named(monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingDependencyError, match=r"leannorm\[demo\]"):
        digits.load()
