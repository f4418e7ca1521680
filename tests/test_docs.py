"""Every example in a docstring and on a docs page runs and prints what it says."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import yaml

import leannorm
from benchmarks.architectures import import_torchvision
from leannorm.report.fitting import mended_by

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "README.zh.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture
def no_pass_is_small():
    """In place of the fixture for all other tests: examples run as users run them, small passes included."""


def names():
    return [
        m.name
        for m in pkgutil.walk_packages(leannorm.__path__, "leannorm.")
        if not m.name.endswith(("__main__", "._C", "._nodes"))
    ]


@pytest.mark.parametrize("name", names())
def test_examples_in_docstrings(name):
    assert doctest.testmod(importlib.import_module(name), optionflags=OPTIONS).failed == 0


def name_of(page):
    return str(page.relative_to(ROOT))


def run(page):
    """Runs every python block of a page, in one namespace: those with prompts print what they say."""
    names = {"__name__": "__main__"}
    text = page.read_text()
    for found in BLOCK.finditer(text):
        code, line = found[1], text.count("\n", 0, found.start(1))
        if ">>> " in code:
            test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), line)
            assert doctest.DocTestRunner(optionflags=OPTIONS).run(test, clear_globs=False).failed == 0
            names = test.globs
        else:
            exec(compile("\n" * line + code, page, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_examples_on_pages(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where examples write their files
    text = page.read_text()
    by_itself = re.search(r"^(?:>>> )?(?:from|import) (?:timm|transformers|torchvision)", text, re.M)
    if by_itself or "interop.lightning import" in text:
        import_torchvision()
    run(page)


NEEDS_TORCHVISION = (
    r"(?:^(?:>>> |# )?(?:from|import) |pip install .*)(?:timm|transformers|torchvision|lightning)\b"
)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_that_imports_torchvision_says_what_to_do_where_it_does_not_fit(page):
    """Itself, or by a library."""
    text = page.read_text()
    if re.search(NEEDS_TORCHVISION, text, re.M) or "interop.lightning import" in text:
        assert "`leannorm info`" in text
        assert mended_by("2.13.0+cpu").replace("torch==2.13.0", "torch") in text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_example_stands_in_a_python_block(page):
    """Others would not be run."""
    rest = BLOCK.sub("", page.read_text())
    assert ">>> " not in rest
    assert set(re.findall(r"^ *```(\w+)", rest, re.M)) <= {"console"}


@pytest.mark.parametrize("page", sorted({*PAGES, *ROOT.glob("[A-Z]*.md")}), ids=name_of)
def test_every_link_to_a_file_leads_to_one(page):
    """The site's own test looks at links as browsers see them, this one at pages as they lie in the tree."""
    rest = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.M | re.S)
    for address in re.findall(r"\]\(([^)\s]+)\)", rest):
        if not re.match(r"https?:|#", address):
            assert (page.parent / address.partition("#")[0]).exists(), address


OURS = {*PAGES, *ROOT.glob("[A-Z]*.md"), ROOT / "csrc/README.md"} - {ROOT / "docs/comparison.md"}  # of others


@pytest.mark.parametrize("page", sorted(OURS), ids=name_of)
def test_every_file_and_module_that_a_page_names_is_there(page):
    """As the tree, the package or the page's folder has them: a file that moves takes its name along."""
    text = page.read_text()
    for name in re.findall(r"(?<![\w/.<-])((?:\w+/)+\w+\.(?:py|h|cpp|yml))\b", text):
        assert any((folder / name).is_file() for folder in (ROOT, ROOT / "src/leannorm", page.parent)), name
    for name in re.findall(r"python -m (benchmarks[\w.]*)", text):
        path = ROOT.joinpath(*name.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), name
    for line in re.findall(r"(?:^    |`)make ([a-z ]+)", text, re.M):
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", makefile, re.M) for target in line.split()), line


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == leannorm.__version__
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


@pytest.mark.parametrize("form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=name_of)
def test_an_issue_form_has_what_the_platform_asks_for(form):
    content = yaml.safe_load(form.read_text())
    if form.name == "config.yml":
        assert content == {"blank_issues_enabled": True}
        return
    assert {"name", "description", "body"} <= set(content)
    asked = [part for part in content["body"] if part["type"] != "markdown"]
    assert all(part["attributes"]["label"] for part in asked)
    assert len({part["id"] for part in asked}) == len(asked)
    assert any(part.get("validations", {}).get("required") for part in asked)


def test_contributors_are_told_the_rooms_of_the_design():
    """The line of rooms, from `ops` on, is DESIGN.md's."""
    told, designed = (
        re.search(r"^    (?:.*\bops\b) ← (.+)$", (ROOT / name).read_text(), re.M)[1]
        for name in ("CONTRIBUTING.md", "DESIGN.md")
    )
    assert told == designed


def test_the_translation_is_of_this_readme():
    """The same sections, links, commands and numbers, in the same order; its comments are translated."""
    pages = ((ROOT / name).read_text() for name in ("README.md", "README.zh.md"))
    readme, translated = (re.sub(r"(?s)<!--.*?-->", "", page) for page in pages)
    assert len(re.findall(r"(?m)^## ", readme)) == len(re.findall(r"(?m)^## ", translated))
    readme = readme.replace("English | [中文](README.zh.md)\n", "")
    translated = translated.replace("[English](README.md) | 中文\n", "")
    for what in (
        r"\]\(([^)]+)\)",
        r"(?m)^(?:    |>>> |\.\.\. )(.*?)(?: +#.*)?$",
        r"\*?\*?\b\d+\.\d+\b\*?\*?",
    ):
        assert re.findall(what, readme) == re.findall(what, translated)
    assert sorted(re.findall(r"`[^`\n]+`", readme)) == sorted(re.findall(r"`[^`\n]+`", translated))


def test_pages_tell_one_number_for_one_measurement():
    """What the first pages say of a network under `lean()` is what docs/measured.md says of it."""

    def row(page, model):
        """The three numbers of each setting in the first row that begins with the model."""
        line = re.search(rf"(?m)^\| {model}\b.*$", (ROOT / page).read_text())[0]
        numbers = re.findall(r"(?<![\d.])\d\.\d\d(?![\d.])", line)
        return [tuple(numbers[i : i + 3]) for i in range(0, len(numbers), 3)]

    names = {"ResNet-50": "resnet50", "ViT-S": "vit_small_patch16_224"}
    for page in ("README.md", "README.zh.md", "docs/index.md"):
        for here, there in names.items():
            cells = [
                f"{float(kept):.0%}, {float(peak):.0%}, +{float(time) - 1:.0%}".replace(
                    "%", "\N{NO-BREAK SPACE}%"
                )
                for kept, peak, time in row("docs/measured.md", there)
            ]
            shown = f" | {cells[0]} | {cells[2]} |"  # of lean() and of lean("conv")
            assert re.search(rf"(?m)^\| {here}\b.*?{re.escape(shown)}", (ROOT / page).read_text()), (
                page,
                here,
            )
    for model in ("resnet50", "efficientnet_b0", "convnext_tiny", "vit_small_patch16_224"):
        assert row("docs/recipes/vision.md", model) == row("docs/measured.md", model)[1:], model
