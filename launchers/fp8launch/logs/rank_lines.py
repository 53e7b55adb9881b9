"""Extract parts of a log: the lines of some ranks, or the iterations as CSV."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator
from pathlib import Path

from fp8launch.diagnostics import ANSWER_IS_NO, error
from fp8launch.injob.supervisor.log_lines import split_prefix, without_colours
from fp8launch.logs import scan_file
from fp8launch.logs.evidence import parse_evidence
from fp8launch.logs.field_names import LOSS_PREFIX
from fp8launch.logs.open_log import open_log

_LABEL = re.compile(r" {0,20}(\d{1,6}): ")
# Longer lines are cut.
_LONGEST = 1 << 20


def lines_of_rank(log: Path, rank: int) -> Iterator[str]:
    """Yield the lines of a rank, which srun or torchrun marks with a prefix.

    torchrun's prefix has the local rank.
    """
    for line in _lines(log):
        if split_prefix(line)[0] == rank:
            yield line


def lines_of_node(log: Path, node: str) -> Iterator[str]:
    """Yield the lines of all processes on a node. Raises UserError if the log does not mention the node.

    srun labels lines with the task number. The first task on each node prints the node's name, and the tasks of a node
    have consecutive numbers. Under torchrun, each node has one task.
    """
    first: dict[str, int | None] = {}
    for line in _lines(log):
        evidence = parse_evidence(line)
        if evidence and evidence.kind == "node" and "node" in evidence.data:
            first.setdefault(str(evidence.data["node"]), _task(line))
    if node not in first:
        message = f"the log has no node '{node}'; nodes: {', '.join(sorted(first)) or 'none'}"
        raise error("unknown-node", message, "--node", "use one of these nodes", ANSWER_IS_NO)
    begin = first[node]
    if begin is None:
        return _lines(log)  # the run has a single node, and its lines have no labels
    end = min([task for task in first.values() if task is not None and task > begin], default=math.inf)
    return (line for line in _lines(log) if (task := _task(line)) is not None and begin <= task < end)


def _task(line: str) -> int | None:
    match = _LABEL.match(line)
    return int(match[1]) if match else None


def as_csv(log: Path) -> str:
    """Return the iterations as CSV, with one line per iteration and one column per field in the log."""
    table = scan_file(log).table
    names = [name for name in table.names if name not in ("offset", "rank")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_header, names))
    for values in zip(*map(table.column, names), strict=True):
        writer.writerow(map(_cell, values))
    return text.getvalue()


def _header(name: str) -> str:
    if name == "number":
        return "iteration"
    return name.removeprefix(LOSS_PREFIX)


def _cell(value: float) -> str:
    if math.isnan(value):
        return ""
    if value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return repr(value)


def _lines(log: Path) -> Iterator[str]:
    with open_log(log) as stream:
        while raw := stream.readline(_LONGEST):
            yield without_colours(raw.decode("utf-8", "replace").rstrip("\r\n"))
