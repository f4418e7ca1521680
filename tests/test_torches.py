"""Beside which torch: one that is too old is refused in a line, one that was not tested is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import matrix
import pytest
import torch

import leannorm
from leannorm._torch import TESTED, is_tested, why_refused
from leannorm.cli import main

ROOT = Path(__file__).parents[1]
REPORT = '<testsuites><testsuite errors="1" failures="2" skipped="3" tests="10"/></testsuites>'


def test_a_torch_that_is_too_old_is_refused_in_one_line(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.9.1+cpu'\n")
    path = os.pathsep.join([str(tmp_path), str(Path(leannorm.__file__).parents[1])])
    code = "try:\n    import leannorm\nexcept ImportError as error:\n    print(error)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.stdout.startswith("leannorm needs torch >= 2.10, found torch 2.9.1+cpu: pip install ")
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("found", ["1.13.1", "2.2.0+cu118", "2.9.1"])
def test_refused(found):
    assert found in why_refused(found)


@pytest.mark.parametrize("found", ["2.10.0", "2.10.0a0+git12", "2.15.0+cu132", "2.16.0.dev20261122", "3.0"])
def test_admitted(found):
    assert why_refused(found) is None


@pytest.mark.parametrize(("found", "said"), [(TESTED[-1] + "+cu132", "tested"), ("2.99.0", "untested")])
def test_info_says_whether_this_release_was_tested(monkeypatch, tmp_path, found, said):
    monkeypatch.setattr(torch, "__version__", found)
    path = tmp_path / "info.json"
    assert main(["info", "--json", str(path)]) == 0
    facts = json.loads(path.read_text())["facts"]
    assert facts["this torch is"].split(":")[0] == said
    assert facts["torch tested"] == ", ".join(TESTED)
    assert is_tested(found) is (said == "tested")


def test_the_matrix_counts_what_pytest_reports(tmp_path):
    report = tmp_path / "report.xml"
    assert matrix.row_of("2.10.0", report, 1.0).failed == 1  # it never came to a report
    report.write_text(REPORT)
    assert matrix.row_of("2.10.0", report, 61.4) == ("2.10.0", 4, 3, 3, 61)
    report.write_text(REPORT.replace('tests="10"', 'tests="0"'))
    assert matrix.row_of("2.10.0", report, 1.0).failed > 0  # nothing was run


def test_the_page_has_a_row_for_every_release():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| 2.")]
    assert rows == list(TESTED)
    assert matrix.HEADER.splitlines()[0] in page
