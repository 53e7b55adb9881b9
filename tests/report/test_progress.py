"""How far a run is: stages of the start from a real log, then iteration, loss, speed and time left."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import log_bytes, sitting

from fp8launch.report.progress import HEAD_BYTES, Progress, duration, progress_of
from fp8launch.rundir.run_dir import RunFolder, create_run_folder
from fp8launch.schedulers.base import JobState

MANIFEST: dict[str, Any] = {
    "run_id": "r", "name": "r", "created": "2026-11-22T07:56:13+00:00", "jobs": [{"id": "7"}],
    "arguments": {"train_iters": 50, "seq_length": 8192}, "layout": {"world": 1, "global_batch": 4},
    "runtime": "pyxis",
}  # fmt: skip
RUNNING = JobState("running")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run_folder(tmp_path, "r", {}, MANIFEST)


def real_log() -> bytes:
    return log_bytes(sitting("2026-11-20-verify") / "blockwise.log")


def progress(run: RunFolder, log: bytes | None, state: JobState = RUNNING) -> Progress:
    if log is not None:
        (run.path / "logs").mkdir(exist_ok=True)
        (run.path / "logs" / "7-0.log").write_bytes(log)
    return progress_of(run, MANIFEST, state)


def test_the_stages_of_a_start_are_those_of_a_real_log(run: RunFolder) -> None:
    whole = real_log()
    seen = [
        progress(run, None, JobState("pending")).position,
        progress(run, None).position,
        progress(run, b"").position,
    ]
    for end in [match.end() for match in re.finditer(rb"\n", whole)]:
        found = progress(run, whole[:end])
        if found.iteration is not None:
            break
        seen.append(found.position)
    assert list(dict.fromkeys(seen)) == [
        "queued", "starting", "image", "imports", "distributed set-up", "model", "data", "first iteration",
    ]  # fmt: skip


def test_iterations_say_the_rest(run: RunFolder) -> None:
    whole = real_log()
    half = whole[: whole.rindex(b" iteration ") - 200]
    found = progress(run, half)
    assert found.stage is None
    assert found.iteration is not None and found.planned is not None and 0 < found.iteration < found.planned
    assert found.step_time_ms and found.eta_s == pytest.approx(
        (found.planned - found.iteration) * found.step_time_ms / 1000
    )
    assert found.tokens_per_s_per_gpu and found.tflops_per_gpu and found.peak_memory_mib
    # The second line has the mean loss of two iterations.
    assert found.loss == found.losses[-1] and len(found.losses) == (found.iteration or 0) - 1
    ended = progress(run, whole, JobState("completed"))
    assert (ended.iteration, ended.eta_s) == (ended.planned, None)


def test_a_long_log_is_read_at_both_ends(run: RunFolder) -> None:
    whole = real_log()
    at = whole.index(b"\n", whole.index(b"elapsed time per iteration")) + 1
    first, last = whole[:at], whole[at:]
    padded = first + b"# words\n" * (2 * HEAD_BYTES // 8) + last
    short, long = progress(run, whole), progress(run, padded)
    assert len(padded) > HEAD_BYTES + len(whole)
    assert (long.iteration, long.loss, long.peak_memory_mib) == (short.iteration, short.loss, short.peak_memory_mib)


def test_a_torn_last_line_is_not_read(run: RunFolder) -> None:
    whole = real_log()
    at = whole.rindex(b"elapsed time per iteration")
    before = progress(run, whole[: whole.rindex(b"\n", 0, at) + 1])
    assert progress(run, whole[: at + 30]).iteration == before.iteration


def test_a_link_in_place_of_the_log_is_not_followed(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "other.log").write_bytes(real_log())
    (run.path / "logs").mkdir(exist_ok=True)
    (run.path / "logs" / "7-0.log").symlink_to(tmp_path / "other.log")
    assert progress_of(run, MANIFEST, RUNNING).iteration is None


def test_a_resume_in_a_new_log_is_compared_with_the_log_before(run: RunFolder) -> None:
    def lines(first: int, last: int, lost: float) -> bytes:
        text = ""
        for i in range(first, last + 1):
            loss = 4 - i / 100 + lost + i % 3 / 100
            text += f" iteration {i:8d}/ 300 | elapsed time per iteration (ms): 900.0 | lm loss: {loss:.6E} |\n"
        return text.encode()

    (run.path / "logs").mkdir(exist_ok=True)
    (run.path / "logs" / "7-0.log").write_bytes(lines(1, 130, 0))
    for lost, codes in ((0.0, []), (1.0, ["resume-jump"])):
        (run.path / "logs" / "7-1.log").write_bytes(lines(101, 120, lost))
        found = progress_of(run, MANIFEST, RUNNING)
        assert found.iteration == 120
        assert [problem.code for problem in found.health] == codes


def test_times() -> None:
    assert [duration(s) for s in (None, 9.4, 75, 7500, 90000)] == ["", "9s", "1m15s", "2h05m", "1d01h"]


@pytest.mark.parametrize("value", ["x", [], {}, True, -1, 0, 10**400, None])
def test_a_manifest_may_hold_anything(run: RunFolder, value: object) -> None:
    (run.path / "logs").mkdir(exist_ok=True)
    (run.path / "logs" / "7-0.log").write_bytes(real_log())
    odd = {"arguments": {"train_iters": value, "seq_length": value}, "layout": {"world": value}, "runtime": value}
    assert progress_of(run, odd, RUNNING).iteration is not None
