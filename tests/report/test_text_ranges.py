"""Excluded iterations in `parse`: few by their ranges, many by their count."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import Made

from fp8launch.cli import run


@pytest.mark.parametrize(
    ("every", "says"),
    [(50, "after checkpoint: iterations 51, 101, 151"), (5, "after checkpoint: 39 iterations from 6 to 196")],
)
def test_many_iterations_are_counted(every: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for line in Made(iterations=200).text().splitlines():
        lines.append(line)
        number = line.partition("iteration")[2].partition("/")[0].strip()
        if number.isdecimal() and int(number) % every == 0 and int(number) < 200:
            lines.append(f"saving checkpoint at iteration {int(number):7d} to /ck in torch_dist format")
    file = tmp_path / "run.log"
    file.write_text("\n".join(lines) + "\n")
    assert run(["parse", str(file)]) == 0
    assert says in " ".join(capsys.readouterr().out.split())
