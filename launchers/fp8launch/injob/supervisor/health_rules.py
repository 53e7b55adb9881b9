"""Training health: the rules by which training is broken although the job runs. docs/health.md documents them.

`parse` applies them to whole logs, and the job to its own log while it runs (`health_watch`). They read columns of the
iteration lines: one line per iteration, from the newest attempt if attempts overlap.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from fp8launch.injob.supervisor.slow_node import NodeTimes, SlowNode, find_slow_node

NO_NODE_TIMES: Mapping[int, Sequence[NodeTimes]] = {}
CODES = (
    "zero-grad-norm", "constant-grad-norm", "loss-jump", "resume-jump", "loss-flat", "nan", "skipped-steps", "slowdown",
    "slow-node",
)  # fmt: skip
# Codes for which a recipe can name an action: they show immediately, and a run does not recover by waiting.
ACTION_CODES = ("nan", "zero-grad-norm", "loss-jump")
SLOW_NODE = "slow-node"
# In `Series.not_finite`: the loss or the gradient norm of a line is NaN, or infinite.
IS_NAN, IS_INFINITE = 1.0, 2.0

# Lines in a rolling median of the loss: a single spike does not move it.
_LOSS_WINDOW = 5
# A change must exceed this many standard deviations of the loss from one line to the next.
_SIGMAS = 6
# In nats: a loss near zero, of a model that has memorized its data, rises by large fractions.
_LEAST_RISE = 0.05
# A slow node must also slow this many of the newest lines, and as many are needed before it.
_RECENT = 10
# Rolling medians of the step time: lines per median, factor on the threshold, and the least share of an attempt's lines
# that must be slow. With a log interval of 10 or more a slowdown is visible in few lines, whose median is less certain.
_TIME_WINDOWS = ((10, 1.0, 0.0), (3, 1.6, 0.25))
# Zero gradients are certain after a few lines, equal ones later: Megatron prints three decimals.
_ZERO_LINES, _EQUAL_LINES, _EQUAL_LEAST = 3, 30, 0.1
# A job acts if this many lines at the end of its log are NaN.
_NAN_LINES = 2
# Iterations before which a loss may be flat (warm-up), and loss scaling skips steps to find its scale.
_FLAT_ITERATIONS, _FLAT_LINES, _SCALING_ITERATIONS = 100, 10, 50
_STANDSTILL = 10
# The share of lines that may be NaN without an error.
_FEW_NAN = 0.01
# In longer logs the loss and the time are read from this many lines, evenly spaced.
_MOST_LINES = 20_000


@dataclass(frozen=True)
class HealthLimits:
    """Thresholds, as fractions. `health:` in a recipe changes them, and `ignore` lists codes to leave out."""

    loss_jump: float = 0.05
    loss_fall: float = 0.01
    skipped_steps: float = 0.01
    slowdown: float = 0.25
    ignore: tuple[str, ...] = ()

    @classmethod
    def of_recipe(cls, stated: Mapping[str, Any]) -> HealthLimits:
        """Return the limits of a recipe's section. A record may contain anything: other types are ignored."""
        found: dict[str, Any] = {}
        for name in ("loss_jump", "loss_fall", "skipped_steps", "slowdown"):
            value = stated.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
                found[name] = float(value)
        ignore = stated.get("ignore")
        if isinstance(ignore, list):
            found["ignore"] = tuple(code for code in CODES if code in ignore)
        return cls(**found)


LIMITS = HealthLimits()


@dataclass(frozen=True)
class HealthProblem:
    """A sign of broken training in iterations `first` to `last`. `facts` are further fields of its JSON."""

    code: str
    severity: str  # error or warning
    message: str
    first: int
    last: int
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """The problem as one line, with its code."""
        return f"{self.severity}: {self.message} [{self.code}]"

    def as_json(self) -> dict[str, object]:
        return {
            "code": self.code,
            "severity": self.severity,
            "message": self.message,
            "iterations": [self.first, self.last],
            **self.facts,
        }


@dataclass(frozen=True)
class Series:
    """The columns that the rules read, one value per iteration line, NaN if the line lacks it.

    The loss of a `mixed` line may be a mean that includes the iteration before.
    """

    number: Sequence[int]
    attempt: Sequence[int]
    step_time_ms: Sequence[float]
    loss: Sequence[float]
    mixed: Sequence[bool]
    grad_norm: Sequence[float]
    not_finite: Sequence[float]
    skipped: Sequence[float]
    nan: Sequence[float]
    has_grad_norm: bool

    def is_nan(self, i: int) -> bool:
        """Return whether loss or gradient norm of line `i` is NaN, from which only a checkpoint can recover the
        training."""
        return self.not_finite[i] == IS_NAN or self.nan[i] > 0 or self.lost(i)

    def lost(self, i: int) -> bool:
        """Return whether a line lacks the loss that the line before has: Megatron does not print a loss that is NaN.

        The last line may be cut off. Skipped steps have no loss, and a loss of 0 is not printed but has a gradient.
        """
        if self.has_grad_norm or i == 0 or i == len(self.number) - 1:
            return False
        return math.isnan(self.loss[i]) and not self.skipped[i] > 0 and math.isfinite(self.loss[i - 1])


def problems_of(
    series: Series,
    timed: Series,
    arguments: Mapping[str, object],
    limits: HealthLimits,
    node_times: Mapping[int, Sequence[NodeTimes]] = NO_NODE_TIMES,
) -> tuple[HealthProblem, ...]:
    """Apply all rules. `timed` are the lines with a usual step time, `node_times` the nodes' times by attempt."""
    if not series.number:
        return ()
    found = [
        *_not_a_number(series),
        *_grad_norm(series),
        *_loss(series, arguments, limits),
        *_skipped(series, limits),
        *_slowdown(timed, limits),
        *_slow_node(timed, limits, node_times),
    ]
    return tuple(problem for problem in found if problem.code not in limits.ignore)


@dataclass(frozen=True)
class Event:
    """Broken training that a job sees while it runs.

    `good` is the last iteration logged before it, None if this attempt logged none. `until` is the last iteration whose
    batch may have caused it.
    """

    code: str
    message: str
    good: int | None
    until: int


def event_in(series: Series, limits: HealthLimits, codes: Collection[str]) -> Event | None:
    """Return the problem at the end of a growing log, if its code is one of `codes`; otherwise None.

    These are the errors that `problems_of` reports at the end of the same lines, except that a single line is not
    enough: with fp16 one step may be lost without harm.
    """
    bad = [series.is_nan(i) or series.not_finite[i] > 0 for i in range(len(series.number))]
    if "nan" in codes:
        event = _event_of_stretch(series, "nan", bad, _NAN_LINES, "the loss or gradient norm is NaN or infinite")
        if event:
            return event
    if "zero-grad-norm" in codes:
        zero = [norm == 0 and not series.skipped[i] > 0 for i, norm in enumerate(series.grad_norm)]
        event = _event_of_stretch(series, "zero-grad-norm", zero, _ZERO_LINES, "the gradient norm is 0")
        if event:
            return event
    if "loss-jump" in codes:
        return _event_of_loss(series, limits)
    return None


def _event_of_stretch(series: Series, code: str, bad: Sequence[bool], lines: int, what: str) -> Event | None:
    """Return an event if at least `lines` lines at the end are bad. The batch of the first one may be the cause."""
    count = 0
    for is_bad in reversed(bad):
        if not is_bad:
            break
        count += 1
    if count < lines:
        return None
    first = len(bad) - count
    good = series.number[first - 1] if first else None
    return Event(code, f"{what} from iteration {series.number[first]} on", good, series.number[first])


def _event_of_loss(series: Series, limits: HealthLimits) -> Event | None:
    """Return an event if the loss is above an earlier one now. The batches up to the first risen median are suspect."""
    usable = [i for i, loss in enumerate(series.loss) if math.isfinite(loss) and not series.mixed[i]]
    known = _thinned(usable)
    if len(known) < _LOSS_WINDOW + 2:
        return None
    loss = [series.loss[i] for i in known]
    for rise in _rises(loss, _noise(loss), limits):
        if rise.end == len(loss):
            first = rise.begin - 1 - _LOSS_WINDOW // 2
            good = series.number[known[first - 1]] if first else None
            message = (
                f"the loss rises from {rise.low:.4f} to {rise.high:.4f} at iteration {series.number[known[first]]}"
            )
            return Event("loss-jump", message, good, series.number[known[rise.begin - 1]])
    return None


def errors_of(problems: Sequence[HealthProblem]) -> list[HealthProblem]:
    """Return the problems that make a run unhealthy."""
    return [problem for problem in problems if problem.severity == "error"]


def _not_a_number(series: Series) -> Iterator[HealthProblem]:
    bad = [number for i, number in enumerate(series.number) if series.is_nan(i) or series.not_finite[i] > 0]
    if not bad:
        return
    # A few steps may be lost without harm; NaN in the last line does not go away.
    many = len(bad) > max(_FEW_NAN * len(series.number), 2)
    severity = "error" if many or bad[-1] == series.number[-1] else "warning"
    lines = _counted(len(bad), "logged iteration")
    yield HealthProblem("nan", severity, f"the loss or gradient norm is NaN or infinite in {lines}", bad[0], bad[-1])


def _grad_norm(series: Series) -> Iterator[HealthProblem]:
    """Report the longest stretches of a gradient norm of zero, and of one that does not change."""
    longest: dict[str, tuple[int, int, int, float]] = {}
    at = 0
    for value, group in groupby(series.grad_norm):
        begin, at = at, at + len(list(group))
        end = at - 1
        if any(skipped > 0 for skipped in series.skipped[begin:at]):
            continue
        if value == 0 and at - begin >= _ZERO_LINES:
            code = "zero-grad-norm"
        elif _EQUAL_LEAST <= value < math.inf and at - begin >= _EQUAL_LINES:
            code = "constant-grad-norm"
        else:
            continue
        longest[code] = max(longest.get(code, (0, 0, 0, 0.0)), (at - begin, begin, end, value))
    for code, (count, begin, end, value) in longest.items():
        text = f"the gradient norm is {value:.3f} in {_counted(count, 'line')} in a row"
        yield HealthProblem(code, "error", text, series.number[begin], series.number[end])


def _loss(series: Series, arguments: Mapping[str, object], limits: HealthLimits) -> Iterator[HealthProblem]:
    usable = [i for i, loss in enumerate(series.loss) if math.isfinite(loss) and not series.mixed[i]]
    known = _thinned(usable)
    if len(known) < _LOSS_WINDOW + 2:
        return
    loss = [series.loss[i] for i in known]
    number = [series.number[i] for i in known]
    noise = _noise(loss)
    attempt = [series.attempt[i] for i in known]
    resumes = {at for at in range(1, len(known)) if attempt[at] != attempt[at - 1]}
    for at in sorted(resumes):
        yield from _resume_jump(loss, number, at, noise, limits)
    jump = _jump(loss, number, noise, resumes, limits)
    if jump:
        yield jump
    if (
        number[0] <= _FLAT_ITERATIONS
        and not _starts_trained(arguments)
        and (jump is None or jump.severity == "warning")
    ):
        yield from _flat(loss, number, arguments, limits)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _thinned(items: list[Any]) -> list[Any]:
    return items[:: 1 + len(items) // _MOST_LINES]


def _noise(loss: Sequence[float]) -> float:
    """Return the standard deviation from one line to the next, estimated by the median of the differences."""
    steps = [abs(loss[i] - loss[i - 1]) for i in range(1, len(loss))]
    return 1.4826 * statistics.median(steps) / math.sqrt(2)


def _rise(before: float, noise: float, limits: HealthLimits) -> float:
    """Return by how much a loss must rise to count."""
    return max(limits.loss_jump * abs(before), _SIGMAS * noise, _LEAST_RISE)


def _resume_jump(
    loss: Sequence[float], number: Sequence[int], at: int, noise: float, limits: HealthLimits
) -> Iterator[HealthProblem]:
    """Compare the last lines before a resume with the first ones after it."""
    after = loss[at : at + _LOSS_WINDOW]
    before = loss[max(at - _LOSS_WINDOW, 0) : at]
    if len(after) < 2 or len(before) < 2:
        return
    old, new = statistics.median(before), statistics.median(after)
    if new - old > _rise(old, noise, limits):
        message = (
            f"the loss rises from {old:.4f} to {new:.4f} at the resume after iteration {number[at - 1]}: the run does "
            "not continue from the state that it saved"
        )
        yield HealthProblem("resume-jump", "error", message, number[at], number[min(at + len(after), len(number)) - 1])


@dataclass(frozen=True)
class _Rise:
    """Consecutive medians above the lowest one before them. `begin` and `end` count the lines up to them."""

    begin: int
    end: int
    low: float
    high: float


def _medians(loss: Sequence[float]) -> list[float]:
    return [statistics.median(loss[i : i + _LOSS_WINDOW]) for i in range(len(loss) - _LOSS_WINDOW + 1)]


def _rises(loss: Sequence[float], noise: float, limits: HealthLimits) -> Iterator[_Rise]:
    """Find where the rolling median is above its lowest earlier value."""
    medians = _medians(loss)
    lowest = medians[0] if medians else math.nan
    lows: list[float | None] = []
    for middle in medians:
        if middle - lowest > _rise(lowest, noise, limits):
            lows.append(lowest)
        else:
            lowest = min(lowest, middle)
            lows.append(None)
    for low, group in groupby(range(len(medians)), key=lows.__getitem__):
        if low is not None:
            risen = list(group)
            high = max(medians[i] for i in risen)
            yield _Rise(risen[0] + _LOSS_WINDOW, risen[-1] + _LOSS_WINDOW, low, high)


def _jump(
    loss: Sequence[float], number: Sequence[int], noise: float, resumes: set[int], limits: HealthLimits
) -> HealthProblem | None:
    """Report the largest rise that is not at a resume."""
    rises = []
    for rise in _rises(loss, noise, limits):
        if not any(rise.begin - _LOSS_WINDOW <= resume <= rise.begin for resume in resumes):
            rises.append(rise)
    if not rises:
        return None
    worst = max(rises, key=lambda rise: rise.high - rise.low)
    # The median follows a rise after half of its window.
    first = number[worst.begin - 1 - _LOSS_WINDOW // 2]
    message = f"the loss rises from {worst.low:.4f} to {worst.high:.4f}"
    if worst.end == len(loss):
        return HealthProblem("loss-jump", "error", f"{message} and does not recover", first, number[-1])
    message += f" and falls again to {min(_medians(loss)[worst.end - _LOSS_WINDOW + 1 :]):.4f}"
    return HealthProblem("loss-jump", "warning", message, first, number[worst.end - 1])


def _starts_trained(arguments: Mapping[str, object]) -> bool:
    """Return whether the run loads weights and counts its iterations from 1 again, so that its loss may be flat."""
    return bool(arguments.get("finetune") or arguments.get("pretrained_checkpoint"))


def _flat(
    loss: Sequence[float], number: Sequence[int], arguments: Mapping[str, object], limits: HealthLimits
) -> Iterator[HealthProblem]:
    """Report a run from scratch whose loss does not fall. Mock data may have nothing to learn; a rise is reported."""
    if number[-1] - number[0] < _FLAT_ITERATIONS or len(loss) < _FLAT_LINES:
        return
    share = max(_LOSS_WINDOW, len(loss) // 10)
    # A learning rate far too large raises the loss in the very first steps.
    start = min(loss[0], statistics.median(loss[:share]))
    end = statistics.median(loss[-share:])
    least = limits.loss_fall
    if arguments.get("mock_data"):
        least = -limits.loss_jump
    if start - end < least * abs(start):
        message = f"the loss does not fall: {start:.4f} at first, {end:.4f} in the last {_counted(share, 'line')}"
        yield HealthProblem("loss-flat", "error", message, number[0], number[-1])


def _skipped(series: Series, limits: HealthLimits) -> Iterator[HealthProblem]:
    """Report skipped steps, except for the first ones, with which fp16 finds its loss scale."""
    counts = {i: int(value) for i, value in enumerate(series.skipped) if 0 < value < 1e9}
    late = [i for i in counts if series.number[i] > _SCALING_ITERATIONS]
    if not late:
        return
    total = sum(counts[i] for i in late)
    covered = max(series.number[-1] - max(series.number[0] - 1, _SCALING_ITERATIONS), 1)
    first, last = series.number[late[0]], series.number[late[-1]]
    standstill = len(series.number) >= _STANDSTILL and all(
        i in counts for i in range(len(series.number) - _STANDSTILL, len(series.number))
    )
    of_all = f"{total} of the {covered} steps from iteration {series.number[-1] - covered + 1} on"
    message = f"training skipped {of_all} ({total / covered:.1%}), in iterations {first} to {last}"
    if standstill:
        yield HealthProblem("skipped-steps", "error", f"{message}; no step is taken any more", first, last)
    elif total >= 3 and total / covered > limits.skipped_steps:
        yield HealthProblem("skipped-steps", "warning", message, first, last)


def _slowdown(series: Series, limits: HealthLimits) -> Iterator[HealthProblem]:
    """Report the largest slowdown within one attempt; attempts may run on other nodes."""
    slowest: _Slowdown | None = None
    for _, lines, times in _timed_lines(series):
        for window, factor, share in _TIME_WINDOWS:
            slowdown = _lasting_slowdown(times, window, factor * limits.slowdown, share)
            if slowdown is None:
                continue
            if slowest is None or slowdown.now_ms / slowdown.best_ms > slowest.now_ms / slowest.best_ms:
                slowest = slowdown
                first, last = series.number[lines[slowdown.begin]], series.number[lines[-1]]
            break
    if slowest:
        ratio = slowest.now_ms / slowest.best_ms
        message = (
            f"steps take {slowest.now_ms:,.0f} ms from iteration {first} on, {ratio:.2f} times the "
            f"{slowest.best_ms:,.0f} ms before"
        )
        yield HealthProblem("slowdown", "warning", message, first, last)


def _timed_lines(series: Series) -> Iterator[tuple[int, list[int], list[float]]]:
    """Yield each attempt with the indices of its lines that have a step time, and these times in ms."""
    usable = [i for i, ms in enumerate(series.step_time_ms) if 0 < ms < math.inf]
    for attempt, group in groupby(usable, key=lambda i: series.attempt[i]):
        lines = _thinned(list(group))
        yield attempt, lines, [series.step_time_ms[i] for i in lines]


def slow_node_of(
    series: Series, node_times: Mapping[int, Sequence[NodeTimes]], limits: HealthLimits
) -> SlowNode | None:
    """Return the node that slows the newest attempt with a slow node; None if no single node does.

    `node_times` are by attempt. The rise of the step time may be smaller than for a `slowdown`, because steps
    that wait for a slow node are irregular: the comparison of nodes rules out noise.
    """
    found = None
    for attempt, lines, times in _timed_lines(series):
        measured = node_times.get(attempt, ())
        if not measured or len(times) < 2 * _RECENT:
            continue
        begin = change_point(times, _RECENT)
        before, after = statistics.median(times[:begin]), statistics.median(times[begin:])
        if min(after, statistics.median(times[-_RECENT:])) < (1 + limits.slowdown) * before:
            continue
        found = find_slow_node(measured, series.number[lines[begin]], before, after, limits.slowdown) or found
    return found


def change_point(values: Sequence[float], margin: int) -> int:
    """Return the index from which values are larger than before, with at least `margin` values on either side.

    There the rank sums of both sides differ by the most standard deviations (as in Pettitt's and Mann-Whitney's tests),
    so outliers do not matter.
    """
    count = len(values)
    ranks = [0.0] * count
    below = 0
    for _, group in groupby(sorted(range(count), key=values.__getitem__), key=values.__getitem__):
        equal = list(group)
        for i in equal:
            ranks[i] = below + (len(equal) - 1) / 2
        below += len(equal)
    total, largest, begin = 0.0, -math.inf, margin
    for i in range(count - margin):
        total += (count - 1) / 2 - ranks[i]
        before = i + 1
        difference = total / math.sqrt(before * (count - before))
        if before >= margin and difference > largest:
            largest, begin = difference, before
    return begin


def _slow_node(
    series: Series, limits: HealthLimits, node_times: Mapping[int, Sequence[NodeTimes]]
) -> Iterator[HealthProblem]:
    slow = slow_node_of(series, node_times, limits)
    if slow is not None:
        yield HealthProblem(SLOW_NODE, "warning", slow.sentence, slow.first, slow.last, slow.as_json())


@dataclass(frozen=True)
class _Slowdown:
    """Step times from index `begin` on, compared with the best median before."""

    begin: int
    now_ms: float
    best_ms: float


def _lasting_slowdown(times: Sequence[float], window: int, limit: float, share: float) -> _Slowdown | None:
    """Return the slowdown by the fraction `limit` in rolling medians that lasts to the end, or None."""
    if len(times) < 3 * window:
        return None
    rolling = [statistics.median(times[end - window : end]) for end in range(window, len(times) + 1)]
    noise = _SIGMAS * _noise(times)
    best = math.inf
    begin: int | None = None
    for i, middle in enumerate(rolling):
        if middle - best > max(limit * best, noise):
            begin = i if begin is None else begin
        else:
            begin = None
            best = min(best, middle)
    if begin is None:
        return None
    # The median follows a rise after half of its window.
    slow = begin + window // 2
    if len(times) - slow < max(window, share * len(times)):
        return None
    return _Slowdown(slow, statistics.median(times[slow:]), best)
