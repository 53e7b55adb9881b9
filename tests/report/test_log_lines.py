"""Parts of a log: the lines of a rank or a node under srun and torchrun, and the iterations as CSV."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from support import log_bytes, only, refused, sitting

from fp8launch.logs.rank_lines import as_csv, lines_of_node, lines_of_rank

SRUN = """\
 0: fp8launch-node: {"node": "node1", "rank": 0}
 8: fp8launch-node: {"node": "node2", "rank": 8}
 3: from three
11: from eleven
 8: fp8launch-node: broken
no label
"""
TORCHRUN = """\
0: [default0]:fp8launch-node: {"node": "node1", "rank": 0}
1: [default0]:fp8launch-node: {"node": "node2", "rank": 8}
0: [default3]:from three
1: [default3]:from eleven
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "x.log"


@pytest.mark.parametrize("text", [SRUN, TORCHRUN])
def test_a_node_is_all_of_its_processes(log: Path, text: str) -> None:
    log.write_text(text)
    one, two = "\n".join(lines_of_node(log, "node1")), "\n".join(lines_of_node(log, "node2"))
    assert ("from three" in one, "from eleven" in one) == (True, False)
    assert ("from three" in two, "from eleven" in two) == (False, True)
    assert "nodes: node1, node2" in only(refused(lines_of_node, log, "node3", exit_code=1)).message


def test_a_rank_is_its_own_lines(log: Path) -> None:
    log.write_text(SRUN)
    assert list(lines_of_rank(log, 11)) == ["11: from eleven"]
    assert list(lines_of_rank(log, 12)) == []


def test_a_single_node_without_labels_is_everything(log: Path) -> None:
    log.write_text('fp8launch-node: {"node": "vm", "rank": 0}\nwords\n')
    assert len(list(lines_of_node(log, "vm"))) == 2


def test_metrics_are_the_iterations_of_a_real_log(log: Path) -> None:
    log.write_bytes(log_bytes(sitting("2026-11-20-verify") / "blockwise.log"))
    rows = list(csv.DictReader(as_csv(log).splitlines()))
    assert [int(row["iteration"]) for row in rows] == list(range(1, len(rows) + 1))
    assert all(float(row["step_time_ms"]) > 0 and float(row["lm loss"]) > 0 for row in rows)
