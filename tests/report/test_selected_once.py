"""A report selects the steady iterations of a run once, whatever it prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from made_runs import Made, write_log

from fp8launch.cli import run
from fp8launch.report import throughput
from fp8launch.report.steady_state import SteadyState, select_steady_state


@pytest.mark.parametrize(("command", "runs"), [("parse", 1), ("compare", 2)])
def test_each_run_is_selected_from_once(
    command: str, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    selected = []

    def counted(attempts: Sequence[Any], *more: Any) -> SteadyState:
        selected.append(attempts)
        return select_steady_state(attempts, *more)

    monkeypatch.setattr(throughput, "select_steady_state", counted)
    logs = [write_log(tmp_path / f"{number}.log", Made()) for number in range(runs)]
    assert run([command, *map(str, logs)]) == 0
    assert len(selected) == runs
