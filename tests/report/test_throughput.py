"""Numbers of real runs, and what a report says of runs that are short, broken, resumed or still going."""

from __future__ import annotations

import io
import json
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console
from support import parse_paths, real_logs

from fp8launch.cli import run as command
from fp8launch.diagnostics import UserError
from fp8launch.logs.open_log import compression
from fp8launch.report.run_report import RunReport, statistic
from fp8launch.report.steady_state import RULE_NOTE
from fp8launch.report.text import render_text

DATA = real_logs("runs")
STATISTICS = {"median", "mean", "min", "max", "iqr", "n"}


def line(
    number: int, planned: int = 50, ms: float = 1000.0, batch: int = 8, nan: int = 0, loss: str = "2.5E+00"
) -> str:
    lm_loss = f" lm loss: {loss} |" if loss else ""
    return (
        f" [2026-11-20 09:40:33.207963] iteration {number:8d}/{planned:8d} | consumed samples: {number * batch:12d} |"
        f" elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.0E-04 | global batch size: {batch} |{lm_loss}"
        f" loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations: {nan} |"
    )


def dump(**arguments: object) -> str:
    rows = "\n".join(f"  {k} {'.' * (48 - len(k))} {v}" for k, v in arguments.items())
    title = "------------------------ arguments ------------------------"
    return f"{title}\n{rows}\n-------------------- end of arguments ---------------------"


@pytest.fixture
def report(tmp_path: Path):
    def make(*logs: list[str], **options: object) -> RunReport:
        paths = []
        for i, lines in enumerate(logs):
            paths.append(tmp_path / f"attempt-{i}.log")
            paths[-1].write_text("".join(x + "\n" for x in lines))
        return parse_paths(paths, **options)

    return make


class TestH200:
    """The values measured on 4 x H200, of which the published figures are the mean of iterations 6 and 7."""

    @pytest.mark.parametrize(
        ("name", "step", "tflops", "tokens", "memory"),
        [("bf16", 5950, 567, 11014, 100124), ("tw", 4318, 781, 15178, 107804)],
    )
    def test_numbers(self, name: str, step: float, tflops: float, tokens: float, memory: float) -> None:
        found = parse_paths([DATA / f"llama8b_4gpu_{name}_mbs1.log"], gpu="h200")
        assert found.status == "ok"
        assert (found.training.iterations, found.steady_state.warmup_dropped) == (7, 2)
        assert found.speed.step_time_ms.n == 5
        assert found.speed.step_time_ms.median == pytest.approx(step, rel=2e-3)
        assert found.speed.tflops_per_gpu.median == pytest.approx(tflops, rel=2e-3)
        assert found.speed.tokens_per_s_per_gpu.median == pytest.approx(tokens, rel=2e-3)
        assert found.peak_memory_mib == pytest.approx(memory, abs=1)

    def test_mfu_divides_by_the_peak_of_what_was_asked_for(self) -> None:
        bf16 = parse_paths([DATA / "llama8b_4gpu_bf16_mbs1.log"], gpu="h200")
        fp8 = parse_paths([DATA / "llama8b_4gpu_tw_mbs1.log"], gpu="h200")
        assert bf16.speed.mfu_denominator == {"gpu": "h200", "dtype": "bf16", "peak_tflops": 989.0}
        assert fp8.speed.mfu_denominator == {"gpu": "h200", "dtype": "fp8", "peak_tflops": 1979.0}
        assert bf16.speed.mfu.median == pytest.approx(566.1 / 989)
        assert fp8.speed.mfu.median == pytest.approx(781.2 / 1979)

    def test_fp8_is_what_the_arguments_say(self) -> None:
        found = parse_paths([DATA / "llama8b_4gpu_tw_mbs1.log"]).fp8
        assert (found["requested"], found["recipe"], found["format"]) == (True, "tensorwise", "hybrid")
        found = parse_paths([DATA / "llama8b_4gpu_bf16_mbs1.log"]).fp8
        assert (found["requested"], found["recipe"], found["format"]) == (False, None, None)

    @pytest.mark.parametrize("path", sorted(DATA.glob("llama8b*.log")), ids=lambda p: p.stem)
    def test_our_flops_agree_with_megatrons_within_its_rounding(self, path: Path) -> None:
        from fp8launch.logs import read_log
        from fp8launch.megatron.flops import flops_per_token

        log = read_log(path)
        head = log.processes[0].head
        for record in log.iterations:
            tokens = record.values["global_batch_size"] * head.arguments["seq_length"]
            flops = flops_per_token(head.arguments) * tokens
            ours = flops / (record.step_time_ms / 1e3) / head.world_size / 1e12
            # 0.05 for the printed throughput, and the printed time is only good to 0.05 ms.
            slack = 0.05 + ours * 0.05 / record.step_time_ms
            assert record.values["tflops_per_gpu"] == pytest.approx(ours, abs=slack)


def test_json_has_the_contract(report) -> None:
    found = parse_paths([DATA / "llama8b_4gpu_tw_mbs1.log"], gpu="h200").as_json()
    assert found == json.loads(json.dumps(found, allow_nan=False))
    for name in ("step_time_ms", "tflops_per_gpu", "tokens_per_s_per_gpu", "mfu"):
        assert set(found[name]) == STATISTICS
    wanted = {
        "status", "iterations", "step_time_ms", "tflops_per_gpu", "tokens_per_s_per_gpu", "mfu", "peak_memory_mib",
        "loss_last", "nan_iterations", "skipped_iterations", "warmup_dropped", "fp8",
    }  # fmt: skip
    assert wanted <= set(found)
    assert "failure" not in found
    failed = report([dump(a=1), "RuntimeError: NCCL error in: x"]).as_json()
    assert {"code", "message", "line"} <= set(failed["failure"])


def test_a_line_that_was_written_twice_is_left_out(report) -> None:
    found = report([dump(a=1), line(1), line(2), line(3), line(3), line(4)])
    assert found.training.lines == 4
    assert "1 repeated iteration line left out" in found.notes


class TestCpu:
    def test_throughput_that_prints_as_zero_is_recomputed(self) -> None:
        found = parse_paths([DATA / "tiny_cpu_0.17_1rank.log"], gpu="cpu")
        assert found.status == "ok"
        assert found.speed.tflops_source == "recomputed"
        assert 0 < found.speed.tflops_per_gpu.median < 1
        assert found.speed.mfu is None
        assert found.peak_memory_mib is None
        assert found.training.loss_last < found.training.loss_first
        assert found.steady_state.dropped["after evaluation"] == (7, 13)

    def test_log_interval(self) -> None:
        found = parse_paths([DATA / "tiny_cpu_0.18_2ranks_interval5.log"])
        assert (
            found.training.lines,
            found.training.iterations,
            found.training.iteration_last,
            found.training.iterations_planned,
        ) == (5, 20, 20, 22)
        assert found.status == "ok"
        assert found.setup.world_size == 2

    def test_resumed_in_one_file(self) -> None:
        found = parse_paths([DATA / "tiny_cpu_0.19_resumed.log"])
        assert found.status == "ok"
        assert (found.training.iterations, found.training.lines) == (12, 12)
        assert found.steady_state.dropped["process start"] == (1, 2, 6, 7)
        assert [a.iterations for a in found.attempts] == ["1-5", "6-12"]

    def test_nan(self) -> None:
        found = parse_paths([DATA / "tiny_cpu_0.19_nan.log"])
        assert (found.status, found.failure.code) == ("failed", "nan")


class TestWarmUp:
    def test_lines_that_are_slow_at_first_are_dropped(self, report) -> None:
        times = [9000, 5000, 1500, 1300, *[1000.0 + i % 3 for i in range(40)]]
        found = report([line(i, ms=t) for i, t in enumerate(times, 1)])
        assert found.steady_state.dropped["process start"] == (1, 2)
        assert found.steady_state.dropped["warm-up"] == (3, 4)
        assert found.steady_state.warmup_dropped == 4
        assert found.speed.step_time_ms.n == 40
        assert found.speed.step_time_ms.max == 1002

    def test_a_slow_line_in_the_middle_stays(self, report) -> None:
        times = [9000, 5000, 1000, 1000, 2000, *[1000.0] * 10]
        found = report([line(i, ms=t) for i, t in enumerate(times, 1)])
        assert found.speed.step_time_ms.max == 2000
        assert found.steady_state.warmup_dropped == 2

    def test_a_run_that_keeps_getting_faster_keeps_its_second_half(self, report) -> None:
        found = report([line(i, ms=100_000 / i) for i in range(1, 43)])
        assert found.speed.step_time_ms.n >= 20

    @pytest.mark.parametrize(("lines", "n"), [(1, None), (2, None), (3, 1), (7, 5)])
    def test_short_runs_say_how_little_they_rest_on(self, report, lines: int, n: int | None) -> None:
        found = report([line(i, planned=lines) for i in range(1, lines + 1)])
        assert (found.speed.step_time_ms.n if found.speed.step_time_ms else None) == n
        assert found.status == "ok"
        assert any("after warm-up" in note for note in found.notes) == (lines < 5)

    def test_ramp_up_batches_are_set_apart(self, report) -> None:
        found = report([line(i, batch=8 if i < 10 else 16, ms=100.0 if i < 10 else 200.0) for i in range(1, 21)])
        assert found.speed.step_time_ms.mean == 200.0
        assert found.steady_state.dropped["other batch size"] == tuple(range(3, 10))

    def test_a_line_that_another_rank_tore_is_not_another_batch_size(self, report) -> None:
        lines = [line(i) for i in range(1, 21)]
        lines[9] = lines[9].partition(" learning rate")[0] + "[rank1]: a warning"
        dropped = report(lines).steady_state.dropped
        assert (dropped["incomplete line"], "other batch size" in dropped) == ((10,), False)

    def test_profiled_iterations_are_set_apart(self, report) -> None:
        arguments = dump(profile=True, profile_step_start=5, profile_step_end=7)
        found = report([arguments, *(line(i, ms=9e3 if 5 <= i <= 8 else 1e3) for i in range(1, 20))])
        assert found.steady_state.dropped["profiled"] == (5, 6, 7, 8)
        assert found.speed.step_time_ms.max == 1e3

    def test_checkpoints_at_every_line_do_not_leave_nothing(self, report) -> None:
        lines = []
        for i in range(1, 10):
            lines += [line(i), f"saving checkpoint at iteration {i:7d} to ck in torch_dist format"]
        found = report(lines)
        assert found.speed.step_time_ms.n == 7
        assert any("checkpoint" in note for note in found.notes)


class TestAttempts:
    def test_the_last_attempt_wins_where_they_overlap(self, report) -> None:
        first = [line(i, ms=1000 + i, planned=20) for i in range(1, 13)]
        second = [line(i, ms=2000 + i, planned=20) for i in range(9, 21)]
        found = report(first, second)
        assert found.status == "ok"
        assert (found.training.lines, found.training.iterations) == (20, 20)
        assert found.steady_state.dropped["process start"] == (1, 2, 9, 10)
        assert found.steady_state.dropped["repeated by a later attempt"] == (9, 10, 11, 12)
        assert found.speed.step_time_ms.n == 16
        assert found.speed.step_time_ms.mean == pytest.approx(
            fmean([*(1000 + i for i in range(3, 9)), *(2000 + i for i in range(11, 21))])
        )

    def test_a_failed_attempt_before_a_good_one_does_not_fail_the_run(self, report) -> None:
        found = report(
            [dump(a=1), line(1), line(2), "[rank0]: torch.OutOfMemoryError: CUDA out of memory."],
            [dump(a=1), *(line(i, planned=9) for i in range(1, 10))],
        )
        assert found.status == "ok"
        assert found.attempts[0].failure.code == "out-of-memory"

    @pytest.mark.parametrize(
        ("first", "second", "reason"),
        [
            ({"world_size": 8, "seq_length": 512}, {"world_size": 4, "seq_length": 512}, "other number of GPUs"),
            ({"world_size": 4, "seq_length": 256}, {"world_size": 4, "seq_length": 512}, "other sequence length"),
        ],
    )
    def test_attempts_of_other_sizes_are_not_mixed(
        self, report, first: dict[str, int], second: dict[str, int], reason: str
    ) -> None:
        found = report(
            [dump(**first), *(line(i, ms=1000, planned=20) for i in range(1, 11))],
            [dump(**second), *(line(i, ms=2000, planned=20) for i in range(11, 21))],
        )
        assert found.steady_state.dropped[reason] == tuple(range(3, 11))
        assert (found.speed.step_time_ms.min, found.speed.step_time_ms.max) == (2000, 2000)
        assert found.speed.tokens_per_s_per_gpu.median == 8 * 512 / 2 / 4

    def test_the_memory_of_an_attempt_of_another_size_does_not_count(self, report) -> None:
        def attempt(world_size: int, mib: float, begin: int) -> list[str]:
            memory = f"[Rank 0] (after {begin} iterations) memory (MB) | allocated: 1.00 | max allocated: {mib:.2f} |"
            lines = [line(i, planned=20) for i in range(begin, begin + 10)]
            return [dump(world_size=world_size), lines[0], memory, *lines[1:]]

        found = report([*attempt(2, 70000, 1), *attempt(4, 40000, 11)])
        assert (found.setup.world_size, found.peak_memory_mib) == (4, 40000)
        same = report([*attempt(4, 70000, 1), *attempt(4, 40000, 11)])
        assert same.peak_memory_mib == 70000

    def test_sizes_of_an_attempt_without_iterations_do_not_count(self, report) -> None:
        found = report(
            [dump(world_size=8, seq_length=512), *(line(i, ms=1000, planned=20) for i in range(1, 11))],
            [dump(world_size=4, seq_length=512), "[rank0]: torch.OutOfMemoryError: CUDA out of memory."],
        )
        assert found.setup.world_size == 8
        assert found.speed.tokens_per_s_per_gpu.median == 512

    def test_a_file_of_a_silent_rank_changes_nothing(self, report) -> None:
        found = report([dump(a=1), *(line(i, planned=9) for i in range(1, 10))], ["NCCL INFO nothing to see"])
        assert found.status == "ok"


class TestStatus:
    def test_nothing(self, report) -> None:
        assert report([]).status == "no_data"
        assert report(["hello"]).status == "no_data"

    def test_still_starting(self, report) -> None:
        assert report([dump(num_layers=4), "training ..."]).status == "no_data"

    def test_still_going_or_cut(self, report) -> None:
        assert report([line(i) for i in range(1, 20)]).status == "incomplete"

    def test_reached_the_end(self, report) -> None:
        assert report([line(i, planned=19) for i in range(1, 20)]).status == "ok"

    def test_left_as_planned(self, report) -> None:
        lines = [line(i) for i in range(1, 20)]
        assert report([*lines, "[exiting program at iteration 19] datetime: 2026-11-20 10:00:00 "]).status == "ok"

    def test_stopped_by_a_signal(self, report) -> None:
        lines = [line(i) for i in range(1, 20)]
        end = "[exiting program after receiving SIGTERM.] datetime: 2026-11-20 10:00:00 "
        assert report([*lines, end]).status == "incomplete"

    def test_died(self, report) -> None:
        lines = [line(i) for i in range(1, 20)]
        found = report([*lines, "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."])
        assert found.status == "failed"
        assert (found.failure.code, found.failure.line) == ("out-of-memory", 20)
        assert found.speed.step_time_ms.n == 17

    def test_died_at_the_start(self, report) -> None:
        found = report(["pretrain_gpt.py: error: unrecognized arguments: --foo"])
        assert (found.status, found.failure.code) == ("failed", "bad-arguments")

    def test_died_while_saving_after_the_last_iteration(self, report) -> None:
        lines = [line(i, planned=9) for i in range(1, 10)]
        end = [
            "[after training is done] datetime: x",
            "Traceback (most recent call last):",
            "OSError: No space left on device",
        ]
        assert report([*lines, *end]).failure.code == "disk-full"

    def test_nan_to_the_end(self, report) -> None:
        lines = [line(i, planned=9, nan=int(i > 5), loss="" if i > 5 else "2.0E+00") for i in range(1, 10)]
        found = report(lines)
        assert (found.status, found.failure.code, found.failure.line) == ("failed", "nan", 6)
        assert found.training.nan_iterations == 4
        assert found.training.loss_last is None

    def test_nan_that_passed(self, report) -> None:
        found = report([line(i, planned=9, nan=int(i == 5)) for i in range(1, 10)])
        assert (found.status, found.training.nan_iterations) == ("ok", 1)

    def test_the_first_lines_count_is_not_counted_twice(self, report) -> None:
        """Megatron does not reset the counter after the first line of a process, so line 2 holds it again."""
        found = report([line(i, planned=9, nan=int(i <= 2)) for i in range(1, 10)])
        assert found.training.nan_iterations == 1


class TestWhatTheLogDoesNotSay:
    def test_no_world_size_no_tokens(self, report) -> None:
        found = report([line(i) for i in range(1, 20)])
        assert found.speed.tokens_per_s_per_gpu is None
        assert found.notes == (
            "the log does not contain the world size and sequence length, so tokens/s is unknown (`parse` has an "
            "option for each)",
        )

    def test_the_manifest_fills_in(self, report) -> None:
        lines = [line(i, ms=2000.0) for i in range(1, 20)]
        found = report(lines, world_size=4, arguments={"seq_length": 1024})
        assert found.speed.tokens_per_s_per_gpu.median == 8 * 1024 / 2 / 4

    def test_the_log_outranks_the_manifest(self, report) -> None:
        lines = [dump(seq_length=2048, world_size=2), *(line(i) for i in range(1, 20))]
        found = report(lines, world_size=4, arguments={"seq_length": 1024, "num_layers": 3})
        assert (found.setup.world_size, found.setup.seq_length, found.setup.arguments["num_layers"]) == (2, 2048, 3)

    def test_a_fork_that_prints_tokens_itself(self, report) -> None:
        text = (
            " iteration {}/9 | elapsed time per iteration (ms): 100.0 | tokens/sec/gpu: 5000.0 | global batch size: 8 |"
        )
        found = report([text.format(i) for i in range(1, 10)])
        assert (found.speed.tokens_per_s_per_gpu.median, found.speed.tokens_source) == (5000.0, "logged")

    def test_no_dump_no_fp8(self, report) -> None:
        assert report([line(1)]).fp8 is None

    def test_a_gpu_without_fp8_has_no_mfu_for_it(self, report) -> None:
        found = report([dump(fp8="hybrid", fp8_recipe="delayed"), *(line(i) for i in range(1, 9))], gpu="a100")
        assert found.speed.mfu is None
        assert any("a100 has no fp8" in note for note in found.notes)


def test_an_unknown_gpu_is_a_user_error() -> None:
    with pytest.raises(UserError, match="h100"):
        parse_paths([DATA / "llama8b_4gpu_tw_mbs1.log"], gpu="h101")


def test_a_missing_log_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        parse_paths([tmp_path / "nothing.log"])
    with pytest.raises(UserError, match="not a regular file"):
        parse_paths([tmp_path])


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)))
def test_statistics_of_anything(values: list[float]) -> None:
    found = statistic(values)
    finite = [v for v in values if abs(v) < 1e150]
    assert (found is None) == (not finite)
    if found:
        assert found.n == len(finite)
        assert found.min <= found.median <= found.max


def test_statistic_values() -> None:
    found = statistic([1.0, 2.0, 3.0, 4.0, 10.0])
    assert (found.median, found.mean, found.min, found.max, found.iqr, found.n) == (3.0, 4.0, 1.0, 10.0, 2.0, 5)


WRECKS = st.lists(
    st.one_of(
        st.binary(max_size=80),
        st.builds(
            lambda n, ms, gbs, nan: line(n, ms=ms, batch=gbs, nan=nan).encode(),
            st.integers(0, 10**14), st.floats(allow_nan=False), st.integers(-1, 10**30), st.integers(0, 10**20),
        ),
        st.integers().map(
            lambda n: dump(seq_length=n, world_size=n, num_layers=n, hidden_size=n, num_experts=n, fp8="x").encode()
        ),
        st.sampled_from(
            [
                b" iteration " + b"9" * 400 + b"/" + b"9" * 400 + b" | elapsed time per iteration (ms): 1.0 |",
                b" iteration 5/9 | elapsed time per iteration (ms): 0.0 | lm loss: nan | grad norm: inf |",
                b" iteration 5/9 | elapsed time per iteration (ms): -1e308 | global batch size: 1e308 |",
                b"saving checkpoint at iteration " + b"9" * 50,
                b" validation loss at iteration 9 | lm loss value: NAN | lm loss PPL: INF |",
                b"[Rank 0] (after 2 iterations) memory (MB) | allocated: nan | max allocated: 1e999 |",
                b"using world size: 0, x", b"using world size: 99999999999999999999, x",
                b"slurmstepd: error: *** JOB 1 ON n CANCELLED AT x DUE TO TIME LIMIT ***",
            ]
        ),
    ),
    max_size=30,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(WRECKS)
def test_any_log_gives_a_report(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("any") / "x.log"
    path.write_bytes(b"\n".join(lines))
    assume(compression(b"\n".join(lines)) is None)
    found = parse_paths([path, path], gpu="h200")
    json.dumps(found.as_json(), allow_nan=False)
    Console(file=io.StringIO()).print(render_text(found, 100))
    if found.speed.step_time_ms:
        assert found.speed.step_time_ms.min > 0


class TestText:
    def text(self, found: RunReport) -> str:
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(render_text(found, 100))
        return console.export_text()

    def test_says_units_denominator_and_rule(self) -> None:
        text = self.text(parse_paths([DATA / "llama8b_4gpu_tw_mbs1.log"], gpu="h200"))
        for part in ("step time, ms", "4,317.8", "15,178.1", "1979 TFLOP/s (H200 fp8 dense)", "39.5", "107,804 MiB"):
            assert part in text
        assert "process start: iterations 1-2" in text
        assert RULE_NOTE in text

    def test_the_loss_of_a_test_set_is_no_validation_loss(self, report) -> None:
        """Megatron evaluates the test set last, and calls its loss a validation loss, too."""
        lines = [line(i, planned=20) for i in range(1, 21)]
        evaluation = " validation loss at iteration {} | lm loss value: {} | lm loss PPL: 1.0E+00 | "
        lines.insert(10, evaluation.format(10, "3.100000E+00"))
        lines.append(evaluation.format("20 on validation set", "3.200000E+00"))
        lines.append(evaluation.format("20 on test set", "3.300000E+00"))
        text = self.text(report(lines))
        assert "last validation, iteration 20: lm loss 3.2000\n" in text
        assert "last test, iteration 20: lm loss 3.3000\n" in text

    def test_an_impossible_mfu_is_doubted(self) -> None:
        log = DATA / "llama8b_4gpu_tw_mbs1.log"
        assert "MFU above 100 % is impossible" not in self.text(parse_paths([log], gpu="h200"))
        assert "MFU above 100 % is impossible" in self.text(
            parse_paths([DATA / "llama8b_4gpu_bf16_mbs1.log"], gpu="a100")
        )

    def test_says_why_a_run_failed(self) -> None:
        text = self.text(parse_paths([DATA / "tiny_cpu_0.19_bad_argument.log"]))
        assert "bad-arguments, line 1" in text
        assert "--frobnicate" in text

    @pytest.mark.parametrize("path", sorted(DATA.glob("*.log")), ids=lambda p: p.stem)
    def test_renders_every_real_log(self, path: Path) -> None:
        assert self.text(parse_paths([path], gpu="h200"))


def test_a_log_without_data_is_not_a_success(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("hello\n")
    assert command(["parse", str(log)]) == 1
    assert command(["parse", str(log), "--json"]) == 1


@pytest.mark.parametrize(
    ("ms", "spread", "iterations", "differ"),
    [(1300, 5, 20, True), (1080, 5, 20, False), (1300, 400, 20, False), (1300, 5, 11, False)],
    ids=["slower", "little", "noise", "few lines"],
)
def test_attempts_of_different_speed_are_named(
    tmp_path: Path, ms: float, spread: float, iterations: int, differ: bool
) -> None:
    """Their times were pooled into one median, as if the node or the clock had not changed."""

    def log(first: int, last: int, usual: float) -> str:
        each = (line(i, 40, usual + spread * (7 * i % 11 - 5) / 5) for i in range(first, last + 1))
        return "\n".join([dump(world_size=8, seq_length=4096), *each, ""])

    (tmp_path / "1-0.log").write_text(log(1, 20, 1000))
    (tmp_path / "2-0.log").write_text(log(21, 20 + iterations, ms))
    found = parse_paths(sorted(tmp_path.glob("*.log")))
    notes = [note for note in found.notes if "mix both speeds" in note]
    if differ:
        assert notes == ["a step took 1,000 ms in attempt 1 and 1,300 ms in attempt 2: the statistics mix both speeds"]
    else:
        assert notes == []
