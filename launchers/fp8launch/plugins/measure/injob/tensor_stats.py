"""Measure in every Nth iteration what FP8 does to each linear's input, weight and gradient, with Transformer Engine.

    underflow_pct     elements other than zero that FP8 turns to zero, in % of all
    overflow_pct      elements clipped at FP8's largest value, in %; only delayed scaling can clip
    scale_inv_min/max smallest and largest factor from FP8 back to values (one per tensor, or one per block)
    mse               mean squared error of the FP8 tensor
    amax              largest absolute value

One line of the log sums up an iteration, `fp8launch-tensors: {json}`, from one rank of each tensor and pipeline
parallel position: for each of `activation` (the linear's input), `weight` and `gradient` (of its output) the worst
value of each statistic, the layer that has it, and the median over layers. Every value is in
`tensor_stats/rank<N>.jsonl` of the run folder. Activations and gradients cover all data-parallel ranks and micro
batches.

This uses Transformer Engine's debug features and NVIDIA's nvdlfw-inspect. A measured iteration takes several times as
long as others; between them the layers run at their usual speed.
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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fp8launch.injob.rank import training_loop
from fp8launch.injob.rank.module_facts import chunks_of
from fp8launch.injob.rank.probe import position_of_rank
from fp8launch.injob.rank.training_loop import CannotMeasure, say

TENSORS = "fp8launch-tensors: "
VERSION = 1
FOLDER = Path("tensor_stats")
_OURS = {"underflows%": "underflow_pct", "overflows%": "overflow_pct", "cur_amax": "amax"}
_NAME = re.compile(r"(?P<layer>.+)_(?P<tensor>activation|weight|gradient)_(?P<stat>.+)")
_LEAST_IS_WORST = ("scale_inv_min",)

Value = tuple[str, str, str, float]  # layer, tensor, our name of the statistic, value


def features(every: int, fp8: bool, delayed: bool, fp8_weights: bool) -> dict[str, Any]:
    """Return the configuration for nvdlfw-inspect: all layers, every `every` iterations.

    Without FP8 there are only largest values. FP8 weights are stored in FP8, and their original values are gone, so
    only their scales are requested.
    """
    scales = ["scale_inv_min", "scale_inv_max"]
    full = ["underflows%", *scales, "mse"]
    if delayed:
        full.append("overflows%")
    names = ("activation", "gradient", "weight")

    def measured(stats: Mapping[str, list[str]]) -> dict[str, Any]:
        listed = [{"tensor": name, "stats": stats[name], "freq": every} for name in names]
        return {"enabled": True, "tensors_struct": listed}

    wanted = {"LogTensorStats": measured({name: ["cur_amax"] for name in names})}
    if fp8:
        weight = scales if fp8_weights else full
        wanted["LogFp8TensorStats"] = measured({"activation": full, "gradient": full, "weight": weight})
    return {"fp8launch": {"enabled": True, "layers": {"layer_name_regex_pattern": ".*"}, "transformer_engine": wanted}}


def value_of(name: str, value: Any) -> Value | None:
    """Split the name of a logged scalar, `<layer>_<tensor>_<statistic>`. Return None for other names."""
    found = _NAME.fullmatch(name)
    if not found:
        return None
    return found["layer"], found["tensor"], _OURS.get(found["stat"], found["stat"]), float(value)


def summary(values: Iterable[Value]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return by tensor and statistic the worst value with its layer, the median over layers, and their number."""
    grouped: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for layer, tensor, stat, value in values:
        grouped.setdefault(tensor, {}).setdefault(stat, []).append((value, layer))
    summed: dict[str, dict[str, dict[str, Any]]] = {}
    for tensor, stats in sorted(grouped.items()):
        summed[tensor] = {stat: _summed(stat, found) for stat, found in sorted(stats.items())}
    return summed


def _summed(stat: str, found: list[tuple[float, str]]) -> dict[str, Any]:
    ordered = sorted(found)
    worst, layer = ordered[0] if stat in _LEAST_IS_WORST else ordered[-1]
    median = statistics.median(value for value, _ in found)
    return {"worst": _short(worst), "layer": layer, "median": _short(median), "n": len(found)}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def layer_names(chunk: Any) -> dict[str, Any]:
    """Return Transformer Engine's modules by names with the number of their layer in the whole model, from 1."""
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


def install(every: int) -> None:
    """Measure from the model's construction on. Raises CannotMeasure."""
    for name in ("nvdlfw_inspect", "transformer_engine"):
        if importlib.util.find_spec(name) is None:
            raise CannotMeasure(f"launch.tensor_stats needs {name.replace('_', '-')}, which {sys.executable} lacks")
    training: Any = importlib.import_module(training_loop.MEGATRON)
    if not hasattr(training, "setup_model_and_optimizer"):
        raise CannotMeasure("launch.tensor_stats does not know this Megatron's training loop")
    measurement = _Measurement(every, training.setup_model_and_optimizer)
    training.setup_model_and_optimizer = measurement.set_up
    training_loop.observe(measurement)


class _Measurement(training_loop.Observer):
    def __init__(self, every: int, set_up: Callable[..., Any]) -> None:
        self._every, self._set_up = every, set_up
        self._count = 0
        self._values: list[Value] = []
        self._position: dict[str, Any] | None = None
        self._file = FOLDER / f"rank{os.environ.get('RANK', '0')}.jsonl"

    def set_up(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for Megatron's set-up of the model.

        Transformer Engine looks for the debug tool when its modules are made, and names them by their order.
        """
        self._start()
        made = self._set_up(*args, **kwargs)
        for chunk in chunks_of(made[0]):
            for name, module in layer_names(chunk).items():
                module.name = name
        return made

    def _start(self) -> None:
        # It reports on itself, for each layer and rank.
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
        # Only these ranks hold the same layers. By default it is all ranks, which wait forever under PP.
        inspector.set_tensor_reduction_group(state.get_data_parallel_group(with_context_parallel=True))
        self._inspector = inspector
        self._position = position_of_rank()

    def before_step(self, model: Any, iteration: int | None) -> None:
        self._count = self._count + 1 if iteration is None else iteration
        self._inspector.initialize_training_step(self._count)

    def after_step(self, model: Any, iteration: int | None) -> bool:
        self._inspector.step()
        if self._values and self._position is not None:
            self._report(self._position)
        self._values.clear()
        return True

    def _report(self, position: dict[str, Any]) -> None:
        with self._file.open("a") as out:
            for layer, tensor, stat, value in self._values:
                row = {"iteration": self._count, "layer": layer, "tensor": tensor, "stat": stat, "value": _short(value)}
                out.write(json.dumps(row) + "\n")
        record = {"v": VERSION, **position, "iteration": self._count, "every": self._every}
        say(TENSORS, {**record, "stats": summary(self._values)})
