"""The speed model beside published and measured throughput: errors.md.

    python benchmarks/plan/errors.py            # writes errors.md
    python benchmarks/plan/errors.py --check    # exit 1 where it is stale, or the errors are beyond the bounds

The errors with each model family and each GPU left out of the calibration come from `calibrate.py --left-out`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from calibrate import errors, stated, summary
from measured_runs import measured_runs
from pack_runs import pack_runs
from published_runs import Run, hybrid_runs, published_runs
from slow_host_runs import slow_host_errors, slow_host_runs

from fp8launch.hardware.quantization import requested
from fp8launch.planning.step_time import UNCERTAINTY_HYBRID, UNCERTAINTY_SLOW_HOST

TABLE = Path(__file__).resolve().parent / "errors.md"
# Of all published and of all measured runs: the median and the ninth decile of the absolute errors.
BOUNDS = {
    "published": (0.06, 0.20),
    "measured": (0.04, 0.10),
    "hybrid": (0.15, UNCERTAINTY_HYBRID),
    "slow host": (0.10, UNCERTAINTY_SLOW_HOST),
}
HEAD = """# Tokens/s/GPU: published or measured, and as predicted

Made by `errors.py`; a test keeps it in step. An error is predicted over real tokens/s/GPU, less one. Rows whose figures
come from several containers have one error for each. Experts are balanced by force in all published runs. For the two
figures of GPT-OSS in container 26.06.01, 0.6 of those before and after, NVIDIA's page has a note. Runs on the slow host
are compared with the prediction for that host: its launch times were fitted to some of them, the others were held out.

"""


def main() -> int:
    groups = {
        "published": [*published_runs(), *pack_runs()],
        "measured": list(measured_runs()),
        "hybrid": list(hybrid_runs()),
    }
    off = {name: errors(runs, stated()) for name, runs in groups.items()}
    groups["slow host"] = list(slow_host_runs())
    off["slow host"] = slow_host_errors(groups["slow host"])
    text = HEAD + _summaries(groups, off)
    for name, runs in groups.items():
        text += f"\n## {name.capitalize()}\n\n" + _rows(runs, off[name])
    if "--check" not in sys.argv[1:]:
        TABLE.write_text(text)
        return 0
    stale = not TABLE.is_file() or TABLE.read_text() != text
    if stale:
        print("errors.md is stale: python benchmarks/plan/errors.py", file=sys.stderr)
    beyond = [name for name, found in off.items() if not _within(found, *BOUNDS[name])]
    for name in beyond:
        print(f"{name}: {summary(off[name])}, beyond {BOUNDS[name]}", file=sys.stderr)
    return int(stale or bool(beyond))


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
            elif name == "slow host":
                found.setdefault(f"slow host, {run.family}", []).append(error)
            else:
                found.setdefault(f"measured {run.family}", []).append(error)
    lines = [f"{name:24s} {summary(errors_of)}" for name, errors_of in found.items()]
    return "```\n" + "\n".join(lines) + "\n```\n"


def _rows(runs: Sequence[Run], off: Sequence[float]) -> str:
    """A row for each kind of run, with the errors of all runs of the kind."""
    rows: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for run, error in zip(runs, off, strict=True):
        kind = run.name.split(" (")[0] if " (" in run.name else run.name
        rows[(kind, str(run.gpus), requested(run.args), layout(run))].append(error)
    lines = ["| run | GPUs | precision | layout | errors |", "|---|---|---|---|---|"]
    for key, found in rows.items():
        lines.append(f"| {' | '.join(key)} | {', '.join(f'{error:+.1%}' for error in found)} |")
    return "\n".join(lines) + "\n"


def layout(run: Run) -> str:
    """The division of a run in short, without what is 1."""
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
