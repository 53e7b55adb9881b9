"""slurm/: one script for each recipe, none stale, none with anything that shellcheck would say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pack_support import HEADLINE, PEERS, ROOT

SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))


def test_every_recipe_has_its_script_and_none_is_stale() -> None:
    by_hand = {"array", "health", "nccl_check"}
    peers = {f"peer_{file.stem}" for file in PEERS if file.stem != "zero_stages"}  # a study has no script of its own
    assert {script.stem for script in SCRIPTS} == {file.stem for file in HEADLINE} | peers | by_hand
    done = subprocess.run(
        [sys.executable, "tools/render_slurm.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_is_clean(script: Path, shellcheck: Callable[[str], None]) -> None:
    shellcheck(script.read_text(encoding="utf-8"))
