"""`leannorm info`: the installed versions, and the backends that can run here."""

from __future__ import annotations

from leannorm.cli.options import JsonFile, tell


def info(json: JsonFile = None) -> None:
    """Print versions, devices, threads and backends, with the reasons for each backend that cannot run."""
    from leannorm.report.info import installation

    tell(installation(), json)
