"""Every report is told by one base: as text, as JSON, on the terminal, in a notebook, and in one line."""

import json
import math
import re
import subprocess
import sys
from dataclasses import dataclass
from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import nn

import leannorm
from leannorm._report import Line, Report, Table
from leannorm.report.bench import CASES
from leannorm.report.check import CheckReport
from leannorm.report.info import installation
from leannorm.report.numerics import Check
from leannorm.transforms import preview


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))


X = torch.randn(4, 3, 9, 9)
MADE = {
    "bench": lambda: leannorm.bench(turns=1, cases=[CASES[0]._replace(shape=(2, 64, 4, 4))]),
    "check": lambda: CheckReport([Check("a sum", 0.0, 1.0, "float64", "a detail")]),
    "doctor": lambda: leannorm.doctor(network(), X),
    "fit": lambda: leannorm.fit(network, (3, 9, 9), "1MB", recompute=["norm"]),
    "fold": lambda: leannorm.fold(network(), (X,)),
    "info": installation,
    "preview": lambda: preview(network()),
    "profile": lambda: leannorm.profile(network(), X, recompute=["norm"], steps=1),
    "recalibrate": lambda: leannorm.recalibrate(network(), [X]),
}


@pytest.fixture(scope="module", params=MADE)
def report(request):
    torch.manual_seed(0)
    return MADE[request.param]()


def test_no_report_stands_beside_the_base(report):
    assert {type(report)} <= set(_all(Report))
    made = {type(make()) for name, make in MADE.items() if name in ("check", "preview", "info")}
    assert all("to_json" not in vars(cls) and "print" not in vars(cls) for cls in {type(report), *made})


def _all(cls):
    return [cls, *(each for sub in cls.__subclasses__() for each in _all(sub))]


def test_text_terminal_and_notebook_have_the_same_cells(report, capsys):
    cells = []
    for part in report.parts():
        rows = [part.columns, *part.rows] if isinstance(part, Table) else [[part.text]]
        cells += [cell for row in rows for cell in row if cell]
    assert cells
    text, html = str(report), report._repr_html_()
    for cell in cells:
        assert cell.strip() in text
    assert html.count("<table>") == sum(isinstance(part, Table) for part in report.parts())
    report.print()
    printed = "".join(capsys.readouterr().out.split())
    assert all("".join(word.split()) in printed for cell in cells[:3] for word in cell.split())
    assert text == text.strip("\n")
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_the_repr_is_one_line(report):
    assert repr(report) == f"{type(report).__name__}({report.summary()})"
    assert "\n" not in repr(report)
    assert len(repr(report)) < 150


def test_json_is_whole_and_indented(report):
    text = report.to_json()
    assert json.loads(text) == report.data()
    assert text.endswith("}\n")
    assert "\n " in text


@dataclass(repr=False)
class Odd(Report):
    """What is in a report that no measurement should make, and does."""

    name: str
    error: float
    moved: dict
    lines: tuple

    def parts(self):
        yield Table(["[bold]", "<b>"], [["[red]x[/red]", "<i>"]], "a & b")
        yield Line("[dim] < 1 of hf:llama: all")

    def summary(self):
        return self.name


def test_names_are_no_markup_and_numbers_that_are_not_finite_are_null(capsys):
    odd = Odd("odd", math.nan, {1: math.inf}, (Line("a"), [0.5]))
    assert json.loads(odd.to_json()) == {
        "name": "odd",
        "error": None,
        "moved": {"1": None},
        "lines": [{"text": "a", "style": ""}, [0.5]],
    }
    odd.print()
    for told in (str(odd), capsys.readouterr().out):
        assert "[red]x[/red]" in told
        assert "[dim] < 1 of hf:llama: all" in told
    html = odd._repr_html_()
    assert "<i>" not in html
    assert "&lt;i&gt;" in html
    assert "<caption>a &amp; b</caption>" in html


@pytest.mark.parametrize(
    "table",
    [
        Table(["norm", "n"], [["layer1.0", "12"], ["x", "1234"]], "norms"),
        Table(["", "a"], []),
        Table(["层", "é", "n"], [["中文", "e\u0301", "1"], ["two\nlines", "34", ""]], numbers_from=2),
    ],
)
def test_text_is_what_rich_draws(table):
    drawn = StringIO()
    Console(file=drawn, width=200, no_color=True).print(table.rich())
    lines = [line.rstrip() for line in drawn.getvalue().splitlines()]
    assert [line.rstrip() for line in table.text().split("\n")] == lines


def test_without_rich_a_report_is_plain_text():
    """And the command says in a line what to install."""
    code = """
import sys, torch
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('rich', 'typer'):
            raise ModuleNotFoundError(f'No module named {name!r}')
sys.meta_path.insert(0, Block())
sys.stderr.isatty = lambda: True  # where there would be a progress bar
import leannorm
report = leannorm.recalibrate(torch.nn.BatchNorm1d(3), [torch.randn(4, 3)])
report.print()
print(report)
from leannorm_command import main
sys.argv[1:] = ['info']
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :] != []
    needs = "leannorm: the command needs rich and typer (No module named 'rich'), the extra leannorm[cli]: "
    assert done.stderr == f"{needs}{sys.executable} -m pip install rich typer\n"
    assert done.returncode == 2


def test_a_tables_title_is_no_markup(capsys):
    class Titled(Odd):
        def parts(self):
            yield Table(["layer"], [["a" * 60]], "norms of [red]x[/red] and y[/a]")

    titled = Titled("titled", 0.0, {}, ())
    titled.print()
    for told in (str(titled), capsys.readouterr().out):
        assert "norms of [red]x[/red] and y[/a]" in told


def test_a_column_has_one_unit():
    tables = [part for part in MADE["profile"]().parts() if isinstance(part, Table)]
    units = [
        {unit for row in table.rows for unit in re.findall(r" ([KM]B)", row[column])}
        for table in tables
        for column in range(len(table.columns))
    ]
    assert {"KB"} in units
    assert all(len(one) <= 1 for one in units)


def test_what_lean_saved_is_one_line():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 4, 3))
    saved = leannorm.lean(budget=0.8)
    assert repr(saved) == "lean(no tensor saved)"
    for _ in range(2):
        with saved:
            loss = model(torch.randn(2, 3, 20, 20)).sum()
        loss.backward()
    kept, rebuilt = saved.kept_bytes / 1e3, saved.rebuilt_bytes / 1e3
    told = f"lean({kept:.1f} KB kept, {rebuilt:.1f} KB to rebuild; plan: {saved.plan.ratio:.2f} of the bytes"
    assert repr(saved).startswith(told)
    assert repr(saved).endswith("; ".join(saved.reasons) + ")")
