"""Whole logs: what is found does not depend on how the bytes arrive or what stands around them."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import log_bytes
from support_logs import DATA, H200, REAL, WITH_ITERATIONS, dump, line

from fp8launch.logs import IterationTable, LogTail, Scanner, scan_file
from fp8launch.logs.lines import Iteration, parse_iterations
from fp8launch.logs.open_log import log_name


def scan(data: bytes, sizes: list[int] | None = None) -> Scanner:
    scanner = Scanner()
    at = 0
    while at < len(data):
        size = sizes[at % len(sizes)] if sizes else len(data)
        scanner.feed(data[at : at + size])
        at += size
    scanner.finish()
    return scanner


def records(table: IterationTable) -> list[Iteration]:
    return list(table)


def slow_way(data: bytes) -> list[Iteration]:
    """Read line by line: the reference for the block reader."""
    return [r for raw in data.split(b"\n") for r in parse_iterations(raw.decode("utf-8", "replace"))]


@pytest.mark.parametrize("path", REAL, ids=log_name)
def test_blocks_say_the_same_as_lines(path: Path) -> None:
    assert records(scan_file(path).table) == slow_way(log_bytes(path))


def test_real_logs_have_all_their_iterations() -> None:
    counts = {log_name(p): len(scan_file(p).table) for p in WITH_ITERATIONS}
    assert counts == {
        "llama8b_4gpu_bf16_mbs1": 7,
        "llama8b_4gpu_tw_mbs1": 7,
        "llama8b_4layers_1gpu_bf16": 10,
        "llama8b_4layers_1gpu_tensorwise": 10,
        "tiny_cpu_0.17_1rank": 14,
        "tiny_cpu_0.18_2ranks_interval5": 5,
        "tiny_cpu_0.19_nan": 2,
        "tiny_cpu_0.19_resumed": 12,
    }


def test_events_of_a_real_log() -> None:
    found = scan_file(DATA / "tiny_cpu_0.19_resumed.log")
    assert len(found.dumps) == 2
    assert [number for _, number in found.saves] == [5, 10, 12]
    assert [v.iteration for _, v in found.validations] == [6, 12, 12, 12]
    memory = scan_file(DATA / "llama8b_4gpu_tw_mbs1.log").memory
    assert max(mib for _, mib in memory) == 107804.33


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20))
def test_pieces_of_any_size_give_the_same(sizes: list[int]) -> None:
    data = b"".join(log_bytes(p)[-12_000:] for p in H200)
    whole, pieces = scan(data).scan, scan(data, sizes).scan
    assert records(pieces.table) == records(whole.table)
    assert (pieces.dumps, pieces.memory, pieces.size) == (whole.dumps, whole.memory, whole.size)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=2000), st.lists(st.integers(1, 100), min_size=1, max_size=5))
def test_any_bytes_are_read_without_complaint(data: bytes, sizes: list[int]) -> None:
    scan(data, sizes)


FRAGMENTS = st.sampled_from(
    [
        line(1).encode(), line(2, ms=3.5).encode(), b"7: " + line(3).encode(),
        b"\x1b[31m" + line(4).encode() + b"\x1b[0m",
        b"[default1]:" + line(5, loss=None).encode(), line(6).encode()[:90], line(7).encode() + line(8).encode(),
        b"NCCL INFO | x |", b"\xff\xfe\x00|", b" iteration 9/10 | lm loss: 3.0 |",
        b"50%|###| 5/10\r" + line(9).encode(),
        line(10).replace("2026-11-20 09:40:33.207963", "2025-01-01 00:00:00").encode(), line(11).encode() + b"\r",
        line(12).replace("1000.0", "1,000.0").encode(), b"[Rank 0] (after 2 iterations) memory (MB) | allocated: x |",
    ]
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(FRAGMENTS, max_size=60))
def test_mixtures_of_dialects_noise_and_wrecks_agree_with_single_lines(pieces: list[bytes]) -> None:
    data = b"\n".join(pieces)
    assert records(scan(data).scan.table) == slow_way(data)


@pytest.mark.parametrize("prefix", [b"0: ", b"[default3]:", b"[rank11]:"])
@pytest.mark.parametrize("path", WITH_ITERATIONS, ids=log_name)
def test_a_prefix_on_every_line_changes_nothing(path: Path, prefix: bytes) -> None:
    data = log_bytes(path)
    prefixed = b"\n".join(prefix + x for x in data.split(b"\n"))
    plain, found = scan(data).scan, scan(prefixed).scan
    assert [r.values for r in found.table] == [r.values for r in plain.table]
    assert len(found.dumps) == len(plain.dumps)
    assert [mib for _, mib in found.memory] == [mib for _, mib in plain.memory]


def test_lines_of_other_ranks_in_between_change_nothing() -> None:
    data = log_bytes(H200[0]).split(b"\n")
    noise = random.Random(1)
    mixed = []
    for text in data:
        mixed += [b"[rank%d]: some NCCL text | with bars" % noise.randrange(8)] * noise.randrange(3) + [text]
    assert records(scan(b"\n".join(mixed)).scan.table) == records(scan(b"\n".join(data)).scan.table)


def test_memory_stays_small_however_long_the_log() -> None:
    noise = b"node1:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n" * 10_000
    scanner = Scanner()
    tracemalloc.start()
    for i in range(60):
        scanner.feed(noise)
        scanner.feed((line(i) + "\n").encode())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(scanner.scan.table) == 60
    assert peak < 8e6


def test_a_file_without_a_newline_does_not_fill_memory() -> None:
    scanner = Scanner()
    tracemalloc.start()
    for _ in range(40):
        scanner.feed(b"x" * 1_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


class TestTail:
    def test_gives_each_iteration_once_as_the_log_grows(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        tail = LogTail(log)
        assert tail.poll() == []
        seen = []
        data = log_bytes(H200[1])
        for end in range(0, len(data) + 7001, 7000):
            log.write_bytes(data[:end])
            seen += [r.number for r in tail.poll()]
        assert seen == [1, 2, 3, 4, 5, 6, 7]
        assert tail.poll() == []

    def test_half_a_line_waits_for_its_end(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        text = line(1)
        log.write_text(text[:150])
        tail = LogTail(log)
        assert tail.poll() == []
        log.write_text(text + "\n")
        assert [r.step_time_ms for r in tail.poll()] == [1000.0]

    def test_a_log_that_was_started_anew_is_read_again(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text(line(1) + "\n" + line(2) + "\n")
        tail = LogTail(log)
        assert len(tail.poll()) == 2
        log.write_text(line(9) + "\n")
        assert [r.number for r in tail.poll()] == [9]


def test_the_dump_is_found_only_by_its_title() -> None:
    quoted = "see '------------------------ arguments ------------------------' below"
    found = scan(f"{quoted}\n{dump(fp8='hybrid')}\n".encode()).scan
    assert found.dumps == [len(quoted) + 1]
