"""Run folders and run roots that other users cannot change: only there fp8launch acts."""

from __future__ import annotations

import os
from pathlib import Path

from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.injob.ownership import below, why_not_own, why_others_may_replace

# Files of a run folder that are run or believed when it is acted upon.
_BELIEVED = ("manifest.json", "survive.json", "attempts.json", "job.sbatch", "job.sh", "study.json", "submitit")


def why_not_own_run(folder: Path) -> str | None:
    """Why the folder of a run or study is not safely this user's own: itself, its scripts, its code, its records."""
    inside = map(folder.joinpath, (*_BELIEVED, "arrays", "logs", "code"))
    there = list(filter(os.path.lexists, inside))
    for path in (folder, *there, *below(folder / "code"), *below(folder / "arrays")):
        if reason := why_not_own(path):
            return reason
    return None


def need_safe_root(root: Path, trusted: bool) -> None:
    """Raises UserError (exit code 3) for a run root in which other users could replace the code of a waiting job.

    `trusted` is the user's own word that these others may run code under this account.
    """
    reason = why_others_may_replace(root)
    if reason is None or (trusted and "by everybody" not in reason):
        return
    raise error(
        "run-root-shared",
        f"other users could replace the code of a waiting job: {reason}",
        str(root),
        "choose a --run-root that only you can write to (chmod go-w), or ask its owner to set the sticky bit (chmod "
        "+t); if everybody in that group may run code as you, set `trust_run_root: true` in the cluster profile",
        MACHINE_LACKS,
    )
