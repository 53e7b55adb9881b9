"""List runs from any shell: the user's state folder remembers the run roots that were used."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from fp8launch.diagnostics import ANSWER_IS_NO, Problem, UserError, did_you_mean, error
from fp8launch.injob.supervisor.run_records import record_root, recorded_roots, roots_file
from fp8launch.recipe.yaml_source import RECIPE_SUFFIXES, is_file, is_there
from fp8launch.rundir.atomic_io import make_folders
from fp8launch.rundir.attempts import LOCAL_JOB, attempts_of
from fp8launch.rundir.run_dir import MANIFEST, STUDY, RunFolder, half_made, natural_order, run_folders
from fp8launch.rundir.study import StudyFolder, study_folders
from fp8launch.rundir.trust import why_not_own_run
from fp8launch.untyped import as_time
from fp8launch.wording import and_more

if TYPE_CHECKING:
    from fp8launch.cluster.profile import Cluster

T = TypeVar("T")
Folder = TypeVar("Folder", RunFolder, StudyFolder)

# Names with these endings mean files, never runs. Names of recipes may contain a dot, such as `qwen2.5`.
_LOG_SUFFIXES = (".log", ".txt", ".out", ".err", ".gz", ".xz", ".bz2", ".zst")
_FILE_SUFFIXES = (*_LOG_SUFFIXES, *RECIPE_SUFFIXES)


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
    """Add a run root to the roots that `runs` searches. Failures are ignored: they must not stop a submission."""
    if root in known_roots() and root != default_root():
        return
    with contextlib.suppress(OSError):
        make_folders(roots_file().parent)
        record_root(root)


def all_runs() -> list[RunFolder]:
    """Return all runs of all known roots, oldest first, except runs with an unreadable manifest (see `damaged`)."""
    runs = [run for root in known_roots() for run in run_folders(root)]
    created = {run: when for run in runs if (when := _created(run)) is not None}
    return sorted(created, key=lambda run: (created[run], run.run_id))


def _created(run: RunFolder) -> float | None:
    """Return the creation time in seconds, which sorts across time zones; None without a manifest."""
    try:
        return as_time(run.manifest().get("created")) or 0.0
    except UserError:
        return None


def damaged() -> list[Problem]:
    """Return the problems of the known roots: unreadable manifests, and folders that were never finished."""
    found: list[Problem] = []
    for root in known_roots():
        for run in run_folders(root):
            try:
                run.manifest()
            except UserError as exc:
                found += exc.problems
        folders = [root, *(study.path for study in study_folders(root))]
        for folder in [unfinished for place in folders for unfinished in half_made(place)]:
            message = "a launcher was stopped while it created this folder; nothing was submitted from it"
            fix = f"rm -r {shlex.quote(str(folder))}, or repeat the same submit command"
            found.append(Problem("warning", "half-made", message, str(folder), fix))
    return found


def is_written_as_path(name: str) -> bool:
    """Return whether a name on the command line is a path: it has a slash or the suffix of a log or recipe.

    Any other name means a run, a study or a recipe, in every working folder. A file or folder of that name counts only
    if nothing else has the name.
    """
    return "/" in name or name in (".", "..") or Path(name).suffix in _FILE_SUFFIXES


def find_run(name: str) -> RunFolder:
    """Return the run that a name selects: a run id, a unique start of one, a job id, its title, `latest`, a folder."""
    folder = None
    if is_file(Path(name) / MANIFEST):
        folder = RunFolder(Path(name).absolute())
    if is_written_as_path(name):
        return folder or _refuse_path(name)
    runs = all_runs()
    own = [run for run in runs if run.is_mine]
    if name == "latest" and own:
        return own[-1]
    if name == "latest":
        raise error("unknown-run", "you have no runs yet", fix="submit one: `fp8launch submit RECIPE`")
    matches = _of_id(name, runs)
    if folder and matches and matches[0].run_id != name:
        raise ambiguous_path(name, [match.path.name for match in matches])
    matches = matches or [run for run in runs if name in job_ids(run) or run.manifest().get("title") == name]
    if folder and not matches:
        return folder
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise error("ambiguous-run", _several(name, "runs", matches), fix=_how_to_choose(matches, ", or `latest`"))
    for study in all_studies():
        if study.study_id == name:
            raise _is_a_study(name, study)
    raise error(
        "unknown-run",
        f"no run '{name}' in {', '.join(map(str, known_roots())) or 'any run root'}",
        fix=did_you_mean(name, [run.run_id for run in runs], "`fp8launch runs` lists them"),
    )


def _of_id(name: str, folders: Iterable[Folder]) -> list[Folder]:
    """Return the runs or studies with this id, else all whose ids start with it."""
    begun = [folder for folder in folders if folder.path.name.startswith(name)]
    return [folder for folder in begun if folder.path.name == name] or begun


def _several(name: str, kind: str, matches: Sequence[RunFolder | StudyFolder]) -> str:
    last = [folder.path.name for folder in matches[-5:]]
    if _share_id(matches):
        last = [str(folder.path) for folder in matches[-5:]]
    return f"'{name}' matches {len(matches)} {kind}: {', '.join(last)}"


def _how_to_choose(matches: Sequence[RunFolder | StudyFolder], other: str = "") -> str:
    if _share_id(matches):
        return "write the folder that you mean"
    return f"use the full id{other}"


def _share_id(matches: Sequence[RunFolder | StudyFolder]) -> bool:
    """Return whether ids cannot tell the matches apart: points of studies are often named alike."""
    return len({folder.path.name for folder in matches}) < len(matches)


def ambiguous_path(name: str, ids: Sequence[str]) -> UserError:
    """Return the error for a name that is both a path in the working folder and the start of ids."""
    ids_text = and_more(ids, 3)
    message = f"'{name}' is the start of {ids_text}, and also a path in this folder"
    return error("ambiguous-run", message, fix=f"write a full id, or ./{name} for the path")


def _refuse_path(name: str) -> NoReturn:
    """Raise UserError for a path, which is never the id of a run."""
    if not is_there(Path(name)):
        raise error("path-not-found", "this path does not exist", name, "`fp8launch runs` lists runs and their ids")
    if is_file(Path(name) / STUDY):
        raise _is_a_study(name, StudyFolder(Path(name).absolute()))
    message = f"is not a run folder or a study: it has neither {MANIFEST} nor {STUDY}"
    raise error("not-a-run", message, name, "`fp8launch runs` lists runs and their ids")


def _is_a_study(name: str, study: StudyFolder) -> UserError:
    runs = [run.run_id for run in study.runs()]
    fix = f"name one of its runs: {and_more(runs, 5)}" if runs else None
    return error("not-a-run", "is a study, and a single run is needed", name, fix)


def without_removed(work: Callable[[Sequence[RunFolder]], T], runs: Sequence[RunFolder]) -> T:
    """Return what `work` makes of the runs, without those that somebody removes in the meantime."""
    left = list(runs)
    while True:
        try:
            return work(left)
        except UserError as exc:
            gone = [run for run in left if exc.problems[0].where in (str(run.path), str(run.path / MANIFEST))]
            if not gone:
                raise
            left.remove(gone[0])


def all_studies() -> list[StudyFolder]:
    """Return all studies of all known roots."""
    return [study for root in known_roots() for study in study_folders(root)]


def find_study(name: str) -> StudyFolder | None:
    """Return the study that a folder, an id or the start of one selects; None if there is none.

    Raises UserError for the start of several studies.
    """
    folder = None
    if is_file(Path(name) / STUDY):
        folder = StudyFolder(Path(name).absolute())
    if is_written_as_path(name):
        return folder
    matches = _of_id(name, all_studies()) if name else []
    whole = bool(matches) and matches[0].study_id == name
    if len(matches) == 1 and (whole or folder is None):
        return matches[0]
    if any(run.run_id == name for run in all_runs()):
        return None
    if matches and folder and not whole:
        raise ambiguous_path(name, [match.path.name for match in matches])
    if matches:
        raise error("ambiguous-study", _several(name, "studies", matches), fix=_how_to_choose(matches))
    return folder


def find_runs(name: str) -> list[RunFolder]:
    """Return the run that a name selects, or the runs of the study."""
    study = find_study(name)
    return [find_run(name)] if study is None else study.runs()


def need_mine(*folders: RunFolder | StudyFolder) -> None:
    """Raise UserError (exit code 1) for runs that another user made or can change: fp8launch only reads these."""
    for folder in folders:
        if reason := why_not_own_run(folder.path):
            message = f"fp8launch only reads this folder, because other users could change it: {reason}"
            fix = "read its recipe.yaml, then name that file to use it"
            raise error("not-yours", message, str(folder.path), fix, ANSWER_IS_NO)


def job_ids(run: RunFolder) -> list[str]:
    """Return the ids of a run's jobs in order, submitted by fp8launch or by an earlier job."""
    submitted = [str(job["id"]) for job in run.manifest().get("jobs", [])]
    own = [job for job in attempts_of(run).jobs if job not in submitted and job != LOCAL_JOB]
    if not own:
        return submitted
    return sorted([*submitted, *own], key=natural_order)


def newest_job(run: RunFolder) -> str | None:
    """Return the id of a run's newest job; None for a run that was never submitted."""
    jobs = job_ids(run)
    return jobs[-1] if jobs else None
