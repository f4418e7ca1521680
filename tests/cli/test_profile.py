"""`profile`: what it measures, that it changes nothing, its page opened in a browser, its command line."""

import copy
import json
import shutil
import subprocess
import sys
import warnings
from math import prod

import pytest
import torch
from torch import nn

from leannorm._errors import InputError, MissingDependencyError
from leannorm.cli import main
from leannorm.cli.inputs import specs_of
from leannorm.cli.models import model_named
from leannorm.report.layers import StockCount, by_layer
from leannorm.report.profile import profile


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv = nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(c)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.bn(self.conv(x))) + x


def small():
    """What the command line's own tests profile."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.Sequential(Block(16), Block(16)), nn.Flatten(), nn.Dropout(0.1)
    )


def shape_maker():
    return "not a module"


X = (4, 3, 34, 34)


@pytest.fixture(scope="module")
def ran():
    torch.manual_seed(0)
    model = small()
    before = copy.deepcopy(model)
    return profile(model, torch.randn(X), budgets=[0.8], against=["checkpoint"], steps=1), model, before


def test_every_setting_is_measured_and_exact(ran):
    stock, *others = ran[0].settings
    assert [s.name for s in ran[0].settings] == ["stock", "lean", "norm", "conv", "budget 0.8", "checkpoint"]
    for setting in others:
        assert setting.gradient_difference == 0
        assert 0 < setting.kept < stock.kept
        assert setting.seconds > 0
        assert setting.peak >= setting.kept


def test_the_model_is_as_before(ran):
    _, model, before = ran
    for (name, a), (_, b) in zip(model.state_dict().items(), before.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert all(p.grad is None for p in model.parameters())
    assert not any("forward" in vars(m) for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_gradients_that_were_there_come_back():
    model = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    kept = [p.grad for p in model.parameters()]
    profile(model, torch.randn(64, 40), recompute=["norm"], steps=1)
    assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))
    assert all((g == 1).all() for g in kept)


def test_layers_keep_what_is_counted_by_hand():
    model = nn.Sequential(
        nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 32, bias=False), nn.Tanh()
    )
    x = torch.randn(100, 64)
    count = StockCount()
    with count, by_layer(model, lambda: (count.kept_bytes, 0)) as layers:
        model(x)
    # linear keeps its input; ReLU its result, which the next linear keeps again; tanh its result
    assert {layer.name: layer.kept for layer in layers} == {"0": 25600, "1": 51200, "3": 12800}


def test_ratios_that_are_not_of_the_times_beside_them_say_what_they_are_of():
    torch.manual_seed(0)
    report = profile(nn.Linear(8, 8), torch.randn(4, 8), recompute=["norm"], steps=1)
    stock, norm = report.settings
    stock.seconds, norm.seconds = 4.250, 4.872
    for ratio, said in ((4.872 / 4.250, False), (0.96, True)):
        norm.time_ratio = ratio
        assert ("the median of the turns' own ratios" in str(report)) is said


def test_what_the_loss_holds_has_a_row():
    torch.manual_seed(0)
    report = profile(nn.Linear(8, 4000), torch.randn(100, 8), recompute=[], steps=1)
    layers = {layer.kind: layer.kept for layer in report.settings[0].layers}
    assert layers["the loss"] == 4 * 100 * 4000  # the output, which the mean square reads
    assert "the loss" in str(report).partition("kept by")[2]


def test_a_goal_out_of_reach_is_told_once_and_the_dtype_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "deep.py").write_text(
        "from torch import nn\ndef made(): return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["--input", "64x64", "--budget", "0.001", "--steps", "1", "--dtype", "bfloat16"]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert main(["profile", "deep:made", *arguments]) == 0
    assert not [one for one in heard if "leannorm" in str(one.message)]
    out, err = capsys.readouterr()
    assert out.count("budget=0.001 is out of reach") == out.count("lowers no peak") == 1
    assert "out of reach" not in err
    assert "bfloat16 parameters" in out


def test_a_module_that_raises_when_imported_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_module.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "broken_module:made", "--input", "2x3"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("leannorm: 'broken_module' was imported and raised ZeroDivisionError")
    assert err.count("\n") == 1


def test_the_layers_add_up_to_what_is_kept(ran):
    for setting in ran[0].settings[:4]:
        total = sum(layer.kept for layer in setting.layers)
        # measured from outside there is not the batch itself
        assert -4 * prod(X) - 16384 <= setting.kept - total <= 16384
    assert sum(layer.rebuilt for layer in ran[0].settings[1].layers) > 0
    assert ran[0].settings[2].rebuilt[0].nbytes > 0


def test_json_holds_every_number(ran):
    data = json.loads(ran[0].to_json())
    assert data["inputs"] == ["4x3x34x34"]
    assert data["settings"][1]["layers"][0].keys() == {"name", "kind", "kept", "rebuilt"}
    assert max(alive for _, alive in data["settings"][0]["timeline"]) == data["settings"][0]["peak"]


def test_it_prints(ran, capsys):
    ran[0].print()
    out = capsys.readouterr().out
    for text in ("stock", "budget 0.8", "checkpoint", "BatchNorm2d", "equal"):
        assert text in out


def test_why_less_is_not_saved_is_told_once_and_many_layers_are_shown_by_part(capsys):
    blocks = [Block(16) for _ in range(12)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Sequential(*blocks), nn.Flatten())
    with pytest.warns(UserWarning, match="out of reach"):
        report = profile(model, torch.randn(2, 3, 34, 34), steps=1, recompute=[], budgets=[0.01, 0.02])
    report.print()
    assert capsys.readouterr().out.count("budget=0.01 is out of reach") == 1
    page = report.html()
    assert page.count("budget=0.01 is out of reach") == page.count("budget=0.02 is out of reach") == 1
    assert "What each part holds" in page
    rows = len({layer.name for setting in report.settings for layer in setting.layers})
    assert rows > 24
    assert f"<summary>{rows} rows</summary>" in page
    names = [f"1.{i}" for i in range(12)]
    assert [name in page for name in (*names, "1.3.conv")] == [True] * 13  # the table has every layer


CLICK = """
<script>
window.addEventListener("load", () => setTimeout(() => {
  const shown = () => [...document.querySelectorAll(".js-plotly-plot")].map(
    plot => plot.data.filter(t => t.visible !== false).length).join();
  const before = shown();
  document.querySelector('[data-setting="norm"]').click();
  setTimeout(() => { document.title = before + " then " + shown(); }, 300);
}, 300));
</script>
"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_opens_the_page_and_a_setting_can_be_hidden(ran, tmp_path):
    page = tmp_path / "page.html"
    ran[0].to_html(page)
    page.write_text(page.read_text() + CLICK)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run(
        ["chromium", *options, f"--user-data-dir={tmp_path / 'browser'}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    # timeline of 6 settings, layers of the 5 that have some; then each without one
    assert "<title>6,5 then 5,4</title>" in done.stdout


BAD_ARGUMENTS = {
    "recompute": ({"recompute": ["all"]}, "recompute is"),
    "budget": ({"budgets": [1.5]}, "budget is a share"),
    "against": ({"against": ["magic"]}, "against is one of checkpoint, compile"),
    "no blocks": ({"against": ["checkpoint"]}, "checkpoint needs blocks"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_unknown_settings_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        profile(nn.Linear(4, 4), torch.randn(2, 4), **arguments)


def test_a_model_that_learns_nothing_is_refused():
    with pytest.raises(InputError, match="no parameter that requires a gradient"):
        profile(nn.ReLU(), torch.randn(2, 4))


BAD_MODELS = {
    "resnet50": "name a model as timm:NAME",
    "timm:": "name a model as timm:NAME",
    "no.such.module:thing": "cannot import 'no.such.module'",
    "torch.nn:NoSuchThing": "has no callable 'NoSuchThing'",
    "test_profile:shape_maker": "made a str",
}


@pytest.mark.parametrize(("spec", "message"), BAD_MODELS.items(), ids=BAD_MODELS)
def test_unknown_models_say_what_to_name(spec, message):
    with pytest.raises(InputError, match=message):
        model_named(spec)


def test_a_library_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingDependencyError, match="timm cannot be imported"):
        model_named("timm:resnet18")


@pytest.mark.parametrize("text", ["", "8x", "8x3x0x3", "8,3,4,4", "axb", "-1x3"])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(InputError, match="like 8x3x224x224"):
        specs_of([text])


def test_the_command_writes_both_files(tmp_path, capsys):
    files = tmp_path / "a.json", tmp_path / "a.html"
    asked = ["profile", "test_profile:small", "--input", "4x3x34x34", "--budget", "0.9", "--steps", "1"]
    status = main([*asked, "--json", str(files[0]), "--report", str(files[1])])
    assert status == 0
    assert "budget 0.9" in capsys.readouterr().out
    assert json.loads(files[0].read_text())["model"] == "test_profile:small"
    assert files[1].stat().st_size > 1e6
    assert main(["profile", "test_profile:small", "--input", "4,3"]) == 2
    assert main(["profile", "test_profile:small"]) == 2


def test_samples_that_come_in_one_order_are_profiled():
    class Lengths(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(3, 8, batch_first=True)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)  # longest first
            return self.layer(packed)[0].data

    report = profile(Lengths(), (torch.randn(3, 5, 3), torch.tensor([5, 4, 2])), recompute=["norm"], steps=1)
    assert [setting.name for setting in report.settings] == ["stock", "norm"]


def test_a_sparse_tensor_counts_as_its_parts():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)
            where = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])
            self.adjacency = torch.sparse_coo_tensor(where, torch.ones(6), (6, 6), check_invariants=True)

        def forward(self, x):
            return self.head(self.norm(torch.sparse.mm(self.adjacency, x)))

    model, x = Graph(), torch.randn(6, 8, requires_grad=True)
    count = StockCount()
    with count:
        torch.sparse.mm(model.adjacency, x)
    assert count.kept_bytes == 6 * (2 * 8 + 4)  # of each entry its two indices and its value
    assert profile(model, x, recompute=["norm"], steps=1).settings[1].gradient_difference == 0
