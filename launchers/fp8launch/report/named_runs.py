"""Find and read what the command line names: runs, studies, recipes, logs and event files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fp8launch.diagnostics import ANSWER_IS_NO, UserError, error
from fp8launch.logs.event_files import event_files
from fp8launch.logs.open_log import log_name, logs_in
from fp8launch.recipe.yaml_source import is_file, is_folder, is_there
from fp8launch.report.read_run import run_from_events, run_from_folder, run_from_logs, runs_from_study
from fp8launch.report.run_report import RunReport
from fp8launch.rundir.names import has_runs, ids_that_begin, is_own_folder, is_recipe_file, runs_named, study_named
from fp8launch.rundir.registry import ambiguous_path, is_written_as_path
from fp8launch.rundir.run_dir import MANIFEST, RunFolder


def read_runs(
    names: Sequence[str], gpu: str | None = None, say: Callable[[str], object] = lambda note: None
) -> list[RunReport]:
    """Read every run that the names refer to, once each and in order. Raises UserError for an unknown name.

    `say` receives a note if a name is ambiguous.
    """
    found: dict[str, RunReport] = {}
    for name in names:
        for run in _read_left(name, gpu, say):
            key = run.sources[0] if run.sources else run.name
            found.setdefault(key, run)
    return _told_apart(list(found.values()))


def _read_left(name: str, gpu: str | None, say: Callable[[str], object]) -> list[RunReport]:
    """Read what a name refers to; look it up again if somebody removes one of its runs in the meantime."""
    gone: set[str | None] = set()
    while True:
        try:
            return _read(name, gpu, say)
        except UserError as exc:
            problem = exc.problems[0]
            if problem.code != "no-manifest" or problem.where in gone:
                raise
            gone.add(problem.where)


def _told_apart(runs: list[RunReport]) -> list[RunReport]:
    """Lengthen equal names of logs, so that they do not count as repeats: by the folder, then to the whole path."""
    for longer in (_with_folder, _whole_path):
        counts = Counter(run.name for run in runs)
        runs = [replace(run, name=longer(run)) if counts[run.name] > 1 and run.sources else run for run in runs]
    return runs


def _with_folder(run: RunReport) -> str:
    if run.study is not None:
        return run.name
    return f"{Path(run.sources[0]).absolute().parent.name}/{run.name}"


def _whole_path(run: RunReport) -> str:
    return run.sources[0]


def _read(name: str, gpu: str | None, say: Callable[[str], object]) -> list[RunReport]:
    path = path_named(name)
    if path is not None:
        if events := event_files(path):
            return [run_from_events(path.name, events, gpu)]
        if is_file(path):
            return [run_from_logs(log_name(path), [path], gpu)]
        logs = logs_in(path)
        if not logs:
            raise error("no-log", "is not a run or a study and contains no *.log", name)
        return [run_from_logs(log_name(log), [log], gpu) for log in logs]
    study = study_named(name, say)
    if study:
        return runs_from_study(study, gpu)
    return [run_from_folder(run, gpu) for run in runs_named(name)]


def path_named(name: str) -> Path | None:
    """Return the log, event file or folder that a name refers to; None for a run, a study or a recipe.

    A name without a slash is a path only if no run has that name. Raises UserError if run ids start with it, too.
    """
    path = Path(name)
    if not is_there(path) or is_recipe_file(name):
        return None
    if is_written_as_path(name):
        return None if is_own_folder(name) else path
    if has_runs(name):
        return None
    begun = ids_that_begin(name)
    if begun and is_folder(path) and not (event_files(path) or logs_in(path)):
        return None
    if begun:
        raise ambiguous_path(name, begun)
    return None if is_own_folder(name) else path


def event_files_named(names: Sequence[str]) -> list[Path]:
    """Return the event files of one run that the names refer to; an empty list for any other names."""
    found: list[Path] = []
    for name in names:
        path = path_named(name)
        if path is not None:
            found += event_files(path)
    return found


def logs_named(names: Sequence[str]) -> list[Path]:
    """Return the paths if the names are log files, which then belong to one run; otherwise an empty list.

    Raises UserError if only some of the names are log files.
    """
    files: list[Path] = []
    others: list[str] = []
    for name in names:
        path = path_named(name)
        if path is not None and is_file(path):
            files.append(path)
        else:
            others.append(name)
    if files and others:
        raise error("file-not-found", "no such log", others[0], "pass runs, or logs of one run")
    return files


def runs_with_logs(names: Sequence[str], say: Callable[[str], object]) -> list[RunFolder]:
    """Return every run that the names refer to, once each. Runs without a log are left out and reported to `say`."""
    named: list[RunFolder] = []
    for name in names:
        named += runs_named(name, newest=True, say=say)
    found = list(dict.fromkeys(named))
    with_log = [run for run in found if run.attempts() or run.batch_output()]
    if not with_log and found:
        return found[:1]  # reading this run raises the error that it has no log
    for run in found:
        if run not in with_log:
            say(f"{run.run_id} has no log yet")
    if not found:
        raise error("no-runs", "the study has no runs yet", names[0], "repeat its submit command", ANSWER_IS_NO)
    return with_log


def report_of(run: RunFolder, gpu: str | None = None) -> RunReport:
    """Report on all attempts of a run. Raises UserError (exit code 1) if it has no log yet."""
    logs_of(run)
    return run_from_folder(run, gpu)


def logs_of(run: RunFolder) -> list[Path]:
    """Return the logs of a run's attempts, oldest first. Raises UserError (exit code 1) if it has none yet."""
    # If the job ended before its first process started, only the batch script produced output.
    logs = run.logs() or run.batch_output()
    if not logs:
        place = str(run.path / MANIFEST)
        raise error("no-log", f"{run.run_id} has no log yet", place, "`fp8launch runs` shows its state", ANSWER_IS_NO)
    return logs
