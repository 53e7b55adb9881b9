"""Read the report of one run, and the facts about its setup, from its folder, its logs or its event files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from fp8launch.engines.base import OWN_ENTRY_TITLE
from fp8launch.hardware.quantization import quantization_recipes, requested
from fp8launch.injob.supervisor.health_rules import LIMITS, HealthLimits
from fp8launch.logs import ParsedLog
from fp8launch.logs.event_files import read_events
from fp8launch.report.goodput import goodput_of_run
from fp8launch.report.outcome import limits_of, with_batch_output, without_earlier_failure
from fp8launch.report.phases import PhaseSpan
from fp8launch.report.run_report import RunReport, StudyPoint
from fp8launch.report.throughput import read_logs, summarise, summarise_run
from fp8launch.rundir.attempts import HealthAction, health_actions
from fp8launch.rundir.registry import job_ids
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.rundir.study import StudyFolder
from fp8launch.secrets import HIDDEN, is_secret, redacted
from fp8launch.untyped import as_mapping

# A manifest has all facts of these kinds. If one is missing there, it is known to be unset.
SETTINGS = ("env ", "config ")
UNSET = "unset"
# Arguments whose name in Megatron's dump differs from the command line.
_DUMP_NAMES = {"fp8_format": "fp8", "fp4_format": "fp4"}


def precision_of(arguments: Mapping[str, object]) -> str | None:
    """Name the precision as recipes do, with deviations from the plain recipe; None if unknown."""
    kind, fp4 = arguments.get("fp8"), arguments.get("fp4")
    if not kind and not fp4:
        return _high_precision(arguments)
    recipe = requested(arguments)
    parts = [recipe]
    quantization = quantization_recipes().get(recipe)
    usually_e4m3 = quantization is not None and quantization.usual_format == "e4m3"
    if kind == "e4m3" and not usually_e4m3:
        parts.append("e4m3")
    history = arguments.get("fp8_amax_history_len", 1)
    if recipe == "delayed" and not fp4 and history != 1024:
        parts.append(f"history {history}")
    if arguments.get("fp8_param_gather") or arguments.get("fp4_param_gather"):
        parts.append("param gather")
    if arguments.get("first_last_layers_bf16"):
        start = arguments.get("num_layers_at_start_in_bf16", 1)
        end = arguments.get("num_layers_at_end_in_bf16", 1)
        parts.append(f"bf16 {start}+{end}")
    return " ".join(parts)


def _high_precision(arguments: Mapping[str, object]) -> str | None:
    for name in ("bf16", "fp16"):
        if arguments.get(name):
            return name
    if "fp8" in arguments:
        return "fp32"
    return None


def stated_arguments(manifest: Mapping[str, Any]) -> dict[str, object]:
    """Return the arguments that a run was started with, from its manifest, under Megatron's names.

    Manifests of older versions only have the command line.
    """
    stated = manifest.get("arguments")
    if isinstance(stated, Mapping):
        # Megatron's dump lists both even if they are unset.
        return {"fp8": None, "fp4": None, **stated}
    return arguments_of(as_mapping(manifest.get("megatron")).get("argv") or [])


def spans_of(manifest: Mapping[str, Any]) -> tuple[PhaseSpan, ...]:
    """Return the phases of a run, as submitted."""
    spans = []
    for phase in manifest.get("phases") or ():
        spans.append(PhaseSpan(str(phase["name"]), int(phase["begin"]), int(phase["end"]), stated_arguments(phase)))
    return tuple(spans)


def arguments_of(argv: Sequence[object]) -> dict[str, object]:
    """Parse Megatron's command line, with names as in its dump. Several values of a flag become a list."""
    found: dict[str, object] = {}
    name = ""
    for word in map(str, argv):
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            name = _DUMP_NAMES.get(name, name)
            found[name] = True
            if equals:
                found[name] = _value(value)
        elif name:
            before = found[name]
            if before is True:
                found[name] = _value(word)
            else:
                found[name] = [*(before if isinstance(before, list) else [before]), _value(word)]
    return found


def _value(word: str) -> object:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def manifest_facts(manifest: Mapping[str, Any], folder: Path) -> dict[str, object]:
    recipe, image, git = map(as_mapping, map(manifest.get, ("recipe", "image", "git")))
    facts: dict[str, object] = {
        "nodes": as_mapping(recipe.get("resources")).get("nodes"),
        "image": image.get("digest") or image.get("image"),
        "commit": git.get("commit"),
        "uncommitted changes": git.get("dirty"),
        "cluster": manifest.get("cluster"),
        "fp8launch": as_mapping(manifest.get("versions")).get("fp8launch"),
        "recipe": manifest.get("name"),
        "script": _entry_title(manifest),
    }
    environment = dict(as_mapping(manifest.get("environment")))
    with contextlib.suppress(ValueError, RecursionError):
        settings = as_mapping(json.loads(str(environment.get("FP8LAUNCH_CONFIG", ""))))
        for name, value in settings.items():
            facts[f"config {name}"] = value
        del environment["FP8LAUNCH_CONFIG"]
    # Paths into the run folder differ between any two runs, so they are made relative.
    for name, value in environment.items():
        if str(folder) not in str(value):
            facts[f"env {name}"] = value
    known: dict[str, object] = {}
    for name, value in facts.items():
        if isinstance(value, str | int | float):
            known[name] = value
        elif value is not None:
            # A manifest edited by hand may contain any type here.
            known[name] = str(value)
    return known


def _entry_title(manifest: Mapping[str, Any]) -> str:
    """Return the title of the training loop. In manifests of older versions, only the recipe has it."""
    title = as_mapping(manifest.get("engine")).get("entry")
    if isinstance(title, str):
        return title
    script = as_mapping(as_mapping(manifest.get("recipe")).get("launch")).get("script")
    if isinstance(script, str):
        return PurePath(script).name
    return OWN_ENTRY_TITLE


NOT_SUBMITTED = "not submitted"


def run_from_logs(name: str, paths: Sequence[Path], gpu: str | None = None) -> RunReport:
    """Read a run of which only logs are known, one per attempt, oldest first."""
    return _run_report(name, read_logs(paths), gpu, None, {}, sources=tuple(map(str, paths)))


def run_from_events(name: str, files: Sequence[Path], gpu: str | None = None) -> RunReport:
    """Read a run of which only TensorBoard event files are known, one per attempt, oldest first."""
    return _run_report(name, read_events(files), gpu, None, {}, sources=tuple(map(str, files)))


def run_from_folder(run: RunFolder, gpu: str | None = None) -> RunReport:
    """Read a run folder and its manifest. A run that has no log yet is not an error here; its report is empty."""
    manifest = run.manifest()
    study = as_mapping(manifest.get("study"))
    logs = read_logs(run.logs() or run.batch_output())
    report = _run_report(
        run.run_id,
        logs,
        gpu or str(manifest.get("gpu") or "") or None,
        as_mapping(manifest.get("layout")).get("world"),
        stated_arguments(manifest),
        spans=spans_of(manifest),
        more=manifest_facts(manifest, run.path),
        limits=limits_of(manifest),
        actions=health_actions(run),
        study=_point_of(str(study["name"]), study.get("point"), study.get("repeat")) if study.get("name") else None,
        reference=as_mapping(as_mapping(manifest.get("recipe")).get("reference")) or None,
        command=_command_line(manifest),
        sources=(str(run.path),),
    )
    report = replace(report, goodput=goodput_of_run(run, logs, report.setup.world_size))
    return with_batch_output(without_earlier_failure(report, run), run)


def _command_line(manifest: Mapping[str, Any]) -> str:
    """Return the command that started a run. For the launcher's own training loop, manifests leave out its name."""
    words = list(map(str, manifest.get("command") or []))
    if not manifest.get("started_by"):
        words.insert(0, "fp8launch")
    return redacted(" ".join(words))


def _point_of(name: str, values: object, repeat: Any) -> StudyPoint:
    shown = {redacted(key): _without_secret(key, value) for key, value in as_mapping(values).items()}
    return StudyPoint(redacted(name), shown, int(repeat or 1))


def runs_from_study(study: StudyFolder, gpu: str | None = None) -> list[RunReport]:
    """Read every planned point of a study that trains, in order, or all of them if none does.

    Points without a run or whose run has no job are `absent`.
    """
    record, runs = study.record(), study.runs()
    others = {run.run_id for run in runs if not as_mapping(run.manifest().get("engine")).get("trains", True)}
    every = [*record["points"], *record.get("left_out", [])]
    planned = [point for point in every if point["run"] not in others] or every
    wanted = {point["run"] for point in planned}
    made = {run.run_id: run_from_folder(run, gpu) for run in runs if run.run_id in wanted}
    found = []
    for point in planned:
        run = made.get(str(point["run"]))
        if run is None:
            found.append(_planned(study.study_id, point, planned, made))
        elif not run.attempts and not job_ids(study.run(run.name)):
            found.append(replace(run, absent=NOT_SUBMITTED))
        else:
            found.append(run)
    return found


def _planned(
    study: str, point: Mapping[str, Any], others: Sequence[Mapping[str, Any]], made: Mapping[str, RunReport]
) -> RunReport:
    """Report on a point that has no run. Name and GPUs per node come from other runs of the recipe in the study."""
    recipe, nodes = point.get("recipe"), point.get("nodes")
    siblings = [
        made[str(other["run"])] for other in others if other.get("recipe") == recipe and str(other["run"]) in made
    ]
    facts: dict[str, object] = {}
    name = next((run.facts["recipe"] for run in siblings if "recipe" in run.facts), recipe)
    if name is not None:
        facts["recipe"] = name
    if isinstance(nodes, int):
        facts["nodes"] = nodes
        for run in siblings:
            world, of_nodes = run.setup.world_size, run.facts.get("nodes")
            if world and isinstance(of_nodes, int) and of_nodes:
                facts["world_size"] = world // of_nodes * nodes
                break
    return replace(
        summarise([]),
        name=str(point["run"]),
        facts=facts,
        study=_point_of(study, point.get("values"), point.get("repeat")),
        absent=str(point.get("why") or NOT_SUBMITTED),
    )


def _run_report(
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
) -> RunReport:
    report = summarise_run(
        logs, spans, gpu=gpu, world_size=world_size, arguments=stated, limits=limits, actions=actions
    )
    facts: dict[str, object] = {**stated, **report.setup.dump}
    if report.setup.global_batch_size:
        facts["global_batch_size"] = report.setup.global_batch_size
    facts |= {**report.setup.versions, **report.machines.facts()}
    if report.setup.gpu is not None:
        facts["gpu"] = report.setup.gpu
    if report.setup.world_size is not None:
        facts["world_size"] = report.setup.world_size
    if report.setup.parameters is not None and _on_one_rank(facts):
        facts["parameters"] = report.setup.parameters
    precision = _precision_in_phases(report) or precision_of(facts)
    if precision:
        facts["precision"] = precision
    facts |= more or {}
    for program, release in report.setup.versions.items():
        if str(facts.get("script")).startswith(f"{program} "):
            facts["script"] = f"{program} {release}"  # not the requested one
    shown = {fact: _without_secret(fact, value) for fact, value in _in_effect(facts).items()}
    return replace(report, name=name, facts=shown, **rest)


def _on_one_rank(facts: Mapping[str, object]) -> bool:
    """Return whether a rank has the whole model, so that the number of parameters does not depend on the layout."""
    tp, pp, ep = (facts.get(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline", "expert"))
    return facts.get("world_size") == 1 or (tp == pp == 1 and ep in (None, 1))


def _in_effect(facts: Mapping[str, object]) -> dict[str, object]:
    """Return the facts that are in effect.

    Fields of `launch.config` override arguments. Expert settings without experts are dropped, and so are the start and
    end that Megatron fills in for a constant weight decay.
    """
    found = {}
    decay = facts.get("weight_decay")
    overlay = {}
    for name, value in facts.items():
        if name.startswith(("moe_", "expert_tensor_")) and not facts.get("num_experts"):
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
    """Mask secrets. Reports and trackers publish what other programs wrote into logs and manifests."""
    if value is not None and is_secret(name, value):
        return HIDDEN
    return value


def _precision_in_phases(report: RunReport) -> str | None:
    """Name the precisions of a run with phases, such as `tensorwise then bf16`; None if there is only one."""
    names: list[str] = []
    for phase in report.phases:
        name = precision_of(phase.report.setup.dump) or phase.name
        if not names or names[-1] != name:
            names.append(name)
    if len(names) < 2:
        return None
    return " then ".join(names)


def with_unset(runs: Sequence[RunReport]) -> list[RunReport]:
    """Add `unset` to each run for variables that only other runs set, provided that its environment is known."""
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
