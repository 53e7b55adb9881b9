"""A study: the runs of one grid, in one folder.

study.json     the points and the names of their runs
RUN/           a run folder for each point
arrays/        job arrays: a batch script each, and the run folders of its tasks in order
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8launch.diagnostics import error
from fp8launch.injob.supervisor.run_records import read_json
from fp8launch.rundir.atomic_io import Busy, held, make_folders
from fp8launch.rundir.run_dir import MANIFEST, STUDY, RunFolder, marked, write_atomically
from fp8launch.rundir.trust import why_not_own_run

if TYPE_CHECKING:
    from typing import TypeGuard

# In the folder of a study, the state of the search that submits its runs (plugin `tune`).
SEARCH = "tune/state.json"
# A study and its runs must be real folders in their place, not links that lead elsewhere.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")


@dataclass(frozen=True)
class StudyFolder:
    path: Path

    @property
    def study_id(self) -> str:
        return self.path.name

    def record(self) -> dict[str, Any]:
        """Read `study.json`. Raises UserError if it is missing or damaged."""
        file = self.path / STUDY
        try:
            found = read_json(file)
        except (OSError, ValueError) as exc:
            raise error("bad-study", f"cannot be read: {exc}", str(file)) from None
        if not _is_study(found):
            raise error("bad-study", "does not contain the points of a study", str(file))
        return found

    def missing(self) -> list[str]:
        """Return the names of points without a run folder: their submission was cut off."""
        return [run.run_id for run in self._points() if not _is_made(run)]

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.path / name)

    def runs(self) -> list[RunFolder]:
        """Return the runs that exist so far, in the order of the points."""
        return [run for run in self._points() if _is_made(run)]

    def _points(self) -> list[RunFolder]:
        return [self.run(point["run"]) for point in self.record()["points"]]


def _is_made(run: RunFolder) -> bool:
    return (run.path / MANIFEST).is_file()


def create_study(root: Path, study: str, record: dict[str, Any]) -> StudyFolder:
    """Make or find the study's folder. Exit code 3 if the disk refuses, or if it is not safely this user's own.

    Anybody can compute a study's id, and make a folder of that name in a shared run root.
    """
    need_study_name(study)
    folder = StudyFolder(root / study)
    if os.path.lexists(folder.path):
        need_own_study(folder)
    try:
        make_folders(folder.path / "arrays")
        make_folders(folder.path / "logs")
        if not (folder.path / STUDY).is_file():
            write_atomically(folder.path / STUDY, json.dumps(record, indent=2) + "\n")
    except OSError as exc:
        place = str(folder.path)
        raise error(
            "run-root", f"cannot write the study: {exc.strerror}", place, "choose another --run-root", 3
        ) from None
    need_own_study(folder)  # including a folder that somebody else created in the meantime
    return folder


def need_study_name(name: str) -> None:
    """Raise UserError for a name that no study can have."""
    if not _plain_name(name):
        fix = "letters, digits, '.', '_' or '-', starting with a letter or digit"
        raise error("bad-study-name", f"'{name}' is not a valid name for a study", "--study", fix)


def need_own_study(study: StudyFolder) -> None:
    """Raise UserError (exit code 3) for a study's folder that is not safely this user's own."""
    if reason := why_not_own_run(study.path):
        message = f"the folder of this study already exists, and other users could change it: {reason}"
        fix = "choose another --study or --run-root; fp8launch never submits files that others could have written"
        raise error("not-yours", message, str(study.path), fix, 3)


@contextlib.contextmanager
def locked(study: StudyFolder, wait: float = 0.0) -> Iterator[None]:
    """Lock the study, so that two submissions of it cannot both find a point missing.

    If the file system has no locks, keys and job comments still find earlier submissions.
    """
    try:
        with held(study.path, wait):
            yield
    except Busy:
        raise error(
            "study-busy",
            f"another submission of {study.study_id} is running",
            str(study.path),
            "repeat the command when it is done; it submits only what is missing",
            3,
        ) from None


def add_points(study: StudyFolder, points: list[dict[str, Any]], left_out: list[dict[str, Any]]) -> None:
    """Add new points to a study, and the points that failed the check."""
    before = study.record()
    known = {point["run"] for point in before["points"]}
    every = [*before["points"], *(point for point in points if point["run"] not in known)]
    # If a point is left out again, the last reason counts.
    bad = {_place(point): point for point in [*before.get("left_out", []), *left_out]}
    for point in every:
        bad.pop(_place(point), None)  # it passes the check now
    record = {**before, "points": every, "left_out": list(bad.values())}
    if record != before:
        write_atomically(study.path / STUDY, json.dumps(record, indent=2) + "\n")


def _place(point: dict[str, Any]) -> str:
    """Return the position of a point in its grid."""
    return json.dumps(list(map(point.get, ("recipe", "nodes", "values", "repeat"))), sort_keys=True)


def _is_study(record: object) -> TypeGuard[dict[str, Any]]:
    if not isinstance(record, dict):
        return False
    points, left_out = record.get("points"), record.get("left_out", [])
    if not isinstance(points, list) or not isinstance(left_out, list):
        return False
    # Points that were left out have no folder; their label takes the place of its name.
    return all(map(_is_point, [*points, *left_out])) and all(_plain_name(point["run"]) for point in points)


def _is_point(point: object) -> bool:
    if not isinstance(point, dict) or not isinstance(point.get("run"), str):
        return False
    shapes = {"nodes": int, "repeat": int, "recipe": str, "values": dict}
    return all(isinstance(point.get(key), (shape, type(None))) for key, shape in shapes.items())


def _plain_name(name: object) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def study_folders(root: Path) -> Iterator[StudyFolder]:
    """Yield the studies below a run root."""
    for file in sorted(marked(root, STUDY)):
        yield StudyFolder(file.parent)


def is_trial(run: str | None) -> bool:
    """Return whether a run folder belongs to a search, which submits dozens of runs and follows each itself."""
    return run is not None and (Path(run).parent / SEARCH).is_file()
