"""Every N iterations: what FP8 does to each linear's input, weight and gradient, as Transformer Engine measures it.

    underflow_pct     elements that FP8 turns to zero and that were none, % of all
    overflow_pct      elements clipped at FP8's largest value, %; delayed scaling alone can clip
    scale_inv_min/max smallest and largest factor from FP8 back to values (one a tensor, or one a block)
    mse               mean squared error of the FP8 tensor
    amax              largest absolute value

One line of the log sums up an iteration, `fp8launch-tensors: {json}`, from one rank of each tensor and pipeline
parallel place: for each of `activation` (the linear's input), `weight` and `gradient` (of its output) the worst value
of each statistic, the layer that has it, and the median over layers. Every value is in `tensor_stats/rank<N>.jsonl` of
the run folder. Activations and gradients are those of all data-parallel ranks and micro batches.

Switched on by FP8LAUNCH_TENSOR_STATS=N, through Transformer Engine's debug features and NVIDIA's nvdlfw-inspect. A
measured iteration takes several times as long as another; between them the layers run at their usual speed.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fp8launch.injob.rank.module_facts import chunks_of

TENSORS = "fp8launch-tensors: "
VERSION = 1
FOLDER = Path("tensor_stats")
_OURS = {"underflows%": "underflow_pct", "overflows%": "overflow_pct", "cur_amax": "amax"}
_NAME = re.compile(r"(?P<layer>.+)_(?P<tensor>activation|weight|gradient)_(?P<stat>.+)")
_LEAST_IS_WORST = ("scale_inv_min",)

Value = tuple[str, str, str, float]  # layer, tensor, our name of the statistic, value


class StatsProblem(Exception):
    """The requested statistics are not available on this machine."""


def features(every: int, fp8: bool, delayed: bool, fp8_weights: bool) -> dict[str, Any]:
    """The configuration for nvdlfw-inspect: all layers, every `every` iterations.

    Without FP8 only the largest values are there. FP8 weights are stored as such: what they were before is gone, so
    only their scales are asked for.
    """
    scales = ["scale_inv_min", "scale_inv_max"]
    full = ["underflows%", *scales, "mse"]
    if delayed:
        full.append("overflows%")
    names = ("activation", "gradient", "weight")

    def of(stats: Mapping[str, list[str]]) -> dict[str, Any]:
        listed = [{"tensor": name, "stats": stats[name], "freq": every} for name in names]
        return {"enabled": True, "tensors_struct": listed}

    wanted = {"LogTensorStats": of({name: ["cur_amax"] for name in names})}
    if fp8:
        weight = full
        if fp8_weights:
            weight = scales
        wanted["LogFp8TensorStats"] = of({"activation": full, "gradient": full, "weight": weight})
    return {"fp8launch": {"enabled": True, "layers": {"layer_name_regex_pattern": ".*"}, "transformer_engine": wanted}}


def value_of(name: str, value: Any) -> Value | None:
    """A logged scalar, `<layer>_<tensor>_<statistic>`, taken apart; None for a name of another kind."""
    found = _NAME.fullmatch(name)
    if not found:
        return None
    return found["layer"], found["tensor"], _OURS.get(found["stat"], found["stat"]), float(value)


def summary(values: Iterable[Value]) -> dict[str, dict[str, dict[str, Any]]]:
    """By tensor and statistic: the worst value with its layer, the median over layers, and how many there are."""
    grouped: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for layer, tensor, stat, value in values:
        grouped.setdefault(tensor, {}).setdefault(stat, []).append((value, layer))
    summed: dict[str, dict[str, dict[str, Any]]] = {}
    for tensor, stats in sorted(grouped.items()):
        summed[tensor] = {stat: _summed(stat, found) for stat, found in sorted(stats.items())}
    return summed


def _summed(stat: str, found: list[tuple[float, str]]) -> dict[str, Any]:
    ordered = sorted(found)
    worst, layer = ordered[-1]
    if stat in _LEAST_IS_WORST:
        worst, layer = ordered[0]
    median = statistics.median(value for value, _ in found)
    return {"worst": _short(worst), "layer": layer, "median": _short(median), "n": len(found)}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def layer_names(chunk: Any) -> dict[str, Any]:
    """Transformer Engine's modules by a name that says which layer of the whole model (from 1) they are in."""
    numbers: dict[str, int | None] = {"": None}
    found = {}
    for name, module in chunk.named_modules():
        number = getattr(module, "layer_number", None)
        numbers[name] = numbers.get(name.rpartition(".")[0])
        if not numbers[name] and isinstance(number, int) and type(module).__name__.endswith("Layer"):
            numbers[name] = number
        if hasattr(module, "fp8_meta") and hasattr(module, "name"):
            short = re.sub(r"^(?:module\.)+", "", name)
            if numbers[name]:
                short = re.sub(r"\blayers\.\d+", f"layers.{numbers[name]}", short, count=1)
            found[short] = module
    return found


# --- In the training loop --------------------------------------------------------------------------------------------


def install() -> None:
    """Measure from the model's construction on, if it is asked for. Raises StatsProblem where it cannot be.

    To be called before the probe's, which puts `train_step` back as it found it.
    """
    every = int(os.environ.get("FP8LAUNCH_TENSOR_STATS") or 0)
    if not every:
        return
    for name in ("nvdlfw_inspect", "transformer_engine"):
        if importlib.util.find_spec(name) is None:
            raise StatsProblem(f"launch.tensor_stats needs {name.replace('_', '-')}, which {sys.executable} has not")
    training: Any = importlib.import_module("megatron.training.training")
    if not hasattr(training, "setup_model_and_optimizer"):
        raise StatsProblem("launch.tensor_stats does not know this Megatron's training loop")
    watch = _Watch(every, training)
    training.setup_model_and_optimizer = watch.set_up
    training.train_step = watch.step


class _Watch:
    """Around Megatron's set-up of the model, and around each of its steps, which it looks up by name."""

    def __init__(self, every: int, training: Any) -> None:
        self._every = every
        self._set_up, self._step = training.setup_model_and_optimizer, training.train_step
        self._count = 0
        self._values: list[Value] = []
        self._place: dict[str, Any] | None = None
        self._file = FOLDER / f"rank{os.environ.get('RANK', '0')}.jsonl"

    def set_up(self, *args: Any, **kwargs: Any) -> Any:
        """Transformer Engine looks for the debug tool when its modules are made, and names them by their order."""
        self._start()
        made = self._set_up(*args, **kwargs)
        model = made[0]
        for chunk in chunks_of(model):
            for name, module in layer_names(chunk).items():
                module.name = name
        return made

    def _start(self) -> None:
        # Its messages are about itself, for each layer and rank.
        os.environ.setdefault("NVDLFW_INSPECT_LOG_LEVEL", "ERROR")
        import nvdlfw_inspect.api as inspector
        import transformer_engine
        from nvdlfw_inspect.logging import BaseLogger

        values = self._values

        class Keep(BaseLogger):  # type: ignore[misc]
            def log_scalar(self, name: str, value: Any, iteration: int, **_: Any) -> None:
                if found := value_of(name, value):
                    values.append(found)

        args = importlib.import_module("megatron.training").get_args()
        fp8 = bool(getattr(args, "fp8", None))
        gathered = bool(getattr(args, "fp8_param_gather", False) or getattr(args, "fp8_param", False))
        config = features(self._every, fp8, fp8 and getattr(args, "fp8_recipe", "") == "delayed", gathered)
        FOLDER.mkdir(exist_ok=True)
        inspector.initialize(
            config_file=config,
            feature_dirs=[str(Path(transformer_engine.__file__).parent / "debug" / "features")],
            statistics_logger=Keep(),
            log_dir=str(FOLDER),
        )
        state = importlib.import_module("megatron.core.parallel_state")
        # Only these ranks hold the same layers. Left alone it would be all ranks, which wait for ever under PP.
        inspector.set_tensor_reduction_group(state.get_data_parallel_group(with_context_parallel=True))
        self._inspector = inspector
        self._place = importlib.import_module("fp8launch.injob.rank.probe")._place()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("iteration")
        if not isinstance(given, int):
            given = self._count
        self._count = number = given + 1
        self._inspector.initialize_training_step(number)
        result = self._step(*args, **kwargs)
        self._inspector.step()
        if self._values:
            if self._place is not None:
                self._tell(number)
            self._values.clear()
        return result

    def _tell(self, number: int) -> None:
        with self._file.open("a") as out:
            for layer, tensor, stat, value in self._values:
                row = {"iteration": number, "layer": layer, "tensor": tensor, "stat": stat, "value": _short(value)}
                out.write(json.dumps(row) + "\n")
        record = {"v": VERSION, **(self._place or {}), "iteration": number, "every": self._every}
        text = json.dumps({**record, "stats": summary(self._values)}, separators=(",", ":"))
        sys.stdout.write(f"{TENSORS}{text}\n")
        sys.stdout.flush()
