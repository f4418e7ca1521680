"""Formulas as MathML, which browsers render themselves: pages need no script and nothing from another
host."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

# what arithmatex turns $...$ and $$...$$ into
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)


def on_page_content(content: str, **_: Any) -> str:
    return FORMULA.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    tag, bracket, formula = found.groups()
    drawn = convert(html.unescape(formula).strip(), display="block" if bracket == "[" else "inline")
    return f'<{tag} class="formula">{drawn}</{tag}>'
