"""The errors of the speed model for known runs, and what they say about other predictions.

`known_runs.csv` has a row for every published or measured run that was predicted. `benchmarks/plan/errors.py` writes
it.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fp8launch.hardware.gpus import gpu

_DATA = Path(__file__).with_name("known_runs.csv")
_KINDS = {"dense": "a dense model", "experts": "experts", "hybrid": "a hybrid model"}
# Share of similar runs, by weight, that the stated uncertainty covers. It covers eight in ten runs of models that are
# not among them (benchmarks/plan/accuracy.md).
COVERED = 0.9
# Distance between runs that differ in one property, and per doubling of a size.
_OTHER_KIND, _OTHER_ARCHITECTURE, _OTHER_GPU, _OTHER_PRECISION, _OTHER_MODEL = 3.0, 1.5, 0.5, 0.5, 1.25
_OTHER_DISPATCH = 1.0
_PER_DOUBLING_OF_GPUS, _PER_DOUBLING_OF_SEQUENCE, _PER_HOST_SHARE = 0.15, 0.3, 4.0
# Every situation also has one imaginary run with this weight and error, so that few known runs cannot promise much.
# With a smaller weight, older results on Blackwell and of models with experts were covered in fewer than eight in ten.
_UNKNOWN_WEIGHT, _UNKNOWN_ERROR = 0.25, 0.3
# A host share beyond the known ones by more than this is an extrapolation.
_NOTICEABLE_SHARE = 0.05

Kind = Literal["dense", "experts", "hybrid"]
# `capacity` is an all-to-all of rows padded to a capacity, `packed` is DeepEP or HybridEP.
Dispatch = Literal["", "all-to-all", "capacity", "packed"]


@dataclass(frozen=True)
class Situation:
    """What decides how well a run is predicted.

    `host` is the share of the step in which the GPU waits for the host. `dispatch` is how tokens reach experts on other
    ranks, empty if none do.
    """

    gpu: str
    kind: Kind
    precision: str
    model: str
    gpus: int
    sequence: int
    host: float
    dispatch: Dispatch = ""


@dataclass(frozen=True)
class KnownRun:
    """A run with the relative error of its predicted step time. Runs of one configuration share a weight of 1."""

    situation: Situation
    error: float
    weight: float


@functools.cache
def known_runs() -> tuple[KnownRun, ...]:
    """Return all runs of `known_runs.csv`."""
    found = []
    with _DATA.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            kind: Kind = row["kind"]  # type: ignore[assignment]
            dispatch: Dispatch = row["dispatch"]  # type: ignore[assignment]
            situation = Situation(
                row["gpu"],
                kind,
                row["precision"],
                row["model"],
                int(row["gpus"]),
                int(row["sequence"]),
                float(row["host"]),
                dispatch,
            )
            found.append(KnownRun(situation, float(row["error"]), float(row["weight"])))
    return tuple(found)


def uncertainty(situation: Situation, runs: Sequence[KnownRun] | None = None) -> float:
    """Return the relative error of the step time that eight in ten similar runs do not exceed."""
    known = known_runs() if runs is None else runs
    own = gpu(situation.gpu)
    if not own.measured or all(gpu(run.situation.gpu).capability[0] != own.capability[0] for run in known):
        return _UNKNOWN_ERROR  # no run is similar
    weighted = [(_UNKNOWN_ERROR, _UNKNOWN_WEIGHT)]
    for run in known:
        weighted.append((abs(run.error), _weight(situation, run)))
    weighted.sort()
    left = COVERED * sum(weight for _, weight in weighted)
    for error, weight in weighted:
        left -= weight
        if left <= 0:
            return error
    return weighted[-1][0]


def _weight(situation: Situation, run: KnownRun) -> float:
    return run.weight * math.exp(-_distance(situation, run.situation))


def _distance(one: Situation, other: Situation) -> float:
    found = _PER_DOUBLING_OF_GPUS * abs(math.log2(one.gpus / other.gpus))
    found += _PER_DOUBLING_OF_SEQUENCE * abs(math.log2(one.sequence / other.sequence))
    found += _PER_HOST_SHARE * abs(one.host - other.host)
    if one.kind != other.kind:
        found += _OTHER_KIND
    if gpu(one.gpu).capability[0] != gpu(other.gpu).capability[0]:
        found += _OTHER_ARCHITECTURE
    elif one.gpu != other.gpu:
        found += _OTHER_GPU
    if one.precision != other.precision:
        found += _OTHER_PRECISION
    if one.model != other.model:
        found += _OTHER_MODEL
    if one.dispatch != other.dispatch:
        found += _OTHER_DISPATCH
    return found


def extrapolations(situation: Situation) -> list[str]:
    """Return the properties of a situation that no known run shares, as sentences without a full stop."""
    name, kind = situation.gpu.upper(), _KINDS[situation.kind]
    on_gpu = [run.situation for run in known_runs() if run.situation.gpu == situation.gpu]
    if not on_gpu:
        return [f"no measured run on {name}"]
    found = []
    if situation.precision not in {other.precision for other in on_gpu}:
        found.append(f"no measured run on {name} in {situation.precision}")
    alike = [other for other in on_gpu if other.kind == situation.kind]
    if not alike:
        return [*found, f"no measured run on {name} with {kind}"]
    most = max(other.gpus for other in alike)
    if situation.gpus > most:
        found.append(f"no measured run on {name} with {kind} above {most} {'GPUs' if most > 1 else 'GPU'}")
    longest = max(other.sequence for other in alike)
    if situation.sequence > longest:
        found.append(f"no measured run on {name} with {kind} above {longest} tokens per sequence")
    share = max(other.host for other in alike)
    if situation.host > share + _NOTICEABLE_SHARE:
        found.append(f"no measured run on {name} with {kind} waits for the host for over {share:.0%} of a step")
    similar = sum(_weight(situation, run) for run in known_runs())
    if not found and (1 - COVERED) * (similar + _UNKNOWN_WEIGHT) < _UNKNOWN_WEIGHT:
        found.append("few measured runs are similar in model, GPU, precision and size")
    return found


def text_of(runs: Iterable[KnownRun]) -> str:
    """Return the text of `known_runs.csv`."""
    lines = ["gpu,kind,precision,model,gpus,sequence,host,dispatch,error,weight"]
    for run in runs:
        one = run.situation
        sizes = f"{one.gpus},{one.sequence},{one.host:.3f},{one.dispatch},{run.error:.4f},{run.weight:.3f}"
        lines.append(f"{one.gpu},{one.kind},{one.precision},{one.model},{sizes}")
    return "\n".join(lines) + "\n"
