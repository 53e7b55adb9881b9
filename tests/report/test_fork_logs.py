"""Whole logs of forks: numbers, status and failure, from the file to the report. Formats are real, numbers made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import parse_paths

from fp8launch.cli import run as command
from fp8launch.report.run_report import RunReport

CLEAN = " number of skipped iterations:   0 | number of nan iterations:   0 |"


def megatron_deepspeed(i: int, ms: float) -> str:
    return (
        f"[2024-04-04 09:10:13,619] [INFO] [logging.py:96:log_dist] [Rank 0] step={i}, skipped=0, lr=[0.0003]\n"
        f"steps: {i} loss: 9.1 iter time (s): {ms / 1e3:.3f} samples/sec: 25.9\n"
        f" iteration {i:8d}/      20 | consumed samples: {32 * i:12d} | consumed tokens: {131072 * i:12d} |"
        f" elapsed time per iteration (ms): {ms:.1f} | learning rate: 3.000E-04 | global batch size:    32 |"
        f" lm loss: 9.100000E+00 | loss scale: 1.0 | grad norm: 1.100 | actual seqlen:  4096 |{CLEAN}"
        " samples per second: 25.900 | tokens per gpu per second (tgs): 13107.2 | TFLOPs: 230.40 |"
    )


def bigscience(i: int, ms: float) -> str:
    return (
        f"[default7]: iteration {i:8d}/      20 | consumed samples: {32 * i:12d} |"
        f" elapsed time per iteration (s): {ms / 1e3:.4f} | learning rate: 5.969E-05 | global batch size:    32 |"
        f" lm loss: 9.100000E+00 | grad norm: 1.100 | num zeros: 0.0 |{CLEAN} samples per second: 25.900 |"
        " TFLOPs: 230.40 |"
    )


def neox(i: int, ms: float) -> str:
    return (
        f"10.0.0.7: [2024-04-04 09:10:13,619] [INFO] [logging.py:96:log_dist] [Rank 0] step={i}, skipped=0\n"
        f" samples/sec: 25.900 | iteration {i:8d}/      20 | elapsed time per iteration (ms): {ms:.1f} | learning rate:"
        " 1.2E-04 | approx flops per GPU: 230.4TFLOPS | lm_loss: 9.100000E+00 |"
        f"{CLEAN}"
    )


def nemo(i: int, ms: float) -> str:
    return (
        f"pretraining/0 [default0]:Training epoch 0, iteration {i - 1}/19 | lr: 1.961e-07 | global_batch_size: 32 |"
        f" global_step: {i - 1} | peak_memory_usage: 70833405952 | reduced_train_loss: 9.1 | train_step_timing in s:"
        f" {ms / 1e3:.4g} | TFLOPS_per_GPU: 230.4 | consumed_samples: {32 * i}"
    )


def bridge(i: int, ms: float) -> str:
    return (
        f"ain_fp8_mx/0 Step Time : {ms / 1e3:.2f}s GPU utilization: 230.4MODEL_TFLOP/s/GPU\n\n"
        f"ain_fp8_mx/0  [2025-12-22 15:18:33] iteration {i:8d}/      20 | consumed samples: {32 * i:12d} |"
        f" elapsed time per iteration (ms): {ms:.1f} | learning rate: 3.000000E-05 | global batch size:    32 |"
        f" lm loss: 9.100000E+00 | load_balancing_loss: 1.000000E+00 | loss scale: 1.0 | grad norm: 1.100 |{CLEAN}"
    )


def early_bridge(i: int, ms: float) -> str:
    return bridge(i, ms).replace("MODEL_TFLOP", "TFLOP")


def old_megatron(i: int, ms: float) -> str:
    return (
        f" iteration {i:8d}/      20 | elapsed time per iteration (ms): {ms:.1f} | learning rate 1.500E-04 | lm loss"
        " 9.100000E+00 | loss scale 1.0 |"
    )


FORKS = {f.__name__: f for f in (megatron_deepspeed, bigscience, neox, nemo, bridge, early_bridge, old_megatron)}
RAN = 20


def text(form, lines: int = RAN) -> str:
    times = {1: 30000.0, 2: 15600.0}
    return "\n".join(form(i, times.get(i, 1250.0 + 10 * (i % 3))) for i in range(1, lines + 1)) + "\n"


@pytest.fixture
def report(tmp_path: Path):
    def parse(content: str, **known: object) -> RunReport:
        (tmp_path / "fork.log").write_text(content)
        return parse_paths([tmp_path / "fork.log"], **known)

    return parse


@pytest.mark.parametrize("form", FORKS.values(), ids=FORKS)
def test_numbers_and_status(report, form) -> None:
    found = report(text(form))
    assert (found.status, found.training.iterations, found.training.lines, found.steady_state.warmup_dropped) == (
        "ok",
        RAN,
        RAN,
        2,
    )
    assert found.speed.step_time_ms.median == pytest.approx(1260, abs=5)
    assert found.speed.step_time_ms.n == RAN - 2
    assert found.training.loss_last == pytest.approx(9.1)
    if form is not old_megatron:
        assert found.speed.tflops_per_gpu.median == pytest.approx(230.4)
        assert found.speed.tflops_source == "logged"


@pytest.mark.parametrize("form", FORKS.values(), ids=FORKS)
def test_a_cut_log_is_incomplete(report, form) -> None:
    whole = text(form, 12)
    found = report(whole[: whole.rindex("elapsed" if "elapsed" in whole else "train_step") + 5])
    assert (found.status, found.training.iterations) == ("incomplete", 11)


@pytest.mark.parametrize("form", FORKS.values(), ids=FORKS)
def test_a_crash_is_named(report, form) -> None:
    crash = [
        "Traceback (most recent call last):",
        '  File "/site/megatron/model.py", line 3, in forward',
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ]
    role = "pretraining/0 [default3]:" if form is nemo else ""
    found = report(text(form, 12) + "\n".join(role + x for x in crash) + "\n")
    assert (found.status, found.failure.code) == ("failed", "out-of-memory")


def test_a_restart_goes_on_where_it_stopped(report) -> None:
    """Twelve iterations, the limit, then 9 to 20 from a checkpoint at 8: the later ones count."""
    limit = "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-20T10:00:00 DUE TO TIME LIMIT ***\n"
    again = "\n".join(bigscience(i, 30000.0 if i == 9 else 1400.0) for i in range(9, RAN + 1))
    found = report(text(bigscience, 12) + limit + again + "\n")
    assert (found.status, found.training.iterations, len(found.attempts)) == ("ok", RAN, 2)
    assert found.attempts[0].failure.code == "time-limit"
    assert found.steady_state.dropped["repeated by a later attempt"] == (9, 10, 11, 12)


def test_what_a_log_does_not_say_can_be_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b.log").write_text(text(bridge))
    assert command(["parse", str(tmp_path / "b.log"), "--world-size", "8", "--seq-length", "4096", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_per_s_per_gpu"]["median"] == pytest.approx(32 * 4096 / 8 / 1.26, rel=1e-3)
    assert found["tokens_source"] == "step time"


def test_a_sequence_length_in_the_line_is_as_good(report) -> None:
    found = report(text(megatron_deepspeed), world_size=8)
    assert found.setup.seq_length == 4096
    assert found.speed.tokens_per_s_per_gpu.median == pytest.approx(32 * 4096 / 8 / 1.26, rel=1e-3)


def test_logged_tokens_stand_in_where_the_size_is_not_known(report) -> None:
    found = report(text(megatron_deepspeed))
    assert (found.speed.tokens_source, found.speed.tokens_per_s_per_gpu.median) == ("logged", pytest.approx(13107.2))


def test_nemos_memory_is_read(report) -> None:
    assert report(text(nemo)).peak_memory_mib == pytest.approx(70833405952 / 2**20)
