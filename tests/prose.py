"""Checks the English of the pages, by proselint's rules and by the words of prose.json: `make check` runs it.

    python tests/prose.py

Of prose.json, `instead` has words for which there is a better one, `phrases` those that only comments,
docstrings and most pages are without, and `off` the rules of proselint that are wrong here, each with the
reason.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_FILE = json.loads((ROOT / "prose.json").read_text(encoding="utf-8"))
INSTEAD, PHRASES, OFF = _FILE["instead"], _FILE["phrases"], _FILE["off"]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(
        ROOT / f"{name}.md"
        for name in ("README", "README.zh", "CONTRIBUTING", "SECURITY", "CHANGELOG", "DESIGN")
    ),
]
UNREAD = {"CHANGELOG.md"}  # pages without `phrases`
# blocks first: in them a backtick may stand alone
_NO_PROSE = (
    r"(?s:<!--.*?-->)|(?ms:^ *```.*?^ *```$)|(?m:^ {4,}.*?$)|(?m:^!!! \w+)",  # the last are mkdocs's
    r"(`+)[^`]*\1|\]\([^)]*\)",
)


def prose(page: str) -> str:
    """What a reader reads as English: a dot stands for each character of code, addresses and comments."""
    for pattern in _NO_PROSE:
        page = re.sub(pattern, lambda found: re.sub(r"[^\n]", "·", found[0]), page)
    return page


def avoided(page: Path) -> dict[str, str]:
    """The words that this page is without, and what to write."""
    return INSTEAD if page.name in UNREAD else INSTEAD | PHRASES


def places(text: str, words: dict[str, str]) -> Iterator[tuple[int, str, str]]:
    """Where a text has one of the words: the position, the word, and what to write."""
    for word, better in words.items():
        for found in re.finditer(rf"(?i)(?<![\w-])(?:{word})\b", text):
            yield found.start(), found[0], better


@cache
def _register() -> None:
    from proselint.checks import __register__
    from proselint.registry import CheckRegistry

    CheckRegistry().register_many(__register__)


def findings(page: Path, text: str, off: Iterable[str] = OFF) -> list[tuple[int, str]]:
    """Line and message of all that is to be changed, without what some of proselint's rules find."""
    from proselint.config import DEFAULT
    from proselint.tools import LintFile

    _register()
    # the first name that a rule begins with decides, so those that are off come before their groups
    rules: Any = {"max_errors": 1000, "checks": dict.fromkeys(off, False) | DEFAULT["checks"]}
    text = prose(text)
    found = [
        (text.count("\n", 0, at) + 1, f"{word!r}: write {better}")
        for at, word, better in places(text, avoided(page))
    ]
    file = LintFile(str(page), text)
    for result in file.lint(rules):
        check = result.check_result
        start, end = check.span
        if "\n" not in file.content[start:end].strip():  # a heading and the text below it are two
            line = file.content.count("\n", 0, start)  # it begins with a line of its own
            found.append((line, f"{check.message} ({check.check_path})"))
    return sorted(found)


def main() -> int:
    wrong = 0
    for page in PAGES:
        for line, message in findings(page, page.read_text(encoding="utf-8")):
            print(f"{page.relative_to(ROOT)}:{line}: {message}")
            wrong += 1
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
