"""Batch scripts of the pack: unchanged unless reviewed, and clean by shellcheck.

`slurm/` has a few as examples, `golden/` the others. After a look at the difference, `python tools/render_slurm.py` and
`pytest tests/pack --update-golden` write them again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pack_support import HEADLINE, PEERS, ROOT, case

sys.path.insert(0, str(ROOT / "tools"))

from render_slurm import EXAMPLES, portable_script

SLURM = ROOT / "slurm"
GOLDEN = Path(__file__).parent / "golden"
EXAMPLE_FILES = [ROOT / "recipes" / f"{example}.yaml" for example in EXAMPLES]
# A study has no script, but a job for each of its points.
OTHERS = [file for file in (*HEADLINE, *PEERS) if file not in EXAMPLE_FILES and file.stem != "zero_stages"]
BY_HAND = ("array", "health", "nccl_check")


@pytest.mark.parametrize("recipe", [case(file) for file in EXAMPLE_FILES], ids=lambda recipe: recipe.stem)
def test_an_example_is_up_to_date(recipe: Path, shellcheck: Callable[[str], None]) -> None:
    name, text = portable_script(recipe)
    assert (SLURM / name).read_text(encoding="utf-8") == text, "run python tools/render_slurm.py"
    assert os.access(SLURM / name, os.X_OK)
    shellcheck(text)


@pytest.mark.parametrize("recipe", [case(file) for file in OTHERS], ids=lambda recipe: recipe.stem)
def test_a_script_is_the_one_that_was_reviewed(
    recipe: Path, golden: Callable[[str, str], None], shellcheck: Callable[[str], None]
) -> None:
    name, text = portable_script(recipe)
    golden(name, text)
    shellcheck(text)


@pytest.mark.parametrize("name", BY_HAND)
def test_a_script_written_by_hand_is_clean(name: str, shellcheck: Callable[[str], None]) -> None:
    shellcheck((SLURM / f"{name}.sbatch").read_text(encoding="utf-8"))


@pytest.mark.needs_plugin("accelerate")
def test_no_script_is_left_over() -> None:
    examples = {portable_script(file)[0] for file in EXAMPLE_FILES}
    assert {path.name for path in SLURM.glob("*.sbatch")} == examples | {f"{name}.sbatch" for name in BY_HAND}
    assert {path.name for path in GOLDEN.iterdir()} == {portable_script(file)[0] for file in OTHERS}
