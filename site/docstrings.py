"""Docstrings by the template of `tests/test_docstrings.py`, as Markdown.

The template is plain text, for `help()`. Each part becomes a paragraph with its label in bold, each example a
block of code. Formulas are indented, which is code in Markdown already.

The arguments of layers' constructors are read at run time, because many inherit them from torch.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

import griffe

LABELS = re.compile(r"^((?:Args|Returns|Shapes|Dtypes|Kept|Raises|Source)(?:, [A-Z]\w+)*):(?=\s|$)", re.M)

PROSE = re.compile(r"(?m)^(?! {4}).*$")  # lines that are not formulas
CODE_OR_STAR = re.compile(r"(`[^`]*`)|\*")


def markdown_of(docstring: str) -> str:
    text, prompt, example = docstring.partition(">>>")
    text = PROSE.sub(lambda line: CODE_OR_STAR.sub(lambda found: found[1] or r"\*", line[0]), text)
    text = LABELS.sub(r"\n**\1**:", text)
    if prompt:
        text = f"{text.rstrip()}\n\n```python\n{prompt}{example.rstrip()}\n```"
    return text.strip() + "\n"


class Template(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown_of(obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if not cls.path.startswith("leannorm.nn.") or cls.name.startswith("_") or "__init__" in cls.members:
            return
        made = getattr(import_module(cls.module.path), cls.name)
        arguments = [
            griffe.Parameter(
                parameter.name,
                kind=getattr(griffe.ParameterKind, parameter.kind.name.lower()),
                default=None if parameter.default is parameter.empty else repr(parameter.default),
            )
            for parameter in inspect.signature(made.__init__).parameters.values()
        ]
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*arguments)))
