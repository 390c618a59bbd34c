"""The command that installs what an extra needs."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    """`pip install ...` that adds an extra to autopar as it is installed here."""
    return f"pip install '{requirement(extra)}'"


def requirement(extra: str) -> str:
    """What pip is to install: the folder or the repository that autopar was installed from, with an extra.

    autopar is installed from a checkout, so its name alone says nothing to pip.
    """
    try:
        origin = json.loads(distribution("autopar").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url = str(origin.get("url", ""))
    if "vcs_info" in origin:
        version = origin["vcs_info"]
        return f"autopar[{extra}] @ {version['vcs']}+{url}@{version['commit_id']}"
    folder = unquote(urlsplit(url).path) if url.startswith("file:") else ""
    if "dir_info" in origin and Path(folder).is_dir():
        return f"{folder}[{extra}]"
    return f"autopar[{extra}]"
