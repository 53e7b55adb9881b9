"""The documentation builds as a site without warnings, is complete, and loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("material", reason="pip install '.[docs]' has MkDocs, which builds the site")


class Page(HTMLParser):
    """The ids of a page, its links, and what a browser loads to show it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.add(values.get("id", ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loaded.append(values["href"])
        elif tag in ("script", "img", "iframe") and "src" in values:
            self.loaded.append(values["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return {path: Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}


def test_every_page_is_in_the_index() -> None:
    index = set(re.findall(r"\]\(([\w.]+\.md)\)", (ROOT / "docs/README.md").read_text(encoding="utf-8")))
    assert index == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_pages_load_nothing_from_other_hosts(site: dict[Path, Page]) -> None:
    loaded = {url for page in site.values() for url in page.loaded}
    assert loaded
    assert [url for url in loaded if urlsplit(url).netloc] == []
    stylesheets = [path for page in site for path in page.parent.glob("assets/stylesheets/*.css")]
    assert stylesheets
    assert not any(re.search(r"url\(['\"]?(https?:)?//", path.read_text(encoding="utf-8")) for path in stylesheets)


def test_links_lead_somewhere(site: dict[Path, Page]) -> None:
    broken = []
    for path, page in site.items():
        if path.name == "404.html":
            continue  # its links start at the address of the site
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = target in site or target.is_file()
            if not known or (parts.fragment and target in site and parts.fragment not in site[target].ids):
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_code_in_tables_has_bars_without_backslashes(site: dict[Path, Page]) -> None:
    page = next(path for path in site if path.name == "command_reference.html")
    assert "--engine [megatron_lm|bridge]" in page.read_text(encoding="utf-8")


def test_measurements_outside_docs_are_pages(site: dict[Path, Page]) -> None:
    names = {path.as_posix() for path in site}
    assert any(name.endswith("benchmarks/h200/peers.html") for name in names)
