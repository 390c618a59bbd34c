"""Add files outside `docs/` that the documentation links to as pages of the site: a hook of mkdocs.

mkdocs reads only `docs/`, whose pages link to result tables, profiles and examples by paths that GitHub follows. Each
such file, and each file that it links to in turn, becomes a page under `repository/`, and links are rewritten. Programs
are shown as code. In `nav`, `decisions/*.md` means all decisions.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
_OUTSIDE = "repository/"
_DECISIONS = "decisions/"
_WIDE = f"{_OUTSIDE}benchmarks/results/"  # tables that need the full width
_LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}
# Links outside blocks and spans of code: the path, then the anchor.
_LINK = re.compile(r"^```.*?^```$|`[^`\n]+`|\]\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Replace a pattern in `nav` by the existing pages."""
    config.nav = [_listed(entry) for entry in config.nav]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the files that pages link to or `nav` names, and those that they link to."""
    waiting = [file.src_uri for file in files.documentation_pages()]
    named = re.findall(r"'(repository/[^']+)'", str(config.nav))
    for uri in named:
        files.append(_added(_path_of(uri), config))
    waiting += named
    while waiting:
        uri = waiting.pop()
        path = _path_of(uri)
        if not path.endswith(".md"):
            continue
        for link in _LINK.finditer((ROOT / path).read_text(encoding="utf-8")):
            target = link["path"] and _linked(path, link["path"])
            if target and (ROOT / target).is_file() and files.get_file_from_path(_uri_of(target)) is None:
                files.append(_added(target, config))
                waiting.append(_uri_of(target))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links between `docs/` and other files to their places on the site, and widen pages with wide tables."""
    uri = page.file.src_uri
    if uri.startswith((_OUTSIDE, _DECISIONS)):
        page.meta.setdefault("search", {"boost": 0.2})  # list guides first in search results
    if uri.startswith(_WIDE):
        page.meta.setdefault("hide", ["toc"])

    def turned(link: re.Match[str]) -> str:
        if not link["path"]:
            return link[0]
        there = posixpath.relpath(_uri_of(_linked(_path_of(uri), link["path"])), posixpath.dirname(uri))
        return f"]({there}{link['anchor'] or ''})"

    return _LINK.sub(turned, markdown)


def _listed(entry: Any) -> Any:
    if isinstance(entry, str):
        return entry
    ((title, inside),) = entry.items()
    if isinstance(inside, list):
        return {title: [_listed(one) for one in inside]}
    if "*" in inside:
        return {title: sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob(inside))}
    return entry


def _added(path: str, config: Any) -> File:
    """A file of the repository: Markdown and pictures unchanged, a program as a page with its code."""
    language = _LANGUAGES.get(Path(path).suffix)
    if language is None:
        return File.generated(config, _uri_of(path), abs_src_path=str(ROOT / path))
    text = (ROOT / path).read_text(encoding="utf-8")
    return File.generated(config, _uri_of(path), content=f"# `{path}`\n\n````{language}\n{text}\n````\n")


def _linked(path: str, target: str) -> str:
    """The target of a link in a file, as a path from the repository's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def _uri_of(path: str) -> str:
    """The place of a repository's file on the site, as mkdocs names sources."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{_OUTSIDE}{path}" + (".md" if Path(path).suffix in _LANGUAGES else "")


def _path_of(uri: str) -> str:
    """The inverse of `_uri_of`."""
    if not uri.startswith(_OUTSIDE):
        return f"docs/{uri}"
    path = uri.removeprefix(_OUTSIDE)
    shown = path.removesuffix(".md")
    return shown if Path(shown).suffix in _LANGUAGES else path
