"""`fp8launch runs`: what was submitted and how it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import click

from fp8launch import backends
from fp8launch.backends.base import JobState
from fp8launch.cli.output import complain, json_option, say, show_json, show_table
from fp8launch.problems import UserError
from fp8launch.runs.attempts import attempts_of
from fp8launch.runs.folder import RunFolder
from fp8launch.runs.store import all_runs, damaged, find_runs, find_study, job_ids, known_roots
from fp8launch.runs.submission import in_words, repair


@click.command()
@click.argument("names", nargs=-1, metavar="[RUN|STUDY...]")
@click.option("-n", "--last", type=click.IntRange(min=1), default=20, show_default=True, help="Show the last N runs.")
@json_option
def runs(names: tuple[str, ...], last: int, as_json: bool) -> None:
    """List runs with their state, newest last; of a study every point."""
    found = [run for name in names for run in find_runs(name)] if names else all_runs()[-last:]
    rows = [(run, run.manifest(), state) for run, state in zip(found, run_states(found), strict=True)]
    if not names:
        complain(damaged())
    for study in filter(None, map(find_study, names)):
        if missing := study.missing():
            count = len(study.record()["points"])
            say(f"{study.study_id}: {len(missing)} of {count} points have no run yet; the same submit makes them")
    if as_json:
        show_json([_json(run, manifest, state) for run, manifest, state in rows])
        return
    if not rows:
        say(f"no runs in {', '.join(map(str, known_roots())) or 'any run root'}")
        return
    show_table(
        ["run", "state", "job", "backend", "size", "created", "detail"],
        [
            (
                run.run_id,
                state.status,
                ",".join(job_ids(run)),
                str(manifest.get("backend", "")),
                _size(manifest),
                str(manifest.get("created", ""))[:16].replace("T", " "),
                "; ".join(filter(None, [state.detail, attempts_of(run).words])),
            )
            for run, manifest, state in rows
        ],
    )
    if len(rows) > 1:
        counts = Counter(state.status for _, _, state in rows)
        say(", ".join(f"{count} {status}" for status, count in counts.most_common()))


def run_states(found: list[RunFolder]) -> list[JobState]:
    """The states of runs of any backends, each backend asked once."""
    by_backend: dict[str, list[RunFolder]] = {}
    for run in found:
        by_backend.setdefault(str(run.manifest().get("backend")), []).append(run)
    states: dict[RunFolder, JobState] = {}
    for name, members in by_backend.items():
        try:
            backend = backends.backend(name)
            repair(members, backend)
            states.update(zip(members, backend.states(members), strict=True))
        except UserError as exc:
            states.update((run, JobState("unknown", str(exc))) for run in members)
    for run in found:
        if not job_ids(run):
            states[run] = JobState("unknown", in_words(run), source="run folder")
    return [states[run] for run in found]


def _size(manifest: dict[str, Any]) -> str:
    resources = manifest.get("recipe", {}).get("resources")
    if not isinstance(resources, dict):
        resources = {}
    return f"{resources.get('nodes', 1)} x {resources.get('gpus_per_node', '?')} {manifest.get('gpu', '')}"


def _json(run: RunFolder, manifest: dict[str, Any], state: JobState) -> dict[str, Any]:
    return {
        "run": run.run_id,
        "folder": str(run.path),
        "name": manifest.get("name"),
        "study": manifest.get("study"),
        "created": manifest.get("created"),
        "backend": manifest.get("backend"),
        "jobs": job_ids(run),
        "state": state.status,
        "detail": state.detail,
        "exit_code": state.exit_code,
        "source": state.source,
        "attempts": len(run.attempts()),
        "survival": asdict(attempts_of(run)),
    }
