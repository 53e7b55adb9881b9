"""Compare the speed model with published and measured throughput: errors.md, and the known runs of the plugin.

    python benchmarks/plan/errors.py            # writes errors.md and known_runs.csv
    python benchmarks/plan/errors.py --check    # exit 1 if they are stale, or if the errors exceed the bounds

The errors with each model family and each GPU left out of the calibration come from `calibrate.py --left-out`.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from bridge_runs import bridge_runs
from calibrate import errors, stated, summary
from measured_runs import measured_runs
from older_runs import BLIND, OlderRun, older_runs
from pack_runs import pack_runs
from published_runs import Run, hybrid_runs, published_runs
from slow_host_runs import slow_host_errors, slow_host_runs

import fp8launch.plugins.plan.known_runs as known_runs_module
from fp8launch.hardware.gpus import gpu
from fp8launch.hardware.quantization import requested
from fp8launch.plugins.plan.known_runs import KnownRun, text_of, uncertainty
from fp8launch.plugins.plan.releases import older_releases, slower
from fp8launch.plugins.plan.speeds import speeds
from fp8launch.plugins.plan.step_time import UNCERTAINTY_SLOW_HOST, LayerTimes, StepTime, step_time, step_time_at

TABLE = Path(__file__).resolve().parent / "errors.md"
KNOWN_RUNS = Path(known_runs_module.__file__).with_name("known_runs.csv")
FITTED, HELD_OUT = "older, fitted", "older, held out"
BRIDGE_SEEN, BRIDGE_HELD_OUT = "earlier Bridge, looked at", "earlier Bridge, held out"
PREDICTED_FIRST = "predicted first"
_HELD_OUT = (HELD_OUT, BRIDGE_HELD_OUT)
# Bounds for the runs of each group: median and ninth decile of the absolute errors.
BOUNDS = {
    "published": (0.06, 0.20),
    "measured": (0.04, 0.10),
    "hybrid": (0.15, 0.25),
    FITTED: (0.06, 0.20),
    HELD_OUT: (0.08, 0.40),
    BRIDGE_SEEN: (0.06, 0.20),
    BRIDGE_HELD_OUT: (0.08, 0.35),
    PREDICTED_FIRST: (0.08, 0.20),
    "slow host": (0.10, UNCERTAINTY_SLOW_HOST),
}
HEAD = """# Tokens/s/GPU: published or measured, and as predicted

Made by `errors.py`; a test keeps it in step. An error is predicted over real tokens/s/GPU, less one. Rows whose figures
come from several containers have one error for each. Experts are balanced by force in all published runs of recent
containers. For the two figures of GPT-OSS in container 26.06.01, 0.6 of those before and after, NVIDIA's page has a
note. Runs on the slow host are compared with the prediction for that host: its launch times were fitted to some of
them. Older results are compared with the prediction for the current release, and in the
lines "as released" with the prediction for their own, if its factor is known. Rows with experts were held out at first;
all of them were looked at later (accuracy.md). Rows "predicted first" were written down before they were predicted.

"""


def main() -> int:
    older: dict[str, list[OlderRun]] = {FITTED: [], HELD_OUT: [], BRIDGE_SEEN: [], BRIDGE_HELD_OUT: []}
    for one in older_runs():
        older[HELD_OUT if one.held_out else FITTED].append(one)
    for one in bridge_runs():
        older[BRIDGE_HELD_OUT if one.held_out else BRIDGE_SEEN].append(one)
    older[PREDICTED_FIRST] = list(older_runs(BLIND))
    groups = {
        "published": [*published_runs(), *pack_runs()],
        "measured": list(measured_runs()),
        "hybrid": list(hybrid_runs()),
        **{name: [one.run for one in results] for name, results in older.items()},
    }
    off = {name: errors(runs, stated()) for name, runs in groups.items()}
    numbers = Counter(_configuration(run) for runs in groups.values() for run in runs)
    known = {name: _known(runs, off[name], numbers) for name, runs in groups.items()}
    groups["slow host"] = list(slow_host_runs())
    off["slow host"] = slow_host_errors(groups["slow host"])
    text = HEAD + _summaries(groups, off) + _of_older(older, off, known)
    for name, runs in groups.items():
        text += f"\n## {name.capitalize()}\n\n" + _rows(runs, off[name])
    data = text_of(run for runs in known.values() for run in runs)
    if "--check" not in sys.argv[1:]:
        TABLE.write_text(text)
        KNOWN_RUNS.write_text(data)
        return 0
    stale = not TABLE.is_file() or TABLE.read_text() != text or KNOWN_RUNS.read_text() != data
    if stale:
        print("errors.md or known_runs.csv is stale: python benchmarks/plan/errors.py", file=sys.stderr)
    beyond = [name for name, found in off.items() if not _within(found, *BOUNDS[name])]
    for name in beyond:
        print(f"{name}: {summary(off[name])}, beyond {BOUNDS[name]}", file=sys.stderr)
    return int(stale or bool(beyond))


def _step(run: Run) -> StepTime:
    known = speeds(gpu(run.gpu))
    assert known is not None
    step = step_time_at(run.args, run.gpus, run.global_batch, known, LayerTimes())
    assert step is not None, run.name
    return step


def _configuration(run: Run) -> tuple[str, str]:
    return run.name.split(" (")[0], layout(run)


def _known(runs: Sequence[Run], off: Sequence[float], numbers: Counter[tuple[str, str]]) -> list[KnownRun]:
    """Return what the plugin keeps of runs. Figures of one configuration in several containers share a weight of 1."""
    return [
        KnownRun(_step(run).situation, error, 1 / numbers[_configuration(run)])
        for run, error in zip(runs, off, strict=True)
    ]


def _class_of(known: KnownRun) -> str:
    if known.situation.kind != "dense":
        return known.situation.kind
    return f"dense {'Hopper' if gpu(known.situation.gpu).capability[0] == 9 else 'Blackwell'}"


def _as_released(one: OlderRun, error: float) -> float | None:
    """Return the error of the prediction for a run's own release, or None if its factor is not known."""
    run = one.run
    step = step_time(run.args, run.gpus, run.global_batch, gpu(run.gpu))
    assert step is not None, run.name
    for release in older_releases(one.run.gpu, step.situation.kind):
        if one.release.startswith(release.name):
            own = slower({term.name: term.ms for term in step.terms}, release, step.unfused_ms)
            return (1 + error) * step.ms / own - 1
    return None


def _of_older(older: dict[str, list[OlderRun]], off: dict[str, list[float]], known: dict[str, list[KnownRun]]) -> str:
    """Return the errors of older results by class, and how many are within the uncertainty that others state."""
    lines = []
    fitted = [run for name, runs in known.items() if name not in (*_HELD_OUT, PREDICTED_FIRST) for run in runs]
    # Before the runs that were predicted first, the plugin knew all others.
    before = [run for name, runs in known.items() if name != PREDICTED_FIRST for run in runs]
    all_held_out: dict[str, list[float]] = defaultdict(list)
    for name, results in older.items():
        found: dict[str, list[float]] = defaultdict(list)
        within: dict[str, list[bool]] = defaultdict(list)
        for result, error, one in zip(results, off[name], known[name], strict=True):
            words = _class_of(one)
            released = _as_released(result, error)
            found[words].append(error)
            found[f"{words}, as released"].append(error if released is None else released)
            if name in (BRIDGE_SEEN, BRIDGE_HELD_OUT) and not result.repeats:
                found[f"{words}, other layouts"].append(error)
            if name in _HELD_OUT:
                all_held_out[words].append(error)
                if not result.repeats:
                    all_held_out[f"{words}, other layouts"].append(error)
            rest = before if name == PREDICTED_FIRST else fitted
            if name not in (*_HELD_OUT, PREDICTED_FIRST):
                rest = [other for other in rest if other.situation.model != one.situation.model]
            within[words].append(abs(error) <= uncertainty(one.situation, rest))
        lines += _of_classes(name, found)
        for words in sorted(within):
            share = f"{sum(within[words])} of {len(within[words])}"
            lines.append(f"{name}: {words:32s} {share} within the uncertainty that the other runs state")
    lines += _of_classes("all held out", all_held_out)
    return "\n```\n" + "\n".join(lines) + "\n```\n"


def _of_classes(name: str, found: dict[str, list[float]]) -> list[str]:
    lines = []
    for words in sorted(found):
        worst = max(map(abs, found[words]))
        lines.append(f"{name}: {words:32s} {summary(found[words])}  worst {worst:.1%}")
    return lines


def _within(off: Sequence[float], median: float, tenth: float) -> bool:
    sizes = sorted(map(abs, off))
    return sizes[len(sizes) // 2] <= median and sizes[int(0.9 * len(sizes))] <= tenth


def _summaries(groups: dict[str, list[Run]], off: dict[str, list[float]]) -> str:
    found: dict[str, list[float]] = {}
    for name, runs in groups.items():
        found[f"all {name}"] = off[name]
        for run, error in zip(runs, off[name], strict=True):
            if name == "published":
                found.setdefault(f"{run.family}", []).append(error)
                found.setdefault(f"on {run.gpu}", []).append(error)
            elif name == "hybrid":
                found.setdefault(run.family, []).append(error)
            elif name in (FITTED, HELD_OUT, BRIDGE_SEEN, BRIDGE_HELD_OUT, PREDICTED_FIRST):
                continue  # by class, below
            elif name == "slow host":
                found.setdefault(f"slow host, {run.family}", []).append(error)
            else:
                found.setdefault(f"measured {run.family}", []).append(error)
    lines = [f"{name:24s} {summary(errors_of)}" for name, errors_of in found.items()]
    return "```\n" + "\n".join(lines) + "\n```\n"


def _rows(runs: Sequence[Run], off: Sequence[float]) -> str:
    """Return a row for each kind of run, with the errors of all its runs."""
    rows: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for run, error in zip(runs, off, strict=True):
        kind = run.name.split(" (")[0] if " (" in run.name else run.name
        rows[(kind, str(run.gpus), requested(run.args), layout(run))].append(error)
    lines = ["| run | GPUs | precision | layout | errors |", "|---|---|---|---|---|"]
    for key, found in rows.items():
        lines.append(f"| {' | '.join(key)} | {', '.join(f'{error:+.1%}' for error in found)} |")
    return "\n".join(lines) + "\n"


def layout(run: Run) -> str:
    """Return the division of a run in short form, without sizes of 1."""
    args = run.args
    sizes = {
        "TP": args.get("tensor_model_parallel_size"),
        "PP": args.get("pipeline_model_parallel_size"),
        "CP": args.get("context_parallel_size"),
        "EP": args.get("expert_model_parallel_size"),
        "MBS": args.get("micro_batch_size"),
    }
    words = [f"{name} {size}" for name, size in sizes.items() if size and (size != 1 or name == "MBS")]
    if args.get("use_megatron_fsdp"):
        words.append("FSDP")
    if args.get("cuda_graph_impl") not in (None, "none"):
        words.append(f"graphs: {args['cuda_graph_impl']}")
    return ", ".join(words)


if __name__ == "__main__":
    sys.exit(main())
