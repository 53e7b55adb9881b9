"""Parse lines of a Megatron log into records. Other lines give None.

Fields are found by their label, never by position, because versions and forks add and reorder them.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fp8launch.injob.supervisor.health_rules import IS_INFINITE, IS_NAN
from fp8launch.injob.supervisor.log_lines import LONGEST_LINE, clean, split_prefix, without_colours
from fp8launch.logs.field_names import (
    LOSS_PREFIX,
    NOT_FINITE,
    UNITS,
    field_of,
    is_health_sign,
)

# Every quantifier has a bound, so that any line of LONGEST_LINE characters is parsed in a short time.
_PRIMUS_RANK = re.compile(r"\[rank-(\d{1,6})/\d{1,6}\]")
_ITERATION = re.compile(r"\biteration\s{0,20}:?\s{1,20}(\d{1,15})\s{0,20}/\s{0,20}(\d{1,15})\s{0,20}\|")
_DIGITS = r"[-+]?(?:\d[\d,]{0,40}(?:\.\d{0,40})?(?:[eE][-+]?\d{1,5})?|nan|inf)"
_NUMBER = _DIGITS + r"(?![\w.])"
_LEADING_NUMBER = re.compile(rf"({_DIGITS})(?:(?![\w.])|(?=[GM]i?B|TFLOPS\b))", re.IGNORECASE)
_NUMBER_FIRST = re.compile(rf"({_NUMBER})\s{{0,20}}(\S.*)$", re.IGNORECASE)
_WHOLE_NUMBER = re.compile(_NUMBER, re.IGNORECASE)
_SCIENTIFIC = re.compile(r"\d\.\d{6}E[+-]\d\d$")
_ONE_DECIMAL = re.compile(r"\d\.\d$")
_MEMORY = re.compile(r"\[Rank \d{1,9}\] \(after \d{1,15} iterations\) memory \(MB\) ")
_VALIDATION = re.compile(r"\bvalidation(\S{0,80}) loss at (?:iteration )?(\d{1,15})?([^|]{0,200})\|(.*)")
_SAVE = re.compile(r"saving checkpoint\s{1,20}at iteration\s{1,20}(\d{1,15})\b")
_ARGUMENT = re.compile(r"\s{0,8}([A-Za-z_]\w{0,200}) (\.{0,60}) ")
_STEP_TIME = re.compile(rf"Step Time\s{{0,20}}:\s{{0,20}}({_DIGITS})s(.{{0,200}})", re.IGNORECASE)
# Bridge called it TFLOP/s/GPU before MODEL_TFLOP/s/GPU.
_MODEL_TFLOPS = re.compile(rf"({_DIGITS})\s{{0,20}}(?:MODEL_)?TFLOP/s/GPU", re.IGNORECASE)
_TIMER = re.compile(rf"\s{{0,8}}([A-Za-z][\w-]{{0,80}}) \.{{2,80}}: \(({_DIGITS}), ({_DIGITS})\)\s{{0,4}}$")
# Longer values are lists of files, whose Python value is not needed.
_LONGEST_VALUE = 1 << 16
# Bits of an integer with 40 digits.
_LARGEST_BITS = 133


@dataclass(frozen=True)
class Iteration:
    """One iteration line. Values are means over the logging interval; missing values are None.

    `values` are by our field names (see `field_names`), `losses` by Megatron's. Megatron prints only positive losses,
    so a NaN is usually missing; if a program prints it, `values` also has `not_finite`.
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
        """The language-model loss, else the first loss of the line."""
        losses = self.losses
        return losses.get("lm loss", next(iter(losses.values()), None))

    @property
    def step_time_ms(self) -> float | None:
        return self.values.get("step_time_ms")


@dataclass(frozen=True)
class Validation:
    iteration: int | None
    losses: Mapping[str, float]
    name: str = ""


@dataclass(frozen=True)
class StepTime:
    """The line of Megatron-Bridge with throughput: its rank 0 prints it apart from the iteration line."""

    seconds: float
    tflops_per_gpu: float


@dataclass(frozen=True)
class Timer:
    """A line of Megatron's timers, printed below their iteration: ms per iteration on the slowest rank."""

    name: str
    slowest_ms: float


def number_in(text: str) -> float | None:
    """Return the number at the start of a value: 123.4 of `123.4/125.6`, 11.9 of `11.9 (avg 12)`, 2.5 of `2.5GB`."""
    found = _LEADING_NUMBER.match(text.lstrip())
    return _as_float(found[1]) if found else None


def parse_iterations(line: str) -> list[Iteration]:
    """Return the iteration records in a line: usually one, several if ranks wrote into the same line, or none.

    A record that ends before its time per iteration, as in a last line that is cut off, does not count.
    """
    line = without_colours(line[:LONGEST_LINE])
    found = list(_ITERATION.finditer(line))
    ends = [*(following.start() for following in found[1:]), len(line)]
    rank, _ = split_prefix(line)
    if rank is None and (primus := _PRIMUS_RANK.search(line)):
        rank = int(primus[1])
    records = []
    for start, end in zip(found, ends, strict=False):
        values = _values(line[start.end() : end])
        broken = [value for name, value in values.items() if not math.isfinite(value) and is_health_sign(name)]
        if broken:
            values[NOT_FINITE] = IS_NAN if any(map(math.isnan, broken)) else IS_INFINITE
        if "step_time_ms" in values:
            records.append(Iteration(int(start[1]), int(start[2]), values, rank))
    return records


def _values(text: str) -> dict[str, float]:
    *closed, rest = text.split("|")
    pairs = list(map(_label_and_number, closed))
    label, number = _label_and_number(rest)
    # Without its closing bar a field may be cut in the middle of a number. It is complete if the label follows the
    # number, or if it has as many decimals as Megatron prints: one in two of the fields, six in losses.
    name = field_of(label)
    whole = ":" not in rest or (name in ("step_time_ms", "tflops_per_gpu") and _ONE_DECIMAL.search(rest.rstrip()))
    if whole or _SCIENTIFIC.search(rest.rstrip()):
        pairs.append((label, number))
    values = {}
    for label, number in pairs:
        if number is not None and (name := field_of(label)) is not None:
            values[name] = number
    return in_our_units(values)


def in_our_units(values: dict[str, float]) -> dict[str, float]:
    """Convert other units, such as seconds, to ours."""
    if not UNITS.keys() & values.keys():
        return values
    converted = {name: value for name, value in values.items() if name not in UNITS}
    for name, (ours, factor) in UNITS.items():
        if name in values:
            converted.setdefault(ours, values[name] * factor)
    return converted


def _label_and_number(segment: str) -> tuple[str, float | None]:
    label, colon, value = segment.rpartition(":")
    if colon:
        return label, number_in(value)
    text = segment.strip()
    first = _NUMBER_FIRST.match(text)
    if first:
        return first[2], _as_float(first[1])
    # Megatron before version 2 had no colon before some of its numbers.
    label, _, number = text.replace("\t", " ").rpartition(" ")
    if label and _WHOLE_NUMBER.fullmatch(number):
        return label.rstrip(), _as_float(number)
    return "", None


def _as_float(number: str) -> float:
    return float(number.replace(",", ""))


def parse_peak_memory(line: str) -> float | None:
    """Return the peak that PyTorch allocated on a rank in MiB (printed as MB, but divided by 1024**2)."""
    before, _, value = line[:LONGEST_LINE].partition("| max allocated:")
    return number_in(value) if _MEMORY.search(before) else None


def parse_validation(line: str) -> Validation | None:
    found = _VALIDATION.search(line[:LONGEST_LINE])
    if not found:
        return None
    losses = {}
    for segment in found[4].split("|"):
        label, _, value = segment.partition(" value:")
        number = _WHOLE_NUMBER.match(value.lstrip())
        if label.strip() and number:
            losses[label.strip()] = _as_float(number[0])
    iteration = int(found[2]) if found[2] else None
    name = (found[1].strip("-") + found[3]).strip()
    return Validation(iteration, losses, name)


def parse_checkpoint_save(line: str) -> int | None:
    """Return the iteration at which a checkpoint is saved."""
    found = _SAVE.search(line[:LONGEST_LINE])
    return int(found[1]) if found else None


def parse_timer(line: str) -> Timer | None:
    """Parse a line of `(min, max) time across ranks (ms)`, which `--timing-log-level` requests."""
    _, rest = split_prefix(clean(line[:LONGEST_LINE]))
    found = _TIMER.match(rest)
    return Timer(found[1], _as_float(found[3])) if found else None


def parse_step_time(line: str) -> StepTime | None:
    found = _STEP_TIME.search(line[:LONGEST_LINE])
    speed = _MODEL_TFLOPS.search(found[2]) if found else None
    return StepTime(_as_float(found[1]), _as_float(speed[1])) if found and speed else None


def parse_argument(line: str) -> tuple[str, str] | None:
    """Read `name ..... value` of the argument dump; dots fill the name to 48 columns, so long names have few or none.

    The value may be longer than any pattern looks at: a blend can name thousands of files.
    """
    found = _ARGUMENT.match(line)
    if not found or (not found[2] and len(found[1]) < 48):
        return None
    return found[1], line[found.end() :].rstrip("\r\n")


def argument_value(text: str) -> object:
    """Return the Python value of a printed argument: None, booleans, numbers, lists; anything else stays text."""
    if len(text) > _LONGEST_VALUE:
        return text
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
        return text  # no argument of Megatron is that large, and a division would fail
    return value
