"""What pages and pictures say of measurements is what the files of `benchmarks/results/` say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks import pages, pictures, record

ROOT = Path(__file__).parent.parent
TEMPLATES = [ROOT / "README.template.md", ROOT / "README.zh.template.md"]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *TEMPLATES]
FILLED = [page for page in PAGES if page not in TEMPLATES and "[[[cog" in page.read_text()]

# What looks measured: a fraction, or a number with a unit. Not a version, whose name comes before it.
NUMBER = re.compile(
    r"(?<![\w.])(?:\d+\.\d+(?:e[-−]\d+)?|\d[\d,]* ?(?:%|[mµnu]?s\b|seconds?\b|minutes?\b|[kMGT]i?B\b))"
)
VERSION = re.compile(
    r"(?:torch|torchtune|torchao|axolotl|Triton|Python|transformers|accelerate|PEFT|TRL|Lightning|MONAI|NCCL|"
    r"timm|diffusers|Flax|Keras|onnxruntime|fvcore|glibc|QuACK|Liger|arXiv:)[^\w|.]*\d+(?:\.\d+)+"
)
# Numbers of a page that nobody measured: settings, defaults, sizes that the code sets, constants of a model,
# what others have published, what a sample prints
GIVEN = {
    "README.template.md": "4MiB",
    "README.zh.template.md": "4MiB",
    "docs/batch_norm_act.md": "0.01",
    "docs/comparison.md": "0.6 0.8 2% 2.13",
    "docs/compatibility.md": "0.4 2.10 2.11 2.12 2.13 2.14 2.15 300s 6GB 6MiB",
    "docs/compiled.md": "3% 12% 2.14",
    "docs/doctor.md": "0.5 0.983 0.997 1.3 1.84 20s",
    "docs/examples.md": "30MB 4MiB",
    "docs/gpu.md": "10.0 12.0 2% 3.6 3.9 8.0 8.6 9.0",
    "docs/interop.md": "0.01 0.8999999761581421 0.9 1.23 3.3",
    "docs/lean.md": "4MiB",
    "docs/measured.md": "32MiB 480MiB",
    "docs/memory.md": "2.36",
    "docs/operator.md": "0.1 0.9 0.99",
    "docs/profile.md": "0.5 24GB 24GiB 4MiB 500MB",
    "docs/recipes/language.md": "4MiB",
    "docs/recipes/port.md": "0.1 0.9 0.99",
    "docs/recipes/trainers.md": "4MiB",
    "docs/recipes/vision.md": "4MiB",
    "docs/scaling.md": "1.25 1MiB 2.23 2.4 200GB 25GB 3µs 50µs 5µs 8ms",
    "docs/start.md": "4MiB",
    "docs/statistics.md": "0.1 0.19",
    "docs/sync.md": "10s 1MiB 2.13",
}


def cog(*arguments):
    command = [sys.executable, "-m", "cogapp", "-P", "-U", "-I", ".", "-p"]
    command += ["from benchmarks.pages import *", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_pages_say_what_was_measured(tmp_path):
    assert len(FILLED) >= 10
    done = cog("--check", "--diff", *FILLED)
    assert done.returncode == 0, f"`make pages` writes them anew:\n{done.stdout}{done.stderr}"
    wrong = tmp_path / "index.md"
    text = (ROOT / "docs" / "index.md").read_text()
    line = next(row for row in text.split("\n") if row.startswith("| ResNet-50"))
    wrong.write_text(text.replace(line, re.sub(r"\| \d+\s%,", "| 1 %,", line, count=1)))
    assert cog("--check", wrong).returncode != 0


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_a_readme_is_what_its_template_gives(template):
    """With what the template's comments print, and without the comments."""
    rendered = cog("-d", template)
    assert rendered.returncode == 0, rendered.stderr
    page = (ROOT / template.name.replace(".template", "")).read_text()
    assert page == rendered.stdout, "`make pages` writes it anew"
    assert "cog" not in page


def numbers_by_hand(text):
    """What looks measured outside of what is filled, of code and of addresses."""
    text = re.sub(r"(?s)<!-- \[\[\[cog.*?\[\[\[end\]\]\] -->", "", text)
    text = re.sub(r"(?ms)^ *```.*?^ *```$|^    .*?$", "", text)
    text = re.sub(r"`+[^`]*`+|\]\([^)]*\)", "", text)
    return {one.replace(" ", "") for one in NUMBER.findall(VERSION.sub("", text))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_measurement_that_was_typed_by_hand(page):
    """It belongs into a comment that cog fills from a file of results; GIVEN has what nobody measured."""
    given = set(GIVEN.get(str(page.relative_to(ROOT)), "").split())
    found = numbers_by_hand(page.read_text())
    assert found <= given, f"typed by hand: {sorted(found - given)}"
    assert given <= found, f"no longer there: {sorted(given - found)}"


def test_a_measurement_typed_by_hand_is_found():
    text = "takes 0.98 of the time, 86 % of 12 ms, | 1.82 | with torch 2.13 and `budget=0.3`; 53.4 MB"
    assert numbers_by_hand(text) == {"0.98", "86%", "12ms", "1.82", "53.4"}


def drawn_from(name, rows):
    """The picture, which says that it was drawn from these rows."""
    drawn = (ROOT / "docs" / name).read_text()
    said = re.search(r"<dc:description>(.*?)</dc:description>", drawn)[1].replace("&quot;", '"')
    assert json.loads(said) == json.loads(json.dumps(rows))
    return drawn


@pytest.mark.parametrize("name", pictures.pictures())
def test_pictures_show_what_was_measured(name):
    drawn = drawn_from(name, pictures.pictures()[name])
    for panel in pictures.pictures()[name]:
        assert panel in drawn
    assert f">{pictures.PEAK}<" in drawn
    assert (f">{pictures.KEPT}<" in drawn) is (name != "compiled.svg")


def test_the_picture_of_overheads_shows_what_was_measured():
    drawn = drawn_from("overhead.svg", pictures.overheads())
    for title in pictures.overheads():
        assert title in drawn


def test_a_picture_is_the_same_each_time_and_has_a_dot_for_every_setting(tmp_path):
    shown = [("baseline", 1.0, 1.0), ("lean()", 0.5, 1.02), ('lean("conv")', 0.2, 1.2)]
    shown += [("checkpoint, every block", 0.3, 1.3)]
    sizes = (pictures.KEPT, pictures.PEAK)
    found = [(name, dict.fromkeys(sizes, size), time) for name, size, time in shown]
    for name in ("a.svg", "b.svg"):
        pictures.picture(tmp_path / name, {"ResNet-50, float32": found})
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    for words in ("baseline", "lean()", '"conv"', "every block", *sizes):
        assert words in drawn
    assert drawn.count(">every block<") == len(sizes)


def row(model, time, **more):
    return {"model": model, "setting": "norm", "kept": 0.5, "peak": 0.6, "time": time, **more}


def test_a_run_takes_the_place_of_its_own_rows_alone(tmp_path, monkeypatch):
    file = tmp_path / "some.json"
    runs = [
        {"processor": "one", "rows": [row("a", 1.1), row("b", 1.2)]},
        {"processor": "two", "rows": [row("c", 1.3)]},
    ]
    file.write_text(json.dumps(runs))
    record.write(file, [row("b", 1.0)], "model", "setting")
    record.write(file, [row("d", 1.4)], "model", "setting")
    record.write(file, [row("c", 1.5)], "model", "setting")
    rows = {r["model"]: (r["time"], r["about"]["processor"]) for r in record.read(file)}
    here = record.processor()
    assert rows == {"a": (1.1, "one"), "b": (1.0, here), "c": (1.5, here), "d": (1.4, here)}
    assert len(json.loads(file.read_text())) == 2  # of this machine, day and code there is one run
    (a,) = pages.find(str(file.with_suffix("")), model="a")
    assert (str(a), a.columns) == ("0.50 / 0.60 / 1.10", "0.50 | 0.60 | 1.10")
    with pytest.raises(ValueError, match="not enough values"):
        pages.one(str(file.with_suffix("")), model="e")


def test_ranges_and_machines_are_told_once():
    run = {"processor": "A, 1 MiB", "threads": 2, "torch": "2", "date": "2026-11-22", "commit": "c"}
    rows = [pages.Measured(0.5, 0.6, time, tuple(run.items())) for time in (1.05, 1.2, 1.1)]
    assert pages.span("time", *rows) == "5–20 %"
    assert pages.span("held", *rows) == "50 %"
    assert rows[0].percents == "50 % | 60 % | +5 %"
    assert [pages.more(time) for time in (0.91, 1.004, 1.5)] == ["−9 %", "0 %", "+50 %"]
    assert pages.where(*rows) == "2 cores of A, torch 2, 2026-11-22 (c)"
