"""Verify a run as a whole and in each phase, with the problems that plugins report about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import Problem
from fp8launch.logs import attempts_of
from fp8launch.report.named_runs import logs_of
from fp8launch.report.phases import by_phase
from fp8launch.report.read_run import spans_of, stated_arguments
from fp8launch.report.run_report import json_list
from fp8launch.report.throughput import read_logs
from fp8launch.report.verify import Verification, plugin_problems, verify_logs
from fp8launch.rundir.run_dir import RunFolder


@dataclass(frozen=True)
class RunVerification:
    """The verdict on a run and on each of its phases. Plugins report `problems`, by field of the JSON."""

    whole: Verification
    phases: Mapping[str, Verification]
    problems: Mapping[str, list[Problem] | None]

    def as_json(self) -> dict[str, Any]:
        found = self.whole.as_json()
        for name, problems in self.problems.items():
            found[name] = None if problems is None else json_list(problems)
        if self.phases:
            found["phases"] = {name: one.as_json() for name, one in self.phases.items()}
        return found


def verify_run(run: RunFolder) -> RunVerification:
    """Verify a run by its logs and its manifest. Raises UserError (exit code 1) if it has no log yet."""
    manifest = run.manifest()
    read = read_logs(logs_of(run))
    spans = by_phase(read, spans_of(manifest))
    if spans:
        phases = {span.name: verify_logs(logs, span.arguments) for span, logs in spans}
        parts = [(attempts_of(logs), span.arguments) for span, logs in spans]
        return RunVerification(_decisive(phases), phases, plugin_problems(parts, manifest))
    stated = stated_arguments(manifest)
    return RunVerification(verify_logs(read, stated), {}, plugin_problems([(attempts_of(read), stated)], manifest))


def verify_log_files(paths: Sequence[Path]) -> RunVerification:
    """Verify a run that is known only by its logs."""
    logs = read_logs(paths)
    return RunVerification(verify_logs(logs, {}), {}, plugin_problems([(attempts_of(logs), {})], {}))


def _decisive(phases: Mapping[str, Verification]) -> Verification:
    """Return the verdict that decides for the run: one that fails, otherwise one of a phase that requested FP8."""
    return min(phases.values(), key=lambda one: (one.ok, not one.asked))
