"""A link to the repository in the footer, if the clone knows where it came from.

Material's own link would ask the host for the number of stars; our pages load nothing from other hosts.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    folder = Path(config.config_file_path).parent
    git = ["git", "-C", str(folder), "remote", "get-url", "origin"]
    try:
        address = subprocess.run(git, capture_output=True, text=True).stdout.strip().removesuffix(".git")
    except OSError:
        return config
    if address.startswith("https://") and "@" not in address:
        link = {"icon": "fontawesome/brands/git-alt", "link": address, "name": "Repository"}
        config.extra["social"] = [link]
    return config
