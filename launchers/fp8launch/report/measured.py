"""One run of a comparison: its report, its iteration lines, and what it was run with, flat and by name."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from fp8launch.logs import ParsedLog
from fp8launch.report.phases import Span, spans_of, summarise_run
from fp8launch.report.run_report import RunReport
from fp8launch.report.selection import Line, Selection, select, values
from fp8launch.report.tensorboard import read_events
from fp8launch.report.throughput import read_logs, summarise
from fp8launch.runs.folder import RunFolder
from fp8launch.runs.store import job_ids
from fp8launch.runs.study import StudyFolder

NOT_SUBMITTED = "not submitted"
OWN_SCRIPT = "fp8launch's entry"
# Facts of these kinds are all known of a run that has a manifest.
SETTINGS = ("env ", "config ")
UNSET = "unset"
# Megatron's dump calls these otherwise than its command line.
_DUMP_NAMES = {"fp8_format": "fp8", "fp4_format": "fp4"}


@dataclass(frozen=True)
class Study:
    """Where a run stands in its study: the axes' values by recipe key, and which repeat it is."""

    name: str
    point: Mapping[str, object]
    repeat: int = 1


@dataclass(frozen=True)
class Measured:
    """`facts` holds Megatron's arguments by name, and beside them gpu, world_size, nodes, precision, image, commit,
    software versions, `node set`, `GPU` and `driver` as the nodes said, `script`, `env NAME` and `config NAME`
    (`launch.config`): only what is known. `dumped` says that the arguments are the log's own. `absent` is why a planned
    run never ran."""

    name: str
    report: RunReport
    selection: Selection
    facts: Mapping[str, object]
    dumped: bool
    study: Study | None = None
    reference: Mapping[str, Any] | None = None
    command: str = ""
    sources: tuple[str, ...] = field(default=())
    absent: str = ""

    @property
    def good(self) -> bool:
        """The run has a number to show: it ended as planned and steady iterations are left."""
        return self.report.status == "ok" and self.report.step_time_ms is not None

    @property
    def world(self) -> int | None:
        return self.report.world_size

    def speeds(self) -> list[float]:
        """Tokens/s/GPU of every kept line, or, where the log does not determine that, iterations/s."""
        batch, tokens = self.report.seq_length, self.report.tokens_per_s_per_gpu
        if batch and self.world:
            per_second = [batch * x.global_batch_size / self.world / (x.step_time_ms / 1e3) for x in self.kept]
        elif tokens:
            per_second = values(self.kept, "tokens_per_s_per_gpu")
        else:
            per_second = [1e3 / x.step_time_ms for x in self.kept]
        return [v for v in per_second if math.isfinite(v) and v > 0]

    @property
    def kept(self) -> tuple[Line, ...]:
        return self.selection.kept

    def why_not(self) -> str:
        """The status in words, for a run that has no number."""
        if self.absent:
            return self.absent
        if self.report.status == "failed" and self.report.failure:
            return f"failed: {self.report.failure.code}"
        if self.report.status == "ok":
            return "no steady iterations"
        return self.report.status.replace("_", " ")


def from_logs(name: str, paths: Sequence[Path], gpu: str | None = None, world_size: int | None = None) -> Measured:
    """A run known by its logs alone: one per attempt, oldest first."""
    return _measured(name, read_logs(paths), gpu, world_size, {}, sources=tuple(map(str, paths)))


def from_events(name: str, files: Sequence[Path], gpu: str | None = None) -> Measured:
    """A run known by its TensorBoard event files, one per attempt, oldest first."""
    return _measured(name, read_events(files), gpu, None, {}, sources=tuple(map(str, files)))


def from_run(run: RunFolder, gpu: str | None = None) -> Measured:
    """A run of ours, with what its manifest knows. A run without a log yet has no data, which is no error here."""
    manifest = run.manifest()
    logs = [attempt.log for attempt in run.attempts()] or run.batch_output()
    stated = {**arguments_of(_mapping(manifest.get("megatron")).get("argv") or [])}
    study = _mapping(manifest.get("study"))
    return _measured(
        run.run_id,
        read_logs(logs),
        gpu or str(manifest.get("gpu") or "") or None,
        _mapping(manifest.get("layout")).get("world"),
        stated,
        spans=spans_of(manifest),
        more=_manifest_facts(manifest, run.path),
        study=Study(str(study["name"]), _mapping(study.get("point")), int(study.get("repeat") or 1))
        if study.get("name")
        else None,
        reference=_mapping(_mapping(manifest.get("recipe")).get("reference")) or None,
        command=" ".join(["fp8launch", *map(str, manifest.get("command") or [])]),
        sources=(str(run.path),),
    )


def from_study(study: StudyFolder, gpu: str | None = None) -> list[Measured]:
    """Every point that the study planned, in its order; one without a run, or whose run has no job, is absent."""
    record = study.record()
    planned = [*record["points"], *record.get("left_out", [])]
    made = {run.run_id: from_run(run, gpu) for run in study.runs()}
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
    study: str, point: Mapping[str, Any], others: Sequence[Mapping[str, Any]], made: Mapping[str, Measured]
) -> Measured:
    """A point without a run. How many GPUs and what name its run would have, the study's other runs tell."""
    nodes, recipe = point.get("nodes"), point.get("recipe")
    alike = [run for other in others if other.get("recipe") == recipe and (run := made.get(str(other["run"])))]
    worlds = [(run.world, run.facts.get("nodes")) for run in alike]
    per_node = next((w // n for w, n in worlds if w and isinstance(n, int) and n), None)
    facts = {
        "nodes": nodes,
        "world_size": per_node * nodes if per_node and isinstance(nodes, int) else None,
        "recipe": next((run.facts["recipe"] for run in alike if "recipe" in run.facts), recipe),
    }
    return Measured(
        str(point["run"]),
        summarise([]),
        select([]),
        {name: value for name, value in facts.items() if value is not None},
        dumped=False,
        study=Study(study, _mapping(point.get("values")), int(point.get("repeat") or 1)),
        absent=str(point.get("why") or NOT_SUBMITTED),
    )


def _measured(
    name: str,
    logs: Sequence[ParsedLog],
    gpu: str | None,
    world_size: int | None,
    stated: Mapping[str, object],
    spans: Sequence[Span] = (),
    more: Mapping[str, object] | None = None,
    **rest: Any,
) -> Measured:
    report, counted = summarise_run(logs, spans, gpu=gpu, world_size=world_size, arguments=stated)
    attempts = [(log, process) for log in counted for process in log.processes]
    selection = select(attempts)
    if counted is not logs:
        every = select([(log, process) for log in logs for process in log.processes])
        selection = replace(every, kept=selection.kept)
    dump: Mapping[str, object] = next((p.head.arguments for _, p in reversed(attempts) if p.head.arguments), {})
    facts: dict[str, object] = {**stated, **dump}
    if report.global_batch_size:
        facts["global_batch_size"] = report.global_batch_size
    facts |= {**report.versions, **report.machines.facts()}
    facts |= {k: v for k, v in (("gpu", report.gpu), ("world_size", report.world_size)) if v is not None}
    if precision := precision_of(facts):
        facts["precision"] = precision
    return Measured(name, report, selection, {**facts, **(more or {})}, bool(dump), **rest)


def precision_of(arguments: Mapping[str, object]) -> str | None:
    """The precision in one word, as recipes name it, with what departs from the plain recipe; None if unknown."""
    kind, fp4 = arguments.get("fp8"), arguments.get("fp4")
    if not kind and not fp4:
        return next((k for k in ("bf16", "fp16") if arguments.get(k)), "fp32" if "fp8" in arguments else None)
    parts = [str(arguments.get("fp4_recipe") or "nvfp4") if fp4 else str(arguments.get("fp8_recipe") or "delayed")]
    if kind == "e4m3" and parts[0] != "mxfp8":
        parts.append("e4m3")
    history = arguments.get("fp8_amax_history_len", 1)
    if parts[0] == "delayed" and not fp4 and history != 1024:
        parts.append(f"history {history}")
    if arguments.get("fp8_param_gather") or arguments.get("fp4_param_gather"):
        parts.append("param gather")
    if arguments.get("first_last_layers_bf16"):
        ends = (arguments.get("num_layers_at_start_in_bf16", 1), arguments.get("num_layers_at_end_in_bf16", 1))
        parts.append(f"bf16 {ends[0]}+{ends[1]}")
    return " ".join(parts)


def arguments_of(argv: Sequence[object]) -> dict[str, object]:
    """Megatron's command line under the names of its dump: one value as number or text, several as a list."""
    found: dict[str, object] = {}
    name = ""
    for word in map(str, argv):
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            name = _DUMP_NAMES.get(name, name)
            found[name] = _value(value) if equals else True
        elif name:
            before = found[name]
            found[name] = _value(word) if before is True else [*_listed(before), _value(word)]
    return found


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else [value]


def _value(word: str) -> object:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _manifest_facts(manifest: Mapping[str, Any], folder: Path) -> dict[str, object]:
    recipe, image, git = (_mapping(manifest.get(name)) for name in ("recipe", "image", "git"))
    script = _mapping(recipe.get("launch")).get("script")
    facts: dict[str, object] = {
        "nodes": _mapping(recipe.get("resources")).get("nodes"),
        "image": image.get("digest") or image.get("image"),
        "commit": git.get("commit"),
        "uncommitted changes": git.get("dirty"),
        "cluster": manifest.get("cluster"),
        "fp8launch": _mapping(manifest.get("versions")).get("fp8launch"),
        "recipe": manifest.get("name"),
        "script": PurePath(script).name if isinstance(script, str) else OWN_SCRIPT,
    }
    environment = dict(_mapping(manifest.get("environment")))
    with contextlib.suppress(ValueError):
        settings = _mapping(json.loads(str(environment.get("FP8LAUNCH_CONFIG", ""))))
        facts |= {f"config {name}": value for name, value in settings.items()}
        del environment["FP8LAUNCH_CONFIG"]
    # Paths into the run's own folder differ by nature.
    facts |= {f"env {name}": value for name, value in environment.items() if str(folder) not in str(value)}
    # What somebody wrote into a manifest by hand may be anything.
    return {
        name: value if isinstance(value, str | int | float) else str(value)
        for name, value in facts.items()
        if value is not None
    }


def with_unset(runs: Sequence[Measured]) -> list[Measured]:
    """The same runs, where one that states its environment also says `unset` of what only others set: that differs."""
    names = {name for run in runs for name in run.facts if name.startswith(SETTINGS)}
    return [
        replace(run, facts={**dict.fromkeys(names, UNSET), **run.facts}) if "script" in run.facts else run
        for run in runs
    ]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
