"""Starts, restarts and ends, and what each process said about itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import log_bytes, log_text
from support_logs import DATA, H200, REAL, dump, line

from fp8launch.logs import ParsedLog, read_log
from fp8launch.logs.field_names import LOSS_PREFIX
from fp8launch.logs.open_log import compression


@pytest.fixture
def log(tmp_path: Path):
    def write(*lines: str) -> ParsedLog:
        path = tmp_path / "run.log"
        path.write_text("\n".join(lines) + "\n")
        return read_log(path)

    return write


def numbers(found: ParsedLog) -> list[list[int]]:
    column = found.iterations.column("number")
    return [[int(column[r]) for r in p.rows] for p in found.processes]


def test_head_of_a_real_log() -> None:
    found = read_log(DATA / "llama8b_4gpu_tw_mbs1.log")
    (process,) = found.processes
    head = process.head
    assert head.world_size == 4
    assert head.parameters == {"0, 0, 0": 8030261248}
    assert head.versions == {"PyTorch": "2.11.0+cu130", "Megatron-Core": "0.19.2", "Transformer Engine": "2.20.2"}
    assert len(head.arguments) == 815
    assert (head.arguments["fp8"], head.arguments["fp8_recipe"]) == ("hybrid", "tensorwise")
    assert head.arguments["seq_length"] == 8192
    assert head.arguments["recompute_granularity"] is None
    assert process.ending.finished
    assert process.ending.failure is None


def test_a_real_resumed_log_is_two_processes() -> None:
    found = read_log(DATA / "tiny_cpu_0.19_resumed.log")
    assert numbers(found) == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12]]
    first, second = found.processes
    assert first.ending.exit_line == "exiting program at iteration 5"
    assert first.head.arguments["load"] is None
    assert second.head.arguments["load"] == "ck"
    assert second.ending.finished


def test_a_falling_number_is_a_restart(log) -> None:
    assert numbers(log(*(line(i, ms=i) for i in (1, 2, 3, 4, 3, 4, 5)))) == [[1, 2, 3, 4], [3, 4, 5]]


def test_a_repeated_number_is_a_restart(log) -> None:
    assert numbers(log(line(1, ms=9), line(2, ms=5), line(2, ms=9), line(3, ms=6))) == [[1, 2], [2, 3]]


def test_a_dump_is_a_restart_even_where_numbers_go_on(log) -> None:
    found = log(dump(lr=1), line(1), line(2), dump(lr=2), line(3), line(4))
    assert numbers(found) == [[1, 2], [3, 4]]
    assert [p.head.arguments["lr"] for p in found.processes] == [1, 2]


def test_what_stands_before_a_dump_belongs_to_the_process_that_prints_it(log) -> None:
    world = "using world size: {}, data-parallel size: 1"
    found = log(world.format(4), dump(a=1), line(1), line(2), world.format(8), dump(a=2), line(3))
    assert [p.head.world_size for p in found.processes] == [4, 8]


def test_a_process_that_died_before_its_first_iteration_is_one(log) -> None:
    found = log(dump(a=1), "[rank0]: RuntimeError: NCCL error in: x", dump(a=2), line(1))
    assert numbers(found) == [[], [1]]
    assert found.processes[0].ending.failure.code == "nccl"
    assert found.processes[1].ending.failure is None


def test_ranks_that_print_the_same_iterations_count_once(log) -> None:
    lines = [f"{rank}: {line(i, ms=100 + i + rank / 10)}" for i in range(1, 6) for rank in (3, 7)]
    found = log(*lines)
    assert numbers(found) == [[1, 2, 3, 4, 5]]
    assert found.duplicates == 5


def test_a_line_that_a_tee_wrote_twice_counts_once(log) -> None:
    found = log(*(line(i, ms=100.5 + i) for i in (1, 1, 2, 2, 3, 3)))
    assert numbers(found) == [[1, 2, 3]]


def test_a_dump_with_other_ranks_lines_in_between(log) -> None:
    rows = dump(num_layers=4, fp8="e4m3", hidden_size=64).split("\n")
    mixed = [x for row in rows for x in (f"0: {row}", "5: /site/x.py:1: UserWarning: something ... else")]
    arguments = log(*mixed, line(1)).processes[0].head.arguments
    assert arguments == {"num_layers": 4, "fp8": "e4m3", "hidden_size": 64}


def test_lines_after_evaluations_and_checkpoints_are_marked() -> None:
    found = read_log(DATA / "tiny_cpu_0.19_resumed.log")
    column = found.iterations.column("number")
    assert {int(column[r]): why for r, why in found.disturbed_rows.items()} == {
        6: "after checkpoint",
        7: "after evaluation",
        11: "after checkpoint",
    }


def test_bridge_throughput_goes_to_the_line_with_its_time(log) -> None:
    def bridge(i: int, ms: float) -> str:
        return f" iteration {i}/9 | elapsed time per iteration (ms): {ms} | global batch size: 8 | lm loss: 1.0E+00 |"

    step = "Step Time : {}s GPU utilization: {}MODEL_TFLOP/s/GPU"
    found = log(
        step.format("9.09", 663.5), bridge(1, 9089.0),
        bridge(2, 8001.0), step.format("8.00", 700.0),
        step.format("77.00", 1.0), bridge(3, 8100.0),
    )  # fmt: skip
    throughput = [r.values.get("tflops_per_gpu") for r in found.iterations]
    assert throughput == [663.5, 700.0, None]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(REAL), st.floats(0, 1), st.floats(0, 1))
def test_logs_cut_anywhere_are_read(tmp_path_factory: pytest.TempPathFactory, path: Path, a: float, b: float) -> None:
    data = log_bytes(path)
    begin, end = sorted((int(a * len(data)), int(b * len(data))))
    cut = tmp_path_factory.mktemp("cut") / "cut.log"
    cut.write_bytes(data[begin:end])
    whole = {(r.number, r.step_time_ms): r for r in read_log(path).iterations}
    for record in read_log(cut).iterations:
        original = dict(whole[record.number, record.step_time_ms].values)
        for name in original.keys() & record.values.keys():
            if name.startswith(LOSS_PREFIX) and record.values[name] != original[name]:
                # Without its beginning a log does not show that a line is the mean of two.
                original[name] = record.values[name]
        assert record.values.items() <= original.items()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=3000))
def test_any_file_is_read(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "x.log"
    path.write_bytes(data)
    assume(compression(data) is None)
    assert read_log(path).processes[-1].end == len(data)


def test_offsets_and_line_numbers_are_those_of_the_file() -> None:
    path = H200[0]
    data = log_bytes(path)
    for offset in read_log(path).iterations.column("offset"):
        assert b"elapsed time" in data[int(offset) :].split(b"\n", 1)[0]
        assert int(offset) == 0 or data[int(offset) - 1 : int(offset)] == b"\n"


WRAPPED = {
    "srun --label": "0: {}",
    "torchrun --tee": "[default0]:{}",
    "NeMo-Run": "train/0 [default0]:{}",
    "time stamps": "2026-11-20T14:55:23.123Z {}",
    "colours": "\x1b[32m{}\x1b[0m",
    "pdsh": "10.0.0.7: {}",
    "carriage returns": "{}\r",
}


@pytest.mark.parametrize("form", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_what_launchers_put_around_lines_changes_nothing(log, path: Path, form: str) -> None:
    plain = read_log(path)
    found = log(*(form.format(text) for text in log_text(path).split("\n")))
    assert len(found.processes) == len(plain.processes)
    for mine, theirs in zip(found.processes, plain.processes, strict=True):
        assert mine.head == theirs.head
        assert (mine.ending.finished, mine.ending.exit_line) == (theirs.ending.finished, theirs.ending.exit_line)
        assert (mine.ending.failure and mine.ending.failure.code) == (
            theirs.ending.failure and theirs.ending.failure.code
        )
        lines = [[parsed.iterations[r] for r in p.rows] for parsed, p in ((found, mine), (plain, theirs))]
        assert [(x.number, x.values) for x in lines[0]] == [(x.number, x.values) for x in lines[1]]


def test_two_ranks_that_print_their_arguments_at_once_are_one_process(log) -> None:
    both = [f"{rank}: {text}" for text in dump(a=1, seq_length=8).split("\n") for rank in (0, 7)]
    found = log(*both, line(1), line(2))
    assert len(found.processes) == 1
    assert found.processes[0].head.arguments == {"a": 1, "seq_length": 8}
