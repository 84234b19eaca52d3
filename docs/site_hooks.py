"""What mkdocs does for the site: README is the first page, and links out of docs/ lead to the repository."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
FIRST = "index.md"
LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )([^)#\s]+)", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Make the first page of README.md."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, FIRST, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Have links lead to pages of the site if there are such, and else to the repository."""
    published = f"{config.repo_url}/blob/main/"
    raw = f"{config.repo_url.replace('github.com', 'raw.githubusercontent.com')}/main/docs/"
    above = PurePosixPath(page.file.src_uri).parent

    def rewritten(found: re.Match[str]) -> str:
        start, target = found.groups()
        inside = target.removeprefix(f"{published}docs/").removeprefix(raw)
        if page.file.src_uri == FIRST and inside != target and files.get_file_from_path(inside):
            return f"{start}{inside}"
        if target.startswith(("http://", "https://", "mailto:")):
            return found[0]
        place = (ROOT / "docs" / above / target).resolve()
        is_elsewhere = place.exists() and not files.get_file_from_path(os.path.relpath(place, ROOT / "docs"))
        return f"{start}{published}{place.relative_to(ROOT).as_posix()}" if is_elsewhere else found[0]

    return LINK.sub(rewritten, markdown)
