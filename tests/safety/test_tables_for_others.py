"""Tables that are opened elsewhere: a spreadsheet computes nothing of ours, and Markdown shows what it should."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from pathlib import Path

Say = Callable[..., tuple[int, str, str]]
LOG = Path(__file__).parents[1] / "logs/data/tiny_cpu_0.17_1rank.log"


def test_a_name_is_no_formula(say: Say, tmp_path: Path) -> None:
    for name in ("=cmd|' x'!A1", "@SUM(1)", "plain"):
        shutil.copy(LOG, tmp_path / f"{name}.log")
    say("compare", str(tmp_path), "--csv", str(tmp_path / "o.csv"), "--md", str(tmp_path / "o.md"), "--force")
    rows = list(csv.DictReader((tmp_path / "o.csv").read_text().splitlines()))
    cells = [cell for row in rows for cell in row.values()]
    assert not [cell for cell in cells if cell.startswith(("=", "@"))]
    assert rows
