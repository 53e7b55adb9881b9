"""Calibrate the speed model's parameters on measured runs, starting from values that hardly depend on these runs.

    python benchmarks/plan/calibrate.py             # prints the parameters: start, calibrated, as stated
    python benchmarks/plan/calibrate.py --left-out  # prints the errors with each family and each GPU left out in turn

One parameter at a time is multiplied by a factor, as long as the runs agree better. Each combination of model, GPU and
precision has the same weight, whatever its number of runs. A small penalty keeps parameters near their start, and the
clock of a GPU without runs keeps the value that follows from its power limit.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from measured_runs import measured_runs
from pack_runs import pack_runs
from published_runs import Run, published_runs

from fp8launch.hardware.gpus import gpu
from fp8launch.hardware.quantization import requested
from fp8launch.plugins.plan.speeds import BLACKWELL, DEVICES, HOPPER, POWER_CLOCK, Fractions, Software, Speeds
from fp8launch.plugins.plan.step_time import LayerTimes, step_time_at

Parameters = dict[str, float]
PENALTY = 0.004
# An outlier counts no more than a run that is off by 40 %.
MOST = math.log(1.4)
STEPS = (1.5, 1 / 1.5, 1.12, 1 / 1.12, 1.03, 1 / 1.03)
ROUNDS = 5
# Measured separately, or calibrated on Nemotron 3's rows (dispatch, scan): not calibrated again.
HELD = {
    "software.launch_expert.bf16",
    "software.launch_expert.delayed",
    "software.launch_expert.blockwise",
    "software.launch_expert.tensorwise",
    "software.launch_expert.mxfp8",
    "software.launch_expert.nvfp4",
    *(f"software.launch_quantized.{name}" for name in ("delayed", "blockwise", "tensorwise", "mxfp8", "nvfp4")),
    "software.launch_gathered",
    "software.launch_dispatch",
    "software.launch_forward",
    "software.launch_overlapped",
    "software.ring",
    "software.scan",
    "software.independent_tokens",
    "software.independent_at_first",
    "software.kernel",
    "software.fuses_latent",
    "software.scale",
    "software.scale_delayed",
    "software.tp_overlapped",
    "software.tp_overlapped_pair",
    "software.experts_overlapped",
    "hopper.memory",
    "hopper.gemm.blockwise",
    "hopper.attention_half",
    "blackwell.attention_half",
}


# Starting point of every calibration. Hopper: kernels measured on H200 (h200/tuning.md). Blackwell: the same, with
# assumed fractions of the peak for its matrix products. Assumed too: 60 % of NVLink, 80 % of the network and 60 %
# between two GPUs, and tokens that are ordered by expert as fast as they are copied. Counted by `passes.py`: passes of
# activations and biases of unfused experts. Launches: 12 layers of Qwen3 30B-A3B on H200. Clocks: power limits.
PRIOR: Parameters = {
    **{f"{name}.attention": 0.55 for name in ("hopper", "blackwell")},
    **{f"{name}.memory": 0.75 for name in ("hopper", "blackwell")},
    **{f"{name}.nvlink": 0.6 for name in ("hopper", "blackwell")},
    **{f"software.network.{card}": 0.8 for card in ("connectx7", "connectx8")},
    "software.pair": 0.6,
    **{f"{name}.contention": 0.25 for name in ("hopper", "blackwell")},
    "hopper.gemm.bf16": 0.76,
    "hopper.gemm.tensorwise": 0.75,
    "hopper.gemm.delayed": 0.75,
    "blackwell.gemm.bf16": 0.70,
    "blackwell.gemm.tensorwise": 0.65,
    "blackwell.gemm.delayed": 0.65,
    "blackwell.gemm.mxfp8": 0.62,
    "blackwell.gemm.nvfp4": 0.60,
    "software.permutation": 1.0,
    "software.biased_activation": 56.0,
    "software.launch": 2.0e-3,
    "software.launch_routing": 2.5e-3,
    **{f"clock.{name}": clock for name, clock in POWER_CLOCK.items()},
}


def stated() -> Parameters:
    """Return the parameters in `fp8launch.plugins.plan.speeds`."""
    found: Parameters = {}
    for name, fractions in (("hopper", HOPPER), ("blackwell", BLACKWELL)):
        found |= {f"{name}.gemm.{recipe}": value for recipe, value in fractions.gemm.items()}
        for part in fields(Fractions):
            if part.name != "gemm":
                found[f"{name}.{part.name}"] = getattr(fractions, part.name)
    for part in fields(Software):
        value = getattr(Software(), part.name)
        each = value if isinstance(value, Mapping) else {"": value}
        found |= {f"software.{part.name}.{recipe}".rstrip("."): one for recipe, one in each.items()}
    return found | {f"clock.{name}": device.clock for name, device in DEVICES.items()}


def speeds_of(name: str, parameters: Parameters) -> Speeds:
    """Return the speeds of a GPU type with these parameters."""
    device = gpu(name)
    architecture = "blackwell" if device.capability >= (10, 0) else "hopper"
    own = {key.removeprefix(f"{architecture}."): v for key, v in parameters.items() if key.startswith(architecture)}
    gemm = {key.removeprefix("gemm."): value for key, value in own.items() if key.startswith("gemm.")}
    rest = {key: value for key, value in own.items() if not key.startswith("gemm.")}
    software = {k.removeprefix("software."): v for k, v in parameters.items() if k.startswith("software.")}
    by_precision: dict[str, dict[str, float]] = defaultdict(dict)
    for key, value in software.items():
        part, _, precision = key.partition(".")
        if precision:
            by_precision[part][precision] = value
    return Speeds(
        device,
        replace(DEVICES[name], clock=parameters[f"clock.{name}"]),
        Fractions(gemm=gemm, **rest),
        Software(**by_precision, **{key: value for key, value in software.items() if "." not in key}),  # type: ignore[arg-type]
    )


def errors(runs: Sequence[Run], parameters: Parameters) -> list[float]:
    """Return the relative error of the predicted tokens/s/GPU of each run."""
    known = {name: speeds_of(name, parameters) for name in {run.gpu for run in runs}}
    found = []
    for run in runs:
        at = known[run.gpu]
        if run.untrained_router:
            at = replace(at, software=replace(at.software, independent_tokens=at.software.independent_at_first))
        predicted = step_time_at(run.args, run.gpus, run.global_batch, at, LayerTimes())
        assert predicted is not None, run.name
        found.append(predicted.tokens_per_s_per_gpu / run.measured - 1)
    return found


def calibrated(runs: Sequence[Run], start: Parameters) -> Parameters:
    """Return the parameters with which the runs agree best."""
    kinds = Counter(_kind(run) for run in runs)
    weights = [1 / kinds[_kind(run)] for run in runs]
    same = _same(runs)
    seen = {f"clock.{run.gpu}" for run in runs} - {"clock.h200", "clock.gb200"}

    def loss(off: Sequence[float], parameters: Parameters) -> float:
        sizes = (min(abs(math.log1p(error)), MOST) for error in off)
        moved = sum(abs(math.log(parameters[name] / start[name])) for name in start)
        return sum(w * size for w, size in zip(weights, sizes, strict=True)) / sum(weights) + PENALTY * moved

    best, off = dict(start), errors(runs, start)
    least = loss(off, best)
    free = [name for name in start if name not in HELD and (not name.startswith("clock.") or name in seen)]
    for _ in range(ROUNDS):
        before = least
        for name in free:
            touched = [alike for alike in same if _reads(runs[alike[0]], name)]
            for factor in STEPS if touched else ():
                tried = {**best, name: best[name] * factor}
                again = list(off)
                for alike, error in zip(touched, errors([runs[group[0]] for group in touched], tried), strict=True):
                    for i in alike:
                        again[i] = (1 + error) * runs[alike[0]].measured / runs[i].measured - 1
                if (found := loss(again, tried)) < least - 1e-6:
                    best, least, off = tried, found, again
        if before - least < 1e-4:
            break
    return best


def _same(runs: Sequence[Run]) -> list[list[int]]:
    """Return groups of runs with equal predictions, by their positions."""
    found: list[list[int]] = []
    for i, run in enumerate(runs):
        for alike in found:
            first = runs[alike[0]]
            if (first.gpu, first.gpus, first.global_batch, first.args) == (
                run.gpu,
                run.gpus,
                run.global_batch,
                run.args,
            ):
                alike.append(i)
                break
        else:
            found.append([i])
    return found


def _reads(run: Run, name: str) -> bool:
    """Return whether a parameter can change the prediction of a run."""
    kind, _, rest = name.partition(".")
    if kind == "clock":
        return run.gpu == rest
    if kind == "software":
        return _of_software(run, rest)
    if kind != ("blackwell" if gpu(run.gpu).capability >= (10, 0) else "hopper"):
        return False
    return not rest.startswith("gemm.") or rest[5:] in ("bf16", _kind(run)[2])


def _of_software(run: Run, name: str) -> bool:
    """Return the same for a parameter of the software, as far as the run's arguments show it."""
    if name == "biased_activation":
        return bool(run.args.get("activation_func_clamp_value"))
    if name == "pair" or name.startswith("network."):
        return True
    if name.startswith("launch"):
        return run.args.get("cuda_graph_impl") != "full_iteration"
    return bool(run.args.get("num_experts"))


def _kind(run: Run) -> tuple[str, str, str]:
    return run.family, run.gpu, requested(run.args)


def left_out(runs: Sequence[Run], start: Parameters) -> None:
    """Print the errors of each family and each GPU with parameters calibrated without it."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        groups[f"family {run.family}"].append(run)
        groups[f"GPU {run.gpu}"].append(run)
    for name, own in groups.items():
        others = [run for run in runs if run not in own]
        print(f"{name:26s} {summary(errors(own, calibrated(others, start)))}", flush=True)


def summary(off: Sequence[float]) -> str:
    """Return the median and the ninth decile of absolute errors, and the signed median."""
    sizes = sorted(map(abs, off))
    tenth = sizes[math.ceil(0.9 * len(sizes)) - 1]
    return (
        f"{len(sizes):3d} runs  median {statistics.median(sizes):5.1%}  nine in ten within {tenth:5.1%}"
        f"  signed median {statistics.median(off):+.1%}"
    )


def main() -> int:
    runs = [*published_runs(), *pack_runs(), *measured_runs()]
    start = {**stated(), **PRIOR}
    print(f"not calibrated             {summary(errors(runs, start))}")
    print(f"as stated in speeds.py     {summary(errors(runs, stated()))}", flush=True)
    if "--left-out" in sys.argv[1:]:
        left_out(runs, start)
        return 0
    best = calibrated(runs, start)
    print(f"calibrated                 {summary(errors(runs, best))}")
    for name, value in best.items():
        print(f"{name:36s} {start[name]:10.4g} {value:10.4g} {stated()[name]:10.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
