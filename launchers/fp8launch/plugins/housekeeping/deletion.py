"""Decide which runs may be deleted, and delete them.

A run is kept if it may still be running, if another user made it or can change it, if another run loads its
checkpoints, or if it is tagged.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from fp8launch.diagnostics import UserError
from fp8launch.injob.ownership import below, why_not_own
from fp8launch.report.run_selection import tags_of
from fp8launch.report.run_status import run_states
from fp8launch.rundir.atomic_io import Busy, held
from fp8launch.rundir.registry import job_ids, known_roots
from fp8launch.rundir.run_dir import STUDY, RunFolder, run_folders
from fp8launch.rundir.study import StudyFolder
from fp8launch.rundir.trust import why_not_own_run
from fp8launch.schedulers.base import JobState
from fp8launch.submit.submission import under_way
from fp8launch.untyped import as_mapping

_DELETING = ".deleting-"
# Tags that a run may have and still be deleted; None for any.
Tags: TypeAlias = "Collection[str] | None"


@dataclass(frozen=True)
class Candidate:
    """A run, the bytes of its folder and its checkpoints, and why it is kept; `why` is None if it may be deleted."""

    run: RunFolder
    state: JobState
    size: int
    why: str | None

    def as_json(self) -> dict[str, Any]:
        entry = {"run": self.run.run_id, "folder": str(self.run.path), "bytes": self.size, "state": self.state.status}
        return entry if self.why is None else {**entry, "why": self.why}


def candidates(runs: Sequence[RunFolder], may_have: Tags) -> list[Candidate]:
    """Return the runs with their sizes and the reasons to keep some. Any tag but `may_have` is a reason."""
    loaders = _loaders()
    found = []
    for run, state in zip(runs, run_states(runs), strict=True):
        why = _why_kept(run, state, loaders, may_have)
        found.append(Candidate(run, state, _size(run), why))
    return found


def delete_run(candidate: Candidate, may_have: Tags) -> str | None:
    """Delete a run. Return why it is kept after all, for example because it was resumed in the meantime."""
    run = candidate.run
    try:
        # `submit` and `resume` hold this lock while they add a job.
        with held(run.path):
            (state,) = run_states([run])
            if why := _why_kept(run, state, _loaders(), may_have):
                return why
            targets = _storage(run)
            # Under this name no command sees the folder; a deletion that is cut off is completed by the next one.
            doomed = run.path.with_name(f"{_DELETING}{run.run_id}.{secrets.token_hex(4)}")
            run.path.rename(doomed)
    except Busy:
        return "another command is submitting it"
    shutil.rmtree(doomed)
    for target in targets:
        shutil.rmtree(target)
    return None


def remove_remains() -> None:
    """Complete deletions that were cut off."""
    for root in known_roots():
        for doomed in [*root.glob(f"{_DELETING}*"), *root.glob(f"*/{_DELETING}*")]:
            if why_not_own(doomed) is None:
                shutil.rmtree(doomed, ignore_errors=True)


def remove_empty_study(folder: Path) -> bool:
    """Remove the folder of a study whose runs were all deleted; return whether it is gone."""
    study = StudyFolder(folder)
    if not (folder / STUDY).is_file() or why_not_own_run(folder) is not None or study.runs():
        return False
    doomed = folder.with_name(f"{_DELETING}{folder.name}.{secrets.token_hex(4)}")
    folder.rename(doomed)
    shutil.rmtree(doomed)
    return True


def _why_kept(run: RunFolder, state: JobState, loaders: Mapping[Path, list[str]], may_have: Tags) -> str | None:
    if reason := why_not_own_run(run.path):
        return f"not safely yours: {reason}"
    if not job_ids(run) and under_way(run):
        return "is being submitted"
    if job_ids(run) and not state.final:
        return f"is {state.status}" if state.status != "unknown" else "its state is not known"
    tags = [tag for tag in tags_of(run.manifest()) if may_have is not None and tag not in may_have]
    if tags:
        return f"is tagged {', '.join(tags)}"
    places = [run.path, *_storage(run)]
    for loaded, names in loaders.items():
        others = [name for name in names if name != run.run_id]
        if others and any(loaded.is_relative_to(os.path.realpath(place)) for place in places):
            return f"{others[0]} loads its checkpoints"
    return None


def _loaders() -> dict[Path, list[str]]:
    """Return the folders that runs load checkpoints from, each with the ids of these runs."""
    found: dict[Path, list[str]] = {}
    for root in known_roots():
        for run in run_folders(root):
            try:
                manifest = run.manifest()
            except UserError:
                continue
            for stated in _loads(manifest):
                # Relative folders begin in the run folder, where `..` leads to other runs.
                place = Path(os.path.realpath(run.path / Path(stated).expanduser()))
                found.setdefault(place, []).append(run.run_id)
    return found


def _loads(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield the folders that a run loads checkpoints from."""
    arguments, recipe = as_mapping(manifest.get("arguments")), as_mapping(manifest.get("recipe"))
    stated = [arguments.get(name) for name in ("load", "pretrained_checkpoint", "ckpt_convert_save")]
    stated.append(as_mapping(recipe.get("checkpoint")).get("load"))
    for phase in as_mapping(recipe.get("phases")).values():
        stated.append(as_mapping(as_mapping(phase).get("checkpoint")).get("load"))
    yield from (each for each in stated if isinstance(each, str) and each)


def _storage(run: RunFolder) -> list[Path]:
    """Return the folders that fp8launch made for the run's checkpoints outside its own folder, if they are safe."""
    found = []
    for name, target in as_mapping(run.manifest().get("storage")).items():
        link, place = run.path / str(name), Path(str(target))
        # Only what the run's own link leads to, and what was made under the run's name.
        is_its_own = link.is_symlink() and link.readlink() == place and place.name.startswith(run.run_id)
        if is_its_own and why_not_own(place) is None:
            found.append(place)
    return found


def _size(run: RunFolder) -> int:
    """Return the bytes that the deletion of a run would free."""
    total = 0
    for place in (run.path, *_storage(run)):
        for path in below(place):
            with contextlib.suppress(OSError):
                total += path.lstat().st_blocks * 512
    return total
