"""Estimate a run without running it: parameters, memory, cost, and predictions of plugins."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fp8launch import plugin_registry
from fp8launch.check.resolved_run import ResolvedRun, resolve_run
from fp8launch.job.prepared import Prepared
from fp8launch.megatron.parameters import Parameters, parameters
from fp8launch.plugins.estimate.cost import Cost, Throughput, cost
from fp8launch.plugins.estimate.fit import covered_estimate
from fp8launch.plugins.estimate.memory import MIB, MemoryEstimate, usable_bytes
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.quoted_speed import as_quoted
from fp8launch.wording import counted

if TYPE_CHECKING:
    from fp8launch.cluster.profile import Cluster


@dataclass(frozen=True)
class Prediction:
    """A plugin's prediction for a run.

    `fields` are added to the JSON of `estimate`, and `print_text` prints the same as text. The cost is computed from
    `throughput` unless a better value is known. `calibrated` is whether it rests on rates measured on the cluster.
    """

    fields: Mapping[str, Any]
    print_text: Callable[[], None]
    throughput: Throughput | None = None
    calibrated: bool = False


# A plugin's function. It returns a prediction for a run on a cluster, or the reason why there is none.
Estimator = Callable[[ResolvedRun, MemoryEstimate | None, "Cluster | None"], "Prediction | str"]


@dataclass(frozen=True)
class Estimate:
    """An estimate for a run or one of its phases.

    `parameters` is None if the model's parameters cannot be counted, and `memory` if its memory is not modelled.
    `not_predicted` maps the field of each missing prediction to the reason. `gpu_hours_at_most` follows from the time
    limit, which belongs to the recipe's own length: it is None for a run of another length.
    """

    prepared: Prepared
    run: ResolvedRun
    parameters: Parameters | None
    memory: MemoryEstimate | None
    cost: Cost
    predictions: Mapping[str, Prediction] = field(default_factory=dict)
    not_predicted: Mapping[str, str] = field(default_factory=dict)
    gpu_hours_at_most: float | None = None


# A plugin's function. It returns the cost of a whole run on a cluster, of all its phases or of this many tokens.
RunCost = Callable[[Sequence[Estimate], "Cluster"], "Prediction | str"]

# Plugin fields that the JSON always has, so that scripts need not know which plugins are active.
_FIELDS = ("predicted",)


def estimate_run(
    prepared: Prepared, gpu: str | None = None, speed: float | None = None, cluster: Cluster | None = None
) -> list[Estimate]:
    """Estimate a run on a cluster, or each of its phases.

    `gpu` replaces the recipe's GPU. `speed` is a throughput in tokens/s/GPU given by the user.
    """
    if not prepared.phases:
        return [_estimated(prepared, None, gpu, speed, cluster)]
    return [
        _estimated(part, phase.end - phase.begin, gpu, speed, cluster)
        for part, phase in zip(prepared.parts, prepared.phases, strict=True)
    ]


def _estimated(
    prepared: Prepared, steps: int | None, gpu: str | None, speed: float | None, cluster: Cluster | None
) -> Estimate:
    run = resolve_run(prepared, cluster)
    args = {**run.defaults, **run.given}
    if steps:
        args["train_iters"] = steps
    world, batch = run.layout.world, run.layout.global_batch
    memory = covered_estimate(run)
    predictions, missing = _predictions(run, memory, cluster)
    throughput = _throughput(prepared.loaded, gpu, speed, list(predictions.values()))
    costs = cost(args, world, batch, throughput)
    counted = parameters(args, world)
    return Estimate(prepared, run, counted, memory, costs, predictions, missing, prepared.gpu_hours_at_most)


def _predictions(
    run: ResolvedRun, memory: MemoryEstimate | None, cluster: Cluster | None
) -> tuple[dict[str, Prediction], dict[str, str]]:
    found: dict[str, Prediction] = {}
    missing: dict[str, str] = {}
    for name in _FIELDS:
        if name not in plugin_registry.offered("estimates"):
            missing[name] = f"the plugin {plugin_registry.absent_plugin('estimates', name)} is not active"
    for name, estimator in plugin_registry.loaded("estimates"):
        answer = estimator(run, memory, cluster)
        if isinstance(answer, str):
            missing[name] = answer
        else:
            found[name] = answer
    return found, missing


def quoted_throughput(loaded: LoadedRecipe) -> Throughput | None:
    """Return the published throughput that a recipe quotes, None if it has none or has other settings."""
    reference = loaded.recipe.reference
    if reference is None or not as_quoted(loaded):
        return None
    basis = f"published for {counted(reference.gpus, 'GPU')}: {reference.source}"
    return Throughput(reference.tokens_per_s_per_gpu, basis, known=True)


def _throughput(
    loaded: LoadedRecipe, what_if: str | None, stated: float | None, predictions: Sequence[Prediction]
) -> Throughput | None:
    """Return the throughput given by the user, predicted with the cluster's own rates, published, or predicted."""
    if stated is not None:
        return Throughput(stated, "stated by --tokens-per-second-per-gpu", known=True)
    predicted = [one for one in predictions if one.throughput]
    for one in predicted:
        if one.calibrated:
            return one.throughput
    quoted = quoted_throughput(loaded) if what_if is None else None
    if quoted is not None:
        return quoted
    return predicted[0].throughput if predicted else None


def of_length(each: Sequence[Estimate], tokens: float) -> list[Estimate]:
    """Return estimates of a run of this many tokens, in whole steps. Phases keep their shares of the tokens."""
    known = sum(one.cost.tokens or 0 for one in each)
    found = []
    for one in each:
        share = (one.cost.tokens or 0) / known if known else 1 / len(each)
        step = one.cost.tokens_per_step
        steps = math.ceil(tokens * share / step) if step else None
        found.append(replace(one, cost=replace(one.cost, steps=steps), gpu_hours_at_most=None))
    return found


def run_costs(each: Sequence[Estimate], cluster: Cluster) -> Prediction | str:
    """Return the cost of a run by the active plugin that computes it, or why there is none."""
    for _, run_cost in plugin_registry.loaded("run_costs"):
        answer: Prediction | str = run_cost(each, cluster)
        return answer
    return "the plugin plan is not active"


def as_json(prepared: Prepared, each: list[Estimate]) -> dict[str, Any]:
    """Return the JSON of an estimate.

    For a run with phases, it has the phase that needs the most memory, the cost of all phases, and every phase.
    """
    phases = list(map(_as_json, each))
    if not prepared.phases:
        return phases[0]
    fullest = max(phases, key=_needed_mib)
    found = dict(fullest)
    for name in ("steps", "tokens", "gpu_hours"):
        values = [one[name] for one in phases]
        found[name] = None if None in values else sum(values)
    if found["gpu_hours_at_most"] is not None:
        found["gpu_hours_at_most"] = prepared.gpu_hours_at_most
    found["phases"] = []
    for phase, one in zip(prepared.phases, phases, strict=True):
        found["phases"].append({"name": phase.name, "begin": phase.begin, "end": phase.end, **one})
    return found


def _needed_mib(one: dict[str, Any]) -> int:
    return int(one["memory"]["total_mib"]) if one["memory"] else 0


def _as_json(one: Estimate) -> dict[str, Any]:
    prepared, run, counted, memory, costs = one.prepared, one.run, one.parameters, one.memory, one.cost
    predicted: dict[str, Any] = {"terms": None}
    for name in _FIELDS:
        predicted |= {name: None, f"{name}_reason": one.not_predicted.get(name)}
    for prediction in one.predictions.values():
        predicted |= prediction.fields
    return {
        "recipe": prepared.loaded.recipe.name,
        "gpu": run.gpu.name,
        "gpus": run.layout.world,
        "parameters": counted
        and {
            "total": counted.total,
            "active": counted.active,
            "active_without_embedding": counted.multiplied,
            "per_stage": list(counted.per_stage),
            "padded_vocab": counted.padded_vocab,
        },
        "memory": memory
        and {
            "device_mib": round(run.gpu.memory_gib * 1024),
            "limit_mib": round(usable_bytes(run.gpu) / MIB),
            "fits": memory.fits(run.gpu),
            "peak_allocated_mib": round(memory.peak / MIB),
            "total_mib": round(memory.total / MIB),
            "uncertainty": memory.uncertainty,
            "stage": memory.stage,
            "stages": memory.stages,
            "terms": [
                {"name": t.name, "bytes": round(t.bytes), "certainty": t.certainty, "note": t.note}
                for t in memory.terms
            ],
        },
        **predicted,
        "flop_per_token": costs.flops_per_token,
        "tokens_per_step": costs.tokens_per_step,
        "steps": costs.steps,
        "tokens": costs.tokens,
        "throughput": costs.throughput
        and {
            "tokens_per_s_per_gpu": costs.throughput.tokens_per_s_per_gpu,
            "basis": costs.throughput.basis,
            "known": costs.throughput.known,
        },
        "step_time_ms": costs.step_time_s and costs.step_time_s * 1000,
        "gpu_hours": costs.gpu_hours,
        "gpu_hours_at_most": one.gpu_hours_at_most,
    }
