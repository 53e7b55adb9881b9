"""One run of a comparison: its report, and the facts that it was run with, flat and by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fp8launch.injob.supervisor.health_rules import LIMITS, HealthLimits
from fp8launch.injob.supervisor.run_records import STARTED_BY
from fp8launch.logs import ParsedLog
from fp8launch.report.goodput import goodput_of_run
from fp8launch.report.health import limits_of
from fp8launch.report.phases import PhaseSpan, spans_of
from fp8launch.report.run_facts import SETTINGS, UNSET, manifest_facts, precision_of, stated_arguments
from fp8launch.report.run_report import RunReport
from fp8launch.report.run_status import with_batch_output
from fp8launch.report.steady_state import Line, SteadyState, values
from fp8launch.report.tensorboard import read_events
from fp8launch.report.throughput import read_logs, summarise, summarise_run
from fp8launch.rundir.attempts import HealthAction, health_actions
from fp8launch.rundir.registry import job_ids
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.rundir.study import StudyFolder
from fp8launch.secrets import HIDDEN, is_secret, redacted
from fp8launch.untyped import as_mapping

NOT_SUBMITTED = "not submitted"


# Units of speed, the most meaningful first. A ratio needs one that all runs on both sides have.
Unit = Literal["tokens/s/GPU", "samples/s/GPU", "iterations/s"]
UNITS: tuple[Unit, ...] = ("tokens/s/GPU", "samples/s/GPU", "iterations/s")


@dataclass(frozen=True)
class StudyPoint:
    """A run's position in its study: the axes' values by recipe key, and the number of the repeat."""

    name: str
    point: Mapping[str, object]
    repeat: int = 1


@dataclass(frozen=True)
class RunData:
    """One run with everything that is known about it.

    `facts` holds Megatron's arguments by name, and beside them gpu, world_size, nodes, precision, image, commit,
    software versions, `node set`, `GPU` and `driver` as the nodes reported them, `script`, `env NAME` and `config NAME`
    (`launch.config`). It holds only what is known. `absent` is the reason why a planned run never ran.
    """

    name: str
    report: RunReport
    facts: Mapping[str, object]
    study: StudyPoint | None = None
    reference: Mapping[str, Any] | None = None
    command: str = ""
    sources: tuple[str, ...] = field(default=())
    absent: str = ""

    @property
    def good(self) -> bool:
        """The run has a number to show: it ended as planned and steady iterations are left.

        The numbers of an unhealthy run are shown, too, and marked.
        """
        return self.report.status in ("ok", "unhealthy") and self.report.step_time_ms is not None

    @property
    def world(self) -> int | None:
        return self.report.world_size

    @property
    def steady_state(self) -> SteadyState:
        return self.report.steady_state

    @property
    def kept(self) -> tuple[Line, ...]:
        return self.report.steady_state.kept

    def speeds(self, unit: Unit) -> list[float]:
        """Return the speed at every kept line; empty where the log does not determine it in this unit."""
        if unit == "tokens/s/GPU":
            speeds = self.tokens_per_s(self.kept)
        elif unit == "samples/s/GPU":
            speeds = self._samples_per_s(self.kept)
        else:
            speeds = [1e3 / line.step_time_ms for line in self.kept if line.step_time_ms]
        return [speed for speed in speeds if math.isfinite(speed) and speed > 0]

    def tokens_per_s(self, lines: Sequence[Line]) -> list[float]:
        """Return tokens/s/GPU at each line, NaN where the log does not determine it."""
        length = self.report.seq_length
        if self.report.tokens_source == "logged" or not length:
            return values(lines, "tokens_per_s_per_gpu")
        return [length * samples for samples in self._samples_per_s(lines)]

    def _samples_per_s(self, lines: Sequence[Line]) -> list[float]:
        """Samples/s/GPU at each line, NaN where the log does not determine it."""
        found = []
        for line in lines:
            speed = math.nan
            if self.world and line.step_time_ms > 0:
                speed = line.global_batch_size / self.world / (line.step_time_ms / 1e3)
            found.append(speed)
        return found

    def status_text(self) -> str:
        """The status in words, for a run that has no number."""
        if self.absent:
            return self.absent
        if self.report.status == "failed" and self.report.failure:
            return f"failed: {self.report.failure.code}"
        if self.report.status in ("ok", "unhealthy"):
            return "no steady iterations"
        return self.report.status.replace("_", " ")


def run_from_logs(name: str, paths: Sequence[Path], gpu: str | None = None, world_size: int | None = None) -> RunData:
    """Read a run known only by its logs: one per attempt, oldest first."""
    return _run_data(name, read_logs(paths), gpu, world_size, {}, sources=tuple(map(str, paths)))


def run_from_events(name: str, files: Sequence[Path], gpu: str | None = None) -> RunData:
    """Read a run known only by its TensorBoard event files, one per attempt, oldest first."""
    return _run_data(name, read_events(files), gpu, None, {}, sources=tuple(map(str, files)))


def run_from_folder(run: RunFolder, gpu: str | None = None) -> RunData:
    """Read a run of ours with its manifest. A run without a log yet has no data, which is not an error here."""
    manifest = run.manifest()
    logs = read_logs(run.logs() or run.batch_output())
    data = _run_data(
        run.run_id,
        logs,
        gpu or str(manifest.get("gpu") or "") or None,
        as_mapping(manifest.get("layout")).get("world"),
        stated_arguments(manifest),
        spans=spans_of(manifest),
        more=manifest_facts(manifest, run.path),
        limits=limits_of(manifest),
        actions=health_actions(run),
        study=_study_point(as_mapping(manifest.get("study"))),
        reference=as_mapping(as_mapping(manifest.get("recipe")).get("reference")) or None,
        command=_command_line(manifest),
        sources=(str(run.path),),
    )
    goodput = goodput_of_run(run, logs, data.report.world_size)
    return replace(data, report=with_batch_output(replace(data.report, goodput=goodput), run))


def _command_line(manifest: Mapping[str, Any]) -> str:
    """Return the command that started a run; manifests of the launcher's own runs leave out its name."""
    words = list(map(str, manifest.get("command") or []))
    if manifest.get("started_by") != STARTED_BY:
        words.insert(0, "fp8launch")
    return redacted(" ".join(words))


def _study_point(study: Mapping[str, Any]) -> StudyPoint | None:
    if not study.get("name"):
        return None
    return _point_of(str(study["name"]), as_mapping(study.get("point")), study.get("repeat"))


def _point_of(name: str, values: Mapping[str, object], repeat: Any) -> StudyPoint:
    shown = {redacted(key): _without_secret(key, value) for key, value in values.items()}
    return StudyPoint(redacted(name), shown, int(repeat or 1))


def runs_from_study(study: StudyFolder, gpu: str | None = None) -> list[RunData]:
    """Read every planned point of a study, in its order; one without a run, or whose run has no job, is absent."""
    record = study.record()
    planned = [*record["points"], *record.get("left_out", [])]
    made = {run.run_id: run_from_folder(run, gpu) for run in study.runs()}
    found = []
    for point in planned:
        run = made.get(str(point["run"]))
        if run is None:
            found.append(_planned(study.study_id, point, planned, made))
        elif not run.report.attempts and not job_ids(study.run(run.name)):
            found.append(replace(run, absent=NOT_SUBMITTED))
        else:
            found.append(run)
    return found


def _planned(
    study: str, point: Mapping[str, Any], others: Sequence[Mapping[str, Any]], made: Mapping[str, RunData]
) -> RunData:
    """A point without a run. Its number of GPUs and its name are those of the study's runs of the same recipe."""
    recipe, nodes = point.get("recipe"), point.get("nodes")
    siblings = []
    for other in others:
        run = made.get(str(other["run"]))
        if run is not None and other.get("recipe") == recipe:
            siblings.append(run)
    facts: dict[str, object] = {}
    name = _recipe_name(siblings) or recipe
    if name is not None:
        facts["recipe"] = name
    if isinstance(nodes, int):
        facts["nodes"] = nodes
        per_node = _gpus_per_node(siblings)
        if per_node:
            facts["world_size"] = per_node * nodes
    return RunData(
        str(point["run"]),
        summarise([]),
        facts,
        study=_point_of(study, as_mapping(point.get("values")), point.get("repeat")),
        absent=str(point.get("why") or NOT_SUBMITTED),
    )


def _recipe_name(runs: Sequence[RunData]) -> object:
    for run in runs:
        if "recipe" in run.facts:
            return run.facts["recipe"]
    return None


def _gpus_per_node(runs: Sequence[RunData]) -> int | None:
    for run in runs:
        nodes = run.facts.get("nodes")
        if run.world and isinstance(nodes, int) and nodes:
            return run.world // nodes
    return None


def _run_data(
    name: str,
    logs: Sequence[ParsedLog],
    gpu: str | None,
    world_size: int | None,
    stated: Mapping[str, object],
    spans: Sequence[PhaseSpan] = (),
    more: Mapping[str, object] | None = None,
    limits: HealthLimits = LIMITS,
    actions: Sequence[HealthAction] = (),
    **rest: Any,
) -> RunData:
    report = summarise_run(
        logs, spans, gpu=gpu, world_size=world_size, arguments=stated, limits=limits, actions=actions
    )
    facts: dict[str, object] = {**stated, **report.argument_dump}
    if report.global_batch_size:
        facts["global_batch_size"] = report.global_batch_size
    facts |= {**report.versions, **report.machines.facts()}
    if report.gpu is not None:
        facts["gpu"] = report.gpu
    if report.world_size is not None:
        facts["world_size"] = report.world_size
    precision = _precision_in_phases(report) or precision_of(facts)
    if precision:
        facts["precision"] = precision
    facts |= more or {}
    shown = {fact: _without_secret(fact, value) for fact, value in _in_effect(facts).items()}
    return RunData(name, report, shown, **rest)


def _in_effect(facts: Mapping[str, object]) -> dict[str, object]:
    """Return the facts in effect.

    Fields of `launch.config` replace arguments, and settings of experts need experts. Megatron fills in the ends of a
    constant weight decay.
    """
    found = {}
    decay = facts.get("weight_decay")
    overlay = {}
    for name, value in facts.items():
        if name.startswith("moe_") and not facts.get("num_experts"):
            continue
        if name in ("start_weight_decay", "end_weight_decay") and value == decay:
            continue
        kind, _, field = name.partition(" ")
        if kind == "config" and field in facts:
            overlay[field] = value
        else:
            found[name] = value
    return found | overlay


def _without_secret(name: str, value: object) -> object:
    """Hide a secret value: reports and trackers publish logs and manifests that other programs wrote."""
    if value is not None and is_secret(name, value):
        return HIDDEN
    return value


def _precision_in_phases(report: RunReport) -> str | None:
    """`tensorwise then bf16`: a run in phases is named by all of them. None for a run of one precision."""
    names: list[str] = []
    for phase in report.phases:
        name = precision_of(phase.report.argument_dump) or phase.name
        if not names or names[-1] != name:
            names.append(name)
    if len(names) < 2:
        return None
    return " then ".join(names)


def with_unset(runs: Sequence[RunData]) -> list[RunData]:
    """Return the runs with `unset` for every variable that only others set, where a run states its environment."""
    settings: dict[str, object] = {}
    for run in runs:
        for name in run.facts:
            if name.startswith(SETTINGS):
                settings[name] = UNSET
    found = []
    for run in runs:
        if "script" in run.facts:
            run = replace(run, facts={**settings, **run.facts})
        found.append(run)
    return found
