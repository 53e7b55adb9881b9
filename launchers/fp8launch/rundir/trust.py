"""Checks that other users cannot change a run folder or a run root: fp8launch acts nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.injob.ownership import below, why_not_own, why_others_may_replace

# Files of a run folder that commands run or trust.
_BELIEVED = ("manifest.json", "survive.json", "attempts.json", "study.json", "submitit")


def why_not_own_run(folder: Path) -> str | None:
    """Return why a run's or study's folder, its scripts, code or records are not safely this user's own."""
    inside = [*map(folder.joinpath, (*_BELIEVED, "arrays", "logs", "code")), *folder.glob("job.*")]
    there = list(filter(os.path.lexists, inside))
    for path in (folder, *there, *below(folder / "code"), *below(folder / "arrays")):
        if reason := why_not_own(path):
            return reason
    return None


def need_safe_root(root: Path, trusted: bool) -> None:
    """Raise UserError (exit code 3) for a run root in which other users could replace the code of a waiting job.

    With `trusted`, the user has stated that these others may run code under this account.
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
