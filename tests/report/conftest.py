from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import Made, write_log


@pytest.fixture
def logs(tmp_path: Path):
    def make(**runs: Made) -> list[Path]:
        return [write_log(tmp_path / f"{name}.log", made) for name, made in runs.items()]

    return make
