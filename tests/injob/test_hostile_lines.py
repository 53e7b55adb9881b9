"""A log holds anything. No line may keep the classifier, or the supervisor on its node, busy."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from fp8launch.injob.supervisor import hang_watchdog
from fp8launch.injob.supervisor.failure_patterns import PATTERNS, LinePattern, fixed_text
from fp8launch.injob.supervisor.failures import ending_of_attempt, read_ending

ALTERNATIVES = [alternative for pattern in PATTERNS for alternative in pattern.alternatives]
SIZE = 1_000_000


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def hostile(needle: str) -> list[str]:
    """A line full of what a pattern begins with, and of what it repeats."""
    fillers = [needle, needle + " ", needle + "(", needle + "[", needle + ": ", needle + "1"]
    lines = [filler * (SIZE // len(filler)) for filler in fillers]
    return lines + [needle + character * SIZE for character in " a1.[(:_-"]


@pytest.mark.parametrize("pattern", ALTERNATIVES, ids=lambda pattern: pattern.expression)
def test_no_pattern_is_slow_on_any_line(pattern: LinePattern) -> None:
    lines = hostile(pattern.needle)
    assert seconds(lambda: read_ending(enumerate(lines))) < 1.5
    # And by itself, on lines as long as the classifier reads: they grow no faster than their length.
    short, long = [line[:2000] for line in lines], [line[:32000] for line in lines]
    small = min(seconds(lambda: [pattern.matches(line) for line in short]) for _ in range(3))
    assert seconds(lambda: [pattern.matches(line) for line in long]) < 16 * 8 * small + 0.1


CASES = {
    "gloo": "rror " + "[gloo" * 4000,
    "brackets": "rror " + "[" * SIZE,
    "FP8 only": "FP8 only " * 22000,
    "FP8 not supported": "FP8 not supported " * 22000,
    "exception": "a" * 30000 + "Error",
    "exception path": "Traceback (most recent call last)\n" + "a." * 20000 + "Errox",
    "exception name": "Traceback (most recent call last)\n" + "A" * 30000 + "Erro",
    "step": "*** STEP " * 100_000,
    "step cancelled": "*** STEP CANCELLED AT " * 50_000,
    "srun": "srun: error: " + "a" * 30000 + ": task 1,1,1,1" * 30000,
    "exiting": "[exiting program " * 60_000,
    "iteration": "iteration 1/ 1 |" * 60_000,
    "iteration spaces": ("iteration" + " " * 100) * 9_000,
    "frames": "  File " * 50_000,
    "labels": "0: " * 300_000,
    "colours": "\x1b]" * 300_000,
    "returns": "a\r" * 300_000,
    "many lines": "DistBackendError: NCCL error\n" * 30_000,
    "unhealthy": "a" * 100_000 + ": bad",
}


@pytest.mark.parametrize("name", CASES)
def test_the_end_of_an_attempt_is_classified_in_time(name: str) -> None:
    assert seconds(lambda: ending_of_attempt(CASES[name], CASES[name])) < 3


@pytest.mark.parametrize("name", CASES)
def test_the_hang_watchdog_reads_any_line_in_time(name: str) -> None:
    progress = hang_watchdog.Progress()
    assert seconds(lambda: progress.grown(1, CASES[name])) < 1.5
    assert seconds(lambda: hang_watchdog.parse_stacks(CASES[name])) < 1.5
    assert seconds(lambda: hang_watchdog.hung_nodes(CASES[name])) < 0.5


@pytest.mark.parametrize(
    "text",
    [
        "iteration 1/ 1 | elapsed time per iteration (ms): 1.2.3 |",
        "iteration " + "9" * 5000 + "/ 1 |",
        "iteration 1/ 1 | elapsed time per iteration (ms): " + "9" * 5000,
        "iteration 1/ 1 | elapsed time per iteration (ms): . |",
        "0: Stack (most recent call first):\n0:   File \"x\", line " + "9" * 5000 + " in f",
        "9" * 5000 + ": Stack (most recent call first):",
        "0: [rank" + "9" * 5000 + "]: no stack",
    ],
)  # fmt: skip
def test_numbers_that_are_none_do_not_end_the_hang_watchdog(text: str) -> None:
    progress = hang_watchdog.Progress()
    progress.grown(1, text)
    assert progress.per_iteration == 0.0
    hang_watchdog.describe_stacks(hang_watchdog.parse_stacks(text), 4)


def test_ten_megabytes_of_complaints_are_read_within_seconds() -> None:
    """Each line holds words that the classifier looks for, and none of them means a failure."""
    line = "rank 3: require Error FP8 only NCCL WARN TCPStore gloo Killedx exitcode ignal 99 pyxis: [Errno 9\n"
    log = line * (10_000_000 // len(line))
    assert seconds(lambda: ending_of_attempt(log)) < 15


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (r"^fp8launch: hang: ", "fp8launch: hang: "),
        (r"\[Errno (?:5|107)\]", "[Errno "),
        (r"colou?red line", "red line"),
        (r"x{1,3} of many", " of many"),
        (r"[^\][]{0,20}gloo\]", "gloo]"),
        (r"first .*second part", "second part"),
        (r"an end:[ ]", "an end: "),
    ],
)
def test_the_text_that_every_match_holds(expression: str, text: str) -> None:
    assert fixed_text(expression) == text


def test_an_expression_without_such_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no text in common"):
        fixed_text(r"(?:Prolog|Epilog) \d+")
