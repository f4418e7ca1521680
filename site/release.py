"""Makes the tree ready for a package index: an index shows neither the repository nor its files.

    python site/release.py https://github.com/OWNER/leannorm v0.1.0

Links and pictures of README.md become addresses in the repository at that tag, and pyproject.toml gets the
addresses of the project. `release.yml` runs this before anything is built; a clone does not know these
addresses.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LINK = re.compile(r"(!?)\[((?:[^\]`]|`[^`]*`)*)\]\(([^)\s]+)\)")
FENCED = re.compile(r"(?ms)(^```.*?^```$)")
PLACES = {
    "Homepage": "",
    "Repository": "",
    "Documentation": "/blob/{tag}/docs/start.md",
    "Changelog": "/blob/{tag}/CHANGELOG.md",
    "Issues": "/issues",
}


def page(text: str, address: str, tag: str, root: Path) -> str:
    """The README's text with absolute links; a link to a missing file is an error."""

    def absolute(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        if re.match(r"\w+:|#", target):
            return found[0]
        if not (root / target.partition("#")[0]).is_file():
            raise SystemExit(f"README.md links to {target}, which is not there")
        return f"{picture}[{words}]({address}/{'raw' if picture else 'blob'}/{tag}/{target})"

    parts = FENCED.split(text)  # every second part is code
    return "".join(part if i % 2 else LINK.sub(absolute, part) for i, part in enumerate(parts))


def project(text: str, address: str, tag: str) -> str:
    """pyproject.toml with the project's addresses."""
    version = re.search(r'(?m)^version = "(.*)"$', text)
    if version is None or tag != f"v{version[1]}":
        raise SystemExit(f"the tag is {tag}, and pyproject.toml has the version {version and version[1]}")
    lines = [f'{name} = "{address}{place.format(tag=tag)}"' for name, place in PLACES.items()]
    return text.replace(
        "[project.scripts]\n", "\n".join(["[project.urls]", *lines, "", "[project.scripts]\n"])
    )


def main(address: str, tag: str, root: Path) -> None:
    for name, change in (
        ("pyproject.toml", lambda text: project(text, address, tag)),
        ("README.md", lambda text: page(text, address, tag, root)),
    ):
        file = root / name
        file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:3], Path(__file__).parents[1])
