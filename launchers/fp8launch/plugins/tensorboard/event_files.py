"""Read TensorBoard event files as logs: Megatron writes the numbers of its log there, too.

The `tensorboard` library reads them, an extra: `pip install 'fp8launch[tensorboard]'`. Megatron writes the time of an
iteration only with --log-timers-to-tensorboard, and never how a run ended. `training_log` in megatron-core
0.17 to 0.20 defines the tags; each argument is a text under its own name.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.logs import Ending, Head, Iteration, IterationTable, ParsedLog, Process, Validation
from fp8launch.logs.field_names import LOSS_PREFIX
from fp8launch.logs.lines import argument_value
from fp8launch.untyped import as_int

# Our field and the factor to its unit.
_FIELDS = {
    "iteration-time": ("step_time_ms", 1e3),
    "throughput": ("tflops_per_gpu", 1.0),
    "batch-size": ("global_batch_size", 1.0),
    "grad-norm": ("grad_norm", 1.0),
    "iter-energy/gpu": ("energy_j_per_gpu", 1.0),
    "power/gpu": ("power_w_per_gpu", 1.0),
}
_MEMORY = "mem-max-allocated-bytes"
_VALIDATION = " validation"
_TEXT = "/text_summary"


def read_events(files: Sequence[Path]) -> list[ParsedLog]:
    """Read one log, with one process, from each event file. Raises UserError without the library, exit code 3."""
    if importlib.util.find_spec("tensorboard") is None:
        fix = "pip install 'fp8launch[tensorboard]', or pass the text log"
        raise error("no-tensorboard", "reading event files needs tensorboard", str(files[0]), fix, MACHINE_LACKS)
    return list(map(_read, files))


def _read(file: Path) -> ParsedLog:
    # By name: an extra without type information.
    reader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    # 0 keeps every value: by default the reader thins them out.
    events = reader.EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    scalars = {}
    for tag in events.Tags()["scalars"]:
        scalars[tag] = {event.step: event.value for event in events.Scalars(tag)}
    arguments = _arguments(events)
    validations = _validations(scalars)
    table = _table(scalars, arguments)
    head = Head(arguments=arguments, world_size=_world_size(scalars, arguments))
    rows = tuple(range(len(table)))
    peak = max(scalars.get(_MEMORY, {}).values(), default=0.0)
    return ParsedLog(
        path=file,
        iterations=table,
        processes=(Process(0, file.stat().st_size, rows, head, Ending()),),
        memory=[(0, peak / 2**20)],
        validations=tuple(validations),
        disturbed_rows=_disturbed(table, validations),
    )


def _world_size(scalars: Mapping[str, Mapping[int, float]], arguments: Mapping[str, object]) -> int | None:
    logged = scalars.get("world-size")
    if logged:
        return int(next(iter(logged.values())))
    return as_int(arguments.get("world_size"))


def _arguments(events: Any) -> dict[str, object]:
    """Megatron writes each of its arguments as a text of that name."""
    found: dict[str, object] = {}
    for tag in events.Tags()["tensors"]:
        if tag.endswith(_TEXT) or tag.isidentifier():
            values = events.Tensors(tag)[-1].tensor_proto.string_val
            if values:
                found[tag.removesuffix(_TEXT)] = argument_value(values[0].decode("utf-8", "replace"))
    return found


def _table(scalars: Mapping[str, Mapping[int, float]], arguments: Mapping[str, object]) -> IterationTable:
    columns: dict[str, Mapping[int, float]] = {}
    for tag, values in scalars.items():
        if tag in _FIELDS:
            name, factor = _FIELDS[tag]
            columns[name] = {step: factor * value for step, value in values.items()}
        elif _is_loss(tag):
            columns[LOSS_PREFIX + tag] = values
    steps = sorted(set().union(*columns.values()))
    planned = as_int(arguments.get("train_iters"))
    if planned is None:
        # Without the number of planned iterations it is unknown whether all were done.
        planned = max(steps, default=-1) + 1
    table = IterationTable()
    for step in steps:
        row = {}
        lost = False
        for name, column in columns.items():
            if step in column:
                row[name] = column[step]
                lost |= name.startswith(LOSS_PREFIX) and math.isnan(column[step])
        if lost:
            # The text log counts these in a separate field.
            row["nan_iterations"] = 1.0
        table.append(Iteration(step, planned, row), 0)
    return table


def _is_loss(tag: str) -> bool:
    if tag == "loss-scale" or tag.endswith("vs samples") or _VALIDATION in tag:
        return False
    return "loss" in tag


def _validations(scalars: Mapping[str, Mapping[int, float]]) -> list[Validation]:
    found: dict[int, dict[str, float]] = {}
    for tag, values in scalars.items():
        if tag.endswith(_VALIDATION):
            for step, value in values.items():
                found.setdefault(step, {})[tag.removesuffix(_VALIDATION)] = value
    return list(starmap(Validation, sorted(found.items())))


def _disturbed(table: IterationTable, validations: Sequence[Validation]) -> dict[int, str]:
    """The first row after each validation."""
    numbers = table.column("number")
    found = {}
    for validation in validations:
        for row, number in enumerate(numbers):
            if number > (validation.iteration or 0):
                found[row] = "after evaluation"
                break
    return found
