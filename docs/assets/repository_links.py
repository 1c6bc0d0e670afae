"""A hook of mkdocs: pages beside docs/ in the repository are on the site too, and links lead to them there.

On a Git host a link is a path in the repository. On the site the content of docs/ is at the top.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages at the top of the repository that the site has, at its top."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages beside docs/."""
    for name in BESIDE:
        files.append(File.generated(config, name, content=(Path(config.config_file_path).parent / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to where their targets are on the site."""
    source = page.file.src_uri
    if source == "README.md":
        page.meta["search"] = {"exclude": True}  # it has the words of every question, and only links to the answers
    folder = posixpath.dirname(source if source in BESIDE else f"docs/{source}")

    def lead(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        if target not in BESIDE and source not in BESIDE:
            return match[0]
        on_site = target.removeprefix("docs/")
        return f"]({posixpath.relpath(on_site, posixpath.dirname(source) or '.')}{match[2] or ''})"

    return re.sub(r"\]\((?!\w+:|#)([^)#]+)(#[^)]*)?\)", lead, markdown)
