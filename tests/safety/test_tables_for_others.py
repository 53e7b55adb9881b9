"""Tables that are opened elsewhere: a spreadsheet computes nothing of ours, and Markdown shows what it should."""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support import real_logs

from fp8launch.report.export import csv_cell

Say = Callable[..., tuple[int, str, str]]
LOG = real_logs("runs") / "tiny_cpu_0.17_1rank.log"


def test_a_name_is_no_formula(say: Say, tmp_path: Path) -> None:
    for name in ("=cmd|' x'!A1", "@SUM(1)", "plain"):
        shutil.copy(LOG, tmp_path / f"{name}.log")
    say("compare", str(tmp_path), "--csv", str(tmp_path / "o.csv"), "--md", str(tmp_path / "o.md"), "--force")
    rows = list(csv.DictReader((tmp_path / "o.csv").read_text().splitlines()))
    cells = [cell for row in rows for cell in row.values()]
    assert not [cell for cell in cells if cell.startswith(("=", "@"))]
    assert rows


@pytest.mark.parametrize("text", ["a;=1+1", "a,\t@SUM(1)", "a\r=1", "; -1+1", "=1", "\uff1d1", ";\uff20SUM(1)", "a; b"])
def test_a_cell_that_a_semicolon_splits_is_no_formula(text: str) -> None:
    """Spreadsheets of many countries split at semicolons: `x;=cmd` was a cell that begins a formula."""
    shown = str(csv_cell(text))
    assert not [
        part
        for part in re.split(r"[;,\t\r\n]", shown)
        if part.strip().startswith(("=", "+", "-", "@", "\uff1d", "\uff20"))
    ]
    assert text != "a; b" or shown == text


def test_markdown_shows_names_and_nothing_else(say: Say, tmp_path: Path) -> None:
    """Neither images, links, HTML nor mentions of people come from names in a report for a pull request."""
    hostile = "![x](http:e) @octocat #1 <b> [l](u) `c` ~~s~~ _i_"
    for name in (hostile, "plain"):
        text = "\n".join(f" iteration {i}/9 | elapsed time per iteration (ms): 9.0 |" for i in range(1, 10))
        (tmp_path / f"{name}.log").write_text(text)
    say("compare", str(tmp_path), "--md", str(tmp_path / "o.md"))
    text = (tmp_path / "o.md").read_text()
    assert "octocat" in text
    for sign in ("![", "@octocat", "<b>", " #1", " _i_", " `c`", " ~~s"):
        assert sign not in text
    assert not re.search(r"(?<!\\)\](?=\()", text)


PLOTS = pytest.mark.needs_plugin("plots")


@pytest.mark.parametrize(
    "option", [pytest.param("--html", marks=PLOTS), "--csv", "--md", pytest.param("--plot", marks=PLOTS)]
)
def test_a_report_does_not_follow_a_link(say: Say, tmp_path: Path, option: str) -> None:
    """In a shared folder a link of another user led `--html` over a file of mine."""
    shutil.copy(LOG, tmp_path / "a.log")
    mine = tmp_path / "precious"
    mine.write_text("mine")
    link = tmp_path / "report.png"
    link.symlink_to(mine)
    status, _, err = say("compare", str(tmp_path / "a.log"), option, str(link))
    assert (status, mine.read_text()) == (2, "mine")
    assert "output-is-a-link" in err


def test_a_report_may_go_to_a_device(say: Say, tmp_path: Path) -> None:
    shutil.copy(LOG, tmp_path / "a.log")
    assert say("compare", str(tmp_path / "a.log"), "--csv", "/dev/null")[0] in (0, 1)
    assert Path("/dev/null").is_char_device()
