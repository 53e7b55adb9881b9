"""The state of a search on disk, in the folder of its study: `tune/state.json`.

A trial is recorded before its run is submitted, and its outcome once the run has ended. A command that was killed can
therefore be repeated: it continues with the open trial, whose run the study knows, and submits nothing twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import error
from fp8launch.injob.supervisor.run_records import read_json
from fp8launch.plugins.tune.candidates import Refused
from fp8launch.plugins.tune.state import Candidate, Limits, Outcome, Start, State, Trial, Variant
from fp8launch.rundir.atomic_io import make_folders, write_atomically
from fp8launch.rundir.study import SEARCH, StudyFolder


@dataclass(frozen=True)
class OpenTrial:
    """A trial whose outcome is not known yet. `cut` is true if its run was stopped at a time limit."""

    trial: Trial
    cut: bool = False


@dataclass(frozen=True)
class Record:
    """A search with the `overrides` of its options, by start and option name. Each trial uses `gpus` GPUs.

    `identity` is the result of `study_name`, or empty in records of versions that did not write it. `basis` has the
    speeds that the predicted gains rest on, as JSON (None without a prediction), and `remarks` what the cluster profile
    changes in them.
    """

    state: State
    overrides: tuple[Mapping[str, Mapping[str, Any]], ...]
    refused: tuple[tuple[Refused, ...], ...]
    gpus: int
    open: OpenTrial | None = None
    identity: str = ""
    basis: Mapping[str, Any] | None = None
    remarks: tuple[str, ...] = ()

    def values(self, variant: Variant) -> dict[str, Any]:
        """Return the merged overrides of a variant; later changes win."""
        known = self.overrides[variant.start]
        merged: dict[str, Any] = {}
        for name in variant.changes:
            merged |= known[name]
        return merged

    def opened(self, trial: Trial) -> Record:
        """Return the record with a trial that is about to be submitted."""
        return replace(self, open=OpenTrial(trial))

    def cut(self, trial: Trial, seconds: float) -> Record:
        """Return the record with a trial whose run was stopped after `seconds`, before it had a result."""
        return replace(self, open=OpenTrial(trial, cut=True), state=replace(self.state, cut_seconds=seconds))

    def with_outcome(self, trial: Trial, outcome: Outcome) -> Record:
        """Return the record with the outcome of a trial, whose seconds include an earlier run that was cut off."""
        state = replace(self.state, results=(*self.state.results, (trial, outcome)), cut_seconds=0.0)
        return replace(self, state=state, open=None)


def folder_of(study: StudyFolder) -> Path:
    return (study.path / SEARCH).parent


def write_record(study: StudyFolder, record: Record) -> None:
    """Write the state atomically. Raises UserError (exit code 3) if the disk refuses."""
    folder = folder_of(study)
    try:
        make_folders(folder)
        write_atomically(folder / Path(SEARCH).name, json.dumps({"format": 1, **asdict(record)}, indent=1) + "\n")
    except OSError as exc:
        fix = "free disk space, then repeat the command: it continues where it stopped"
        raise error("run-root", f"cannot write the state of the search: {exc.strerror}", str(folder), fix, 3) from None


def read_record(study: StudyFolder) -> Record | None:
    """Read the record of a search, or None if it is new. Raises UserError if the file is damaged."""
    file = study.path / SEARCH
    if not file.is_file():
        return None
    try:
        return _record(read_json(file))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as exc:
        fix = "choose another --study, or delete this folder to start over"
        raise error("bad-tune-state", f"cannot be read: {type(exc).__name__}: {exc}", str(file), fix) from None


def _record(data: Any) -> Record:
    held = data["state"]
    starts = []
    for one in held["starts"]:
        candidates = tuple(Candidate(**candidate) for candidate in one["candidates"])
        starts.append(Start(one["name"], candidates, one["memory_gib"]))
    results = tuple((_trial(trial), _outcome(outcome)) for trial, outcome in held["results"])
    state = State(
        tuple(starts),
        results,
        Limits(**held["limits"]),
        capacity_gib=held["capacity_gib"],
        expected_seconds=held["expected_seconds"],
        cut_seconds=held["cut_seconds"],
    )
    refused = []
    for several in data["refused"]:
        refused.append(tuple(Refused(**one) for one in several))
    opened = data["open"] and OpenTrial(_trial(data["open"]["trial"]), data["open"]["cut"])
    return Record(
        state,
        tuple(data["overrides"]),
        tuple(refused),
        data["gpus"],
        opened,
        data.get("identity", ""),
        data.get("basis"),
        tuple(data.get("remarks", ())),
    )


def _trial(data: Mapping[str, Any]) -> Trial:
    return Trial(Variant(data["variant"]["start"], tuple(data["variant"]["changes"])), data["repeat"])


def _outcome(data: Mapping[str, Any]) -> Outcome:
    return Outcome(**{**data, "speeds": tuple(data["speeds"])})
