"""`leannorm doctor`: findings on the terminal, in a file, on a page, and in the exit status."""

import contextlib
import copy
import io
import json
import os
import re
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch import nn

import leannorm
from leannorm.cli import main
from leannorm.report.doctor.findings import remedies
from leannorm.report.doctor.mend import mend

HERE = "doctor_network"
NETWORK = f"{HERE}:healthy"


@pytest.fixture
def network(tmp_path, monkeypatch):
    """A module of networks and data in the working directory."""
    (tmp_path / f"{HERE}.py").write_text(
        """
import torch
from torch import nn

def healthy():
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())

def forgetful():
    model = healthy()
    model[1].momentum = 0.99
    return model

def apart():
    model = healthy()
    model[1].running_mean += 5
    return model

def divides_by_0():
    model = healthy()
    model[1].eps = 0.0
    return model

def two_momentums():
    model = nn.Sequential(*(healthy() for _ in range(4)))
    for block, momentum in zip(model, (0.0, 1.0, 1.0, 1.0)):
        block[1].momentum = momentum
    return model

def batches():
    return [torch.randn(8, 3, 8, 8) for _ in range(2)]

def flat():
    return torch.randn(8, 3)
"""
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_healthy_model(network, capsys):
    assert main(["doctor", NETWORK, "--input", "4x3x8x8"]) == 0
    assert "1 norm layer and 1 batch of doctor_network:healthy: nothing found" in capsys.readouterr().out


@pytest.mark.parametrize(("least", "status"), [("note", 1), ("warning", 1), ("error", 0)])
def test_the_severity_that_fails_can_be_said(network, least, status):
    assert main(["doctor", f"{HERE}:forgetful", "--fail-on", least]) == status


def test_one_remedy_mends_every_layer_that_it_names():
    model = nn.Sequential(*(nn.BatchNorm1d(4, momentum=0.99) for _ in range(7)))
    report = leannorm.doctor(model)
    assert len(report.findings) == 7
    lines = remedies(report.findings)
    assert lines[0].startswith("for name in [")
    assert all(line in str(report) for line in lines)
    exec("\n".join(lines), {"model": model})
    assert not leannorm.doctor(model).findings


def test_findings_are_status_1_and_numbers(network, capsys):
    assert main(["doctor", f"{HERE}:forgetful", "--json", "out.json", "--html", "out.html"]) == 1
    out = capsys.readouterr().out
    assert 'model.get_submodule("1").momentum = 0.01' in out
    data = json.loads((network / "out.json").read_text())
    assert [(one["check"], one["layer"], one["value"]) for one in data["findings"]] == [
        ("momentum", "1", 0.99)
    ]
    assert data["model"] == "doctor_network:forgetful"
    page = (network / "out.html").read_text()
    assert "Momentum forgets at once" in page
    assert "Findings per layer" in page


def test_fix_looks_again_at_batches_that_can_be_read_once(network, capsys, tmp_path):
    (tmp_path / "once.py").write_text(
        """
import torch
from torch import nn

def made():
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, momentum=0.9), nn.ReLU())

def batches():
    yield from (torch.randn(8, 3, 16, 16) for _ in range(2))
"""
    )
    assert main(["doctor", "once:made", "--data", "once:batches", "--fix", "--fail-on", "error"]) == 0
    assert "1 settings fixed on a copy: 0 findings left" in capsys.readouterr().out


def test_fix_is_a_diff_and_leaves_outputs_as_they_were(network, capsys, tmp_path):
    (tmp_path / "faulty.py").write_text(
        """
import torch
from torch import nn

def made():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=0.9), nn.ReLU(), nn.Conv2d(8, 8, 3),
                        nn.BatchNorm2d(8, eps=1e-12), nn.ReLU(), nn.BatchNorm2d(8), nn.BatchNorm2d(8))
    net(torch.randn(8, 3, 16, 16))  # running statistics know the biases
    return net
"""
    )
    assert main(["doctor", "faulty:made", "--fix", "--fail-on", "error"]) == 0
    told = capsys.readouterr().out
    for line in ("@@ 1 @@", "-momentum = 0.9", "+momentum = 0.1", "-eps = 1e-12", "+eps = 1e-05",
                 "-bias = 8 values", "+bias = None"):  # fmt: skip
        assert f"{line}\n" in told
    assert "0 findings left" in told

    sys.path.insert(0, str(tmp_path))
    model = __import__("faulty").made()
    findings = [one for one in leannorm.doctor(model).findings if one.check == "removed_bias"]
    x = torch.randn(8, 3, 16, 16)
    before = [m(x) for m in (copy.deepcopy(model).train(), copy.deepcopy(model).eval())]
    assert [change.name for change in mend(model, findings)] == ["running_mean", "bias"] * 2
    for mode, was in ((model.train, before[0]), (model.eval, before[1])):
        torch.testing.assert_close(mode()(x) if mode == model.eval else copy.deepcopy(mode())(x), was)


@pytest.mark.parametrize("batches", [["--input", "8x3x8x8"], ["--data", f"{HERE}:batches"]])
def test_what_stops_the_batches_does_not_stop_the_rest(network, batches, capsys):
    arguments = ["doctor", f"{HERE}:divides_by_0", *batches, "--fail-on", "error", "--json", "out.json"]
    assert main(arguments) == 1  # the batches were not run
    told = capsys.readouterr().out
    assert "a constant channel is divided by 0" in told
    assert f"without batches: {HERE}:divides_by_0 does not run on a" in told
    assert "eps must be positive" in json.loads((network / "out.json").read_text())["stopped"]
    assert main([*arguments, "--fix"]) == 1
    assert "1 settings fixed on a copy: 0 findings left" in capsys.readouterr().out


def test_layers_with_another_consequence_have_their_own_why(network, capsys):
    assert main(["doctor", f"{HERE}:two_momentums", "--html", "out.html"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.endswith(" ...")]
    assert lines[1:3] == ["  0.1: 0", "  why:    running statistics never move"]
    assert lines[3:6] == ["  1.1: 1", "  2.1: 1", "  3.1: 1"]
    assert lines[6].startswith("  why:    running statistics are 100 %")
    page = (network / "out.html").read_text()
    names = ", ".join(f"&#34;{i}.1&#34;" for i in range(4))
    assert (
        f"for name in [{names}]: model.get_submodule(name).momentum = 0.1" in page
    )  # not the first one alone
    assert re.search("<td class=text [^>]*>running statistics never move</td>", page)


def test_random_input_says_nothing_of_the_data(network, capsys):
    assert main(["doctor", f"{HERE}:apart", "--input", "8x3x8x8"]) == 0
    assert main(["doctor", f"{HERE}:apart", "--data", f"{HERE}:batches"]) == 1
    assert "train_eval_gap" in capsys.readouterr().out


BAD_USAGE = {
    "no such model": (["doctor", "timm:bogus_net"], "timm has no model"),
    "sizes": (["doctor", NETWORK, "--input", "8,3"], "like 8x3x224x224"),
    "both": (["doctor", NETWORK, "--input", "8x3x8x8", "--data", "a:b"], "not both"),
    "data": (["doctor", NETWORK, "--data", "nowhere"], "package.module:callable"),
    "no folder": (["doctor", NETWORK, "--html", "nowhere/at/all.html"], "there is no folder"),
    "an input that does not fit": (
        ["doctor", NETWORK, "--input", "8x4x8x8"],
        "does not run on an input of 8x4x8x8",
    ),
    "data that does not fit": (["doctor", NETWORK, "--data", f"{HERE}:flat"], f"a batch of {HERE}:flat"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_USAGE.values(), ids=BAD_USAGE)
def test_bad_usage_is_one_line_and_status_2(network, arguments, message, capsys):
    if "timm" in arguments[1]:
        from benchmarks.architectures import import_torchvision

        import_torchvision()
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert sorted(p.name for p in network.iterdir() if p.suffix != "") == [f"{HERE}.py"]


def test_without_plotly_it_is_refused_before_the_work(network, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main(["doctor", NETWORK, "--html", "out.html"]) == 2
    assert "needs plotly" in capsys.readouterr().err


def test_a_model_of_other_norms_and_of_none(capsys):
    assert main(["doctor", "torch.nn:Identity"]) == 0
    assert "has no norm layer that is known" in capsys.readouterr().out


def apart():
    """A model whose second rank has another eps."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))
    model[1].eps = 1e-5 if dist.get_rank() == 0 else 1e-4
    return model


def of_this_rank():
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(dist.get_rank()))


def _on_a_rank(rank, *arguments):
    os.environ["RANK"] = str(rank)  # as torchrun does
    with contextlib.redirect_stdout(io.StringIO()) as told:
        status = main(
            ["doctor", "test_doctor_cli:apart", "--data", "test_doctor_cli:of_this_rank", *arguments]
        )
    return status, told.getvalue()


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")
def test_in_a_job_the_first_rank_tells_what_all_have_found():
    (status, told), other = ranks(2, _on_a_rank, "--fix")
    assert "rank 0: eps=1e-05; rank 1: eps=0.0001" in told
    assert "0 settings fixed" in told
    assert status == other[0] == 1
    assert other[1] == ""
