"""What is published: the page of a package index has no relative link, and the source archive builds."""

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RELEASE = ROOT / "site" / "release.py"
pytestmark = pytest.mark.skipif(not RELEASE.exists(), reason="an installed copy is no part of the tree")
ADDRESS, TAG = "https://host.org/owner/leannorm", "v0.1.0"


def release():
    return runpy.run_path(str(RELEASE))


def test_the_page_of_an_index_has_absolute_links(tmp_path):
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"\]\(([^)\s]+)\)", text))
    for target in targets:  # the files that it links to
        (tmp_path / target.partition("#")[0]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / target.partition("#")[0]).touch()
    shutil.copy(ROOT / "README.md", tmp_path)
    release()["main"](ADDRESS, TAG, tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert {t for t in re.findall(r"\]\(([^)\s]+)\)", page) if not t.startswith("https://")} == set()
    assert f"]({ADDRESS}/blob/{TAG}/docs/start.md)" in page
    assert re.search(rf"!\[[^]]+\]\({ADDRESS}/raw/{TAG}/docs/lean\.svg\)", page)
    assert page.replace(f"{ADDRESS}/blob/{TAG}/", "").replace(f"{ADDRESS}/raw/{TAG}/", "") == text
    project = (tmp_path / "pyproject.toml").read_text()
    assert f'[project.urls]\nHomepage = "{ADDRESS}"\n' in project
    assert len(project.splitlines()) == len((ROOT / "pyproject.toml").read_text().splitlines()) + 7


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("[`a`](DESIGN.md#one-idea)", f"[`a`]({ADDRESS}/blob/{TAG}/DESIGN.md#one-idea)"),
        ("[a](https://b.org) [b](#c)", "[a](https://b.org) [b](#c)"),
        ("```python\nx[1](y)\n```\n", "```python\nx[1](y)\n```\n"),
    ],
)
def test_links_are_those_of_the_text(text, page):
    assert release()["page"](text, ADDRESS, TAG, ROOT) == page


def test_what_does_not_fit_stops_the_release():
    with pytest.raises(SystemExit, match=r"links to docs/none\.md"):
        release()["page"]("[a](docs/none.md)", ADDRESS, TAG, ROOT)
    with pytest.raises(SystemExit, match="the tag is v9"):
        release()["project"]((ROOT / "pyproject.toml").read_text(), ADDRESS, "v9")


def test_every_version_is_the_same():
    said = {
        re.search(r'(?m)^(?:__)?version(?:__)?(?: =|:) "?([\d.]+)"?$', (ROOT / name).read_text())[1]
        for name in ("pyproject.toml", "CITATION.cff", "src/leannorm/_version.py")
    }
    assert len(said) == 1


def test_the_source_archive_has_what_a_build_needs_and_no_test(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "csrc", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "src" / "leannorm" / "_C.so").touch()  # of this machine alone
    subprocess.run([sys.executable, "setup.py", "-q", "sdist"], cwd=tmp_path, check=True, capture_output=True)
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    here = {p.relative_to(ROOT) for folder in ("csrc", "src/leannorm") for p in (ROOT / folder).rglob("*")}
    sources = {str(path) for path in here if path.suffix in (".py", ".cpp", ".h", ".html", ".typed")}
    assert {*sources, "setup.py", "src/leannorm/py.typed", "src/leannorm_command.py", "LICENSE"} <= names
    assert not [name for name in names if name.startswith("tests") or name.endswith((".so", ".reason"))]
