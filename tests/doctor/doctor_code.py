"""Remedies as code: each of a report's, run as printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import leannorm
from leannorm.report.doctor.remedies import OR, remedies


def alternatives(findings: Sequence[Any]) -> list[str]:
    """The remedy of some findings, and each that is named in its place, as the report prints them."""
    lines = remedies(findings)
    main = [line for line in lines if not line.startswith(OR)]
    return ["\n".join(main), *(line.removeprefix(OR) for line in lines if line.startswith(OR))]


def run_as_printed(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Runs it where only torch, leannorm and the names that findings introduce are known."""
    names = {"torch": torch, "leannorm": leannorm, **names}
    exec(compile(code, "remedy", "exec"), names)
    return names


def code_in(remedy: str) -> str:
    """What of it is no comment."""
    return "\n".join(line for line in remedy.split("\n") if not line.startswith("#"))
