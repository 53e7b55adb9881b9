"""One line of a Megatron log -> one record. Pure functions; a line that is not what was asked for gives None.

A line may carry what launchers put in front of it: `7: ` (srun --label), `[default7]:` or `[rank7]:` (torchrun --tee,
PyTorch), `[rank-63/64]` (Primus), `role/0 ` (NeMo-Run), `10.0.0.1: ` (pdsh), a time stamp, ANSI colours, a progress
bar that ends in a carriage return.
Fields are found by their label, never by position, because versions and forks add and reorder them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fp8launch.logs.labels import LOSS_PREFIX, UNITS, field_of

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_TIME = r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:?(?= )"
_RANK = r"(\d{1,6}):(?= )|\[(?:default|rank|Rank )-?(\d{1,6})(?:/\d+)?\]:?"
_ROLE = r"[\w.-]{1,40}/\d{1,6}(?= )|\d{1,3}(?:\.\d{1,3}){3}:(?= )"
_PREFIX = re.compile(rf"\s*(?:{_RANK}|{_ROLE}|{_TIME}) ?")
_PRIMUS_RANK = re.compile(r"\[rank-(\d{1,6})/\d+\]")
_ITERATION = re.compile(r"\biteration\s*:?\s+(\d{1,15})\s*/\s*(\d{1,15})\s*\|")
_DIGITS = r"[-+]?(?:\d[\d,]*(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf)"
_NUMBER = _DIGITS + r"(?![\w.])"
_LEADING_NUMBER = re.compile(rf"\s*({_DIGITS})(?:(?![\w.])|(?=[GM]i?B|TFLOPS\b))", re.IGNORECASE)
_NUMBER_FIRST = re.compile(rf"\s*({_NUMBER})\s*(\S.*?)\s*$", re.IGNORECASE)
_NUMBER_LAST = re.compile(rf"\s*(\S.*?)\s+({_NUMBER})\s*$", re.IGNORECASE)
_SCIENTIFIC = re.compile(r"\d\.\d{6}E[+-]\d\d\s*$")
_ONE_DECIMAL = re.compile(r"\d\.\d\s*$")
_MEMORY = re.compile(r"\[Rank (\d{1,9})\] \(after (\d{1,15}) iterations\) memory \(MB\) \|(.*)")
_VALIDATION = re.compile(r"\bvalidation(\S*) loss at (?:iteration )?(\d{1,15})?([^|]*)\|(.*)")
_VALUE = re.compile(rf"\s*(\S[^|]*?) value:\s*({_NUMBER})", re.IGNORECASE)
_SAVE = re.compile(r"saving checkpoint\s+at iteration\s+(\d{1,15})\b")
_ARGUMENT = re.compile(r"\s{0,8}([A-Za-z_]\w*) (\.*) (.*)$")
_STEP_TIME = re.compile(rf"Step Time\s*:\s*({_DIGITS})s.*?({_DIGITS})\s*MODEL_TFLOP/s/GPU", re.IGNORECASE)


@dataclass(frozen=True)
class Iteration:
    """One iteration line. Values are means over the logging interval; what the line does not say is None.

    `values` has our field names (see `labels`); `losses` the names that Megatron gave them. A loss that is NaN is
    missing, because Megatron prints a loss only when it is >= 0.
    """

    number: int
    planned: int
    values: Mapping[str, float] = field(default_factory=dict)
    rank: int | None = None

    @property
    def losses(self) -> dict[str, float]:
        return {k.removeprefix(LOSS_PREFIX): v for k, v in self.values.items() if k.startswith(LOSS_PREFIX)}

    @property
    def loss(self) -> float | None:
        """The language-model loss, or the only one that there is."""
        losses = self.losses
        return losses.get("lm loss", next(iter(losses.values()), None))

    @property
    def step_time_ms(self) -> float | None:
        return self.values.get("step_time_ms")


@dataclass(frozen=True)
class Memory:
    """`[Rank N] (after K iterations) memory`: PyTorch's allocator, in MiB (printed as MB, but divided by 1024**2)."""

    rank: int
    iteration: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class Validation:
    iteration: int | None
    losses: Mapping[str, float]
    name: str = ""


@dataclass(frozen=True)
class StepTime:
    """Megatron-Bridge's own line: its rank 0 prints throughput apart from the iteration line."""

    seconds: float
    tflops_per_gpu: float


def clean(line: str) -> str:
    """The line without colours, and only what is left after the last progress-bar return."""
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    if "\r" in line:
        line = line.rstrip("\r").rsplit("\r", 1)[-1]
    return line


def split_prefix(line: str) -> tuple[int | None, str]:
    """The rank or task that a launcher wrote in front of the line, if any, and the rest."""
    rank = None
    while found := _PREFIX.match(line):
        if found[1] or found[2]:
            rank = int(found[1] or found[2])
        line = line[found.end() :]
    return rank, line


def number_in(text: str) -> float | None:
    """The number that a value starts with: `123.4/125.6` is 123.4, `11.9 (avg 12)` 11.9, `253.38GB/2.6GB` 253.38."""
    found = _LEADING_NUMBER.match(text)
    return float(found[1].replace(",", "")) if found else None


def parse_iterations(line: str) -> list[Iteration]:
    """Every iteration record in a line: one as a rule, two when two ranks wrote into one line, none elsewhere.

    A record that ends before its time per iteration (a cut last line) is not one.
    """
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    found = list(_ITERATION.finditer(line))
    rank, _ = split_prefix(line)
    if rank is None and (primus := _PRIMUS_RANK.search(line)):
        rank = int(primus[1])
    records = []
    for i, start in enumerate(found):
        end = found[i + 1].start() if i + 1 < len(found) else len(line)
        values = _values(line[start.end() : end])
        if "step_time_ms" in values:
            records.append(Iteration(int(start[1]), int(start[2]), values, rank))
    return records


def _values(text: str) -> dict[str, float]:
    *closed, rest = text.split("|")
    pairs = [_label_and_number(segment) for segment in closed]
    label, number = _label_and_number(rest)
    # Without its closing bar a field may be cut in the middle of a number. It is whole if the label follows the
    # number, or if it has the one decimal that these two fields, or all the digits that losses, are printed with.
    name = field_of(label)
    whole = ":" not in rest or (name in ("step_time_ms", "tflops_per_gpu") and _ONE_DECIMAL.search(rest))
    if whole or _SCIENTIFIC.search(rest):
        pairs.append((label, number))
    return in_our_units({name: n for label, n in pairs if n is not None and (name := field_of(label)) is not None})


def in_our_units(values: dict[str, float]) -> dict[str, float]:
    """Seconds as milliseconds, and the like."""
    if not UNITS.keys() & values.keys():
        return values
    converted = {UNITS[k][0]: v * UNITS[k][1] for k, v in values.items() if k in UNITS}
    return {**converted, **{k: v for k, v in values.items() if k not in UNITS}}


def _label_and_number(segment: str) -> tuple[str, float | None]:
    label, colon, value = segment.rpartition(":")
    if colon:
        return label, number_in(value)
    if found := _NUMBER_FIRST.match(segment):
        return found[2], float(found[1].replace(",", ""))
    # Megatron before version 2 had no colon before some of its numbers.
    found = _NUMBER_LAST.match(segment)
    return (found[1], float(found[2].replace(",", ""))) if found else ("", None)


def parse_memory(line: str) -> Memory | None:
    found = _MEMORY.search(line)
    if not found:
        return None
    values = {}
    for segment in found[3].split("|"):
        label, _, value = segment.partition(":")
        number = number_in(value)
        if number is not None:
            values[label.strip()] = number
    return Memory(int(found[1]), int(found[2]), values)


def parse_validation(line: str) -> Validation | None:
    found = _VALIDATION.search(line)
    if not found:
        return None
    losses = {m[1].strip(): float(m[2]) for m in map(_VALUE.match, found[4].split("|")) if m}
    name = (found[1].strip("-") + found[3]).strip()
    return Validation(int(found[2]) if found[2] else None, losses, name)


def parse_checkpoint_save(line: str) -> int | None:
    """The iteration at which a checkpoint is being saved."""
    found = _SAVE.search(line)
    return int(found[1]) if found else None


def parse_step_time(line: str) -> StepTime | None:
    found = _STEP_TIME.search(line)
    return StepTime(float(found[1].replace(",", "")), float(found[2].replace(",", ""))) if found else None


def parse_argument(line: str) -> tuple[str, str] | None:
    """`name ..... value` of the argument dump; dots fill the name to 48 columns, so long names have few or none."""
    found = _ARGUMENT.match(line)
    if not found or (not found[2] and len(found[1]) < 48):
        return None
    return found[1], found[3].rstrip("\r\n")


def argument_value(text: str) -> object:
    """The Python value behind a printed argument: None, booleans, numbers, lists; anything else stays text."""
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value
