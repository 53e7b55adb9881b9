"""Hooks of mkdocs.yml: the navigation from docs/README.md, and files outside docs/ that pages link to.

On a code host, pages link to files of the repository (`../benchmarks/README.md`). The site has a copy of each such
file at its path in the repository, and links are rewritten to it. The pages of docs/ are at the top of the site.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# A link's target without its anchor; URLs and anchors of the same page are not matched.
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")


def on_config(config: Any) -> Any:
    config.nav = navigation((ROOT / "docs/README.md").read_text(encoding="utf-8"))
    return config


def navigation(index: str) -> list[Any]:
    """Return the navigation: the headings of the index, each with the links of its list."""
    nav: list[Any] = [{"Documentation": "README.md"}]
    for section in index.split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        links = re.findall(r"\[([^\]]+)\]\(([^)]+)\)", body)
        pages = [{_title(text): _on_site(posixpath.normpath(f"docs/{target}"))} for text, target in links]
        nav.append({heading: pages})
    return nav


def _title(text: str) -> str:
    """Return the text of a link as a title. Titles of the navigation are not Markdown."""
    return text[0].upper() + text[1:].replace("`", "")


def on_files(files: Any, config: Any) -> Any:
    """Add every file outside docs/ that a page links to, and the files that these link to."""
    pending = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    known = set(pending)
    while pending:
        for target in _targets(pending.pop()):
            if target in known or not (ROOT / target).is_file():
                continue
            known.add(target)
            if target.startswith("docs/"):
                continue
            files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
            if target.endswith(".md"):
                pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page between their places in the repository and on the site."""
    here = page.file.src_uri
    source = here if page.file.generated_by else f"docs/{here}"

    def rewritten(link: re.Match[str]) -> str:
        target = _on_site(posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2])))
        return f"{link[1]}{posixpath.relpath(target, posixpath.dirname(here) or '.')}{link[3]}"

    return LINK.sub(rewritten, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Show `\\|` in the code of a table as a code host does: as a bar that does not end the cell."""
    return re.sub(r"<td.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.S)


def _on_site(path: str) -> str:
    """Return the place on the site of a file of the repository."""
    return path.removeprefix("docs/")


def _targets(path: str) -> Iterator[str]:
    """Return the files that a page links to, by their paths in the repository."""
    for _, target, _ in LINK.findall((ROOT / path).read_text(encoding="utf-8")):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
