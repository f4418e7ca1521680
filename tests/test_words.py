"""The pages speak as torch's own documentation does: words that sound like a translation have better ones."""

import inspect
import re
from pathlib import Path

import pytest

from leannorm.saving import reasons

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG", "DESIGN")),
]
INSTEAD = {
    r"stock": "baseline, or plain PyTorch",
    r"held": "kept, or saved for backward",
    r"beside": "with, next to, or in addition to",
    r"told|tells": "reported, or says",
    r"serves": "is used",
    r"mend(?:s|ed|ing)?": "fix",
    r"of the clock": "wall-clock",
    r"to the bit": "bit for bit",
    r"(?:by|in) turns": "alternating",
    r"rooms?": "package, or memory",
}


def prose(page):
    """What a reader reads as English: no code, no addresses, no comments."""
    text = re.sub(r"(?s)<!--.*?-->", "", page)
    text = re.sub(r"(?ms)^ *```.*?^ *```$|^ {4,}.*?$", "", text)
    return re.sub(r"`+[^`]*`+|\]\([^)]*\)", "", text)


def found_in(page):
    return {w: use for w, use in INSTEAD.items() if re.search(rf"(?i)(?<![\w-])(?:{w})\b", prose(page))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_word_for_which_there_is_a_better_one(page):
    assert found_in(page.read_text()) == {}


def test_such_a_word_is_found_in_prose_alone():
    assert set(found_in("Bytes held, of stock's, beside torch")) == {"stock", "held", "beside"}
    assert found_in("`lean(held=hooks)` keeps a mushroom; see [more](rooms.md)\n\n    what is held\n") == {}


def test_a_change_is_one_line():
    for line in (ROOT / "CHANGELOG.md").read_text().splitlines():
        assert len(line) <= 160, line
    unreleased = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert re.findall(r"(?m)^### (.*)$", unreleased) == ["Added", "Changed", "Fixed"]


def test_the_faq_quotes_what_reasons_say():
    """Whoever searches the page for the sentence that was printed finds it."""
    source = re.sub(r'"\s*\n\s*f?[\'"]', "", inspect.getsource(reasons))
    parts = (ROOT / "docs" / "faq.md").read_text().split("\n## ")
    rows = "\n".join(part for part in parts if "`saved.reasons` says |" in part)
    quoted = [
        quote for row in re.findall(r"(?m)^\| (`.*?`) \|", rows) for quote in row.strip("`").split("`, `")
    ]
    assert len(quoted) > 12
    for quote in quoted:
        for words in quote.split("..."):
            assert words.strip("= ") in source, quote
