"""Write `slurm/*.sbatch`, one portable script for each recipe at the top of the pack and in `peers`.

Run it as `python tools/render_slurm.py`.

Scripts there that are written by hand are left alone. With `--check`, say which are stale and exit with 1 instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fp8launch.cluster.profile import Cluster
from fp8launch.job.batch_script import AUTHOR, batch_script
from fp8launch.job.build_job import plan
from fp8launch.job.prepared import prepare

ROOT = Path(__file__).resolve().parents[1]


def scripts() -> dict[Path, str]:
    """Every script that belongs in `slurm/`, with its text."""
    found = {}
    pack = ROOT / "recipes"
    for recipe in sorted([*pack.glob("*.yaml"), *(pack / "peers").glob("*_*.yaml")]):
        prepared = prepare(str(recipe))
        if prepared.loaded.recipe.is_study:
            continue  # a job for each of its points
        job = plan(prepared, Cluster(), None, runtime="pyxis", check_paths=False)
        found[ROOT / "slurm" / f"{prepared.loaded.recipe.name}.sbatch"] = batch_script(job)
    return found


def main() -> int:
    wanted = scripts()
    present = {path for path in (ROOT / "slurm").glob("*.sbatch") if AUTHOR in path.read_text()}
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
    left = sorted(present - set(wanted))
    if "--check" in sys.argv[1:]:
        for path in [*stale, *left]:
            print(f"stale: {path.relative_to(ROOT)}; run python tools/render_slurm.py", file=sys.stderr)
        return 1 if stale or left else 0
    for path, text in wanted.items():
        path.write_text(text)
        path.chmod(0o755)
    for path in left:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
