"""A log holds anything: whatever it holds, reading it takes a time that grows with its size and no faster."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import parse_paths

from fp8launch.injob.supervisor import failures, log_lines
from fp8launch.injob.supervisor.log_lines import LONGEST_LINE
from fp8launch.logs import evidence, lines, processes, table

DUMP = "------------------------ arguments ------------------------"
DUMP_END = "-------------------- end of arguments ---------------------"
ITERATION = (
    " iteration        {}/     100 | consumed samples: 1 | elapsed time per iteration (ms): 10.0 | lm loss: 1.0 |"
)
RECORD = " iteration 1/ 2 | elapsed time per iteration (ms): "
# Texts that begin what a pattern looks for, and never come to its end.
UNITS = (
    "x",
    " ",
    "1",
    "1,",
    ".",
    "a.",
    "iteration ",
    "iteration" + " " * 100,
    "iteration 1/2|",
    "Step Time: 1s ",
    "value: ",
    "0: ",
    "[default0]:",
    "[rank-1/2]",
    "validation-",
    "validation loss at ",
    "validation loss at iteration 1 |",
    "[Rank 1] (after 1 iterations) memory (MB) |",
    "saving checkpoint ",
    "saving checkpoint at iteration ",
    "\x1b[",
    "\x1b]",
    "\x1b[0",
    "\r",
    "[exiting program",
    "number of parameters on ",
    "number of parameters on rank (",
    "padded vocab (size: 1",
    "> PyTorch version .",
    "using world size: ",
    "fp8launch-node: {",
    'fp8launch-node: {"a":',
    "fp8launch-probe: [",
    "[gloo",
    "rror [",
    "NCCL WARN ",
    "FP8 not supported ",
    "DataLoader worker ",
    "Xid (PCI",
    "Traceback (most recent call last)",
    '  File "',
    "A.Error: ",
    "MODEL_TFLOP/s/GPU 1",
    DUMP,
    f"{DUMP}\n",
    f"{DUMP}\n{DUMP_END}\n",
    f"{DUMP}\n  data_path " + "." * 40 + " ['a', ",
    f"{RECORD}10.0 |\n",
    f"{RECORD}10.0 | a loss: 1 |" + " a: 1 |" * 9,
    RECORD + "1" * 50,
    f"{RECORD}10.0\n",
    f"{RECORD}10.0 | lm loss:",
)


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def log_of(unit: str, size: int) -> str:
    body = (unit * (size // len(unit) + 1))[:size]
    return "\n".join([ITERATION.format(1), body, ITERATION.format(3), ""])


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("width", [200, LONGEST_LINE, 0], ids=["short-lines", "long-lines", "one-line"])
def test_a_log_of_anything_is_read_in_time(tmp_path: Path, unit: str, width: int) -> None:
    """A line of 33 KB stopped `parse`. The limit leaves room for a busy machine: 200 KB take 0.3 s at most."""
    text = log_of(unit, 200_000)
    if width:
        text = re.sub(rf"[^\n]{{{width}}}", r"\g<0>\n", text)
    log = tmp_path / "a.log"
    log.write_text(text)
    assert seconds(lambda: parse_paths([log])) < 2.0


def distinct(i: int) -> str:
    """Lines that are all different: each has its own label, loss and layout."""
    return f" iteration {i}/ 9 | elapsed time per iteration (ms): 1.0 | x{i} loss: {i}.0 |" + " y: 1 |" * (i % 50)


@pytest.mark.parametrize(
    "line",
    [
        distinct,
        lambda i: ITERATION.format(90 - i % 90),
        lambda i: f'fp8launch-node: {{"node":"n{i}","gpus":{{"H200":1}}}}\n{ITERATION.format(9 - i % 9)}',
        lambda i: (
            f"{DUMP}\n  profile ...... True\n  profile_step_start ... 0\n  profile_step_end ... 1{'0' * 15}\n{DUMP_END}"
        ),
        lambda i: f"torch.OutOfMemoryError: CUDA out of memory\n{ITERATION.format(90 - i % 90)}",
    ],
)
def test_many_processes_labels_and_failures(tmp_path: Path, line: Callable[[int], str]) -> None:
    log = tmp_path / "a.log"
    log.write_text("\n".join(line(i) for i in range(2000)))
    assert seconds(lambda: parse_paths([log])) < 5.0


def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    found = []
    for module in (lines, evidence, processes, table, log_lines, failures):
        for name, value in vars(module).items():
            if isinstance(value, re.Pattern):
                found.append((f"{module.__name__.rpartition('.')[2]}.{name}", value))
    return found


@pytest.mark.parametrize(("name", "pattern"), _patterns())
def test_every_pattern_on_adversarial_lines(name: str, pattern: re.Pattern[str]) -> None:
    """Each on lines as long as any pattern is given, made of pieces that begin a match."""
    for unit in UNITS:
        line = (unit * (LONGEST_LINE // len(unit) + 1))[:LONGEST_LINE]
        assert seconds(lambda line=line: pattern.search(line)) < 0.1, (name, unit)


def test_patterns_are_given_no_more_than_that() -> None:
    """The functions that search a line cut it first, or are given lines that were cut."""
    for function in (
        lines.parse_peak_memory,
        lines.parse_validation,
        lines.parse_checkpoint_save,
        lines.parse_step_time,
    ):
        assert "[:LONGEST_LINE]" in inspect.getsource(function)


@pytest.mark.parametrize("before", ["", "\r100%|████████| 1/1 " * 1000, "x" * 100_000])
def test_an_iteration_at_the_end_of_a_long_line_is_read(tmp_path: Path, before: str) -> None:
    log = tmp_path / "a.log"
    rows = [before + ITERATION.format(i) for i in range(1, 9)]
    log.write_text("\n".join(rows))
    assert parse_paths([log]).training.lines == 8


def test_many_records_in_one_line_are_all_read(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(ITERATION.format(i) for i in range(1, 101)))
    assert parse_paths([log]).training.iteration_last == 100


def test_a_long_argument_is_whole(tmp_path: Path) -> None:
    blend = [f"/data/part{i}" for i in range(2000)]
    log = tmp_path / "a.log"
    rows = [DUMP, f"  data_path {'.' * 39} {blend}", f"  num_layers {'.' * 38} 4", DUMP_END, ITERATION.format(1)]
    log.write_text("\n".join(rows))
    report = parse_paths([log])
    assert report.setup.dump["data_path"] == blend
    assert report.setup.arguments["num_layers"] == 4
