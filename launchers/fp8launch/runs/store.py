"""Which runs there are, from any shell: the run roots that were used are remembered in the user's state folder."""

from __future__ import annotations

import contextlib
import os
import shlex
from datetime import datetime
from pathlib import Path

from fp8launch.problems import ANSWER_IS_NO, Problem, UserError, error, nearest
from fp8launch.recipe.source import is_file
from fp8launch.runs.attempts import attempts_of
from fp8launch.runs.disk import make_folders
from fp8launch.runs.folder import MANIFEST, STUDY, RunFolder, half_made, run_folders
from fp8launch.runs.study import StudyFolder, study_folders


def default_root() -> Path:
    """`FP8LAUNCH_RUNS`, else `~/fp8launch-runs`: home is the one folder that most clusters share between nodes."""
    return Path(os.environ.get("FP8LAUNCH_RUNS") or "~/fp8launch-runs").expanduser().absolute()


def known_roots() -> list[Path]:
    """Every run root that was used and still exists, the default one first."""
    try:
        lines = _roots_file().read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        lines = []
    roots = [default_root(), *(Path(line) for line in lines if line)]
    return [root for root in dict.fromkeys(roots) if root.is_dir()]


def remember_root(root: Path) -> None:
    """Add a run root to those that `runs` looks in. Failing to is no reason to stop a submission."""
    if root in known_roots() and root != default_root():
        return
    file = _roots_file()
    with contextlib.suppress(OSError):
        make_folders(file.parent)
        # A line is added in one go: of two launchers neither loses the other's.
        with file.open("a", encoding="utf-8", errors="surrogateescape") as lines:
            lines.write(f"{root}\n")


def all_runs() -> list[RunFolder]:
    """All runs of all known roots, oldest first, without those whose manifest cannot be read: `damaged` tells."""
    found = [(run, _created(run)) for root in known_roots() for run in run_folders(root)]
    return [run for run, _ in sorted((f for f in found if f[1] is not None), key=lambda f: (f[1] or 0.0, f[0].run_id))]


def _created(run: RunFolder) -> float | None:
    """When the run was made, in seconds: texts of two time zones do not sort. None without a manifest."""
    try:
        return datetime.fromisoformat(str(run.manifest().get("created"))).timestamp()
    except UserError:
        return None
    except (ValueError, OverflowError):
        return 0.0


def damaged() -> list[Problem]:
    """What is wrong in the known roots: manifests that cannot be read, and folders that were never finished."""
    found: list[Problem] = []
    for root in known_roots():
        for run in run_folders(root):
            try:
                run.manifest()
            except UserError as exc:
                found += exc.problems
        for folder in [*half_made(root), *(part for study in study_folders(root) for part in half_made(study.path))]:
            message = "a launcher was ended while it made this folder; nothing was submitted of it"
            fix = f"rm -r {shlex.quote(str(folder))}, or the same submit"
            found.append(Problem("warning", "half-made", message, str(folder), fix))
    return found


def find_run(name: str) -> RunFolder:
    """The run that a user means: a folder, a run id, the start of one that no other shares, a job id, or `latest`."""
    if is_file(Path(name) / MANIFEST):
        return RunFolder(Path(name).absolute())
    runs = all_runs()
    if name == "latest" and (own := [run for run in runs if run.is_mine]):
        return own[-1]
    matches = [r for r in runs if r.run_id == name] or [r for r in runs if r.run_id.startswith(name)]
    if not matches and name.isdigit():
        matches = [r for r in runs if name in job_ids(r)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        message = f"'{name}' fits {len(matches)} runs: {', '.join(r.run_id for r in matches[-5:])}"
        raise error("ambiguous-run", message, fix="give the whole run id, or `latest`")
    near = nearest(name, [r.run_id for r in runs])
    raise error(
        "unknown-run",
        f"no run '{name}' in {', '.join(map(str, known_roots())) or 'any run root'}",
        fix=f"did you mean '{near}'?" if near else "`fp8launch runs` lists them",
    )


def all_studies() -> list[StudyFolder]:
    """All studies of all known roots."""
    return [study for root in known_roots() for study in study_folders(root)]


def find_study(name: str) -> StudyFolder | None:
    """The study that a user means by a folder, an id or the start of one; None for no study.

    Raises UserError for the start of several studies.
    """
    if is_file(Path(name) / STUDY):
        return StudyFolder(Path(name).absolute())
    studies = all_studies()
    matches = [s for s in studies if s.study_id == name] or [s for s in studies if name and s.study_id.startswith(name)]
    if len(matches) > 1 and not any(run.run_id == name for run in all_runs()):
        message = f"'{name}' fits {len(matches)} studies: {', '.join(s.study_id for s in matches[-5:])}"
        raise error("ambiguous-study", message, fix="give the whole id")
    return matches[0] if len(matches) == 1 else None


def find_runs(name: str) -> list[RunFolder]:
    """The run, or the runs of the study, that a user means."""
    study = find_study(name)
    return study.runs() if study else [find_run(name)]


def need_mine(run: RunFolder | StudyFolder) -> None:
    """Raises UserError (exit code 1) for what another user made: what it says is not to be acted upon."""
    if not run.is_mine:
        message = "another user made this folder: its runs are only read here"
        raise error("not-yours", message, str(run.path), "submit a run of your own from its recipe.yaml", ANSWER_IS_NO)


def job_ids(run: RunFolder) -> list[str]:
    """The ids of the jobs that were submitted for a run, by us and by its own jobs, in order."""
    submitted = [str(job["id"]) for job in run.manifest().get("jobs", [])]
    own = [job for job in attempts_of(run).jobs if job not in submitted]
    return sorted([*submitted, *own], key=lambda job: int(job.partition("_")[0])) if own else submitted


def _roots_file() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "fp8launch" / "run_roots"
