"""Observe Megatron's training loop, and report observations as lines of the log."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MEGATRON = "megatron.training.training"


class CannotMeasure(Exception):
    """A measurement that the recipe requests is not available on this machine."""


class Observer:
    """Observer of the loop's steps. `iteration` counts from 1, and is None if the loop does not state it."""

    def before_step(self, model: Any, iteration: int | None) -> None:
        """Called before each step with Megatron's model: a list of chunks, or one module."""

    def after_step(self, model: Any, iteration: int | None) -> bool:
        """Return whether to observe further steps."""
        raise NotImplementedError


def observe(observer: Observer, loop: str = MEGATRON) -> None:
    """Have `observer` see the steps of a loop: of the module whose `train_step` the loop calls by name."""
    training: Any = importlib.import_module(loop)
    if not isinstance(training.train_step, _ObservedStep):
        training.train_step = _ObservedStep(training)
    training.train_step.observers.append(observer)


class _ObservedStep:
    """Stands in for `train_step`, which the loop looks up at each iteration, while there are observers."""

    def __init__(self, training: Any) -> None:
        self._training, self._step = training, training.train_step
        self.observers: list[Observer] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = kwargs["model"] if "model" in kwargs else args[2]
        iteration = _iteration(args, kwargs)
        for observer in self.observers:
            observer.before_step(model, iteration)
        result = self._step(*args, **kwargs)
        for observer in list(self.observers):
            if not observer.after_step(model, iteration):
                self.observers.remove(observer)
        if not self.observers:
            self._training.train_step = self._step
        return result


def _iteration(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of the iteration whose step is called with these arguments."""
    number = kwargs.get("iteration")
    for argument in (*args, *kwargs.values()):
        if hasattr(argument, "train_state"):  # the global state of Megatron-Bridge
            number = argument.train_state.step
    if number is None:
        try:
            number = importlib.import_module("megatron.training").get_args().curr_iteration
        except Exception:  # another program's loop
            return None
    return number + 1 if isinstance(number, int) else None


def start_measurements() -> None:
    """Let plugins act at the start of a rank, before torch is imported.

    The function `start` of a module `measurements` may replace this process with a profiler that starts it again.
    """
    for module in _measurements():
        module.start()


def install_measurements(loop: str = MEGATRON) -> None:
    """Prepare what plugins measure in a training loop. Raises CannotMeasure.

    Each module `measurements` in the in-job package of a plugin has a function `install`, which returns if the job's
    environment does not request its measurement.
    """
    for module in _measurements():
        module.install(loop)


def _measurements() -> Iterator[Any]:
    for file in sorted(Path(__file__).resolve().parents[2].glob("plugins/*/injob/measurements.py")):
        yield importlib.import_module(f"fp8launch.plugins.{file.parts[-3]}.injob.measurements")


def say(marker: str, record: Mapping[str, Any]) -> None:
    """Print a record as a line of JSON, in one write, so that other ranks' output does not interrupt it."""
    sys.stdout.write(f"{marker}{json.dumps(record, separators=(',', ':'), default=str)}\n")
    sys.stdout.flush()


def attempt(what: str, action: Callable[[], Any]) -> Any:
    """Run `action` and return its result. If it fails, print that `what` failed and return None: training continues."""
    try:
        return action()
    except Exception as problem:
        reason = (str(problem).strip().splitlines() or [""])[0]
        print(
            f"fp8launch: {what} failed, training continues: {type(problem).__name__}: {reason}",
            file=sys.stderr,
            flush=True,
        )
        return None
