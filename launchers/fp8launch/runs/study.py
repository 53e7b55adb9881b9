"""A study: the runs of one grid, in one folder.

study.json     the points and the names of their runs
RUN/           a run folder for each point
arrays/        job arrays: a batch script each, and the run folders of its tasks in order
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.problems import error
from fp8launch.runs.folder import MANIFEST, STUDY, RunFolder, write_atomically


@dataclass(frozen=True)
class StudyFolder:
    path: Path

    @property
    def study_id(self) -> str:
        return self.path.name

    def record(self) -> dict[str, Any]:
        """What `study.json` says. Raises UserError when it is missing or damaged."""
        file = self.path / STUDY
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            assert isinstance(record["points"], list)
        except (OSError, ValueError, KeyError, AssertionError) as exc:
            raise error("bad-study", f"cannot be read: {exc}", str(file)) from None
        assert isinstance(record, dict)
        return record

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.path / name)

    def runs(self) -> list[RunFolder]:
        """The runs that have been made so far, in the order of the points."""
        found = [self.run(str(point["run"])) for point in self.record()["points"]]
        return [run for run in found if (run.path / MANIFEST).is_file()]


def create_study(root: Path, study: str, record: dict[str, Any]) -> StudyFolder:
    """Make or find the study's folder. Exit code 3 when the disk refuses."""
    folder = StudyFolder(root / study)
    try:
        (folder.path / "arrays").mkdir(parents=True, exist_ok=True)
        (folder.path / "logs").mkdir(exist_ok=True)
        if not (folder.path / STUDY).is_file():
            write_atomically(folder.path / STUDY, json.dumps(record, indent=2) + "\n")
    except OSError as exc:
        place = str(folder.path)
        raise error(
            "run-root", f"cannot write the study: {exc.strerror}", place, "choose another --run-root", 3
        ) from None
    return folder


@contextlib.contextmanager
def locked(study: StudyFolder) -> Iterator[None]:
    """Hold the study, so that two submissions of it cannot both find a point missing."""
    with (study.path / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise error(
                "study-busy", f"another submission of {study.study_id} is under way", str(study.path), exit_code=3
            ) from None
        except OSError:
            # Some shared file systems have no locks: keys and comments still keep points from being submitted twice.
            pass
        yield


def study_folders(root: Path) -> Iterator[StudyFolder]:
    """The studies below a run root."""
    for file in sorted(root.glob(f"*/{STUDY}")):
        yield StudyFolder(file.parent)
