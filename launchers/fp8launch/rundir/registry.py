"""List runs from any shell: the user's state folder remembers the run roots that were used."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fp8launch.diagnostics import ANSWER_IS_NO, Problem, UserError, did_you_mean, error
from fp8launch.injob.supervisor.run_records import record_root, recorded_roots, roots_file
from fp8launch.recipe.yaml_source import is_file, is_there
from fp8launch.rundir.atomic_io import make_folders
from fp8launch.rundir.attempts import LOCAL_JOB, attempts_of
from fp8launch.rundir.run_dir import MANIFEST, STUDY, RunFolder, half_made, run_folders
from fp8launch.rundir.study import StudyFolder, study_folders
from fp8launch.rundir.trust import why_not_own_run

if TYPE_CHECKING:
    from fp8launch.cluster.profile import Cluster

Folder = TypeVar("Folder", RunFolder, StudyFolder)

# Names with these endings mean files, never runs.
_LOG_SUFFIXES = (".log", ".txt", ".out", ".err", ".gz", ".xz", ".bz2", ".zst")


def default_root() -> Path:
    """Return `FP8LAUNCH_RUNS`, else `~/fp8launch-runs`, because most clusters share the home folder between nodes."""
    return Path(os.environ.get("FP8LAUNCH_RUNS") or "~/fp8launch-runs").expanduser().absolute()


def run_root(cluster: Cluster, stated: str | None) -> Path:
    """Return where run folders go: `--run-root`, else the cluster profile, else the default."""
    root, place = stated, "--run-root"
    if not root:
        root, place = cluster.run_root, "cluster profile: run_root"
    if not root:
        return default_root()
    from fp8launch.cluster.storage import stated_folder  # most commands find runs without a profile

    return stated_folder(root, "the run root", place)


def known_roots() -> list[Path]:
    """Return the run roots that were used and still exist, the default one first."""
    roots = [default_root()]
    with contextlib.suppress(OSError):
        roots += map(Path, recorded_roots())
    return list(filter(Path.is_dir, dict.fromkeys(roots)))


def remember_root(root: Path) -> None:
    """Add a run root to those that `runs` searches. A failure is ignored, so that it does not stop a submission."""
    if root in known_roots() and root != default_root():
        return
    with contextlib.suppress(OSError):
        make_folders(roots_file().parent)
        record_root(root)


def all_runs() -> list[RunFolder]:
    """Return all runs of all known roots, oldest first, except those whose manifest cannot be read (see `damaged`)."""
    dated: list[tuple[float, str, RunFolder]] = []
    for root in known_roots():
        for run in run_folders(root):
            created = _created(run)
            if created is not None:
                dated.append((created, run.run_id, run))
    dated.sort(key=lambda entry: entry[:2])
    return [run for _, _, run in dated]


def _created(run: RunFolder) -> float | None:
    """Return the creation time in seconds, which sorts across time zones; None without a manifest."""
    try:
        return datetime.fromisoformat(str(run.manifest().get("created"))).timestamp()
    except UserError:
        return None
    except (ValueError, OverflowError):
        return 0.0


def damaged() -> list[Problem]:
    """Return the problems of the known roots: unreadable manifests, and folders that were never finished."""
    found: list[Problem] = []
    for root in known_roots():
        for run in run_folders(root):
            try:
                run.manifest()
            except UserError as exc:
                found += exc.problems
        unfinished = [*half_made(root)]
        for study in study_folders(root):
            unfinished += half_made(study.path)
        for folder in unfinished:
            message = "a launcher was stopped while it created this folder; nothing was submitted from it"
            fix = f"rm -r {shlex.quote(str(folder))}, or repeat the same submit command"
            found.append(Problem("warning", "half-made", message, str(folder), fix))
    return found


def find_run(name: str) -> RunFolder:
    """Return the run that a name selects: a folder, a run id, a unique start of one, a job id, or `latest`."""
    if is_file(Path(name) / MANIFEST):
        return RunFolder(Path(name).absolute())
    if "/" in name or Path(name).suffix in _LOG_SUFFIXES:
        _refuse_path(name)
    runs = all_runs()
    own = [run for run in runs if run.is_mine]
    if name == "latest" and own:
        return own[-1]
    if name == "latest":
        raise error("unknown-run", "you have no runs yet", fix="submit one: `fp8launch submit RECIPE`")
    matches = _matching(name, runs)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise error("ambiguous-run", _several(name, "runs", matches), fix="use the full run id, or `latest`")
    raise error(
        "unknown-run",
        f"no run '{name}' in {', '.join(map(str, known_roots())) or 'any run root'}",
        fix=did_you_mean(name, [run.run_id for run in runs], "`fp8launch runs` lists them"),
    )


def _matching(name: str, runs: Sequence[RunFolder]) -> list[RunFolder]:
    """The run of this id, else those whose ids start so, else that of a job of this number."""
    found = _of_id(name, runs)
    if found or not name.isdigit():
        return found
    return [run for run in runs if name in job_ids(run)]


def _of_id(name: str, folders: Iterable[Folder]) -> list[Folder]:
    """The runs or studies of this id, else those whose ids start so."""
    begun: list[Folder] = []
    exact: list[Folder] = []
    for folder in folders:
        if folder.path.name == name:
            exact.append(folder)
        elif folder.path.name.startswith(name):
            begun.append(folder)
    return exact or begun


def _several(name: str, kind: str, matches: Sequence[RunFolder | StudyFolder]) -> str:
    last = [folder.path.name for folder in matches[-5:]]
    return f"'{name}' matches {len(matches)} {kind}: {', '.join(last)}"


def _refuse_path(name: str) -> None:
    """Raises UserError for a path, which is never the id of a run."""
    if not is_there(Path(name)):
        raise error("path-not-found", "this path does not exist", name, "`fp8launch runs` lists runs and their ids")
    message = f"is not a run folder or a study: it has neither {MANIFEST} nor {STUDY}"
    raise error("not-a-run", message, name, "`fp8launch runs` lists runs and their ids")


def all_studies() -> list[StudyFolder]:
    """Return all studies of all known roots."""
    studies: list[StudyFolder] = []
    for root in known_roots():
        studies += study_folders(root)
    return studies


def find_study(name: str) -> StudyFolder | None:
    """Return the study that a folder, an id or the start of one selects; None if there is none.

    Raises UserError for the start of several studies.
    """
    if is_file(Path(name) / STUDY):
        return StudyFolder(Path(name).absolute())
    matches = []
    if name:
        matches = _of_id(name, all_studies())
    if len(matches) == 1:
        return matches[0]
    if matches and all(run.run_id != name for run in all_runs()):
        raise error("ambiguous-study", _several(name, "studies", matches), fix="use the full id")
    return None


def find_runs(name: str) -> list[RunFolder]:
    """Return the run that a name selects, or the runs of the study."""
    study = find_study(name)
    if study is None:
        return [find_run(name)]
    return study.runs()


def need_mine(*folders: RunFolder | StudyFolder) -> None:
    """Raises UserError (exit code 1) for what another user made or can change: it is read, and never acted upon."""
    for folder in folders:
        if reason := why_not_own_run(folder.path):
            message = f"fp8launch only reads this folder, because other users could change it: {reason}"
            fix = "read its recipe.yaml, then name that file to use it"
            raise error("not-yours", message, str(folder.path), fix, ANSWER_IS_NO)


def job_ids(run: RunFolder) -> list[str]:
    """The ids of the jobs that were submitted for a run, by us and by its own jobs, in order."""
    submitted = [str(job["id"]) for job in run.manifest().get("jobs", [])]
    own = [job for job in attempts_of(run).jobs if job not in submitted and job != LOCAL_JOB]
    if not own:
        return submitted
    return sorted([*submitted, *own], key=lambda job: int(job.partition("_")[0]))


def newest_job(run: RunFolder) -> str | None:
    """Return the id of a run's newest job; None for a run that was never submitted."""
    jobs = job_ids(run)
    if not jobs:
        return None
    return jobs[-1]
