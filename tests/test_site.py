"""The site builds without a warning, its links lead somewhere, and it loads nothing from other hosts."""

import html
import inspect
import os
import re
import runpy
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urldefrag, urlparse

import pytest
from test_docstrings import PUBLIC, ROOMS

ROOT = Path(__file__).parent.parent
NEEDED = ["mkdocs", "material", "mkdocstrings", "latex2mathml"]
LOADED = {  # what a browser fetches by itself
    ("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src"),
    ("object", "data"), ("use", "href"),
}  # fmt: skip
missing = [name for name in NEEDED if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert built.stderr.strip() == ""
    return folder


class Page(HTMLParser):
    """A page's `ids`, its `links` and what it `loads`: (tag, address)."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("id", "name") and value:
                self.ids.add(value)
            if (tag, name) in LOADED and ("rel", "canonical") not in attributes:
                self.loads.append((tag, value))
            elif name == "href":
                self.links.append((tag, value))


@cache
def page_of(path):
    return Page(path.read_text())


def pages_of(site):
    found = sorted(site.rglob("*.html"))
    assert len(found) > 40
    return [path for path in found if path.name != "404.html"]  # its addresses begin at the host's root


def test_every_link_inside_the_site_leads_somewhere(site):
    dead, followed = [], 0
    for path in pages_of(site):
        for tag, address in page_of(path).links + page_of(path).loads:
            there, part = urldefrag(address)
            if urlparse(there).scheme:
                continue
            followed += 1
            target = (path.parent / unquote(there)).resolve() if there else path
            within = target.suffix == ".html" and target.is_file()
            if not target.is_file() or (part and within and unquote(part) not in page_of(target).ids):
                dead.append((path.name, tag, address))
    assert dead == []
    assert followed > 2000


def test_a_page_loads_nothing_from_another_host(site):
    for path in pages_of(site):
        foreign = [address for _, address in page_of(path).loads if urlparse(address).netloc]
        assert foreign == [], path
    for path in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", path.read_text()), path


def test_the_search_works_from_the_disk(site):
    """Its index is a script, as a page read from a file may fetch nothing, and its worker runs in a frame."""
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")
    for path in pages_of(site):
        assert [a for tag, a in page_of(path).loads if tag == "script" and "iframe-worker.js" in a], path


@pytest.mark.parametrize(
    ("origin", "link"),
    [
        ("https://host.org/a/b.git", "https://host.org/a/b"),
        ("https://name:word@host.org/a", None),
        ("/a", None),
    ],
)
def test_the_footer_links_to_the_repository_where_the_clone_knows_it(tmp_path, origin, link):
    for command in (["init", "--quiet"], ["remote", "add", "origin", origin]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    hook = runpy.run_path(str(ROOT / "site" / "repository.py"))["on_config"]
    config = hook(SimpleNamespace(config_file_path=str(tmp_path / "mkdocs.yml"), extra={}))
    assert [one["link"] for one in config.extra.get("social", [])] == ([link] if link else [])


def test_formulas_are_drawn(site):
    text = (site / "derivations.html").read_text()
    assert text.count("<math") > 20
    assert "arithmatex" not in text
    assert not re.search(r"\\[a-z]+\{", re.sub(r"<annotation.*?</annotation>", "", text))


def test_the_reference_has_every_public_name(site):
    ids = set().union(*(page_of(path).ids for path in (site / "api").glob("*.html")))
    inner = [name for name in PUBLIC if name.rpartition(".")[0] in ROOMS]
    assert len(inner) > 55
    assert sorted(set(inner) - ids) == []


def test_the_reference_says_what_every_public_name_is_for(site):
    texts = {path.stem: plain_text(path) for path in (site / "api").glob("*.html")}
    for name, value in PUBLIC.items():
        room = name.rpartition(".")[0]
        page = "index" if room == "leannorm" else room.removeprefix("leannorm.")
        first = inspect.getdoc(value).splitlines()[0]
        assert words_of(first) in texts[page], name


def plain_text(path):
    return words_of(html.unescape(re.sub(r"<[^>]+>", "", path.read_text())))


def words_of(text):
    """Its words alone: code is marked on a page."""
    return " ".join(re.findall(r"\w+", text))


def test_a_reference_shows_arguments_and_the_template_s_parts(site):
    text = (site / "api" / "nn.html").read_text()
    for label in ("Shapes", "Dtypes", "Kept", "Raises", "Source"):
        assert f"<strong>{label}</strong>" in text
    assert "&gt;&gt;&gt;" in text
    plain = re.sub(r"<[^>]+>", "", text)
    assert re.search(r"BatchNorm1d\(\s*num_features,\s*eps=1e-05,", plain)  # which it inherits
